"""Ends a run: reports its end, and gives the job back to Slurm where it is to be held or started again."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from deeplink.core.timeouts import start_call
from deeplink.scheduler.launch.history import ITS_OWN_FAULT
from deeplink.scheduler.recovery.records import Action, IncidentKind, IncidentOutcome, Phase
from deeplink.scheduler.recovery.relaunch import AGAIN_CODE, AttemptVerdict, NextMove

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from deeplink.core.types import NodeName
    from deeplink.scheduler.launch.backend import RunContext
    from deeplink.scheduler.launch.history import History
    from deeplink.scheduler.launch.slurm_monitor import NodesPoller
    from deeplink.scheduler.launch.status_reporter import StatusReporter

T = TypeVar("T")
log = logging.getLogger(__name__)

TICK_S = 0.1
ASK_SLURM_S = 5.0
RESTART_S = 2.0
BACK_S = 3.0  # a lost node is trusted again, when there is no other, after it has answered for so long
QUEUED_WAIT_S = 30.0  # how long Slurm may take to end a job that went back into its queue
# How long it may take to give it the job back: it may be away for a while (`ANSWER_S` of its backend), and then
# take its time for each command. What is left behind must not order anything any more.
ORDER_S = 240.0


class RequeueWait:
    """Waits for a rescue, as often as a run is stranded.

    Meanwhile the watchdog, if there is one, takes the lost nodes from Slurm, which then starts the job again
    elsewhere. Without one Slurm does the first half by itself after its own timeout; the second half is ours,
    and only then: asking for it while a node is unreachable and not down would lose the job its GPUs.
    """

    def __init__(self, run: RunContext, nodes: NodesPoller) -> None:
        self._backend, self._agents, self._events, self._clock = run.backend, run.agents, run.events, run.clock
        self._nodes, self._doubt_s = nodes, run.policy.doubt_s
        self._asked = False  # Slurm to start the job again
        self.is_elsewhere = False  # Slurm says that the job has been started again elsewhere
        self.found = ""  # what had become of the nodes that came back, for people; empty where that is not known

    def wait(
        self,
        lost: Collection[NodeName],
        timeout_s: float,
        *,
        others: Collection[NodeName],
        enough: Callable[[int], bool],
        listen: Callable[[], None],
        told_to_end: Callable[[], bool],
    ) -> bool:
        """Wait until enough nodes answer again (True), or until the time is up or something ends us (False)."""
        deadline = self._clock.monotonic() + timeout_s
        back_since: float | None = None
        asking: threading.Thread | None = None
        asked = tried = self._clock.monotonic()
        while self._backend.can_requeue and self._clock.monotonic() < deadline:
            listen()
            if told_to_end() or self.is_elsewhere:
                return False
            now = self._clock.monotonic()
            silence, taken = self._agents.silence(), self._nodes.tick().taken
            ours = [node for node in (*lost, *others) if node not in taken]
            silent = [node for node in ours if silence[node].answer_s >= self._doubt_s]
            if not enough(len(ours) - len(silent)):
                back_since = None
            elif back_since is None:
                back_since = now
            elif now - back_since >= BACK_S:
                self._report_back(lost, ours)
                return True
            if silent and now - tried >= RESTART_S:
                tried = now
                # Of a rebooted node nothing is left that could answer. One that is out of reach must not keep the
                # others waiting: they are started apart from it.
                gone = self._agents.without_agent(silent)
                begun = self._agents.restart(gone)
                begun += self._agents.restart([node for node in silent if node not in gone])
                if begun:
                    self._events.event("agents-again", nodes=begun)
            if now - asked >= ASK_SLURM_S and (asking is None or not asking.is_alive()):
                asked = now
                asking = threading.Thread(target=self._requeue_if_down, args=(tuple(lost),), daemon=True)
                asking.start()
            self._clock.sleep(TICK_S)
        return False

    def _report_back(self, lost: Collection[NodeName], ours: Collection[NodeName]) -> None:
        rebooted = tuple(sorted(self._agents.rebooted() & set(lost)))
        self.found = f"{', '.join(rebooted)} rebooted" if rebooted else ""
        said = f"the lost nodes answer again{self.found and f' ({self.found})'}"
        self._events.event("back", said, nodes=tuple(node for node in lost if node in ours), rebooted=rebooted)

    def _requeue_if_down(self, lost: Collection[NodeName]) -> None:
        status = self._backend.job_status()
        if status is not None and not status.ours:
            self.is_elsewhere = True
        elif not self._asked and self._backend.requeue_if_down(lost):
            self._asked = True
            self._events.event("requeue", "Slurm has given the lost nodes up: asked it to start the job again")


class Ending:
    """Ends a run. The supervising thread alone uses it."""

    def __init__(self, run: RunContext, reporter: StatusReporter, told_to_end: Callable[[], bool]) -> None:
        self._backend, self._events, self._clock = run.backend, run.events, run.clock
        self._hold, self._limits = run.spec.hold, run.policy.limits
        self._reporter, self._told_to_end = reporter, told_to_end

    def action_for(self, verdict: AttemptVerdict, history: History, *, requeueable: bool) -> Action:
        """Return what is done about a run that ends."""
        # A job that failed by its own fault is held where its user asked for it. Where the user said nothing: if
        # there is something to go on from, and where the run before this one ended so, too: else Slurm
        # (RequeueExit) starts it again and again. A script that never came to a step fails as it does anywhere.
        if verdict.move is NextMove.REQUEUE:
            return Action.REQUEUE
        if verdict.kind not in ITS_OWN_FAULT or not self._backend.can_requeue:
            return Action.NONE
        if self._hold is not None:
            return Action.HOLD if self._hold else Action.NONE
        if not self._limits.retries or verdict.code in self._limits.final_codes:
            return Action.NONE  # somebody waits for that code
        return Action.HOLD if history.before is not None or (history.goes_on and requeueable) else Action.NONE

    def give_up(
        self,
        verdict: AttemptVerdict,
        action: Action,
        history: History,
        attempts: int,
        *,
        lost: Collection[NodeName] = (),
    ) -> int:
        """End a run that failed; returns its exit code. `lost` are the nodes that this run has lost."""
        now = self._clock.monotonic()
        self._in_bounds(lambda: history.leave(verdict, now), QUEUED_WAIT_S)
        if action is Action.HOLD:
            release = f"scontrol release {self._backend.label}"
            held = f"held: mend it, then `{release}` starts it again where it was saved"
            self._reporter.enter(Phase.FAILED, f"{verdict.because}; {held}")
            if self._give_back(partial(self._backend.hold, verdict.because, lost), "held", held):
                verdict = replace(verdict, because=f"{verdict.because}; {held}")
            else:
                self._reporter.refused()
        return self.end(verdict, attempts)

    def start_again(self, verdict: AttemptVerdict, attempts: int, *, lost: Collection[NodeName] = ()) -> int:
        """Have Slurm start the job again, as its owner may; returns the exit code for the meantime."""
        self._reporter.enter(Phase.RECOVERING, verdict.because)
        said = f"{verdict.because}: asked Slurm to start the job again"
        if self._give_back(partial(self._backend.requeue, lost), "requeue", said):
            # Neither failed nor recovered: the next run of this job, or the watchdog, will say.
            return self._report_end(Phase.RECOVERING, AGAIN_CODE, verdict.because, attempts)
        self._reporter.refused()
        because = f"{verdict.because}; Slurm does not start it again"
        return self.end(AttemptVerdict(NextMove.FAILED, because, code=verdict.code or AGAIN_CODE), attempts)

    def lose_before_the_start(self, lost: tuple[NodeName, ...], because: str) -> int:
        """End a run whose nodes were lost before there were ranks: Slurm starts it again elsewhere, if it may."""
        self._reporter.open(IncidentKind.NODE_SILENT, lost[0], 0.0, because, Action.REQUEUE)
        verdict = AttemptVerdict(NextMove.REQUEUE, because, lost, code=AGAIN_CODE)
        return self.start_again(verdict, 0, lost=lost)

    def leave_stranded(self, verdict: AttemptVerdict, told: str, attempts: int) -> int:
        """End while stranded: told to, since the job starts again elsewhere, or because the time is up."""
        if not told:
            return self.end(AttemptVerdict(NextMove.FAILED, verdict.because, code=AGAIN_CODE), attempts)
        # Neither failed nor recovered: the next run of this job, or the watchdog, will say.
        self._reporter.enter(Phase.STRANDED, verdict.because)
        because = f"{verdict.because}; told to end by {told}"
        return self._report_end(Phase.STRANDED, AGAIN_CODE, because, attempts)

    def end(self, verdict: AttemptVerdict, attempts: int) -> int:
        """Report the end of a run; returns its exit code."""
        good = verdict.move is NextMove.SUCCEEDED
        phase = Phase.SUCCEEDED if good else Phase.FAILED
        # Ranks that never report a step have recovered, as far as can be seen, when they end well.
        self._reporter.settle(IncidentOutcome.RECOVERED if good else IncidentOutcome.FAILED)
        self._reporter.enter(phase, verdict.because)
        return self._report_end(phase, verdict.code, verdict.because, attempts)

    def elsewhere(self, verdict: AttemptVerdict, attempts: int) -> int:
        """End without reporting to journal or watchdog: this job's newer run does."""
        because = verdict.because
        self._events.event("elsewhere", f"{because}; ending", because=because, attempts=attempts, code=AGAIN_CODE)
        return AGAIN_CODE

    def _report_end(self, phase: Phase, code: int, because: str, attempts: int) -> int:
        said = "" if phase is Phase.SUCCEEDED else f"ended with exit code {code}: {because}"
        self._events.event("ended", said, code=code, phase=phase.value, because=because, attempts=attempts)
        return code

    def _give_back(self, order: Callable[[], bool], event: str, sentence: str) -> bool:
        """Have Slurm take the job back, and wait until it ends us; False where it does not."""
        if not self._in_bounds(order, ORDER_S):
            return False
        self._events.event(event, sentence)
        deadline = self._clock.monotonic() + QUEUED_WAIT_S
        while not self._told_to_end() and self._clock.monotonic() < deadline:
            self._reporter.tick()
            self._clock.sleep(TICK_S)
        return True

    def _in_bounds(self, work: Callable[[], T], longest_s: float) -> T | None:
        """Do what may hang, storage or Slurm; what takes longer, or than we are given, is left behind."""
        began, doing = self._clock.monotonic(), start_call(work)
        while not doing.done():
            waited_s = self._clock.monotonic() - began
            if waited_s >= longest_s or (waited_s >= QUEUED_WAIT_S and self._told_to_end()):
                return None
            self._reporter.tick()
            wait([doing], TICK_S)
        if problem := doing.exception():
            log.error("ending the run", exc_info=problem)
        return None if problem else doing.result()
