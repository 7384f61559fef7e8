"""Polls Slurm while ranks run: time left, the job's state, its nodes' states, the reason for an end."""

from __future__ import annotations

import math
import signal
from collections import deque
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from deeplink.core import process_metrics
from deeplink.core.timeouts import LastAnswer
from deeplink.scheduler.launch.backend import OVER_S, NodesStatus
from deeplink.scheduler.recovery.records import IncidentKind
from deeplink.scheduler.recovery.relaunch import AttemptVerdict, NextMove

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from deeplink.core.clock import Clock
    from deeplink.core.types import NodeName
    from deeplink.scheduler.launch.backend import Backend, JobStatus, RunContext
    from deeplink.scheduler.launch.event_log import EventLog
    from deeplink.scheduler.recovery.records import ProgressPoint

NODES_S, PAUSE_S = 2.0, 0.02  # a relaunch waits so long for the nodes' states, and looks for them so often
NODES_EVERY_S = 2.0  # between two questions while nodes are silent, or the job is stranded
AGAIN_S = 1.0  # Slurm is asked for the job's status no sooner again
# Between two questions for it: a quarter of the time that is left, within these bounds. The limit may be changed.
STATUS_EVERY_S, SELDOM_S = 5.0, 300.0

LEAD_S = 3.0  # for every rank to learn of the step to save at: its agent is told, then its next report is answered
END_S = 20.0  # what is left once the ranks are ended: for Slurm to start the job again before it ends it
LEAST_MARGIN_S, MOST_MARGIN_S = 60.0, 900.0
SAVES = 3.0  # times a save: storage may be slower than it was so far, and the limit comes for many jobs at once
MOVED_S = 30.0  # the time left grows by more only where the limit was moved, or the job was suspended for a while
MOST_POINTS = 512

WORD_S = 5.0  # so long Slurm is waited for once ranks have ended; then they are judged by what else is known
TERMINATED = 128 + signal.SIGTERM
LAG_S = 1.0  # ranks were gone before squeue told of the preemption that ended them (measured once, 22.05.8)
# Ranks are ended for the time limit only by an answer of Slurm's that is no older than the first; or, of a busy
# controller, no older than the second and asked for since they were to be ended.
FRESH_S, SLOW_S = 5.0, 15.0
AFTERMATH_S = 3.0  # nodes that were silent together are not heard again at one instant: so long none is lost


class NodesPoller:
    """Slurm's last answer on the job's nodes. The supervising thread alone uses it."""

    def __init__(self, backend: Backend, clock: Clock) -> None:
        self._clock = clock
        self._last = LastAnswer(backend.nodes_status, clock, "deeplink-nodes")
        self._is_answered = True  # whether Slurm answered when it was last waited for

    @property
    def status(self) -> NodesStatus:
        """The last answer."""
        return self._last.value or NodesStatus()

    def tick(self) -> NodesStatus:
        """Return the last answer, and ask again if it is time to; does not wait."""
        if self._clock.monotonic() - self._last.asked >= NODES_EVERY_S:
            self._last.ask()
        return self.status

    def ask(self) -> float:
        """Ask now, without waiting; return when, for `look`."""
        now = self._clock.monotonic()
        self._last.ask()
        return now

    def look(self, listen: Callable[[], None], since: float = math.inf) -> NodesStatus:
        """Return the answer to a question asked since then, or now; the last one where none comes in time."""
        began = self._clock.monotonic()
        since = min(began, max(since, began - NODES_S))
        while self._last.asked < since and self._clock.monotonic() < began + NODES_S:
            self._last.ask()
            listen()
            self._clock.sleep(PAUSE_S)
        self._is_answered = self._last.answered >= since
        return self.status

    def report(self, events: EventLog, usable: Collection[NodeName], chosen: Collection[NodeName]) -> None:
        """Say of each usable node that Slurm has withdrawn what becomes of it."""
        if not self._is_answered:
            said = f"Slurm does not say within {NODES_S:.0f} s how the nodes stand: its last answer counts"
            events.event("nodes-unknown", said)
        for node in usable:
            if node in self.status.taken:
                name, becomes = "taken", "Slurm has taken it from the job, it is not used any more"
                because = f"{self.status.taken[node]}; {becomes}"
            elif node in self.status.out:
                becomes = "used all the same, no other node is left" if node in chosen else "left out"
                name, because = "drained", f"{self.status.out[node]}; {becomes}"
            else:
                continue
            events.event(name, f"{node} is {because}", nodes=[node], because=because)


