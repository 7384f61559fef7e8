"""Runs a job's ranks inside its allocation, and runs them again without the nodes that were lost.

The first rung of the recovery ladder: it needs no right but the job owner's, and is done before Slurm has noticed.
The loop gathers evidence and carries out verdicts; what they are is decided in `recovery/relaunch.py`.
"""

from __future__ import annotations

import math
import signal
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from deeplink.core.text import counted
from deeplink.scheduler.launch import parent
from deeplink.scheduler.launch.backend import LaunchError
from deeplink.scheduler.launch.ending import TICK_S, Ending, RequeueWait
from deeplink.scheduler.launch.hangs import Hangs
from deeplink.scheduler.launch.history import History, Progress, file_of
from deeplink.scheduler.launch.launch_spec import RankLayout, lay_out
from deeplink.scheduler.launch.process import EndedRanks
from deeplink.scheduler.launch.run_state import AttemptState
from deeplink.scheduler.launch.slurm_monitor import NodesPoller, SlurmMonitor
from deeplink.scheduler.launch.status_reporter import StatusReporter, first_attempt, note_attempt, points_of
from deeplink.scheduler.recovery.rank_failure import Cause
from deeplink.scheduler.recovery.records import Action, IncidentKind, IncidentOutcome, Phase
from deeplink.scheduler.recovery.relaunch import (
    AGAIN_CODE,
    AttemptEvidence,
    AttemptVerdict,
    NextMove,
    decide,
    is_alone,
    select_nodes,
    too_few,
)

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Collection

    from deeplink.core.types import NodeName
    from deeplink.scheduler.launch.backend import RankStep, RunContext
    from deeplink.scheduler.launch.environment import Launch
    from deeplink.scheduler.launch.process import StartedSlots
    from deeplink.scheduler.launch.run_state import Handover

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
ENDING = frozenset({signal.SIGTERM, signal.SIGINT})
# Once ranks have ended every node is asked whether it lives; the answers are looked for so often, for so long.
QUICK_S, SOON_S = 0.02, 1.0
STORAGE_AGAIN_S = 0.5  # between two tries to write what ranks are started by


@dataclass(slots=True)
class _Running:
    layout: RankLayout
    step: RankStep
    began: float
    exited_at: float | None = None


