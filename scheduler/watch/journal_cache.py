"""Caches what the loop reads from the journal; reads again only what may have changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deeplink.scheduler.watch.budget import fruitless_starts
from deeplink.scheduler.watch.records import IncidentKind, IncidentOutcome
from deeplink.scheduler.watch.rules.endings import BLAMELESS

if TYPE_CHECKING:
    from deeplink.clock import Clock
    from deeplink.scheduler.watch.heartbeats import LauncherHeartbeat
    from deeplink.scheduler.watch.journal import Journal
    from deeplink.types import Attempt, NodeName

RECENT_INCIDENTS = 16
OF_ALL_STARTS = 256
REREAD_S = 30.0
"""What is not known to have changed is read again after so long all the same."""
PROGRESS_S = 3.0
"""How old a count of fruitless starts may be: less than any hang takes to be one."""


_NO_REASON = frozenset(
    {IncidentKind.RANK_FAILED, IncidentKind.STRAGGLER, IncidentKind.STORAGE_FROZEN, IncidentKind.AGENTS_SILENT}
)
"""Kinds for which nobody starts a job again: one that is in the queue went there by its user's will."""


@dataclass(frozen=True, slots=True)
class AttemptMemory:
    """What is on record of one attempt.

    Attributes:
        told: kinds of its incidents that have not recovered.
        suspects: nodes that those blame.
        rescued: one of them is of a kind that a restart is to cure.
    """

    told: frozenset[str] = frozenset()
    suspects: tuple[NodeName, ...] = ()
    rescued: bool = False


_State = tuple["Attempt", int]


@dataclass(slots=True, kw_only=True)
class JournalCache:
    """The loop's memory of the journal. One thread only.

    Who writes an incident or begins an action beside the launchers' beats says so by `changed`.
    """

    journal: Journal
    clock: Clock
    _of_jobs: dict[int, tuple[_State, float, AttemptMemory]] = field(default_factory=dict)
    _fruitless: dict[int, tuple[_State, float, int]] = field(default_factory=dict)
    _drained: tuple[float, dict[NodeName, float]] | None = None
    _open: tuple[float, int] | None = None

    def changed(self, job: int | None = None) -> None:
        """Forget what is known of a job, and of what we drained."""
        self._drained = self._open = None
        if job is not None:
            self._of_jobs.pop(job, None)
            self._fruitless.pop(job, None)

    def forget(self, jobs: set[int]) -> None:
        """Drop every job that is not among these."""
        for job in self._of_jobs.keys() - jobs:
            del self._of_jobs[job]
            self._fruitless.pop(job, None)

    def drained(self) -> dict[NodeName, float]:
        """Return the nodes we ever set out to drain, and when last."""
        now = self.clock.monotonic()
        if self._drained is None or now - self._drained[0] > REREAD_S:
            self._drained = (now, self.journal.drained())
        return self._drained[1]

    def open_incidents(self) -> int:
        """Return how many incidents have no end."""
        now = self.clock.monotonic()
        if self._open is None or now - self._open[0] > REREAD_S:
            self._open = (now, self.journal.open_incidents())
        return self._open[1]

    def of(self, heard: LauncherHeartbeat) -> AttemptMemory:
        """Return what is on record of the attempt that beat."""
        state, now = (heard.beat.attempt, heard.tellings), self.clock.monotonic()
        known = self._of_jobs.get(heard.beat.attempt.job)
        if known and known[0] == state and now - known[1] < REREAD_S:
            return known[2]
        recalled = self._read(heard.beat.attempt)
        self._of_jobs[heard.beat.attempt.job] = (state, now, recalled)
        self._open = None
        return recalled

    def _read(self, attempt: Attempt) -> AttemptMemory:
        # Failed counts too: a launcher that Slurm ends while it waits for rescue gives its incident that end.
        hits = [
            hit
            for hit in self.journal.incidents(job=attempt.job, limit=RECENT_INCIDENTS)
            if hit.attempt == attempt and hit.outcome is not IncidentOutcome.RECOVERED
        ]
        return AttemptMemory(
            told=frozenset(hit.kind for hit in hits),
            suspects=tuple(sorted({hit.node for hit in hits if hit.node and hit.kind not in BLAMELESS})),
            rescued=any(hit.kind not in _NO_REASON for hit in hits),
        )

    def fruitless(self, heard: LauncherHeartbeat) -> int:
        """Return how many starts of the job in a row failed by themselves without a new step."""
        state, now = (heard.beat.attempt, heard.tellings), self.clock.monotonic()
        number = heard.beat.attempt.job
        known = self._fruitless.get(number)
        if known and known[0] == state and now - known[1] < PROGRESS_S:
            return known[2]
        job = self.journal.job(number)
        count = fruitless_starts(job, self.journal.incidents(job=number, limit=OF_ALL_STARTS)) if job else 0
        self._fruitless[number] = (state, now, count)
        return count
