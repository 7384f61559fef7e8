"""Finds ranks that are late or slow, and whether they hang.

`hang_detection.py` and `hang_attribution.py` decide. This module asks agents what ranks do and where they are,
reports the result, and keeps what was learned and the stacks of ranks that hang.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.core.codec import from_message
from deeplink.core.publish import write_unsynced
from deeplink.core.text import counted
from deeplink.core.timeouts import call_with_timeout
from deeplink.rpc.channel import attempt_from_wire, attempt_to_wire
from deeplink.scheduler.launch.hang_attribution import (
    ActivityAnswer,
    ActivityHistory,
    Blame,
    NeighbourTest,
    ProcessSnapshot,
    RankPlace,
    blame,
    deadlock,
    main_frames,
    summary,
)
from deeplink.scheduler.launch.hang_detection import (
    IDLE_S,
    STOPPED_SHARE,
    ProgressClock,
    Silences,
    Stragglers,
    hung,
    longest_late,
    named,
    stopped,
)
from deeplink.scheduler.recovery.records import RankStack
from deeplink.v1 import node_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path
    from typing import Any

    from deeplink.core.clock import Clock
    from deeplink.core.types import NodeName
    from deeplink.scheduler.launch.agent_pool import AgentPool
    from deeplink.scheduler.launch.backend import RunContext
    from deeplink.scheduler.launch.environment import Launch
    from deeplink.scheduler.launch.event_log import EventLog
    from deeplink.scheduler.launch.hang_detection import LateRank, Straggler
    from deeplink.v1 import common_pb2

log = logging.getLogger(__name__)

LEARNED_FILE = "silences.json"  # in the job's state folder: what was learned, for its next run
SAVE_EVERY_S = 30.0
NEARLY = 0.7  # ranks are looked at once they have used up so much of their time: it takes two looks
EXAMINED = 0.9  # and asked why they are late once all have used up so much: that takes some seconds
LOOK_AGAIN_S, LOOK_EARLY_S = 1.5, 3.0  # how often, when ranks are late, and when they are merely without news
SELDOM_S = 10.0  # how often when that has been so for longer than a minute


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """Ranks that hang, or are to be replaced."""

    hung: str = ""  # why ranks count as hung; empty while they do not
    slow: str = ""  # why a rank is to be replaced; empty while none is
    suspects: tuple[NodeName, ...] = ()  # nodes to blame, where it can be told


class Hangs:
    """Watches the progress of each rank of a run; the supervising thread alone uses it, from `begin` on."""

    _collector: StackCollector  # of the newest attempt
    _neighbours: NeighbourTest

    def __init__(self, run: RunContext) -> None:
        self._agents, self._events, self._clock = run.agents, run.events, run.clock
        self._folder = run.backend.folder
        self._timeout_s = run.spec.step_timeout_s
        self._replaces = run.spec.replace_stragglers
        self._silences = _read(self._folder / LEARNED_FILE)
        self._progress = ProgressClock(self._silences, self._timeout_s)
        self._activity = ActivityHistory()
        self._are_ports_open = False  # those of ranks, as far as was tried while they made progress
        self._examine_at_s = 0.0  # once they are silent for so long it is asked why; each time twice as late
        self._seen: Blame | None = None  # the newest answer to that
        self._stragglers = Stragglers()
        self._told_late = False  # what was said already, so that it is said once
        self._told_slow: set[int] = set()
        self._saved = run.clock.monotonic()
        self._saving: threading.Thread | None = None

    def begin(self, launch: Launch) -> None:
        """A new attempt begins."""
        self._told_slow = set()
        self._collector = StackCollector(self._agents, launch, self._clock)
        self._progress.begin(self._clock.monotonic(), launch.world_size)
        self._forget()
        hosts = {node: facts.host for node, facts in self._agents.facts.items()}
        nodes = [facts.name for facts in launch.nodes]
        is_open = self._are_ports_open
        self._neighbours = NeighbourTest(nodes, hosts, self._agents.stubs, self._clock, are_ports_open=is_open)
        self._stragglers = Stragglers()

    def take(self, reports: Iterable[common_pb2.Progress]) -> None:
        """Take in what agents heard of ranks; what is of other attempts does not count."""
        now = self._clock.monotonic()
        self._progress.tick(now)
        for report in reports:
            if attempt_from_wire(report.attempt) != self._collector.launch.attempt:
                continue
            step = report.step if report.step or not report.section else None
            self._progress.take(report.rank, step, report.section, now)
            if step is not None and not report.section:
                self._stragglers.take(report.rank, step, report.work_s, now)
        if now - self._saved > SAVE_EVERY_S:
            self._saved = now
            self._save()

    def look(self) -> Late:
        """Return what is to be said of ranks now; does not wait."""
        slow = self._look_at_stragglers()
        if self._timeout_s == 0:
            return slow
        now = self._clock.monotonic()
        share = STOPPED_SHARE if self._timeout_s is None else 1.0
        if not self._progress.quiet(now, NEARLY * share):
            self._forget()
            if not self._progress.is_setting_up:
                self._neighbours.learn()
                self._are_ports_open = self._neighbours.are_ports_open
            return slow
        nearly = self._progress.late(now, NEARLY * share)
        is_long = any(one.silent_s - one.limit_s > 6 * SELDOM_S for one in nearly)
        snapshots = self._collector.look(SELDOM_S if is_long else LOOK_AGAIN_S if nearly else LOOK_EARLY_S)
        if snapshots is not None:
            self._activity.look(snapshots, now, self._collector.launch.world_size)
        seen, is_heard = self._activity.newest, self._progress.is_heard
        late = self._progress.late(now, share)
        if because := stopped(seen, self._activity.stopped_s(), late, is_heard=is_heard):
            return Late(hung=because, suspects=self._collector.nodes_of(seen.ranks))
        if self._progress.are_all(late := self._progress.late(now, EXAMINED)):
            self._examine(min(one.silent_s for one in late))
        late = self._progress.late(now)
        self._told_late = self._told_late and bool(nearly)
        return self._judged(late) if late else slow

    def _forget(self) -> None:
        self._told_late, self._examine_at_s, self._seen = False, 0.0, None
        self._activity.forget()
        self._collector.forget()

    def _judged(self, late: tuple[LateRank, ...]) -> Late:
        all_late, is_set = self._progress.are_all(late), self._timeout_s is not None
        seen = self._seen if all_late else Blame()
        if seen is None:  # it is asked
            return Late()
        because = hung(late, all_late=all_late, why=seen.why, idle_s=self._activity.idle_s(), is_set=is_set)
        if because:
            return Late(hung=because, suspects=seen.nodes)
        if self._activity.newest.answer is not ActivityAnswer.UNKNOWN and not self._told_late:
            self._told_late = True
            self._say_late(late, self._activity.newest.answer)
        return Late()

    def _examine(self, silent_s: float) -> None:
        """Ask why nothing will come of waiting, and whose fault it is, where it is time. Does not wait."""
        if self._activity.newest.answer is ActivityAnswer.HELD:
            self._seen = Blame()
            return
        if silent_s >= self._examine_at_s and not self._neighbours.is_under_way:
            self._seen = None
            self._examine_at_s = 2 * silent_s
            self._collector.ask_for_stacks()
            self._neighbours.start()
        network = self._neighbours.answer
        if self._seen is None and network is not None and self._collector.are_stacks_here:
            # Once: what ranks do later does not go with where they were.
            places, world = self._collector.places(self._progress.steps), self._collector.launch.world_size
            idle = self._activity.idle() - self._progress.moving_data
            self._seen = network if network.why else deadlock(places, idle, world)

    def _say_late(self, late: tuple[LateRank, ...], answer: ActivityAnswer) -> None:
        longest, ranks = longest_late(late), [one.rank for one in late]
        what = {
            ActivityAnswer.HELD: "they are held by a debugger or suspended: left alone",
            ActivityAnswer.IDLE: f"no rank works: that counts as a hang after {IDLE_S:.0f} s",
            ActivityAnswer.WORKING: "ranks work: left alone (deeplink.section tells what they are about)",
        }.get(answer, "")
        self._events.event(
            "late",
            f"nothing new of {named(ranks)} for {longest.silent_s:.0f} s ({longest.limit}); {what}",
            ranks=ranks,
            section=longest.section,
            silent_s=longest.silent_s,
            limit_s=longest.limit_s,
            answer=answer.value,
        )

    def _look_at_stragglers(self) -> Late:
        found = self._stragglers.found
        for rank, one in found.items():
            if rank not in self._told_slow:
                node = self._collector.node_of(rank) or ""
                facts = {"factor": one.factor, "work_s": one.work_s, "median_s": one.median_s}
                self._events.event("straggler", self._because(one), rank=rank, node=node, **facts)
        for rank in self._told_slow - found.keys():
            self._events.event("straggler-over", f"rank {rank} is as fast as the others again", rank=rank)
        self._told_slow = set(found)
        if not found or not self._replaces:
            return Late()
        worst = max(found.values(), key=lambda one: one.factor)
        return Late(slow=self._because(worst), suspects=self._collector.nodes_of([worst.rank]))

    def _because(self, one: Straggler) -> str:
        node = self._collector.node_of(one.rank) or "?"
        return (
            f"rank {one.rank} on {node}: {one.factor:.2f} x the median of the ranks' own work, "
            f"{one.work_s * 1e3:.4g} ms against {one.median_s * 1e3:.4g} ms, for {counted(one.steps, 'step')}"
        )

    @property
    def stragglers(self) -> dict[NodeName, str]:
        """The nodes of the stragglers there are now, and why they count as that."""
        found = self._stragglers.found.items()
        return {node: self._because(one) for rank, one in found if (node := self._collector.node_of(rank))}

    def locate(self, listen: Callable[[], None]) -> StackReport:
        """Collect the stacks of all ranks, as `StackCollector.locate` does."""
        self._save()
        if self._seen is None or not self._seen.why:
            self._collector.forget()  # the stacks that are here tell of another moment
        return self._collector.locate(self._progress.steps, self._folder, self._events, listen)

    def _save(self) -> None:
        # In a thread of its own, and never two at once: the storage may hang.
        if self._saving is None or not self._saving.is_alive():
            what = self._folder / LEARNED_FILE, self._silences.as_text().encode()
            self._saving = threading.Thread(target=_save, args=what, name="deeplink-learned", daemon=True)
            self._saving.start()


def _save(path: Path, text: bytes) -> None:
    try:
        write_unsynced(path, text)
    except OSError as problem:
        log.warning("what was learned of the ranks' steps is not kept: %s", problem)


def _read(path: Path) -> Silences:
    try:
        return Silences.read(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return Silences()


# Asks the agents what an attempt's ranks do and where they are.

LOOK_S = 3.0  # how long an agent may take to say what its ranks do
STACKS_S, STACKS_ANSWER_S = 8.0, 10.0  # how long an agent may look for stacks, and how long it is waited for
WRITE_S = 3.0  # how long the file of stacks may take: its storage may be what the ranks hang on
POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class StackReport:
    """Places of the ranks, when they were asked."""

    gist: str = ""  # in one line, for people; empty when no agent could say
    suspects: tuple[NodeName, ...] = ()  # nodes of the ranks that the others seem to wait for
    stacks: tuple[RankStack, ...] = ()  # of all ranks that were found


@dataclass(slots=True)
class _Question:
    """One that all agents were asked at once."""

    asked: float
    calls: Mapping[NodeName, Any]  # futures of StacksReply

    @property
    def is_answered(self) -> bool:
        return all(call.done() for call in self.calls.values())

    def answers(self) -> dict[NodeName, Sequence[node_pb2.RankStack]]:
        """Return what came back; nodes that did not answer, or whose agent is too old to, are missing."""
        done = {node: call for node, call in self.calls.items() if call.done() and not call.cancelled()}
        return {node: call.result().ranks for node, call in done.items() if call.exception() is None}


class StackCollector:
    """Asks the agents of one launch what its ranks do. The supervising thread alone uses it."""

    def __init__(self, agents: AgentPool, launch: Launch, clock: Clock) -> None:
        self.launch = launch
        self._agents, self._clock = agents, clock
        self._question: _Question | None = None
        self._stacks: _Question | None = None
        self._looked = clock.monotonic()
        self._nodes: dict[int, NodeName] = {}  # by rank, as agents answer
        first = 0
        for facts, ranks in zip(launch.nodes, launch.ranks, strict=True):
            self._nodes.update(dict.fromkeys(range(first, first + ranks), facts.name))
            first += ranks

    def node_of(self, rank: int) -> NodeName | None:
        """Return the node that runs the rank; None where there is no such rank."""
        return self._nodes.get(rank)

    def nodes_of(self, ranks: Iterable[int]) -> tuple[NodeName, ...]:
        """Return the nodes that run these ranks, each once."""
        return tuple(dict.fromkeys(self._nodes[rank] for rank in ranks if rank in self._nodes))

    def forget(self) -> None:
        """Drop what was asked."""
        self._question = self._stacks = None

    def look(self, pause_s: float) -> dict[int, ProcessSnapshot] | None:
        """Return what ranks do, by rank, where that has just come in; ask again after a pause. Does not wait."""
        now = self._clock.monotonic()
        snapshots: dict[int, ProcessSnapshot] | None = None
        if self._question is not None:
            if not self._question.is_answered and now - self._question.asked < LOOK_S:
                return None
            snapshots = {}
            for node, ranks in self._question.answers().items():
                for one in ranks:
                    if one.rank not in snapshots or one.state:
                        snapshots[one.rank] = ProcessSnapshot(state=one.state, cpu_s=one.cpu_s)
                        self._nodes[one.rank] = node
            self._question, self._looked = None, now
        if now - self._looked >= pause_s:
            self._question = self._ask(LOOK_S, LOOK_S, states_only=True)
        return snapshots

    def _ask(self, deadline_s: float, timeout_s: float, *, states_only: bool) -> _Question:
        request = node_pb2.StacksRequest(
            attempt=attempt_to_wire(self.launch.attempt), deadline_s=deadline_s, states_only=states_only
        )
        stubs = self._agents.stubs(facts.name for facts in self.launch.nodes)
        calls = {node: stub.Stacks.future(request, timeout=timeout_s) for node, stub in stubs.items()}
        return _Question(self._clock.monotonic(), calls)

    def ask_for_stacks(self) -> None:
        """Ask every agent for the stacks of its ranks. Does not wait."""
        self._stacks = self._ask(STACKS_S, STACKS_ANSWER_S, states_only=False)

    @property
    def are_stacks_here(self) -> bool:
        """Whether all agents that were asked for stacks have answered, or had the time for it."""
        asked = self._stacks
        return asked is not None and (
            asked.is_answered or self._clock.monotonic() - asked.asked >= STACKS_ANSWER_S
        )

    def places(self, steps: Mapping[int, int]) -> list[RankPlace]:
        """Return where ranks are, as far as agents that were asked for stacks have said."""
        return [
            RankPlace(
                rank=one.rank, node=node, state=one.state, frames=main_frames(one.text), step=steps.get(one.rank)
            )
            for one, node in self._answers()
        ]

    def _answers(self) -> list[tuple[node_pb2.RankStack, NodeName]]:
        by_node = self._stacks.answers() if self._stacks is not None else {}
        answers = [(one, node) for node, ranks in by_node.items() for one in ranks]
        return sorted(answers, key=lambda answer: (answer[0].rank, answer[1]))

    def locate(
        self, steps: Mapping[int, int], folder: Path, events: EventLog, listen: Callable[[], None]
    ) -> StackReport:
        """Ask every agent for the stacks of its ranks, unless that was done; keep them, and say what they say."""
        # Takes `STACKS_ANSWER_S` at most, and the file `WRITE_S`.
        if self._stacks is None:
            self.ask_for_stacks()
        while not self.are_stacks_here:
            listen()
            self._clock.sleep(POLL_S)
        answers = self._answers()
        if not answers:
            return StackReport()
        blamed = blame(places := self.places(steps))
        file = folder / f"stacks.{self.launch.attempt}"
        is_kept = _is_written(file, stack_text(answers, steps))
        kept = f"stacks of {counted(len(answers), 'rank')} in {file}" if is_kept else "stacks could not be written"
        gist = "; ".join(filter(None, [summary(places, blamed), kept]))
        silent = sorted({facts.name for facts in self.launch.nodes} - {node for _, node in answers})
        events.event("stacks", gist, file=str(file), blamed=[one.rank for one in blamed.ranks], silent=silent)
        stacks = tuple(from_message(RankStack, one) for one, _ in answers)
        return StackReport(gist=gist, suspects=blamed.nodes, stacks=stacks)


def stack_text(answers: Iterable[tuple[node_pb2.RankStack, NodeName]], steps: Mapping[int, int]) -> str:
    """Return the file of an attempt's stacks."""
    parts = []
    for one, node in answers:
        source = f", by {one.source}" if one.source else ""
        step = f", step {steps[one.rank]}" if one.rank in steps else ""
        parts.append(f"=== rank {one.rank} on {node}, pid {one.pid}, state {one.state or 'gone'}{step}{source}")
        parts.append(one.text.rstrip())
        if one.flight:
            parts.append(f"--- newest collectives: {one.flight}")
    return "\n".join(parts) + "\n"


def _is_written(file: Path, text: str) -> bool:
    try:
        call_with_timeout(lambda: write_unsynced(file, text.encode("utf-8", "replace")), WRITE_S)
    except OSError as problem:  # a TimeoutError, too
        log.warning("stacks: %s", str(problem) or f"not written within {WRITE_S:g} s")
        return False
    return True
