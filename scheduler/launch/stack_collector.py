"""Asks the agents what an attempt's ranks do and where they are, and keeps the stacks of those that hang."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.core.codec import from_message
from deeplink.core.publish import write_unsynced
from deeplink.core.text import counted
from deeplink.core.timeouts import call_with_timeout
from deeplink.rpc.channel import attempt_to_wire
from deeplink.scheduler.launch.hang_attribution import ProcessSnapshot, RankPlace, blame, main_frames, summary
from deeplink.scheduler.recovery.records import RankStack
from deeplink.v1 import node_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path
    from typing import Any

    from deeplink.core.clock import Clock
    from deeplink.core.types import NodeName
    from deeplink.scheduler.launch.agent_pool import AgentPool
    from deeplink.scheduler.launch.environment import Launch
    from deeplink.scheduler.launch.event_log import EventLog

log = logging.getLogger(__name__)

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