class StatusPoller:
    """Asks Slurm for the job's status. The supervising thread alone uses it."""

    def __init__(self, backend: Backend, clock: Clock) -> None:
        self._clock = clock
        self._last = LastAnswer(backend.job_status, clock, "deeplink-status")

    def tick(self) -> None:
        """Ask, if it is time to."""
        left = self.left_s()
        pause = SELDOM_S if left is None else min(SELDOM_S, max(STATUS_EVERY_S, left / 4))
        if self._last.value is None:
            pause = STATUS_EVERY_S  # it is not known yet whether there is a limit
        if self._clock.monotonic() - self._last.asked >= pause:
            self._last.ask()

    def ask_since(self, moment: float) -> None:
        """Ask, and again after a while, until there is an answer to a question asked at `moment` or later."""
        if self._last.answered < moment and self._clock.monotonic() - self._last.asked >= AGAIN_S:
            self._last.ask()

    def since(self, moment: float) -> JobStatus | None:
        """Return the answer to a question asked at `moment` or later; None while there is none."""
        return self._last.value if self._last.answered >= moment else None

    def left_s(self) -> float | None:
        """Return the seconds until the time limit as of now; None where there is none, or it is not known."""
        if self._last.value is None or self._last.value.left_s is None:
            return None
        return self._last.value.left_s - (self._clock.monotonic() - self._last.answered)

    @property
    def requeueable(self) -> bool:
        """Whether Slurm said that it may start the job again."""
        return self._last.value is not None and self._last.value.requeueable


class DeadlineAction(Enum):
    """The action for the time that is left."""

    NOTHING = "nothing"
    SAVE = "save"
    END = "end"


@dataclass(slots=True)
class Deadline:
    """When the ranks are to save before the time limit, and when the job is better started again; pure."""

    margin_s: float | None = None
    save_s: float | None = None  # the longest save so far; None before the first
    saved: int | None = None  # step of the newest whole checkpoint; None before the first
    save_at: int = 0  # the step the ranks were told to save at; 0 while they were not
    _least_s: float = math.inf
    _points: deque[ProgressPoint] = field(default_factory=lambda: deque(maxlen=MOST_POINTS))

    def begin(self) -> None:
        """A new attempt begins: its ranks have been told nothing."""
        self.save_at = 0
        self._points.clear()

    def take(self, points: Iterable[ProgressPoint]) -> None:
        """Take in reports of the newest attempt."""
        for point in points:
            if point.rank:
                continue
            self._points.append(point)
            step = point.metrics.get(process_metrics.CHECKPOINT_STEP)
            if step is not None and step != self.saved:
                self.saved = int(step)
                begun = next((one.unix for one in self._points if one.step >= step), point.unix)
                took = max(0.0, point.metrics.get(process_metrics.CHECKPOINT_UNIX, point.unix) - begun)
                self.save_s = max(took, self.save_s or 0.0)

    @property
    def step_s(self) -> float:
        """Seconds of a step lately; 0 where too little was heard."""
        if not self._points or (steps := self._points[-1].step - self._points[0].step) <= 0:
            return 0.0
        return max(0.0, self._points[-1].unix - self._points[0].unix) / steps

    @property
    def margin(self) -> float:
        """Seconds before the limit at which the ranks are told to save."""
        if self.margin_s is not None:
            return self.margin_s
        wanted = END_S + LEAD_S + SAVES * (self.save_s or 0.0) + 2 * self.step_s
        return min(MOST_MARGIN_S, max(LEAST_MARGIN_S, wanted))

    def look(self, left_s: float | None) -> DeadlineAction:
        """Return what is to be done with so much time left; SAVE once an attempt, for one limit."""
        if left_s is None or not self._points:
            return DeadlineAction.NOTHING  # ranks that never said how far they are, are not told to save either
        if left_s > self._least_s + MOVED_S:
            self.save_at, self._least_s = 0, math.inf  # what was told was for another limit
        self._least_s = min(self._least_s, left_s)
        if self.save_at:
            done = self.saved is not None and self.saved >= self.save_at
            return DeadlineAction.END if done or left_s < min(END_S, self.margin / 2) else DeadlineAction.NOTHING
        return DeadlineAction.SAVE if left_s <= self.margin else DeadlineAction.NOTHING

    def told(self) -> int:
        """Return the step at which all ranks are to save, and remember that they were told."""
        ahead = 1 + math.ceil(LEAD_S / self.step_s) if self.step_s else 1
        self.save_at = self._points[-1].step + ahead
        return self.save_at


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalEvents:
    """Events from outside: a signal, preemption, the time limit, the job started elsewhere."""

    told: str = ""  # the signal that told us to end; empty while none did
    code: int | None = None  # exit code of the ranks; None while they run
    agents_gone: bool = False  # all agents have ended, and we did not end them
    status: JobStatus | None = None  # Slurm's answer to a question asked since any of this began
    asked_for_s: float = 0.0  # since then
    now: DeadlineAction = DeadlineAction.NOTHING  # what the time limit asks for
    gained: bool = False  # whether a newer step than before this run was reported
    requeueable: bool = False

    @property
    def was_ended(self) -> bool:
        """Whether something was ended that we did not end."""
        return bool(self.told or self.agents_gone or self.code == TERMINATED)


