"""Runs a job's ranks inside its allocation, and runs them again without the nodes that were lost.

The first rung of the recovery ladder: it needs no right but the job owner's, and is done before Slurm has noticed.
The loop gathers evidence and carries out verdicts; what they are is decided in `verdict.py`.
"""

from __future__ import annotations

import re
import signal
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from deeplink.scheduler.launch.ending import Ending
from deeplink.scheduler.launch.failure import Cause
from deeplink.scheduler.launch.hangs import Hangs
from deeplink.scheduler.launch.history import Log, file_of
from deeplink.scheduler.launch.launch_spec import LaunchSpec, RankLayout, lay_out
from deeplink.scheduler.launch.node_selection import select_nodes
from deeplink.scheduler.launch.progress import Progress
from deeplink.scheduler.launch.service import Service
from deeplink.scheduler.launch.slurm_monitor import SlurmMonitor
from deeplink.scheduler.launch.status_reporter import StatusReporter, first_attempt, note_attempt, points_of
from deeplink.scheduler.launch.verdict import (
    AttemptEvidence,
    AttemptVerdict,
    NextMove,
    RelaunchPolicy,
    decide,
    is_alone,
    too_few,
)
from deeplink.scheduler.launch.wait_for_requeue import TICK_S, RequeueWait
from deeplink.scheduler.watch.records import Action, IncidentKind, IncidentOutcome, Phase
from deeplink.text import counted

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Collection

    from deeplink.clock import Clock
    from deeplink.scheduler.launch.agent_pool import AgentPool
    from deeplink.scheduler.launch.backend import Backend, RankStep
    from deeplink.scheduler.launch.event_log import EventLog
    from deeplink.types import NodeName

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
ENDING = frozenset({signal.SIGTERM, signal.SIGINT})
QUICK_S, SOON_S = 0.02, 1.0
"""Once ranks have ended every node is asked whether it lives; the answers are looked for so often, for so long."""
_HOW_LONG = re.compile(r" for \d[\d.]* s\b")


def gist_of_wait(because: str) -> str:
    """Return what stays the same of why nothing is done while that lasts, so that it is said once.

    >>> gist_of_wait("nothing heard of n7 for 2.6 s; asking Slurm whose the job is")
    'nothing heard of n7; asking Slurm whose the job is'
    """
    return _HOW_LONG.sub("", because).rpartition(":")[2]


@dataclass(slots=True)
class _Running:
    layout: RankLayout
    step: RankStep
    began: float
    exited_at: float | None = None


