"""Submits a new job in place of one that Slurm ended: once, however often the watchdog is killed meanwhile.

The heir is submitted held, with a token in its comment; then the old job is marked, and cancelled; then the heir
is let go. Each step is seen in Slurm itself, so that the next one follows from what is true.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from deeplink.publish import published_file
from deeplink.scheduler.slurm import command
from deeplink.scheduler.slurm.client import JobVanishedError
from deeplink.scheduler.slurm.parse import SlurmTextError
from deeplink.scheduler.slurm.settings import parse_settings
from deeplink.scheduler.slurm.submitted import SubmissionFormatError, Submitted, keep, kept
from deeplink.scheduler.view.folder import read_events
from deeplink.scheduler.view.notes import note
from deeplink.scheduler.watch.resubmission import (
    SCRIPT_NAME,
    argv_anew,
    depends_on,
    env_anew,
    left_for,
    why_not,
)
from deeplink.scheduler.watch.slurm_comment import with_our_comment
from deeplink.scheduler.wish import record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from deeplink.clock import Clock
    from deeplink.scheduler.slurm.client import Slurm
    from deeplink.scheduler.slurm.parse import JobRow
    from deeplink.types import NodeName

log = logging.getLogger(__name__)

SUBMIT_S = 10.0
WORTH_S = 10.0
"""Slurm must take longer than this still until it gives the node up, or the job keeps its id and waits."""


class Submit(Protocol):
    """Runs sbatch in an environment and a folder."""

    def __call__(self, argv: Sequence[str], /, *, env: Mapping[str, str], cwd: Path) -> str:
        """Return what it wrote to standard output.

        Raises:
            CommandError, CommandTimeoutError, CommandMissingError: see `command.run`.
        """
        ...


def _submit(argv: Sequence[str], /, *, env: Mapping[str, str], cwd: Path) -> str:
    return command.answer_of(command.finish(argv, timeout_s=SUBMIT_S, env=env, cwd=cwd))


@dataclass(slots=True, kw_only=True)
class Resubmitter:
    """The jobs of one user that agreed to be submitted anew. One thread only.

    Args:
        slurm: Slurm's commands, with this user's rights.
        state: the user's state folder.
        user: whose jobs: those of others cannot be submitted anew.
        submit: runs sbatch.
    """

    slurm: Slurm
    state: Path
    user: str
    clock: Clock
    submit: Submit = _submit
    _timeout_s: int | None = field(default=None)

    def agreed(self, job: JobRow) -> Submitted | None:
        """Return how a job was submitted, if its user agreed that it may be submitted anew."""
        if job.user != self.user:
            return None
        try:
            return kept(self._folder(job.id))
        except (OSError, SubmissionFormatError) as problem:
            log.warning("job %d is not submitted anew: %s", job.id, problem)
            return None

    def _submission(self, job: int) -> Submitted:
        submitted = kept(self._folder(job))
        if submitted is None:
            raise SubmissionFormatError("it is gone")
        return submitted

    def is_left_to(self, job: int, heir: int) -> bool:
        """Whether a job's folder tells that it was left to its heir, and so cancelled by us."""
        return any(
            event["event"] == "resubmitted" and event.get("as") == heir for event in read_events(self._folder(job))
        )

    def obstacle(self, job: JobRow, submitted: Submitted, bad: AbstractSet[NodeName], silent_s: float) -> str:
        """Return why a job is not submitted anew now; empty where it is to be.

        Args:
            job: it.
            submitted: how it was submitted.
            bad: the nodes that it lost.
            silent_s: for how long they have been lost.
        """
        if not job.label.isdigit():
            return "it is a part of several jobs"
        reason = why_not(submitted, bad)
        if reason:
            return reason
        if depends_on(job.id, self.slurm.dependencies()):
            return "another job depends on it"
        timeout_s = self._slurmd_timeout()
        if timeout_s is None:
            return "how long Slurm will wait for the node is not known"
        # Until it calls a node down Slurm takes 1.7 to 1.9 times as long (measured with 22.05).
        left_s = 2 * timeout_s - silent_s
        return f"Slurm gives the node up within {left_s:.0f} s" if timeout_s and left_s < WORTH_S else ""

    def _slurmd_timeout(self) -> int | None:
        if self._timeout_s is None:
            with contextlib.suppress(SlurmTextError):
                said = parse_settings(self.slurm.run(["scontrol", "show", "config"]))
                self._timeout_s = said.number("SlurmdTimeout")
        return self._timeout_s

    def find(self, token: str) -> list[JobRow]:
        """Return the jobs that carry a token, the first one first."""
        found = [job for job, comment in self.slurm.comments(self.user).items() if token in comment]
        rows = [self.slurm.job(job) for job in sorted(found)]
        return [row for row in rows if row.user == self.user]

    def submit_anew(self, job: JobRow, token: str, bad: AbstractSet[NodeName]) -> None:
        """Submit a job's heir, held.

        Raises:
            CommandError, CommandTimeoutError, CommandMissingError: sbatch failed.
            SubmissionFormatError: how it was submitted is not known any more.
            OSError: the script cannot be written.
        """
        submitted = self._submission(job.id)
        script = self._folder(job.id) / SCRIPT_NAME
        if submitted.script is not None:
            with published_file(script, mode=0o700) as draft:
                draft.write_bytes(submitted.script.encode(errors="surrogateescape"))
        argv = argv_anew(
            submitted,
            script=str(script),
            name=job.name,
            comment=self.slurm.comment(job.id),
            mark=token,
            excluded=sorted({*self.slurm.excluded_nodes(job.id), *bad}),
        )
        self.submit(argv, env=env_anew(submitted), cwd=Path(submitted.cwd))

    def hand_over(self, job: JobRow, heir: JobRow) -> None:
        """Say in the old job's comment which job stands for it from now on."""
        self.slurm.comment_job(job.address, with_our_comment(self.slurm.comment(job.id), left_for(heir.id)))

    def supersede(self, job: JobRow, heir: JobRow) -> None:
        """Cancel the old job; its folder, which lasts longer than Slurm's memory, tells which job stands for it.

        Raises:
            OSError: that cannot be noted.
        """
        if not self.is_left_to(job.id, heir.id):
            facts = {"as": int(heir.id), "by": "deeplink watch"}
            note(self._folder(job.id), "resubmitted", self.clock.unix(), **facts)
        self.slurm.cancel(job.address)

    def release_hold(self, job: int, token: str) -> None:
        """Let the heir start, with the old job's record; whatever else carries the token goes.

        Raises:
            JobVanishedError: there is no heir any more.
            SubmissionFormatError: how the job was submitted is not known any more.
            OSError: the record cannot be written.
        """
        submitted, found = self._submission(job), self.find(token)
        if not found:
            raise JobVanishedError(job)
        heir, *others = found
        for other in others:
            self.slurm.cancel(other.address)
        folder = self._folder(heir.id)
        keep(folder, replace(submitted, generation=submitted.generation + 1, predecessor=job))
        if not any(event["event"] == "resubmission" for event in read_events(folder)):
            note(folder, "resubmission", self.clock.unix(), of=job)
        decided = record.read(self._folder(job))
        if decided and not record.read(folder):
            record.append(folder, replace(decided[-1], unix=self.clock.unix(), by="watch", done=()))
        self.slurm.release(heir.address)

    def _folder(self, job: int) -> Path:
        return record.job_folder(self.state, job)