def look_outside(seen: ExternalEvents) -> AttemptVerdict | None:
    """Return what is to be done for a reason from outside; None where there is none. Pure."""
    if seen.status is not None and not seen.status.ours and not seen.told:
        because = "Slurm has started the job again elsewhere; stopping this copy"
        return AttemptVerdict(NextMove.SUPERSEDED, because)
    waits = seen.status is None and seen.asked_for_s < WORD_S
    if seen.told:
        return _about_told(seen, waits=waits)
    if seen.was_ended:
        return _about_ended(seen, waits=waits)
    if seen.now is DeadlineAction.END and seen.code is None and seen.requeueable and seen.gained:
        return AttemptVerdict(NextMove.REQUEUE, "the time limit is near", kind=IncidentKind.TIME_LIMIT)
    return None


def _about_told(seen: ExternalEvents, *, waits: bool) -> AttemptVerdict | None:
    if seen.code is None:
        return None  # the ranks have their time
    if waits:
        return AttemptVerdict(NextMove.WAIT, "told to end; asking Slurm why")
    kind, why = _why(seen.status)
    return _ended(seen, seen.code, kind, f"ended after {seen.told}{why}")


def _about_ended(seen: ExternalEvents, *, waits: bool) -> AttemptVerdict | None:
    if waits:
        return AttemptVerdict(NextMove.WAIT, "something ended them; asking Slurm why")
    kind, why = _why(seen.status)
    if kind is None and (seen.status is None or seen.status.runs):
        return None  # not Slurm's doing
    if seen.code is None:
        return AttemptVerdict(NextMove.WAIT, f"the agents were ended{why}; waiting for the ranks to end")
    return _ended(seen, seen.code, kind, f"the ranks were ended{why}")


def _ended(seen: ExternalEvents, code: int, kind: IncidentKind | None, because: str) -> AttemptVerdict:
    if kind is not None and seen.requeueable and (seen.gained or kind is IncidentKind.PREEMPTED):
        return AttemptVerdict(NextMove.REQUEUE, because, kind=kind, code=code)
    if not code:
        return AttemptVerdict(NextMove.SUCCEEDED, because, kind=None if seen.told else kind)
    return AttemptVerdict(NextMove.FAILED, because, kind=kind, code=code)


def _why(status: JobStatus | None) -> tuple[IncidentKind | None, str]:
    if status is None:
        return None, ""
    if not status.ours:
        return None, ": Slurm starts the job again"
    if status.preempting:
        return IncidentKind.PREEMPTED, ": another job is to have the nodes"
    if status.left_s is not None and status.left_s <= OVER_S:
        return IncidentKind.TIME_LIMIT, ": the time limit"
    return None, "" if status.runs else f": by Slurm ({status.word})"


