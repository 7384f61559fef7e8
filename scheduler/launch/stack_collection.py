"""Collects the stacks of an attempt's ranks from the agents and keeps them in a file."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.publish import write_unsynced
from deeplink.scheduler.launch.hang_attribution import Where, blame, main_frames, summary
from deeplink.scheduler.launch.process_activity import ProcessSnapshot
from deeplink.scheduler.launch.questions import Question, by_rank, stack_text
from deeplink.scheduler.watch.messages import stack_from_wire
from deeplink.text import counted
from deeplink.v1 import node_pb2
from deeplink.wire import attempt_to_wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from deeplink.clock import Clock
    from deeplink.scheduler.launch.agent_pool import AgentPool
    from deeplink.scheduler.launch.environment import Launch
    from deeplink.scheduler.launch.event_log import EventLog
    from deeplink.scheduler.watch.records import RankStack
    from deeplink.types import NodeName

log = logging.getLogger(__name__)

LOOK_S = 3.0
"""How long an agent may take to say what its ranks do."""
STACKS_S, STACKS_ANSWER_S = 8.0, 10.0
"""How long an agent may look for stacks, and how long its answer is waited for."""
WRITE_S = 3.0
"""How long the file may take: its storage may be what the ranks hang on."""
POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class StackReport:
    """Where the ranks were, when they were asked.

    Attributes:
        gist: in one line, for people; empty when nobody could say.
        suspects: nodes of the ranks that the others seem to wait for.
        stacks: of all ranks that were found.
    """

    gist: str = ""
    suspects: tuple[NodeName, ...] = ()
    stacks: tuple[RankStack, ...] = ()


class Whereabouts:
    """Asks the agents of one launch. The supervising thread alone uses it.

    Args:
        fleet: the agents.
        launch: the attempt.
        clock: for every duration.
    """

    def __init__(self, fleet: AgentPool, launch: Launch, clock: Clock) -> None:
        self._fleet, self._launch, self._clock = fleet, launch, clock
        self._question: Question | None = None
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
        """What was asked is not of interest any more."""
        self._question = None

    def look(self, pause_s: float) -> dict[int, ProcessSnapshot] | None:
        """Return what ranks do, by rank, where that has just come in; ask again after a pause. Does not wait."""
        now = self._clock.monotonic()
        sights = None
        if self._question is not None:
            if not self._question.is_answered and now - self._question.asked < LOOK_S:
                return None
            sights = self._sights(self._question)
            self._question, self._looked = None, now
        if now - self._looked >= pause_s:
            self._question = self._asked(LOOK_S, LOOK_S, states_only=True)
        return sights

    def _sights(self, question: Question) -> dict[int, ProcessSnapshot]:
        sights: dict[int, ProcessSnapshot] = {}
        for node, ranks in question.answers().items():
            for one in ranks:
                if one.rank not in sights or one.state:
                    sights[one.rank] = ProcessSnapshot(state=one.state, cpu_s=one.cpu_s)
                    self._nodes[one.rank] = node
        return sights

    def _asked(self, deadline_s: float, timeout_s: float, *, states_only: bool) -> Question:
        request = node_pb2.StacksRequest(
            attempt=attempt_to_wire(self._launch.attempt), deadline_s=deadline_s, states_only=states_only
        )
        nodes = [facts.name for facts in self._launch.nodes]
        return Question(self._clock.monotonic(), self._fleet.ask_stacks(nodes, request, timeout_s))

    def locate(
        self, steps: Mapping[int, int], folder: Path, chronicle: EventLog, listen: Callable[[], None]
    ) -> StackReport:
        """Ask every agent for the stacks of its ranks, keep them, and return what they say.

        Takes `STACKS_ANSWER_S` at most, and the file `WRITE_S`.

        Args:
            steps: the newest step of each rank that reported one.
            folder: the file is put there.
            chronicle: who is told.
            listen: called all the while.
        """
        question = self._asked(STACKS_S, STACKS_ANSWER_S, states_only=False)
        while not question.is_answered and self._clock.monotonic() - question.asked < STACKS_ANSWER_S:
            listen()
            self._clock.sleep(POLL_S)
        by_node = question.answers()
        answers = sorted(((one, node) for node, ranks in by_node.items() for one in ranks), key=by_rank)
        if not answers:
            return StackReport()
        places = [
            Where(
                rank=one.rank, node=node, state=one.state, frames=main_frames(one.text), step=steps.get(one.rank)
            )
            for one, node in answers
        ]
        blamed = blame(places)
        file = folder / f"stacks.{self._launch.attempt}"
        is_kept = _in_time(lambda: write_unsynced(file, stack_text(answers, steps).encode("utf-8", "replace")))
        kept = f"stacks of {counted(len(answers), 'rank')} in {file}" if is_kept else "stacks could not be written"
        gist = "; ".join(filter(None, [summary(places, blamed), kept]))
        silent = sorted({facts.name for facts in self._launch.nodes} - by_node.keys())
        chronicle.event("stacks", gist, file=str(file), blamed=[one.rank for one in blamed.ranks], silent=silent)
        return StackReport(
            gist=gist, suspects=blamed.nodes, stacks=tuple(stack_from_wire(one) for one, _ in answers)
        )


def _in_time(write: Callable[[], None]) -> bool:
    done: list[bool] = []

    def run() -> None:
        try:
            write()
            done.append(True)
        except OSError as problem:
            log.warning("stacks: %s", problem)

    thread = threading.Thread(target=run, name="deeplink-stacks", daemon=True)
    thread.start()
    thread.join(WRITE_S)
    return bool(done)
