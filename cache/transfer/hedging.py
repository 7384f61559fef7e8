"""When not to wait for a member: those that did not answer are skipped, of a slow one another is asked too."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deeplink.core.types import NodeName

_FIRST_SKIP_S = 5.0
_LONGEST_SKIP_S = 60.0
_PROBE_S = 5.0
"""How long a member that is tried again has to answer before another batch may try it."""
_MOST_OVERTAKEN = 3

_LATENCIES_KEPT = 128
_LATENCIES_ENOUGH = 16
_SECOND_SHARE = 0.05
"""Second requests over first ones, at most."""
_MOST_SAVED_REQUESTS = 4.0
_PERCENTILE = 0.95
_SHORTEST_PATIENCE_S = 0.02
"""Less is noise of the machine's own scheduling."""
_UNKNOWN_PATIENCE_S = 0.1
_RECOMPUTED_EVERY = 16


class Breaker:
    """Which members to skip because they did not answer: after each failure in a row 5 s, doubling, 60 s at most.

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
            if self._until.get(member, 0.0) > now and member not in self._tried:
                return self._until[member] - now  # another thread waited for the same silence
            failures = self._failures.get(member, 0)
            self._tried.discard(member)
            self._failures[member] = failures + 1
            pause = min(_FIRST_SKIP_S * 2.0 ** min(failures, 10), _LONGEST_SKIP_S)
            self._until[member] = now + pause
            return pause

    def overtaken(self, member: NodeName, now: float) -> float:
        """Note that another member answered in its place; return how long it is skipped, seconds, or 0."""
        with self._lock:
            count = self._overtaken[member] = self._overtaken.get(member, 0) + 1
            if count < _MOST_OVERTAKEN:
                return 0.0
            self._overtaken.pop(member)
        return self.failed(member, now)

    def answered(self, member: NodeName) -> None:
        """Note that a member answered: its failures are forgotten."""
        if not (self._failures or self._until or self._overtaken):
            return
        with self._lock:
            self._failures.pop(member, None)
            self._until.pop(member, None)
            self._tried.discard(member)
            self._overtaken.pop(member, None)

    def skipped(self, now: float) -> frozenset[NodeName]:
        """Return the members that one batch skips; each whose time is over is tried by this batch alone."""
        if not self._until:
            return frozenset()
        with self._lock:
            found = frozenset(member for member, until in self._until.items() if until > now)
            for member in self._until.keys() - found:
                self._until[member] = now + _PROBE_S
                self._tried.add(member)
            return found


class LatencyTracker:
    """How fast each member begins to answer: past that a second one is asked, within bounds. Thread-safe."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._lock = threading.Lock()
        self._times: dict[NodeName, deque[float]] = {}
        self._patience: dict[NodeName, float] = {}
        self._seen = 0
        self._saved = _MOST_SAVED_REQUESTS

    def asked(self) -> None:
        """Note a first request: it earns a part of a second one."""
        with self._lock:
            self._saved = min(self._saved + _SECOND_SHARE, _MOST_SAVED_REQUESTS)

    def began(self, member: NodeName, seconds: float) -> None:
        """Note how long a member took to begin its answer."""
        with self._lock:
            if (times := self._times.get(member)) is None:
                times = self._times[member] = deque(maxlen=_LATENCIES_KEPT)
            times.append(seconds)
            self._seen += 1
            if len(times) >= _LATENCIES_ENOUGH and (
                self._seen % _RECOMPUTED_EVERY == 0 or member not in self._patience
            ):
                self._patience[member] = sorted(times)[int(len(times) * _PERCENTILE)]

    def patience_s(self, member: NodeName) -> float:
        """Return how long to wait for a member before another is asked too."""
        known = self._patience.get(member, _UNKNOWN_PATIENCE_S)
        return min(max(known, _SHORTEST_PATIENCE_S), self._longest_s)

    def may_ask_twice(self) -> bool:
        """Tell whether a second request is within the bounds; it is counted then."""
        with self._lock:
            if self._saved < 1.0:
                return False
            self._saved -= 1.0
            return True
