"""Polls Slurm while ranks run: time left, the job's state, the reason for an end."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from deeplink.scheduler.launch.deadline import Deadline, DeadlineAction
from deeplink.scheduler.launch.external_events import ExternalEvents, look_outside
from deeplink.scheduler.launch.job_status import AGAIN_S, StatusPoller
from deeplink.scheduler.launch.verdict import AttemptVerdict, NextMove
from deeplink.scheduler.watch.records import IncidentKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deeplink.clock import Clock
    from deeplink.scheduler.launch.agent_pool import AgentPool
    from deeplink.scheduler.launch.backend import Backend
    from deeplink.scheduler.launch.event_log import EventLog
    from deeplink.scheduler.launch.job_status import JobStatus
    from deeplink.scheduler.watch.records import ProgressPoint


LAG_S = 1.0
"""Ranks were gone before squeue told of the preemption that ended them (measured once, 22.05.8)."""
FRESH_S, SLOW_S = 5.0, 15.0
"""Ranks are ended for the time limit only by a word of Slurm's that is no older than the first; or, of a busy
controller, no older than the second and asked for since they were to be ended."""
AFTERMATH_S = 3.0
"""Nodes that were silent together are not heard again at one instant: so long nobody is lost."""


class SlurmMonitor:
    """Between a run and Slurm. The supervising thread alone uses it.

    Args:
        backend: the allocation.
        fleet: its agents, by which ranks are told when to save.
        chronicle: who is told.
        clock: for every duration.
        margin_s: how long before the time limit the ranks are to save; None: learned.
        partition_s: how long nothing is done that Slurm has not been asked about, after most nodes were silent.
    """

    def __init__(
        self,
        backend: Backend,
        fleet: AgentPool,
        chronicle: EventLog,
        clock: Clock,
        *,
        margin_s: float | None,
        partition_s: float,
    ) -> None:
        self._backend, self._fleet, self._chronicle, self._clock = backend, fleet, chronicle, clock
        self._desk, self._deadline = StatusPoller(backend, clock), Deadline(margin_s)
        self._partition_s = partition_s
        self._cut_off_at: float | None = None
        self._alone = False
        self._silent_at = float("-inf")  # when most nodes were last silent at once
        self._odd_at: float | None = None  # since when Slurm's word is wanted
        self._over_at = float("inf")  # since when the ranks are to be ended for the time limit

    @property
    def requeueable(self) -> bool:
        """Whether Slurm said that it may start the job again."""
        return self._backend.can_requeue and self._desk.requeueable

    @property
    def in_doubt(self) -> bool:
        """Whether it may have been us who were cut off, and Slurm has not said since whose the job is."""
        return self._cut_off_at is not None

    def begin(self) -> None:
        """A new attempt begins."""
        self._deadline.begin()
        self._fleet.save_at = 0

    def take(self, points: Iterable[ProgressPoint]) -> None:
        """Take in reports of the newest attempt."""
        self._deadline.take(points)

    def look(self, code: int | None, told: str, *, gained: bool) -> AttemptVerdict | None:
        """Return what is to be done for a reason from outside; None where there is none.

        Args:
            code: exit code of the ranks; None while they run.
            told: the signal that told us to end; empty while none did.
            gained: whether a newer step than before this run was reported.
        """
        now = self._clock.monotonic()
        self._desk.tick()
        moment = max(min(now, self._over_at) - FRESH_S, now - SLOW_S)
        is_fresh = self._desk.since(moment) is not None  # first: a word that comes in now is not yet looked at
        time = self._deadline.look(self._desk.left_s())
        self._over_at = min(now, self._over_at) if time is DeadlineAction.END else float("inf")
        if time is DeadlineAction.SAVE:
            self._wish_save()
        elif (
            time is DeadlineAction.END and not is_fresh
        ):  # the job may have been suspended since, or its limit moved
            self._desk.press(moment)
            time = DeadlineAction.NOTHING
        seen = ExternalEvents(
            told=told,
            code=code,
            agents_gone=self._fleet.is_gone,
            cut_off=self._cut_off_at is not None,
            now=time,
            gained=gained,
            requeueable=self.requeueable,
        )
        if not seen.wants_word or not self._backend.can_requeue:
            self._odd_at = None
            return look_outside(replace(seen, asked_for_s=float("inf")))
        self._odd_at = now if self._odd_at is None else self._odd_at
        since = max(self._odd_at, self._silent_at)
        # While most nodes are silent every answer is older than the silence: it is asked for when that is over.
        word = None if now - self._silent_at < AGAIN_S else self._word(since, now, why=seen.was_ended)
        if word is not None:
            self._cut_off_at = None  # here alone: what the word means is looked at below
        return look_outside(replace(seen, standing=word, asked_for_s=now - since))

    def _word(self, since: float, now: float, *, why: bool) -> JobStatus | None:
        """Return Slurm's word to what was odd at `since`.

        Where it is asked why something ended, a word that explains nothing may be early: it is asked again.
        """
        self._desk.press(since)
        word = self._desk.since(since)
        if word is None or word.explains or not why:
            return word
        if now >= since + LAG_S:
            self._desk.press(since + LAG_S)
        return self._desk.since(since + LAG_S)

    def weigh(self, verdict: AttemptVerdict, *, alone: bool) -> AttemptVerdict:
        """Return a verdict on the nodes as it may be carried out.

        Cut off for a while, we may be what is left of an older run: nothing is done before Slurm has said. Nor
        while nobody but our own node is heard (`alone`): of two nodes either may be the one that is cut off. What
        is held back so names the nodes that are given up.
        """
        now = self._clock.monotonic()
        if alone and not self._alone:
            self._cut_off_at = now
        self._alone = alone
        if verdict.kind is IncidentKind.AGENTS_SILENT:
            self._cut_off_at = self._silent_at = now
        if now - self._silent_at < AFTERMATH_S and verdict.kind in {
            IncidentKind.NODE_SILENT,
            IncidentKind.JOB_STRANDED,
        }:
            because = f"{verdict.because}; most were silent a moment ago, and come back one after the other"
            return AttemptVerdict(move=NextMove.WAIT, because=because, kind=verdict.kind)
        if self._cut_off_at is None or not self._backend.can_requeue:
            return verdict
        if now - self._cut_off_at > self._partition_s:
            self._cut_off_at = None
        elif verdict.move in {NextMove.RELAUNCH, NextMove.STRANDED}:
            because = f"{verdict.because}; asking Slurm whose the job is"
            return AttemptVerdict(move=NextMove.WAIT, because=because, kind=verdict.kind, lost=verdict.lost)
        return verdict

    def _wish_save(self) -> None:
        left_s = self._desk.left_s() or 0.0
        step = self._fleet.save_at = self._deadline.told()
        sentence = f"{left_s:.0f} s until the time limit: a checkpoint is wanted at step {step}"
        self._chronicle.event("save-wanted", sentence, step=step, left_s=left_s)
