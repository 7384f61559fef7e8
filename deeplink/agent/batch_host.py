"""An agent of a job whose batch host died, and the launcher with it: has Slurm start the job again.

With `--no-kill` Slurm takes a batch host that it calls down from the job, which then runs on without a script,
until its time limit. Any node of the job may have it put back into the queue then, by its owner's right alone.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deeplink.core.errors import DeepLinkError
from deeplink.core.timeouts import call_with_timeout
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.recovery.records import Action, Incident, IncidentKind, end_id
from deeplink.scheduler.slurm.nodeset import unfold
from deeplink.scheduler.slurm.states import JobState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from deeplink.core.clock import Clock
    from deeplink.core.types import Attempt, NodeName
    from deeplink.scheduler.slurm.client import Slurm

log = logging.getLogger(__name__)

SILENT_S = 5.0  # without a question of the launcher's; one that is started again is back after a second
LOOK_S, SELDOM_S = 4.0, 60.0  # how often Slurm is asked then: by the first nodes of the job, by each other one
RECORD_S = 3.0  # how long the incident may take: its storage may be gone with the host
FIRST = 16  # nodes: a thousand that ask at once would be a burden to slurmctld
JOURNAL = "journal.sqlite"


@dataclass(slots=True)
class BatchHostWatch:
    """Looks from `start` to `stop`, in a thread."""

    job: int
    number: int  # of this node in the job
    nodes: tuple[NodeName, ...]  # that the job began with
    silent_s: Callable[[], float]  # since the launcher's last question
    newest: Callable[[], Attempt | None]  # the newest attempt, as it told; None before
    slurm: Slurm
    clock: Clock
    folder: Path  # the job's
    _ending: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def of_job(
        cls,
        env: Mapping[str, str],
        silent_s: Callable[[], float],
        newest: Callable[[int], Attempt | None],
        *,
        slurm: Slurm,
        clock: Clock,
        state: Path,
    ) -> BatchHostWatch | None:
        """Return the watch of an agent with this environment; None outside of a Slurm job."""
        job, number = env.get("SLURM_JOB_ID", ""), env.get("SLURM_NODEID", "")
        if not (job.isdigit() and number.isdigit()):
            return None
        folder = state / "jobs" / job
        nodes = unfold(env.get("SLURM_JOB_NODELIST", ""))
        return cls(int(job), int(number), nodes, silent_s, lambda: newest(int(job)), slurm, clock, folder)

    def start(self) -> None:
        """Begin."""
        threading.Thread(target=self._run, name="deeplink-batch-host", daemon=True).start()

    def stop(self) -> None:
        """Look no more; does not wait."""
        self._ending.set()

    def _run(self) -> None:
        pause_s = LOOK_S if self.number < FIRST else SELDOM_S
        # Not all at one moment.
        while not self._ending.wait(pause_s + LOOK_S / FIRST * (self.number % FIRST)):
            if self.look():
                return

    def look(self) -> bool:
        """Have the job put back into the queue, if its batch host is gone; True once nothing is left to do."""
        silent_s, attempt = self.silent_s(), self.newest()
        if silent_s < SILENT_S or attempt is None:
            return False
        try:
            job = self.slurm.job(self.job)
            if job.restarts != attempt.restart:
                return True
            # Its name may be kept (22.05.8). That of salloc, for whom there is no requeue, was none of its nodes.
            is_gone = job.batch_host is None or job.batch_host in {*self.nodes} - {*job.nodes}
            if job.state is not JobState.RUNNING or not is_gone or not job.requeueable:
                return False
            self._record(attempt, silent_s)  # first: the requeue ends us
            self.slurm.requeue(job.address)
        except DeepLinkError as problem:
            log.warning("job %d has lost its batch host: %s", self.job, problem)
            return False
        return True

    def _record(self, attempt: Attempt, silent_s: float) -> None:
        now = self.clock.unix()
        incident = Incident(
            id=end_id(attempt),
            kind=IncidentKind.LAUNCHER_LOST,
            attempt=attempt,
            began_unix=now - silent_s,
            detected_unix=now,
            acted_unix=now,
            action=Action.REQUEUE,
            evidence="Slurm has taken the batch host from the job, and nothing is heard of the launcher; an agent "
            "asked for the job to be started again",
        )

        def record() -> None:
            with Journal(self.folder / JOURNAL, shared_file_system=True) as journal:
                journal.record_incident(incident)

        try:
            call_with_timeout(record, RECORD_S)
        except (DeepLinkError, OSError) as problem:  # a TimeoutError, too
            log.warning("the job's journal: %s", problem)
