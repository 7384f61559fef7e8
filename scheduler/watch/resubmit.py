"""Starts a job again: as a new job in its place, on better nodes, without those that are suspected.

The replacement is submitted held, with a token in its comment; then the old job is marked, and cancelled; then the
replacement is let go. Each step is seen in Slurm itself, so the next one follows from what is true, however often
the watchdog is killed meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pwd
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from deeplink.core.errors import DeepLinkError
from deeplink.core.publish import published_file
from deeplink.core.timeouts import call_with_timeout
from deeplink.scheduler.jobs.job_folder import note, read_events
from deeplink.scheduler.placement.hint import decision as record
from deeplink.scheduler.placement.hint.cluster_survey import read_queue, taking_back
from deeplink.scheduler.placement.hint.decision import Decision, HintKind, Recorded
from deeplink.scheduler.placement.hint.reconcile import HintChange, Mine, plan
from deeplink.scheduler.recovery.exclusions import bounded, release_changes, required_without, still_suspected
from deeplink.scheduler.recovery.resubmission import (
    SCRIPT_NAME,
    depends_on,
    left_for,
    resubmit_argv,
    resubmit_env,
    why_not,
    with_our_comment,
)
from deeplink.scheduler.slurm import command
from deeplink.scheduler.slurm.client import JobVanishedError
from deeplink.scheduler.slurm.command import CommandError, is_unanswered
from deeplink.scheduler.slurm.nodeset import fold
from deeplink.scheduler.slurm.settings import parse_settings
from deeplink.scheduler.slurm.states import SlurmTextError
from deeplink.scheduler.slurm.submission import SubmissionError, Submitted, keep, kept, unreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from deeplink.core.clock import Clock
    from deeplink.core.types import NodeName
    from deeplink.scheduler.journal.journal import Journal
    from deeplink.scheduler.placement.hint.cluster_survey import Row
    from deeplink.scheduler.placement.hint.reconcile import SurveyedCluster
    from deeplink.scheduler.slurm.client import Slurm
    from deeplink.scheduler.slurm.command import Runner
    from deeplink.scheduler.slurm.parse import JobRow
    from deeplink.scheduler.watch.observer import Observer

log = logging.getLogger(__name__)

SUBMIT_S = 10.0
WORTH_S = 10.0
"""Slurm must take longer than this still until it gives the node up, or the job keeps its id and waits."""


class Submit(Protocol):
    """Runs sbatch in an environment and a folder."""

    def __call__(self, argv: Sequence[str], /, *, env: Mapping[str, str], cwd: Path) -> str:
        """Return what it wrote to standard output."""
        ...


def _submit(argv: Sequence[str], /, *, env: Mapping[str, str], cwd: Path) -> str:
    return command.answer_of(command.finish(argv, timeout_s=SUBMIT_S, env=env, cwd=cwd))


@dataclass(slots=True, kw_only=True)
class Resubmitter:
    """The jobs of one user that agreed to be submitted again. One thread only."""

    slurm: Slurm
    state: Path
    user: str
    clock: Clock
    submit: Submit = _submit
    _timeout_s: int | None = field(default=None)

    def agreed(self, job: JobRow) -> Submitted | None:
        """Return how a job was submitted, if its user agreed that it may be submitted again."""
        if job.user != self.user:
            return None
        try:
            return kept(self._folder(job.id))
        except (OSError, SubmissionError) as problem:
            log.warning("job %d is not submitted again: %s", job.id, problem)
            return None

    def _submission(self, job: int) -> Submitted:
        submitted = kept(self._folder(job))
        if submitted is None:
            raise unreadable("it is gone")
        return submitted

    def is_left_to(self, job: int, replacement: int) -> bool:
        """Whether a job's folder tells that it was left to its replacement, and so cancelled by us."""
        return any(
            event["event"] == "resubmitted" and event.get("as") == replacement
            for event in read_events(self._folder(job))
        )

    def obstacle(self, job: JobRow, submitted: Submitted, bad: AbstractSet[NodeName], silent_s: float) -> str:
        """Return why a job is not submitted again now; empty where it is to be."""
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

    def submit_replacement(self, job: JobRow, token: str, bad: AbstractSet[NodeName]) -> None:
        """Submit a job's replacement, held."""
        submitted = self._submission(job.id)
        script = self._folder(job.id) / SCRIPT_NAME
        if submitted.script is not None:
            with published_file(script, mode=0o700) as draft:
                draft.write_bytes(submitted.script.encode(errors="surrogateescape"))
        argv = resubmit_argv(
            submitted,
            script=str(script),
            name=job.name,
            comment=self.slurm.comment(job.id),
            mark=token,
            excluded=sorted({*self.slurm.excluded_nodes(job.id), *bad}),
        )
        self.submit(argv, env=resubmit_env(submitted), cwd=Path(submitted.cwd))

    def hand_over(self, job: JobRow, replacement: JobRow) -> None:
        """Say in the old job's comment which job stands for it from now on."""
        self.slurm.comment_job(job.address, with_our_comment(self.slurm.comment(job.id), left_for(replacement.id)))

    def supersede(self, job: JobRow, replacement: JobRow) -> None:
        """Cancel the old job; its folder, which outlasts Slurm's memory, names the job that replaces it."""
        if not self.is_left_to(job.id, replacement.id):
            facts = {"as": int(replacement.id), "by": "deeplink watch"}
            note(self._folder(job.id), "resubmitted", self.clock.unix(), **facts)
        self.slurm.cancel(job.address)

    def release_hold(self, job: int, token: str) -> None:
        """Let the replacement start, with the old job's record; whatever else carries the token goes."""
        submitted, found = self._submission(job), self.find(token)
        if not found:
            raise JobVanishedError(job)
        replacement, *others = found
        for other in others:
            self.slurm.cancel(other.address)
        folder = self._folder(replacement.id)
        keep(folder, replace(submitted, generation=submitted.generation + 1, predecessor=job))
        if not any(event["event"] == "resubmission" for event in read_events(folder)):
            note(folder, "resubmission", self.clock.unix(), of=job)
        decided = record.read(self._folder(job))
        if decided and not record.read(folder):
            record.append(folder, replace(decided[-1], unix=self.clock.unix(), by="watch", done=()))
        self.slurm.release(replacement.address)

    def _folder(self, job: int) -> Path:
        return record.job_folder(self.state, job)


