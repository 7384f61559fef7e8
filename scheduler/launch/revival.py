"""Agents started once more on nodes that lost theirs: after a reboot, or where an agent was killed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from deeplink.clock import Clock
    from deeplink.scheduler.launch.backend import AgentStep
    from deeplink.scheduler.launch.environment import NodeFacts
    from deeplink.types import NodeName

TRY_S = 20.0
"""A try on a node that is out of reach hangs; after so long it is given up for another one."""


class Revival:
    """Tries to start agents, one try at a time. The supervising thread alone uses it.

    Args:
        start: starts agents on nodes.
        clock: for every duration.
    """

    def __init__(self, start: Callable[[Collection[NodeName]], AgentStep], clock: Clock) -> None:
        self._start, self._clock = start, clock
        self._trying: AgentStep | None = None
        self._since = 0.0
        self._up: list[AgentStep] = []

    def begin(self, nodes: Collection[NodeName]) -> None:
        """Try again, unless a try is under way; does not wait."""
        now = self._clock.monotonic()
        if self._trying is not None:
            if self._trying.ended() is None and now - self._since < TRY_S:
                return
            self._trying.abandon()
        self._trying, self._since = self._start(nodes), now

    def announced(self) -> list[NodeFacts]:
        """Return the agents that came up since the last call."""
        found = [facts for step in (*self._up, self._trying) if step is not None for facts in step.announced()]
        if found and self._trying is not None:
            self._up.append(self._trying)
            self._trying = None
        return found

    def abandon(self) -> None:
        """Let go of them, where they are not ours to end any more."""
        for step in (*self._up, self._trying):
            if step is not None:
                step.abandon()

    def close(self) -> None:
        """End them; returns in bounded time."""
        if self._trying is not None:
            self._trying.abandon()
        for step in self._up:
            step.stop()
