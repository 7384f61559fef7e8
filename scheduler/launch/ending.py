"""How a run ends: told to everybody, and the job given back to Slurm where it is to be held or started again."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from deeplink.scheduler.launch.history import ITS_OWN_FAULT
from deeplink.scheduler.launch.verdict import AGAIN_CODE, AttemptVerdict, NextMove
from deeplink.scheduler.launch.wait_for_requeue import TICK_S
from deeplink.scheduler.watch.records import Action, IncidentKind, IncidentOutcome, Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from deeplink.clock import Clock
    from deeplink.scheduler.launch.backend import Backend
    from deeplink.scheduler.launch.event_log import EventLog
    from deeplink.scheduler.launch.failure import RelaunchLimits
    from deeplink.scheduler.launch.history import Log
    from deeplink.scheduler.launch.status_reporter import StatusReporter
    from deeplink.types import NodeName

QUEUED_WAIT_S = 30.0
"""How long Slurm may take to end a job that went back into its queue."""
ORDER_S = 240.0
"""How long it may take to give it the job back: it may be away for a while (`ANSWER_S` of its backend), and then
take its time for each command. What is left behind must not order anything any more."""


class Ending:
    """Ends a run. The supervising thread alone uses it.

    Args:
        backend: the allocation.
        account: what is told of the job.
        chronicle: who is told.
        clock: for every duration.
        hold: whether the job is to be held when it fails by its own fault; None: where there is something to go
            on from.
        limits: how often ranks are started again.
        told_to_end: asked while Slurm is waited for.
    """

    def __init__(
        self,
        backend: Backend,
        account: StatusReporter,
        chronicle: EventLog,
        *,
        clock: Clock,
        hold: bool | None,
        limits: RelaunchLimits,
        told_to_end: Callable[[], bool],
    ) -> None:
        self._backend, self._account, self._chronicle = backend, account, chronicle
        self._clock, self._hold, self._limits, self._told_to_end = clock, hold, limits, told_to_end

    def action_for(self, verdict: AttemptVerdict, log: Log, *, requeueable: bool) -> Action:
        """Return what is done about a run that ends.

        A job that failed by its own fault is held where its user asked for it. Where he said nothing: if there is
        something to go on from, and where the run before this one ended so, too: then somebody (RequeueExit)
        starts it again and again. A script that never came to a step fails as it does anywhere.

        Args:
            verdict: why it ends.
            log: what was tried.
            requeueable: whether Slurm said that it may start the job again.
        """
        if verdict.move is NextMove.REQUEUE:
            return Action.REQUEUE
        if verdict.kind not in ITS_OWN_FAULT or not self._backend.can_requeue:
            return Action.NONE
        if self._hold is not None:
            return Action.HOLD if self._hold else Action.NONE
        if not self._limits.retries or verdict.code in self._limits.final_codes:
            return Action.NONE  # somebody waits for that code
        again = log.history.before is not None
        return Action.HOLD if again or (log.goes_on and requeueable) else Action.NONE

    def give_up(
        self, verdict: AttemptVerdict, action: Action, log: Log, attempts: int, *, lost: Collection[NodeName] = ()
    ) -> int:
        """End a run that failed; returns its exit code. `lost` are the nodes that this run has lost."""
        now = self._clock.monotonic()
        self._in_bounds(lambda: log.leave(verdict, now), QUEUED_WAIT_S)
        if action is Action.HOLD:
            release = f"scontrol release {self._backend.label}"
            held = f"held: mend it, then `{release}` starts it again where it was saved"
            self._account.enter(Phase.FAILED, f"{verdict.because}; {held}")
            if self._give_back(partial(self._backend.hold, verdict.because, lost), "held", held):
                verdict = replace(verdict, because=f"{verdict.because}; {held}")
            else:
                self._account.refused()
        return self.end(verdict, attempts)

    def start_again(self, verdict: AttemptVerdict, attempts: int, *, lost: Collection[NodeName] = ()) -> int:
        """Have Slurm start the job again, as its owner may; returns the exit code for the meantime."""
        self._account.enter(Phase.RECOVERING, verdict.because)
        said = "asked Slurm to start the job again"
        if self._give_back(partial(self._backend.requeue, lost), "requeue", f"{verdict.because}: {said}"):
            # Neither failed nor recovered: the next run of this job, or the watchdog, will say.
            self._tell_end(
                Phase.RECOVERING,
                AttemptVerdict(move=verdict.move, because=verdict.because, code=AGAIN_CODE),
                attempts,
            )
            return AGAIN_CODE
        self._account.refused()
        refused = AttemptVerdict(
            move=NextMove.FAILED,
            because=f"{verdict.because}; Slurm does not start it again",
            code=verdict.code or AGAIN_CODE,
        )
        return self.end(refused, attempts)

    def lose_before_the_start(self, lost: tuple[NodeName, ...], because: str) -> int:
        """End a run whose nodes were lost before there were ranks: Slurm starts it again elsewhere, if it may."""
        self._account.open(IncidentKind.NODE_SILENT, lost[0], 0.0, because, Action.REQUEUE)
        verdict = AttemptVerdict(move=NextMove.REQUEUE, because=because, lost=lost, code=AGAIN_CODE)
        return self.start_again(verdict, 0, lost=lost)

    def leave_stranded(self, verdict: AttemptVerdict, told: str, attempts: int) -> int:
        """End while stranded: told to, since the job starts again elsewhere, or because the time is up."""
        if not told:
            return self.end(
                AttemptVerdict(move=NextMove.FAILED, because=verdict.because, code=AGAIN_CODE), attempts
            )
        # Neither failed nor recovered: the next run of this job, or the watchdog, will say.
        self._account.enter(Phase.STRANDED, verdict.because)
        because = f"{verdict.because}; told to end by {told}"
        self._tell_end(
            Phase.STRANDED, AttemptVerdict(move=verdict.move, because=because, code=AGAIN_CODE), attempts
        )
        return AGAIN_CODE

    def end(self, verdict: AttemptVerdict, attempts: int) -> int:
        """Tell of the end of a run; returns its exit code."""
        good = verdict.move is NextMove.SUCCEEDED
        phase = Phase.SUCCEEDED if good else Phase.FAILED
        # Ranks that never report a step have recovered, as far as anybody can tell, when they end well.
        self._account.settle(IncidentOutcome.RECOVERED if good else IncidentOutcome.FAILED)
        self._account.enter(phase, verdict.because)
        self._tell_end(phase, verdict, attempts)
        return verdict.code

    def elsewhere(self, verdict: AttemptVerdict, attempts: int) -> int:
        """End without a word to anybody but people: whatever is told of this job is told by its newer run."""
        self._chronicle.event(
            "elsewhere", f"{verdict.because}; ending", because=verdict.because, attempts=attempts, code=AGAIN_CODE
        )
        return AGAIN_CODE

    def _tell_end(self, phase: Phase, verdict: AttemptVerdict, attempts: int) -> None:
        good = phase is Phase.SUCCEEDED
        self._chronicle.event(
            "ended",
            "" if good else f"ended with exit code {verdict.code}: {verdict.because}",
            code=verdict.code,
            phase=phase.value,
            because=verdict.because,
            attempts=attempts,
        )

    def _give_back(self, order: Callable[[], bool], event: str, sentence: str) -> bool:
        """Have Slurm take the job back, and wait until it ends us; False where it does not."""
        done: list[bool] = []
        self._in_bounds(lambda: done.append(order()), ORDER_S)
        if not any(done):
            return False
        self._chronicle.event(event, sentence)
        deadline = self._clock.monotonic() + QUEUED_WAIT_S
        while not self._told_to_end() and self._clock.monotonic() < deadline:
            self._account.tick()
            self._clock.sleep(TICK_S)
        return True

    def _in_bounds(self, work: Callable[[], None], longest_s: float) -> None:
        """Do what may hang, storage or Slurm; what takes longer, or than we are given, is left behind."""
        thread = threading.Thread(target=work, name="deeplink-ending", daemon=True)
        thread.start()
        began = self._clock.monotonic()
        while thread.is_alive():
            waited_s = self._clock.monotonic() - began
            if waited_s >= longest_s or (waited_s >= QUEUED_WAIT_S and self._told_to_end()):
                break
            self._account.tick()
            thread.join(TICK_S)