# Chooses nodes again for a job that is about to restart, as its submission did.


QUESTION_S = 1.0  # how long one question to Slurm may take here: a hint is worth no more of a job's recovery
WISH_S = 3.0  # how long all of it may take: a user's record may lie on storage that hangs
USUAL_STATE = Path(".local/state/deeplink")


@dataclass(frozen=True, slots=True)
class RequeueHint:
    """What to change about a job before it starts again."""

    changes: Mapping[str, str] = field(default_factory=dict)  # in scontrol's words; empty for nothing
    nodes: tuple[NodeName, ...] = ()  # those that it is hinted to run on now; empty for none


@dataclass(frozen=True, slots=True, kw_only=True)
class RequeueHints:
    """Makes hints again for jobs that were submitted with `deeplink sbatch`."""

    run: Runner
    state_of: Callable[[str], Path | None]
    ground: Callable[[Sequence[Mine]], SurveyedCluster]
    clock: Clock
    owner_of: Callable[[str], int | None] = lambda _user: None
    longest_s: float = WISH_S

    def of(self, job: int, excluded: AbstractSet[NodeName]) -> RequeueHint | None:
        """Return the hint at a job that waits and is about to be let go; None where nothing is known of it."""
        try:
            return call_with_timeout(lambda: self._of(job, frozenset(excluded)), self.longest_s)
        except (DeepLinkError, OSError) as problem:
            log.info("job %d: no hint at nodes: %s", job, problem)
            return None

    def _of(self, job: int, excluded: frozenset[NodeName]) -> RequeueHint | None:
        queue = read_queue(self.run)
        row = next((row for row in queue if row.id == job and row.waits), None)
        known = self._known(row.user, row.record_id) if row else None
        if row is None or known is None:
            return None
        folder, last = known
        mine = self._mine(row, last, excluded)
        moves = plan(
            [mine], [mine.row if one is row else one for one in queue], self.ground([mine]), mine.wished_at
        )
        return self._carried(folder, row, last, moves[0]) if moves else None

    def _mine(self, row: Row, last: Recorded, excluded: frozenset[NodeName]) -> Mine:
        # Slurm tells a job that lost nodes by those it had left, and its hold is about to be cleared.
        # Nodes that were hinted for its last run count no more.
        nodes, required = max(row.nodes, last.ask.nodes), frozenset() if row.wished else row.required
        wish = last.decision
        if wish.names_nodes and not required:
            wish = replace(wish, kind=HintKind.NOTHING, nodes=())
        row = replace(row, reason="", nodes=nodes, excluded=excluded, required=required)
        return Mine(row=row, ask=last.ask, wish=wish, wished_at=self.clock.unix())

    def _carried(self, folder: Path, row: Row, last: Recorded, move: HintChange) -> RequeueHint:
        nodes = move.decision.nodes if move.decision.names_nodes else ()
        changes = {**(taking_back(row.comment) if row.wished else {}), **move.fields}
        if changes:
            self._append(folder, row.user, last, move.decision)
        return RequeueHint(changes, nodes)

    def _known(self, user: str, job: str) -> tuple[Path, Recorded] | None:
        state = self.state_of(user)
        if state is None:
            return None
        folder = record.job_folder(state, job)
        found = record.read(folder)
        return (folder, found[-1]) if found else None

    def _append(self, folder: Path, user: str, last: Recorded, decision: Decision) -> None:
        line = Recorded(unix=self.clock.unix(), by="watch", ask=last.ask, decision=decision)
        record.append(folder, line, self.owner_of(user))


