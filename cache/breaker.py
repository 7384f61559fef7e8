"""Which members to leave alone for a while because they did not answer. State only; time is passed in."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deeplink.types import NodeName

_FIRST_S = 5.0
_LONGEST_S = 60.0


class Breaker:
    """Counts each member's failures in a row; after each it is to be skipped: 5 s, doubling, 60 s at most."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failures: dict[NodeName, int] = {}
        self._until: dict[NodeName, float] = {}

    def failed(self, member: NodeName, now: float) -> float:
        """Note that a member did not answer; return how long it is skipped, seconds."""
        with self._lock:
            if self._until.get(member, 0.0) > now:  # another thread waited for the same silence
                return self._until[member] - now
            failures = self._failures.get(member, 0)
            self._failures[member] = failures + 1
            pause = min(_FIRST_S * 2.0 ** min(failures, 10), _LONGEST_S)
            self._until[member] = now + pause
            return pause

    def answered(self, member: NodeName) -> None:
        """Note that a member answered: it is as good as new."""
        with self._lock:
            self._failures.pop(member, None)
            self._until.pop(member, None)

    def is_skipped(self, member: NodeName, now: float) -> bool:
        """Tell whether a member is to be left alone at this moment."""
        with self._lock:
            return self._until.get(member, 0.0) > now