class Supervisor:
    """Runs an order on a fleet of agents to its end, in one thread.

    Args:
        backend: the allocation.
        fleet: its agents, those that came up.
        order: what to run.
        chronicle: who is told.
        signals: those that are meant for the ranks, put there as they come.
        clock: for every duration.
        policy: the thresholds of verdicts.

    Attributes:
        has_lost: whether a node was lost, or was out of reach at the end.
    """

    def __init__(
        self,
        backend: Backend,
        fleet: AgentPool,
        order: LaunchSpec,
        chronicle: EventLog,
        *,
        signals: deque[signal.Signals],
        clock: Clock,
        policy: RelaunchPolicy | None = None,
    ) -> None:
        self._backend, self._fleet, self._order = backend, fleet, order
        self._chronicle, self._clock, self._policy = chronicle, clock, policy or RelaunchPolicy()
        self._here = backend.here
        self._account = StatusReporter(backend, fleet, chronicle, clock)
        self._service = Service(backend, clock)
        self._rescue = RequeueWait(
            backend, fleet, chronicle, self._service, clock=clock, doubt_s=self._policy.doubt_s
        )
        self._progress = Progress()
        self._log = Log(file_of(backend.folder, order.command), backend.restart, self._progress)
        self._liaison = SlurmMonitor(
            backend, fleet, chronicle, clock, margin_s=order.margin_s, partition_s=self._policy.partition_s
        )
        self._ends = Ending(
            backend,
            self._account,
            chronicle,
            clock=clock,
            hold=order.hold,
            limits=self._policy.limits,
            told_to_end=lambda: self.ending is not None,
        )
        self._hangs = Hangs(fleet, chronicle, backend.folder, order, clock)
        self._attempt = first_attempt(backend)
        self._begun = 0
        self._usable: list[NodeName] = []
        self._signals = signals
        self._ending: signal.Signals | None = None
        self._said = ""
        self._boots: dict[NodeName, str] = {}
        self.has_lost = False
        self._step: RankStep | None = None

    def close(self) -> None:
        """End the ranks, should any still run: after an error of ours nobody would watch over them."""
        if self._step is not None:
            self._step.kill()

    @property
    def ending(self) -> signal.Signals | None:
        """The signal that told us to end, if one did before the ranks were started."""
        return next((number for number in self._signals if number in ENDING), self._ending)

    def run(self) -> int:
        """Return the exit code of the whole run, once it has ended."""
        self._usable = list(self._fleet.facts)
        running = self._start(self._usable)
        while True:
            verdict = self._watch(running)
            if verdict.move not in {NextMove.RELAUNCH, NextMove.STRANDED}:
                return self._finish(running, verdict)
            chosen: list[NodeName] = []
            if verdict.move is NextMove.RELAUNCH:
                chosen = self._relaunch(running, verdict)
                verdict = verdict if chosen else too_few(verdict, self._service.word.taken, self._fleet.facts)
            if verdict.move is NextMove.STRANDED:
                self._strand(running, verdict)
                chosen = self._rescued(verdict.lost)
            if not chosen:
                if self._rescue.is_elsewhere and self.ending is None:
                    return self._finish(running, replace(verdict, move=NextMove.SUPERSEDED))
                told = self.ending.name if self.ending else ""
                return self._ends.leave_stranded(verdict, told, self._begun)
            running = self._start_next(chosen, running)

    def _start(self, candidates: Collection[NodeName], before: Collection[NodeName] = ()) -> _Running:
        chosen = set(candidates)
        facts = {node: one for node, one in self._fleet.facts.items() if node in chosen}
        port = self._backend.port_for(self._attempt)
        order = replace(self._order, count=self._order.count_for(len(facts)) or self._order.count)
        restarts = self._backend.restart + self._begun
        most = self._policy.limits.most_relaunches
        most = restarts + self._policy.limits.most_fruitless if most is None else most
        layout = lay_out(
            order, self._attempt, facts, port=port, before=before, restarts=restarts, max_restarts=most
        )
        self._progress.begin(self._clock.monotonic(), relaunch=self._begun > 0)
        self._hangs.begin(layout.launch)
        self._liaison.begin()
        self._begun += 1
        self._boots = {node: boot for node, boot in self._fleet.boot_ids().items() if boot}
        note_attempt(self._backend, self._attempt)
        self._said = ""
        self._account.begin(layout, self._hangs.told_s)
        began = self._clock.monotonic()
        self._step = self._backend.start_ranks(layout.launch, self._order.command)
        running = _Running(layout, self._step, began)
        self._account.acted()
        self._account.enter(Phase.RUNNING)
        return running

    def _start_next(self, candidates: Collection[NodeName], last: _Running) -> _Running:
        self._attempt = replace(self._attempt, relaunch=self._attempt.relaunch + 1)
        self._log.history.relaunches += 1
        return self._start(candidates, last.layout.active)

    def _watch(self, running: _Running) -> AttemptVerdict:
        """Return the first verdict that ends this attempt."""
        while True:
            self._listen()
            self._pass_signals(running)
            verdict = self._decided(running)
            if verdict.move is NextMove.DROP_SPARES:
                self._lose_spares(running, verdict)
            elif verdict.move is NextMove.WAIT:
                self._say_once(verdict.because)
                self._account.hold_back(self._silent_s(verdict.lost), verdict.because)
            elif verdict.move is NextMove.CONTINUE:
                if not self._liaison.in_doubt:  # else it may have been us who were away, and that is told already
                    self._account.come_back()
            else:
                return verdict
            self._clock.sleep(self._pause_s(running))

    def _pause_s(self, running: _Running) -> float:
        waited_s = None if running.exited_at is None else self._clock.monotonic() - running.exited_at
        return TICK_S if waited_s is None or waited_s > self._policy.settle_s + SOON_S else QUICK_S

    def _listen(self) -> None:
        now = self._clock.monotonic()
        reports = self._fleet.tick(self._attempt)
        self._hangs.take(reports)
        self._account.describe(step_timeout_s=self._hangs.told_s)
        self._account.note_slow(self._hangs.stragglers)
        points = points_of(reports)
        self._account.note(points)
        self._liaison.take(point for point in points if point.attempt == self._attempt)
        if self._progress.take(points, self._attempt, now):
            self._account.note_first_step(self._progress.first, self._progress.repeated)
            self._log.note_step()
        self._log.note_progress()
        self._account.tick()

    def _decided(self, running: _Running) -> AttemptVerdict:
        now = self._clock.monotonic()
        code = running.step.exit_code()
        if code is not None and running.exited_at is None:
            running.exited_at = now
            self._fleet.press(now + self._policy.settle_s)
        told = self._ending.name if self._ending else ""
        outside = self._liaison.look(code, told, gained=self._log.gained)
        if outside is not None:
            return outside
        self._revive()
        active = running.layout.active
        silence, booted = self._fleet.silence(), self._booted_anew()
        spares = self._spares(running)
        late = self._hangs.look()
        seen = AttemptEvidence(
            active=active,
            spares=spares,
            silence={node: silence[node] for node in (*active, *spares)},
            anew=tuple(node for node in active if node in booted),
            here=self._here,
            exit_code=code,
            exited_for_s=0.0 if running.exited_at is None else now - running.exited_at,
            ran_for_s=now - running.began,
            failed=running.step.failed(),
            hung=late.hung,
            slow=late.slow,
            suspects=late.suspects,
            health=self._fleet.health(),
            unix=self._fleet.unix(),
            fewest=self._order.fewest,
            tried=self._log.tried(now),
        )
        verdict = self._liaison.weigh(decide(seen, self._policy), alone=is_alone(seen, self._policy))
        if verdict.move in {NextMove.RELAUNCH, NextMove.STRANDED} and self._ending is not None:
            code = 128 + self._ending
            return AttemptVerdict(move=NextMove.FAILED, because=verdict.because, lost=verdict.lost, code=code)
        return verdict

    def _revive(self) -> None:
        """Start agents once more that are gone while their machines are not, unless we are to end."""
        if self._ending is None:
            nodes = self._fleet.revive(self._fleet.bereft(self._usable))
            if nodes:
                said = f"{counted(len(nodes), 'agent')} gone from machines that answer: starting once more"
                self._chronicle.event("agents-again", said, nodes=nodes)

    def _booted_anew(self) -> set[NodeName]:
        """Return the nodes that run another boot of their kernel than at the start of this attempt."""
        known = {node: boot for node, boot in self._fleet.boot_ids().items() if boot}
        return {node for node, boot in known.items() if self._boots.setdefault(node, boot) != boot}

    def _pass_signals(self, running: _Running) -> None:
        while self._signals:
            number = self._signals.popleft()
            if number in ENDING:
                self._ending = number
            self._chronicle.event("signal", f"passing {number.name} on to the ranks", signal=number.name)
            running.step.send(number)

    def _lose_spares(self, running: _Running, verdict: AttemptVerdict) -> None:
        self._tell_silent(verdict.lost)
        self._account.lose_spares(self._silent_s(verdict.lost), verdict.because)
        self._forget(verdict.lost)
        self._account.describe(spares=self._spares(running))
        self._chronicle.event("spare-lost", f"{verdict.because}: no spare any more", nodes=verdict.lost)

    def _spares(self, running: _Running) -> tuple[NodeName, ...]:
        active = set(running.layout.active)
        return tuple(node for node in self._usable if node not in active)

    @property
    def _lost(self) -> list[NodeName]:
        return [node for node in self._fleet.facts if node not in self._usable]

    def _forget(self, lost: Collection[NodeName]) -> None:
        self.has_lost = self.has_lost or bool(lost)
        self._usable = [node for node in self._usable if node not in lost]

    def _relaunch(self, running: _Running, verdict: AttemptVerdict) -> list[NodeName]:
        """End the ranks and return the nodes for the next ones; empty where too few are left to us."""
        self._open(verdict, Action.RELAUNCH)
        if verdict.cause is Cause.HANG and not verdict.slow:
            verdict = self._located(verdict)
        self._forget(verdict.lost)
        self._chronicle.event(
            "relaunch", f"{verdict.because}: starting the ranks again", lost=verdict.lost, because=verdict.because
        )
        self._account.enter(Phase.RECOVERING, verdict.because)
        self._while_listening(running.step.kill)
        self._log.note(verdict.cause or Cause.UNKNOWN, verdict.code, self._clock.monotonic())
        return self._mustered(verdict.suspects)

    def _mustered(self, suspects: Collection[NodeName] = ()) -> list[NodeName]:
        """Return the nodes for the next attempt, by Slurm's word too; empty where they are too few."""
        word = self._service.look(self._listen)
        before = self._usable
        self._forget(word.taken)
        chosen = select_nodes(
            self._usable,
            self._order.count,
            silence=self._fleet.silence(),
            doubt_s=self._policy.doubt_s,
            here=self._here,
            suspects=suspects,
            sick=self._fleet.sick(),
            out=word.out,
        )
        self._service.tell(self._chronicle, before, chosen)
        return chosen if self._order.count_for(len(chosen)) else []

    def _located(self, verdict: AttemptVerdict) -> AttemptVerdict:
        """Return the verdict with what was found of where the ranks are: asked before any of them is ended."""
        self._account.enter(Phase.RECOVERING, verdict.because)
        found = self._hangs.locate(self._listen)
        self._account.locate(found)
        because = "; ".join(filter(None, (verdict.because, found.gist)))
        return replace(verdict, because=because, suspects=verdict.suspects or found.suspects)

    def _strand(self, running: _Running, verdict: AttemptVerdict) -> None:
        self._open(verdict, Action.NONE)
        self._forget(verdict.lost)
        self._chronicle.event(
            "stranded", f"{verdict.because}: waiting for a rescue", lost=verdict.lost, because=verdict.because
        )
        self._account.enter(Phase.STRANDED, verdict.because)
        self._while_listening(running.step.kill)

    def _rescued(self, lost: Collection[NodeName]) -> list[NodeName]:
        """Wait until enough nodes answer again and return those for the next attempt; empty where they do not."""
        deadline = self._clock.monotonic() + self._order.strand_timeout_s
        while self._rescue.wait(
            [node for node in lost if node not in self._usable],
            deadline - self._clock.monotonic(),
            others=tuple(self._usable),
            enough=lambda nodes: self._order.count_for(nodes) > 0,
            listen=self._listen,
            told_to_end=lambda: self.ending is not None,
        ):
            self._account.add(self._rescue.found)
            silence, taken = self._fleet.silence(), self._service.word.taken
            away = [node for node in lost if node not in (*self._usable, *taken)]
            self._usable += [node for node in away if silence[node].answer_s < self._policy.doubt_s]
            if chosen := self._mustered():
                return chosen
        return []

    def _while_listening(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="deeplink-kill", daemon=True)
        thread.start()
        while thread.is_alive():
            self._listen()
            thread.join(TICK_S)

    def _open(self, verdict: AttemptVerdict, action: Action) -> None:
        quiet_s = self._tell_silent(verdict.lost) or self._progress.stuck_s(self._clock.monotonic()) or 0.0
        blamed = (*verdict.lost, *verdict.suspects)
        kind = verdict.kind or IncidentKind.RANK_FAILED
        self._account.settle(IncidentOutcome.FAILED)  # the one before, if it has not come to a step since
        self._account.open(kind, blamed[0] if blamed else None, quiet_s, verdict.because, action)

    def _silent_s(self, nodes: Collection[NodeName]) -> dict[NodeName, float]:
        """Return for how long nothing was heard of each of these nodes."""
        if not nodes:  # as of most waits: this is asked ten times a second
            return {}
        silence = self._fleet.silence()
        return {node: silence[node].contact_s for node in nodes}

    def _tell_silent(self, lost: Collection[NodeName]) -> float:
        """Tell of lost nodes; returns for how long nothing was heard of them, 0 where there are none."""
        silent_s = max(self._silent_s(lost).values(), default=0.0)
        if lost:
            self._chronicle.event("node-silent", nodes=lost, silent_s=silent_s, attempt=str(self._attempt))
        return silent_s

    def _say_once(self, because: str) -> None:
        kind = gist_of_wait(because)
        if kind != self._said:
            self._said = kind
            self._chronicle.event("waiting", because, because=because)

    def _finish(self, running: _Running, verdict: AttemptVerdict) -> int:
        if verdict.move is NextMove.SUPERSEDED:
            running.step.abandon()
            self._fleet.abandon()
            self._step, self.has_lost = None, True
            return self._ends.elsewhere(verdict, self._begun)
        action = self._ends.action_for(verdict, self._log, requeueable=self._liaison.requeueable)
        if verdict.kind is not None:  # before the stacks are asked for: they belong to it
            self._open(verdict, action)
        self._forget(verdict.lost)
        # Of who is out of reach now the next run is to know, too, though nobody has called it lost.
        silence = self._fleet.silence().values()
        self.has_lost = self.has_lost or any(one.contact_s >= self._policy.doubt_s for one in silence)
        if verdict.cause is Cause.HANG:
            verdict = self._located(verdict)
        self._while_listening(running.step.kill)
        if action is Action.REQUEUE:
            return self._ends.start_again(verdict, self._begun, lost=self._lost)
        if verdict.kind is None:
            return self._ends.end(verdict, self._begun)
        return self._ends.give_up(verdict, action, self._log, self._begun, lost=self._lost)