class SlurmMonitor:
    """Between a run and Slurm. The supervising thread alone uses it."""

    def __init__(self, run: RunContext) -> None:
        self._backend, self._agents, self._events, self._clock = run.backend, run.agents, run.events, run.clock
        self._poller, self._deadline = StatusPoller(run.backend, run.clock), Deadline(run.spec.margin_s)
        self._brake_s = run.policy.brake_s
        self._cut_off_at: float | None = None
        self._alone = False
        self._silent_at = float("-inf")  # when most nodes were last silent at once
        self._odd_at: float | None = None  # since when Slurm's answer is wanted
        self._over_at = float("inf")  # since when the ranks are to be ended for the time limit

    @property
    def requeueable(self) -> bool:
        """Whether Slurm said that it may start the job again."""
        return self._backend.can_requeue and self._poller.requeueable

    @property
    def in_doubt(self) -> bool:
        """Whether it may have been us who were cut off, and Slurm has not said since whose the job is."""
        # Most nodes were silent at once, or all but our own.
        return self._cut_off_at is not None

    def begin(self) -> None:
        """A new attempt begins."""
        self._deadline.begin()
        self._agents.save_at = 0

    def take(self, points: Iterable[ProgressPoint]) -> None:
        """Take in reports of the newest attempt."""
        self._deadline.take(points)

    def look(self, code: int | None, told: str, *, gained: bool) -> AttemptVerdict | None:
        """Return what is to be done for a reason from outside; None where there is none."""
        now = self._clock.monotonic()
        seen = ExternalEvents(
            told=told,
            code=code,
            agents_gone=self._agents.is_gone,
            now=self._time_limit(now),
            gained=gained,
            requeueable=self.requeueable,
        )
        if not (self.in_doubt or seen.was_ended) or not self._backend.can_requeue:
            self._odd_at = None
            return look_outside(replace(seen, asked_for_s=float("inf")))
        self._odd_at = now if self._odd_at is None else self._odd_at
        since = max(self._odd_at, self._silent_at)
        # While most nodes are silent every answer is older than the silence: it is asked for when that is over.
        status = None if now - self._silent_at < AGAIN_S else self._status(since, now, why=seen.was_ended)
        if status is not None:
            self._cut_off_at = None  # here alone: what the answer means is looked at below
        return look_outside(replace(seen, status=status, asked_for_s=now - since))

    def _time_limit(self, now: float) -> DeadlineAction:
        self._poller.tick()
        moment = max(min(now, self._over_at) - FRESH_S, now - SLOW_S)
        # First: an answer that comes in now is not yet looked at.
        is_fresh = self._poller.since(moment) is not None
        action = self._deadline.look(self._poller.left_s())
        self._over_at = min(now, self._over_at) if action is DeadlineAction.END else float("inf")
        if action is DeadlineAction.SAVE:
            left_s = self._poller.left_s() or 0.0
            step = self._agents.save_at = self._deadline.told()
            sentence = f"{left_s:.0f} s until the time limit: a checkpoint is wanted at step {step}"
            self._events.event("save-wanted", sentence, step=step, left_s=left_s)
        elif action is DeadlineAction.END and not is_fresh:
            self._poller.ask_since(moment)  # the job may have been suspended since, or its limit moved
            return DeadlineAction.NOTHING
        return action

    def _status(self, since: float, now: float, *, why: bool) -> JobStatus | None:
        """Return Slurm's answer to what was odd at `since`."""
        # Where it is asked why something ended, an answer that explains nothing may be early: it is asked again.
        self._poller.ask_since(since)
        status = self._poller.since(since)
        if status is None or status.explains or not why:
            return status
        if now >= since + LAG_S:
            self._poller.ask_since(since + LAG_S)
        return self._poller.since(since + LAG_S)

    def weigh(self, verdict: AttemptVerdict, *, alone: bool) -> AttemptVerdict:
        """Return a verdict on the nodes as it may be carried out."""
        # Cut off for a while, we may be what is left of an older run: nothing is done before Slurm has said. Nor
        # while only our own node is heard (`alone`): of two nodes either may be the one that is cut off. What is
        # held back so names the nodes that are given up.
        now = self._clock.monotonic()
        if alone and not self._alone:
            self._cut_off_at = now
        self._alone = alone
        if verdict.kind is IncidentKind.AGENTS_SILENT:
            self._cut_off_at = self._silent_at = now
        of_nodes = verdict.kind in {IncidentKind.NODE_SILENT, IncidentKind.JOB_STRANDED}
        if of_nodes and now - self._silent_at < AFTERMATH_S:
            because = f"{verdict.because}; most were silent a moment ago, and come back one after the other"
            return AttemptVerdict(NextMove.WAIT, because, kind=verdict.kind)
        if self._cut_off_at is None or not self._backend.can_requeue:
            return verdict
        if now - self._cut_off_at > self._brake_s:
            self._cut_off_at = None
        elif verdict.move in {NextMove.RELAUNCH, NextMove.STRANDED}:
            because = f"{verdict.because}; asking Slurm whose the job is"
            return AttemptVerdict(NextMove.WAIT, because, kind=verdict.kind, lost=verdict.lost)
        return verdict
