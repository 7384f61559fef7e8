"""Decides when to ask a second member: past the first one's usual latency, and at most so often.

Dean and Barroso, "The Tail at Scale" (CACM 56(2), 2013): a second request after the 95th percentile of the first's
time costs a twentieth more and takes most of the tail away. State only; time is passed in.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deeplink.types import NodeName

_KEPT = 128
_ENOUGH = 16
_SHARE = 0.05
"""Second requests over first ones, at most."""
_MOST_SAVED = 4.0
_PERCENTILE = 0.95
_SHORTEST_S = 0.02
"""Less is noise of the machine's own scheduling."""
_UNKNOWN_S = 0.1
_NOT_OFTEN = 16


class LatencyTracker:
    """How fast each member begins to answer. Safe to use from several threads.

    Args:
        longest_s: a second request is not put off longer.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._lock = threading.Lock()
        self._times: dict[NodeName, deque[float]] = {}
        self._patience: dict[NodeName, float] = {}
        self._seen = 0
        self._saved = _MOST_SAVED

    def asked(self) -> None:
        """Note a first request: it earns a part of a second one."""
        with self._lock:
            self._saved = min(self._saved + _SHARE, _MOST_SAVED)

    def began(self, member: NodeName, seconds: float) -> None:
        """Note how long a member took to begin its answer."""
        with self._lock:
            times = self._times.setdefault(member, deque(maxlen=_KEPT))
            times.append(seconds)
            self._seen += 1
            if len(times) >= _ENOUGH and (self._seen % _NOT_OFTEN == 0 or member not in self._patience):
                self._patience[member] = sorted(times)[int(len(times) * _PERCENTILE)]

    def patience_s(self, member: NodeName) -> float:
        """Return how long to wait for a member before another is asked too."""
        known = self._patience.get(member, _UNKNOWN_S)
        return min(max(known, _SHORTEST_S), self._longest_s)

    def may_ask_twice(self) -> bool:
        """Tell whether a second request is within the bounds; it is counted then."""
        with self._lock:
            if self._saved < 1.0:
                return False
            self._saved -= 1.0
            return True