def other_user(user: str) -> int | None:
    """Return the number of a user, unless it is us, or he is not known (then nothing of his is found either)."""
    try:
        number = pwd.getpwnam(user).pw_uid
    except KeyError:
        return None
    return None if number == os.getuid() else number


def state_folder(own: Path, user: str) -> Path | None:
    """Return where a user's records are: as ours, below his home; where ours are elsewhere, at the usual place."""
    try:
        entry = pwd.getpwnam(user)
        if entry.pw_uid == os.getuid():
            return own
        home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return None
    below = own.relative_to(home) if own.is_relative_to(home) else USUAL_STATE
    return Path(entry.pw_dir) / below


# Letting a requeued job go: without its hold, off the nodes that are suspected, onto the best of the rest.


@dataclass(slots=True, kw_only=True)
class Releaser:
    """Lets jobs go. One thread only."""

    slurm: Slurm
    journal: Journal
    observer: Observer
    clock: Clock
    say: Callable[[str], None]
    hints: RequeueHints | None = None

    def release(
        self, row: JobRow, exclude: tuple[NodeName, ...], *, carry: bool = True, held: bool = False
    ) -> None:
        """Clear the hold of a waiting job; its own exclusions stay, ours are as few as there is reason for."""
        job = row.id
        place, before, now_unix = self.slurm.place(job), self.journal.excluded(job), self.clock.unix()
        users = {*place.excluded} - before.keys()
        older = (
            still_suspected(before, {node.name: node for node in self.journal.nodes()}, now_unix) if carry else ()
        )
        known = self.journal.job(job)
        size = len(known.newest.nodes) + len(known.newest.spares) if known else 0
        asks = replace(place, nodes=max(place.nodes, size), excluded=tuple(users))
        partition = self.slurm.partition_nodes(place.partitions) if exclude or older else frozenset()
        silent = self.observer.silent((*exclude, *older))
        ours = bounded((*exclude, *older), asks, partition, self.observer.cluster.nodes, silent)
        since = {name: now_unix if name in exclude else before[name] for name in ours if name not in users}
        # Before the command both, after it what is true: killed in between, ours are never taken for the user's.
        self.journal.set_excluded(job, {**before, **since})
        wanted = users | {*ours}
        changes = release_changes(place, wanted, required_without(asks, {*ours}))
        wish = self.hints.of(job, wanted) if self.hints and carry else None
        if not wish or not self._let_go(row, changes, wish):
            self.slurm.update_job(row.address, **changes, StartTime="now")
        if held:
            self.slurm.release(row.address)
        self.journal.set_excluded(job, since)

    def _let_go(self, job: JobRow, changes: Mapping[str, str], wish: RequeueHint) -> bool:
        """Let a job go with a hint; False where Slurm refuses that, which is no reason to keep it waiting."""
        try:
            self.slurm.update_job(job.address, **{**changes, **wish.changes}, StartTime="now")
        except CommandError as refused:
            if is_unanswered(refused):
                raise
            self.say(f"job {job.label}: its hint is refused: {refused.stderr.strip()}")
            return False
        if wish.nodes:
            self.say(f"job {job.label} is hinted to run on {fold(wish.nodes)}")
        return True
