"""Starts agents again on nodes that lost theirs while their machines are well."""

from __future__ import annotations

import logging
from concurrent.futures import wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.core.timeouts import LastAnswer, start_call
from deeplink.scheduler.launch.backend import NoSlurmdError
from deeplink.scheduler.launch.process import AgentProcesses

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from deeplink.core.clock import Clock
    from deeplink.core.types import NodeName
    from deeplink.scheduler.launch.backend import AgentStep
    from deeplink.scheduler.launch.environment import NodeFacts

    Start = Callable[[Mapping[NodeName, NodeFacts]], AgentStep]

log = logging.getLogger(__name__)

TRY_S = 20.0  # a try on a node that is out of reach hangs; after so long it is given up for another one
PAUSE_S, LONGEST_PAUSE_S = 2.0, 10.0  # between two tries on a node; doubled each time, until its agent is up
MOST_TRIES = 4  # under way at once: one that hangs on a node must not keep the others waiting


class _Try:
    """One step of agents on some nodes; started in a thread, since what it writes to may hang."""

    def __init__(self, start: Start, nodes: Mapping[NodeName, NodeFacts], clock: Clock) -> None:
        self.since = clock.monotonic()
        self.is_up = False  # an agent of it came up
        self._nodes = set(nodes)
        self._starting = start_call(lambda: start(nodes))
        self._starting.add_done_callback(self._complain)
        # What its agents announce, in a thread: they are in a file of a shared folder, which may hang.
        self._reading: LastAnswer[list[NodeFacts]] = LastAnswer(self._announced, clock, "deeplink-announced")

    def _complain(self, _: object) -> None:
        names, problem = ", ".join(sorted(self._nodes)), self._starting.exception()
        if self.step is None:
            log.warning("agents could not be started once more on %s: %s", names, problem)
        elif self.step.gone:
            log.warning("agents are not started once more on all nodes: %s", NoSlurmdError(self.step.gone))

    def _announced(self) -> list[NodeFacts]:
        return self.step.announced() if self.step is not None else []

    @property
    def step(self) -> AgentStep | None:
        """The step; None until it is started, and where it cannot be."""
        started = self._starting
        return started.result() if started.done() and started.exception() is None else None

    @property
    def is_over(self) -> bool:
        return self._starting.done() and (self.step is None or self.step.ended() is not None)

    def gone(self) -> frozenset[NodeName]:
        """Return the nodes found to have no slurmd since the last call; they are awaited no longer."""
        if not self._starting.done():
            return frozenset()
        problem = self._starting.exception()
        found = problem.nodes if isinstance(problem, NoSlurmdError) else self.step.gone if self.step else ()
        gone = self._nodes.intersection(found)
        self._nodes -= gone
        return frozenset(gone)

    def awaited(self, now: float) -> frozenset[NodeName]:
        """The nodes whose agents may still come up."""
        return frozenset(self._nodes) if now - self.since < TRY_S else frozenset()

    def announced(self) -> list[NodeFacts]:
        if self.step is None or not self._nodes or self._reading.is_under_way:
            return []
        found, self._reading.value = self._reading.value or [], None
        self._reading.ask()
        self._nodes -= {facts.name for facts in found}
        self.is_up = self.is_up or bool(found)
        return found

    def abandon(self) -> None:
        """Let go of the step, also where it is started only later."""
        self._starting.add_done_callback(self._let_go)

    def _let_go(self, _: object) -> None:
        if self.step is not None:
            self.step.abandon()


@dataclass(slots=True)
class _Backoff:
    next_at: float = 0.0
    pause_s: float = PAUSE_S


class AgentRestart:
    """Tries to start agents again, a few tries at a time and ever more seldom. For the supervising thread."""

    def __init__(self, start: Start, clock: Clock) -> None:
        self._start, self._clock = start, clock
        self._tries: list[_Try] = []
        self._backoffs: dict[NodeName, _Backoff] = {}
        # Nodes of which the last try found that slurmd is gone with the agent.
        self.deserted: frozenset[NodeName] = frozenset()

    def begin(self, nodes: Mapping[NodeName, NodeFacts]) -> tuple[NodeName, ...]:
        """Try again, in one step, on those of these nodes for which it is time; return them. Does not wait."""
        now = self._clock.monotonic()
        self._tidy(now)
        if sum(not one.is_up for one in self._tries) >= MOST_TRIES:
            return ()
        busy = {node for one in self._tries for node in one.awaited(now)}
        due = {
            node: facts
            for node, facts in nodes.items()
            if node not in busy and now >= self._backoffs.setdefault(node, _Backoff()).next_at
        }
        if not due:
            return ()
        for backoff in map(self._backoffs.__getitem__, due):
            backoff.next_at, backoff.pause_s = now + backoff.pause_s, min(LONGEST_PAUSE_S, 2 * backoff.pause_s)
        self._tries.append(_Try(self._start, due, self._clock))
        return tuple(due)

    def _tidy(self, now: float) -> None:
        self._note_deserted()
        over = [one for one in self._tries if one.is_over or (not one.is_up and now - one.since >= TRY_S)]
        self._tries = [one for one in self._tries if one not in over]
        for one in over:
            if not one.is_up:
                self.deserted = self.deserted - one.awaited(one.since) | one.gone()
                one.abandon()

    def _note_deserted(self) -> None:
        self.deserted = self.deserted.union(*(one.gone() for one in self._tries))

    def announced(self) -> list[NodeFacts]:
        """Return the agents that came up since the last call."""
        self._note_deserted()
        found = [facts for one in self._tries for facts in one.announced()]
        self.deserted -= {facts.name for facts in found}
        for facts in found:
            self._backoffs.pop(facts.name, None)
        return found

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes of those whose agents came up."""
        steps = [one.step for one in self._tries if one.is_up]
        return tuple(pid for step in steps if isinstance(step, AgentProcesses) for pid in step.started.pids)

    def abandon(self) -> None:
        """Let go of them, where they are not ours to end any more."""
        for one in self._tries:
            one.abandon()

    def close(self) -> None:
        """End them; returns in bounded time."""
        stops = [start_call(one.step.stop) for one in self._tries if one.is_up and one.step is not None]
        for one in self._tries:
            if not one.is_up:
                one.abandon()
        wait(stops)
