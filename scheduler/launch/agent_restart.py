"""Restarts agents on nodes that lost theirs: after a reboot, or where agents were killed.

Slurm ends all agents of a step when one of its nodes boots anew, `--no-kill` or not (srun: "Aborting, io error and
missing step on node", 22.05.8): losing them all at once is as usual as losing one.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deeplink.errors import DeepLinkError
from deeplink.scheduler.launch.backend import NoSlurmdError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from deeplink.clock import Clock
    from deeplink.scheduler.launch.backend import AgentStep
    from deeplink.scheduler.launch.environment import NodeFacts
    from deeplink.types import NodeName

log = logging.getLogger(__name__)

TRY_S = 20.0
"""A try on a node that is out of reach hangs; after so long it is given up for another one."""
PAUSE_S, LONGEST_PAUSE_S = 2.0, 10.0
"""Between two tries on a node; doubled each time, until its agent is up."""
MOST_TRIES = 4
"""Under way at once: one that hangs on a node must not keep the others waiting."""


class _Try:
    """One step of agents on some nodes; started in a thread, since what it writes to may hang."""

    def __init__(
        self,
        start: Callable[[Mapping[NodeName, NodeFacts]], AgentStep],
        nodes: Mapping[NodeName, NodeFacts],
        since: float,
    ) -> None:
        self.since = since
        self._nodes = set(nodes)
        self.step: AgentStep | None = None
        self._lock = threading.Lock()
        self._is_over = self._has_failed = False
        self._gone: frozenset[NodeName] = frozenset()
        threading.Thread(target=self._run, args=(start, nodes), name="deeplink-revival", daemon=True).start()

    def _run(
        self, start: Callable[[Mapping[NodeName, NodeFacts]], AgentStep], nodes: Mapping[NodeName, NodeFacts]
    ) -> None:
        try:
            step = start(nodes)
        except (DeepLinkError, OSError) as problem:
            self._gone = problem.nodes if isinstance(problem, NoSlurmdError) else frozenset()
            log.warning("agents could not be started once more on %s: %s", ", ".join(sorted(nodes)), problem)
            self._has_failed = True
            return
        if step.gone:
            log.warning("agents are not started once more on all nodes: %s", NoSlurmdError(step.gone))
        with self._lock:
            self._gone, self.step = step.gone, step
            too_late = self._is_over
        if too_late:
            step.abandon()

    @property
    def is_over(self) -> bool:
        return self._has_failed or (self.step is not None and self.step.ended() is not None)

    def gone(self) -> frozenset[NodeName]:
        """Return the nodes found to have no slurmd since the last call; they are awaited no longer."""
        with self._lock:
            gone, self._gone = self._gone, frozenset()
        self._nodes -= gone
        return gone

    def awaited(self, now: float) -> frozenset[NodeName]:
        """The nodes whose agents may still come up."""
        return frozenset(self._nodes) if now - self.since < TRY_S else frozenset()

    def announced(self) -> list[NodeFacts]:
        found = self.step.announced() if self.step is not None else []
        self._nodes -= {facts.name for facts in found}
        return found

    def abandon(self) -> None:
        with self._lock:
            self._is_over, step = True, self.step
        if step is not None:
            step.abandon()


@dataclass(slots=True)
class _Pace:
    next_at: float = 0.0
    pause_s: float = field(default=PAUSE_S)


class AgentRestart:
    """Tries to start agents, a few tries at a time and ever more seldom. The supervising thread alone uses it.

    Attributes:
        deserted: nodes of which the last try found that slurmd is gone with the agent.

    Args:
        start: starts agents on nodes, in the places of those that are named.
        clock: for every duration.
    """

    def __init__(self, start: Callable[[Mapping[NodeName, NodeFacts]], AgentStep], clock: Clock) -> None:
        self._start, self._clock = start, clock
        self._tries: list[_Try] = []
        self._up: list[_Try] = []
        self._paces: dict[NodeName, _Pace] = {}
        self.deserted: frozenset[NodeName] = frozenset()

    def begin(self, nodes: Mapping[NodeName, NodeFacts]) -> tuple[NodeName, ...]:
        """Try again, in one step, on those of these nodes for which it is time; return them. Does not wait."""
        now = self._clock.monotonic()
        self._tidy(now)
        if len(self._tries) >= MOST_TRIES:
            return ()
        busy = {node for one in (*self._tries, *self._up) for node in one.awaited(now)}
        due = {
            node: facts
            for node, facts in nodes.items()
            if node not in busy and now >= self._paces.setdefault(node, _Pace()).next_at
        }
        if not due:
            return ()
        for node in due:
            pace = self._paces[node]
            pace.next_at, pace.pause_s = now + pace.pause_s, min(LONGEST_PAUSE_S, 2 * pace.pause_s)
        self._tries.append(_Try(self._start, due, now))
        return tuple(due)

    def _tidy(self, now: float) -> None:
        self._desert()
        for one in [one for one in self._tries if one.is_over or now - one.since >= TRY_S]:
            self._tries.remove(one)
            self.deserted = self.deserted - one.awaited(one.since) | one.gone()
            one.abandon()
        self._up = [one for one in self._up if not one.is_over]

    def _desert(self) -> None:
        for one in (*self._up, *self._tries):
            self.deserted |= one.gone()

    def announced(self) -> list[NodeFacts]:
        """Return the agents that came up since the last call."""
        self._desert()
        found = []
        for one in (*self._up, *self._tries):
            said = one.announced()
            if said and one in self._tries:
                self._tries.remove(one)
                self._up.append(one)
            found += said
        self.deserted -= {facts.name for facts in found}
        for facts in found:
            self._paces.pop(facts.name, None)
        return found

    def abandon(self) -> None:
        """Let go of them, where they are not ours to end any more."""
        for one in (*self._up, *self._tries):
            one.abandon()

    def close(self) -> None:
        """End them; returns in bounded time."""
        for one in self._tries:
            one.abandon()
        stops = [
            threading.Thread(target=one.step.stop, name="deeplink-revived-end", daemon=True)
            for one in self._up
            if one.step is not None
        ]
        for stop in stops:
            stop.start()
        for stop in stops:
            stop.join()