class Supervisor:
    """Runs ranks on the nodes of an agent pool to their end, in one thread."""

    def __init__(self, run: RunContext, signals: deque[signal.Signals]) -> None:
        self._backend, self._agents, self._events, self._clock = run.backend, run.agents, run.events, run.clock
        self._spec, self._policy, self._signals, self._handover = run.spec, run.policy, signals, run.handover
        self._reporter = StatusReporter(run)
        self._nodes = NodesPoller(run.backend, run.clock)
        self._rescue = RequeueWait(run, self._nodes)
        self._progress = Progress()
        file = file_of(run.backend.folder, run.spec.command)
        self._history = History(file, run.backend.restart, self._progress)
        self._slurm = SlurmMonitor(run)
        self._end = Ending(run, self._reporter, lambda: self.ending is not None)
        self._hangs = Hangs(run)
        self._attempt = first_attempt(run.backend)
        self._begun = 0  # attempts
        self._usable: list[NodeName] = []
        self._ending: signal.Signals | None = None
        self._step: RankStep | None = None
        self._is_alone = False  # the process that holds our place in the batch script is dead, and that is told
        self._has_news = False  # for the run's state: the attempt has come to its first step
        # What it last said of agents that were started once more, and of slots.
        self._left: tuple[tuple[int, ...], tuple[StartedSlots, ...]] = ((), ())
        self.has_lost = False  # whether a node was lost, or was out of reach at the end

    def close(self) -> None:
        """End the ranks, should any still run: after an error of ours nobody would watch over them."""
        if self._step is not None:
            self._step.kill()
            self._agents.let_slots_leave(self._attempt)
            self._backend.end_slots()

    @property
    def ending(self) -> signal.Signals | None:
        """The signal that told us to end, if one did."""
        return next((number for number in [*self._signals] if number in ENDING), self._ending)

    def run(self) -> int:
        """Return the exit code of the whole run, once it has ended."""
        self._usable = list(self._agents.facts)
        given: AttemptVerdict | None = None
        if self._handover is not None and (before := self._handover.attempt) is not None:
            running, given = self._take_over(self._handover, before)
        else:
            running = self._start(self._usable)
        while True:
            verdict, given = given or self._watch(running), None
            if self._handover is not None:
                is_told, longest_s = lambda: self.ending is not None, self._spec.strand_timeout_s
                self._handover.keep_role(verdict.move, self._agents.silence, self._listen, is_told, longest_s)
            if verdict.move not in {NextMove.RELAUNCH, NextMove.STRANDED}:
                return self._finish(running, verdict)
            chosen: list[NodeName] = []
            if verdict.move is NextMove.RELAUNCH:
                chosen = self._relaunch(running, verdict)
                verdict = verdict if chosen else too_few(verdict, self._nodes.status.taken, self._agents.facts)
            if verdict.move is NextMove.STRANDED:
                self._strand(running, verdict)
                chosen = self._rescued(verdict.lost)
            if not chosen:
                if self._rescue.is_elsewhere and self.ending is None:
                    return self._finish(running, replace(verdict, move=NextMove.SUPERSEDED))
                told = self.ending.name if self.ending else ""
                return self._end.leave_stranded(verdict, told, self._begun)
            self._attempt = replace(self._attempt, relaunch=self._attempt.relaunch + 1)
            self._history.relaunches += 1
            running = self._start(chosen, running.layout.active)

    def _take_over(self, handover: Handover, before: AttemptState) -> tuple[_Running, AttemptVerdict | None]:
        """Go on with the attempt of a launcher that died; a verdict where something is to be done at once."""
        launch = before.launch
        self._attempt, self._begun, self._usable = launch.attempt, before.begun, [*before.usable]
        self._agents.boots, self.has_lost = dict(before.boots), before.has_lost
        self._history.go_on(before.progress, before.setbacks, before.relaunches)
        self._progress = before.progress
        self._hangs.begin(launch)
        self._slurm.begin()
        crossings, stock = before.crossings, before.crossings_stock
        layout = RankLayout(launch=launch, crossings=crossings, crossings_stock=stock, groups=self._spec.groups)
        link, said = handover.link, handover.said
        away_s = max(0.0, self._clock.monotonic() - link.died_at)
        if handover.silent_host is not None:
            self._agents.count_silence(handover.silent_host, self._policy.silence_s)
        self._reporter.take_over(layout, before.incident, said, away_s, handover.silent_host)
        reach = self._agents.reach(launch.attempt)
        self._step = handover.ranks(self._backend, before, self._spec.command, reach)
        running = _Running(layout, self._step or EndedRanks(), before.began)
        then = f"attempt {launch.attempt} goes on" if self._step is not None else "the ranks are started again"
        facts = {"attempt": str(launch.attempt), "signal": link.died, "away_s": away_s, "node": self._backend.here}
        self._events.event("launcher-restarted", f"{said}: {then}", **facts)
        if link.is_last:
            because = f"{said}, {parent.MOST_DEATHS} times in {parent.WITHIN_S / 60:.0f} minutes"
            code, kind = 128 + (link.died or 0), IncidentKind.LAUNCHER_LOST
            return running, AttemptVerdict(NextMove.FAILED, because, code=code, kind=kind)
        if self._step is not None:
            return running, None
        verdict = AttemptVerdict(NextMove.RELAUNCH, said, kind=IncidentKind.LAUNCHER_RESTARTED)
        if before.runs and handover.silent_host is not None:  # MPI's: their srun died with its host
            kind, away = IncidentKind.NODE_SILENT, (handover.silent_host,)
            verdict = replace(verdict, kind=kind, suspects=away, cause=Cause.NODE_LOST)
        return running, verdict

    def _leave(
        self,
        layout: RankLayout,
        began: float,
        step: RankStep | None = None,
        *,
        code: int | None = None,
        soon: bool = False,
    ) -> None:
        """Leave what a next launcher needs to go on; without a step the ranks are not there, or to be ended."""
        self._has_news = False
        self._left = restarted, slots = self._agents.restarted, self._backend.started_slots()
        if self._handover is None:
            return
        told = {*layout.launch.nodes, *layout.launch.spares}
        state = AttemptState(
            launch=layout.launch,
            runs=step is not None,
            began=began,
            begun=self._begun,
            code=code,
            crossings=layout.crossings,
            crossings_stock=layout.crossings_stock,
            others=tuple(one for one in self._agents.facts.values() if one not in told),
            slots=slots,
            usable=tuple(self._usable),
            restarted=restarted,
            has_lost=self.has_lost,
            boots=dict(self._agents.boots),
            relaunches=self._history.relaunches,
            setbacks=tuple(self._history.setbacks),
            progress=replace(self._progress),
            incident=self._reporter.incident,
        )
        self._handover.leave(state, soon=soon)

    def _start(self, candidates: Collection[NodeName], before: Collection[NodeName] = ()) -> _Running:
        chosen, limits = set(candidates), self._policy.limits
        facts = {node: one for node, one in self._agents.facts.items() if node in chosen}
        restarts = self._backend.restart + self._begun
        most = limits.most_relaunches
        layout = lay_out(
            replace(self._spec, count=self._spec.count_for(len(facts)) or self._spec.count),
            self._attempt,
            facts,
            port=self._backend.port_for(self._attempt),
            before=before,
            restarts=restarts,
            max_restarts=restarts + limits.most_fruitless if most is None else most,
        )
        self._progress.begin(self._clock.monotonic(), relaunch=self._begun > 0)
        self._hangs.begin(layout.launch)
        self._slurm.begin()
        self._begun += 1
        self._agents.boots = {node: boot for node, boot in self._agents.boot_ids().items() if boot}
        self._events.waiting("")
        self._reporter.begin(layout)
        began = self._clock.monotonic()
        self._leave(layout, began)
        self._step = self._ranks(layout.launch)
        self._leave(layout, began, self._step)
        self._reporter.acted()
        self._reporter.enter(Phase.RUNNING)
        return _Running(layout, self._step, began)

    def _ranks(self, launch: Launch) -> RankStep:
        """Start the ranks; where the job's folder takes no writes, as soon as it does."""
        deadline = self._clock.monotonic() + self._spec.strand_timeout_s
        while True:
            try:
                note_attempt(self._backend, self._attempt)
                reach = self._agents.reach(self._attempt)
                return self._backend.start_ranks(launch, self._spec.command, reach)
            except OSError as problem:
                said = f"{self._backend.folder} takes no writes ({problem.strerror})"
                if self.ending is not None or self._clock.monotonic() >= deadline:
                    remedy = "Once it takes writes again, submit the job again: it goes on where it was saved."
                    raise LaunchError(said, remedy, exit_code=AGAIN_CODE) from problem
                self._events.waiting(f"{said}; the ranks are started once it does")
            self._listen()
            self._clock.sleep(STORAGE_AGAIN_S)

    def _watch(self, running: _Running) -> AttemptVerdict:
        """Return the first verdict that ends this attempt."""
        while True:
            self._listen()
            if self._has_news or self._left != (self._agents.restarted, self._backend.started_slots()):
                self._leave(running.layout, running.began, running.step, soon=True)
            self._pass_signals(running)
            verdict = self._decided(running)
            if verdict.move is NextMove.DROP_SPARES:
                self._lose_spares(running, verdict)
            elif verdict.move is NextMove.WAIT:
                self._events.waiting(verdict.because)
                self._reporter.hold_back(self._silent_s(verdict.lost), verdict.because)
            elif verdict.move is not NextMove.CONTINUE:
                return verdict
            elif not self._slurm.in_doubt:  # else it may have been us who were away, and that is reported already
                self._reporter.come_back()
            exited_s = 0.0 if running.exited_at is None else self._clock.monotonic() - running.exited_at
            is_soon = running.exited_at is not None and exited_s <= self._policy.settle_s + SOON_S
            self._clock.sleep(QUICK_S if is_soon else TICK_S)

    def _listen(self) -> None:
        now = self._clock.monotonic()
        reports = self._agents.tick(self._attempt)
        if self._handover is not None:
            self._handover.look(self._agents)
        self._hangs.take(reports)
        self._reporter.note_slow(self._hangs.stragglers)
        points = points_of(reports)
        self._reporter.note(points)
        self._reporter.note_rank_times(reports, self._attempt)
        self._slurm.take(point for point in points if point.attempt == self._attempt)
        if self._progress.take(points, self._attempt, now):
            self._has_news = True
            self._reporter.note_first_step(self._progress.first, self._progress.repeated)
            self._history.note_step()
        self._history.note_progress()
        self._reporter.tick()

    def _decided(self, running: _Running) -> AttemptVerdict:
        now = self._clock.monotonic()
        code = running.step.exit_code()
        if code is not None and running.exited_at is None:
            running.exited_at = now
            self._leave(running.layout, running.began, running.step, code=code)
            self._agents.ask_at(now + self._policy.settle_s)
        told = self._ending.name if self._ending else ""
        outside = self._slurm.look(code, told, gained=self._history.gained)
        outside = outside or self._without_parent(code, told)
        if outside is not None:
            return outside
        self._restart_agents()
        active, spares = running.layout.active, self._spares(running)
        silence, rebooted = self._agents.silence(), self._agents.rebooted()
        late = self._hangs.look()
        is_doubtful = any(silence[node].answer_s >= self._policy.silence_s for node in (*active, *spares))
        seen = AttemptEvidence(
            active=active,
            spares=spares,
            silence={node: silence[node] for node in (*active, *spares)},
            rebooted=tuple(node for node in active if node in rebooted),
            here=self._backend.here,
            exit_code=code,
            exited_for_s=0.0 if running.exited_at is None else now - running.exited_at,
            ran_for_s=now - running.began,
            failed=running.step.failed(),
            stepped_s=math.inf if (stuck_s := self._progress.stuck_s(now)) is None else stuck_s,
            hung=late.hung,
            slow=late.slow,
            suspects=late.suspects,
            health=self._agents.health(),
            unix=self._agents.unix(),
            taken=self._nodes.tick().taken if is_doubtful else (),
            fewest=self._spec.fewest,
            tried=self._history.tried(now),
        )
        verdict = self._slurm.weigh(decide(seen, self._policy), alone=is_alone(seen, self._policy))
        if verdict.move in {NextMove.RELAUNCH, NextMove.STRANDED} and self._ending is not None:
            return AttemptVerdict(NextMove.FAILED, verdict.because, verdict.lost, code=128 + self._ending)
        return verdict

    def _without_parent(self, code: int | None, told: str) -> AttemptVerdict | None:
        """Return what is to be done about the death of the process that holds our place in the batch script."""
        if self._handover is None or (gone_s := self._handover.link.gone_s()) is None:
            return None
        if self._handover.link.is_elsewhere:
            return None  # there it holds nothing in the batch script
        self._handover.link.heed()
        if code is not None or told or self._is_alone:
            return None
        self._is_alone = True
        because = "`deeplink run` itself was killed, and its script goes on without the ranks"
        if self._slurm.requeueable and self._history.gained:
            return AttemptVerdict(NextMove.REQUEUE, because, code=AGAIN_CODE, kind=IncidentKind.LAUNCHER_LOST)
        self._reporter.open(IncidentKind.LAUNCHER_LOST, None, gone_s, because, Action.NONE, ends=False)
        self._reporter.enter(Phase.RUNNING, because)
        self._events.event("parent-lost", because)
        return None

    def _restart_agents(self) -> None:
        """Start agents again that are gone while their machines are not, unless we are to end."""
        if self._ending is None and (nodes := self._agents.restart(self._agents.without_agent(self._usable))):
            said = f"{counted(len(nodes), 'agent')} gone from machines that answer: starting once more"
            self._events.event("agents-again", said, nodes=nodes)

    def _pass_signals(self, running: _Running) -> None:
        while self._signals:
            number = self._signals.popleft()
            if number in ENDING:
                self._ending = number
            self._events.event("signal", f"passing {number.name} on to the ranks", signal=number.name)
            running.step.send(number)

    def _lose_spares(self, running: _Running, verdict: AttemptVerdict) -> None:
        self._report_silent(verdict.lost)
        self._reporter.lose_spares(self._silent_s(verdict.lost), verdict.because)
        self._forget(verdict.lost)
        self._reporter.describe(spares=self._spares(running))
        self._events.event("spare-lost", f"{verdict.because}: no spare any more", nodes=verdict.lost)

    def _spares(self, running: _Running) -> tuple[NodeName, ...]:
        return tuple(node for node in self._usable if node not in running.layout.active)

    def _forget(self, lost: Collection[NodeName]) -> None:
        self.has_lost = self.has_lost or bool(lost)
        self._usable = [node for node in self._usable if node not in lost]

    def _relaunch(self, running: _Running, verdict: AttemptVerdict) -> list[NodeName]:
        """End the ranks and return the nodes for the next ones; empty where too few are left to us."""
        if is_new := verdict.kind is not IncidentKind.LAUNCHER_RESTARTED:  # that was told with the takeover
            self._open(verdict, Action.RELAUNCH)
        if verdict.cause is Cause.HANG and verdict.kind is not IncidentKind.STRAGGLER:
            verdict = self._located(verdict)
        self._forget(verdict.lost)
        why = verdict.because
        self._events.event("relaunch", f"{why}: starting the ranks again", lost=verdict.lost, because=why)
        self._reporter.enter(Phase.RECOVERING, why)
        self._leave(running.layout, running.began)
        asked = self._nodes.ask()  # Slurm answers while the ranks end
        self._while_listening(running.step.kill)
        if is_new:
            self._history.note(verdict.cause or Cause.UNKNOWN, verdict.code, self._clock.monotonic())
        return self._selected(verdict.suspects, asked)

    def _selected(self, suspects: Collection[NodeName] = (), asked: float = math.inf) -> list[NodeName]:
        """Return the nodes for the next attempt, by what Slurm says too; empty where they are too few."""
        status = self._nodes.look(self._listen, asked)
        before = self._usable
        self._forget(status.taken)
        chosen = select_nodes(
            self._usable,
            self._spec.count,
            silence=self._agents.silence(),
            doubt_s=self._policy.doubt_s,
            here=self._backend.here,
            suspects=suspects,
            sick=self._agents.sick(),
            out=status.out,
        )
        self._nodes.report(self._events, before, chosen)
        return chosen if self._spec.count_for(len(chosen)) else []

    def _located(self, verdict: AttemptVerdict) -> AttemptVerdict:
        """Return the verdict with what was found of where the ranks are: asked before any of them is ended."""
        self._reporter.enter(Phase.RECOVERING, verdict.because)
        found = self._hangs.locate(self._listen)
        self._reporter.locate(found)
        because = "; ".join(filter(None, (verdict.because, found.gist)))
        return replace(verdict, because=because, suspects=verdict.suspects or found.suspects)

    def _strand(self, running: _Running, verdict: AttemptVerdict) -> None:
        self._open(verdict, Action.NONE)
        self._forget(verdict.lost)
        said = f"{verdict.because}: waiting for a rescue"
        self._events.event("stranded", said, lost=verdict.lost, because=verdict.because)
        self._reporter.enter(Phase.STRANDED, verdict.because)
        self._leave(running.layout, running.began)
        self._while_listening(running.step.kill)

    def _rescued(self, lost: Collection[NodeName]) -> list[NodeName]:
        """Wait until enough nodes answer again and return those for the next attempt; empty where they do not."""
        deadline = self._clock.monotonic() + self._spec.strand_timeout_s
        while self._rescue.wait(
            [node for node in lost if node not in self._usable],
            deadline - self._clock.monotonic(),
            others=tuple(self._usable),
            enough=lambda nodes: self._spec.count_for(nodes) > 0,
            listen=self._listen,
            told_to_end=lambda: self.ending is not None,
        ):
            self._reporter.add(self._rescue.found)
            silence, taken = self._agents.silence(), self._nodes.status.taken
            away = [node for node in lost if node not in (*self._usable, *taken)]
            self._usable += [node for node in away if silence[node].answer_s < self._policy.doubt_s]
            if chosen := self._selected():
                return chosen
        return []

    def _while_listening(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="deeplink-kill", daemon=True)
        thread.start()
        while thread.is_alive():
            self._listen()
            thread.join(TICK_S)

    def _open(self, verdict: AttemptVerdict, action: Action) -> None:
        quiet_s = self._report_silent(verdict.lost) or self._progress.stuck_s(self._clock.monotonic()) or 0.0
        blamed = self._reporter.named((*verdict.lost, *verdict.suspects))
        kind = verdict.kind or IncidentKind.RANK_FAILED
        self._reporter.settle(IncidentOutcome.FAILED)  # the one before, if it has not come to a step since
        ends = kind is not IncidentKind.STRAGGLER
        self._reporter.open(kind, blamed, quiet_s, verdict.because, action, ends=ends)

    def _silent_s(self, nodes: Collection[NodeName]) -> dict[NodeName, float]:
        """Return for how long nothing was heard of each of these nodes."""
        if not nodes:  # as of most waits: this is asked ten times a second
            return {}
        silence = self._agents.silence()
        return {node: silence[node].contact_s for node in nodes}

    def _report_silent(self, lost: Collection[NodeName]) -> float:
        """Report lost nodes; returns for how long nothing was heard of them, 0 where there are none."""
        silent_s = max(self._silent_s(lost).values(), default=0.0)
        if lost:
            self._events.event("node-silent", nodes=lost, silent_s=silent_s, attempt=str(self._attempt))
        return silent_s

    def _finish(self, running: _Running, verdict: AttemptVerdict) -> int:
        if verdict.move is NextMove.SUPERSEDED:
            running.step.abandon()
            self._agents.abandon()
            if self._handover is not None:
                self._handover.abandon()
            self._step, self.has_lost = None, True
            return self._end.elsewhere(verdict, self._begun)
        action = self._end.action_for(verdict, self._history, requeueable=self._slurm.requeueable)
        if verdict.kind is not None:  # before the stacks are asked for: they belong to it
            self._open(verdict, action)
        self._forget(verdict.lost)
        # Of nodes that are out of reach now the next run is to know, too, though none was called lost.
        silence = self._agents.silence().values()
        self.has_lost = self.has_lost or any(one.contact_s >= self._policy.doubt_s for one in silence)
        if verdict.cause is Cause.HANG:
            verdict = self._located(verdict)
        if not (self._is_alone and action is Action.REQUEUE):  # else Slurm ends all of it, and us, within moments
            self._while_listening(running.step.kill)
        lost = [node for node in self._agents.facts if node not in self._usable]
        if action is Action.REQUEUE:
            return self._end.start_again(verdict, self._begun, lost=lost)
        if verdict.kind is None:
            return self._end.end(verdict, self._begun)
        return self._end.give_up(verdict, action, self._history, self._begun, lost=lost)
