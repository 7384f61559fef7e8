"""Which members to leave alone for a while because they did not answer. State only; time is passed in."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deeplink.types import NodeName

_FIRST_S = 5.0
_LONGEST_S = 60.0
_PROBE_S = 5.0
"""How long a member that is tried again has to answer before somebody else may try it."""
_MOST_OVERTAKEN = 3


class Breaker:
    """Counts each member's failures in a row; after each it is to be skipped: 5 s, doubling, 60 s at most.

    After that one batch is tried on it; the others follow when that was answered. A member that others overtake
    three times in a row, without an answer of its own between, has failed too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failures: dict[NodeName, int] = {}
        self._overtaken: dict[NodeName, int] = {}
        self._until: dict[NodeName, float] = {}
        self._tried: set[NodeName] = set()

    def failed(self, member: NodeName, now: float) -> float:
        """Note that a member did not answer; return how long it is skipped, seconds."""
        with self._lock:
            return self._failed(member, now)

    def _failed(self, member: NodeName, now: float) -> float:
        if self._until.get(member, 0.0) > now and member not in self._tried:
            return self._until[member] - now  # another thread waited for the same silence
        failures = self._failures.get(member, 0)
        self._tried.discard(member)
        self._failures[member] = failures + 1
        pause = min(_FIRST_S * 2.0 ** min(failures, 10), _LONGEST_S)
        self._until[member] = now + pause
        return pause

    def overtaken(self, member: NodeName, now: float) -> float:
        """Note that another member answered in its place; return how long it is skipped, 0 if it is not."""
        with self._lock:
            count = self._overtaken[member] = self._overtaken.get(member, 0) + 1
            if count < _MOST_OVERTAKEN:
                return 0.0
            self._overtaken.pop(member)
            return self._failed(member, now)

    def answered(self, member: NodeName) -> None:
        """Note that a member answered: it is as good as new."""
        with self._lock:
            self._failures.pop(member, None)
            self._until.pop(member, None)
            self._tried.discard(member)
            self._overtaken.pop(member, None)

    def skipped(self, now: float) -> frozenset[NodeName]:
        """Return the members to be left alone by one batch; each whose time is over is tried by this one alone."""
        if not self._until:
            return frozenset()
        with self._lock:
            found = frozenset(member for member, until in self._until.items() if until > now)
            for member in self._until.keys() - found:
                self._until[member] = now + _PROBE_S
                self._tried.add(member)
            return found
