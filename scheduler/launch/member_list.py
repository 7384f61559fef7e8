"""The list of a job's agents, in a file of its folder that is named by its digest."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from deeplink.core.publish import leave_members
from deeplink.core.timeouts import LastAnswer
from deeplink.core.types import format_members

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from deeplink.core.clock import Clock
    from deeplink.core.types import NodeName
    from deeplink.scheduler.launch.environment import NodeFacts

log = logging.getLogger(__name__)

WRITE_AGAIN_S = 10.0  # after the list could not be written


class MemberList:
    """Writes the list whenever it is another one, in a thread: supervision never waits for the shared folder.

    Heartbeats carry the file's name; an agent that does not know it yet reads it.
    """

    def __init__(self, folder: Path, clock: Clock) -> None:
        self._folder, self._clock = folder, clock
        self._facts: Mapping[NodeName, NodeFacts] = {}
        self._is_outdated, self._again_at = True, float("-inf")
        self._written = LastAnswer(self._leave, clock, "deeplink-members")

    def outdated(self) -> None:
        """The agents are others from here on, or are reached elsewhere."""
        self._is_outdated = True

    def value(self, facts: Callable[[], Mapping[NodeName, NodeFacts]]) -> str:
        """Return what stands for the list of these agents; empty while it is not written. Does not wait."""
        now = self._clock.monotonic()
        if self._written.is_under_way:
            return ""
        if self._is_outdated:
            self._is_outdated, self._facts = False, facts()
            self._written = LastAnswer(self._leave, self._clock, "deeplink-members")
            self._again_at = float("-inf")
        if self._written.value is None and now >= self._again_at:
            self._again_at = now + WRITE_AGAIN_S
            self._written.ask()
        return self._written.value or ""

    def _leave(self) -> str | None:
        try:
            return leave_members(self._folder, format_members(tuple(one.member for one in self._facts.values())))
        except OSError as problem:
            log.warning("the agents cannot be told of each other: %s: %s", self._folder, problem)
            return None
