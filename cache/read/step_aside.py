"""Compares reading through DeepLink with reading the small files themselves, and says when to leave it to them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deeplink.core.clock import Clock

_SLOW_S = 0.005
"""Seconds a sample below which nothing is compared: the source is spared the reads."""
_WINDOW = 256
"""Samples that say how fast reading is."""
_PAUSE_S = 10.0
"""Between two comparisons, each of which costs the source some reads."""
_TIMES = 3
"""So many comparisons in a row must agree."""
_FASTER = 1.5
"""How much faster the files must be."""
_ASIDE_S = 600.0


class RawComparison:
    """Whether samples are to come from the small files for a time. Safe to use from several threads."""

    def __init__(self, clock: Clock, *, allowed: bool) -> None:
        self._clock, self._allowed = clock, allowed
        self._lock = threading.Lock()
        self._samples, self._seconds = 0, 0.0
        self._slower = 0
        self._not_before = self._aside_until = float("-inf")

    def is_aside(self) -> bool:
        """Tell whether the small files are to be read now."""
        return self._clock.monotonic() < self._aside_until

    def end_aside(self) -> None:
        """The small files cannot be read: use the cache again."""
        with self._lock:
            self._aside_until, self._slower = float("-inf"), 0

    def is_due(self, samples: int, seconds: float) -> bool:
        """Note how long so many samples took; tell whether as many should be read at the source to compare."""
        if not self._allowed:
            return False
        with self._lock:
            self._samples += samples
            self._seconds += seconds
            if self._samples < _WINDOW:
                return False
            is_slow = self._seconds > _SLOW_S * self._samples
            if not is_slow:
                self._slower = 0
            if is_slow and (now := self._clock.monotonic()) >= self._not_before:
                self._not_before = now + _PAUSE_S
                return True
            self._samples, self._seconds = 0, 0.0
            return False

    def compared(self, raw_s: float) -> str:
        """Take in how long a sample took at the source; return what is to be said where that was faster.

        Then `is_aside` for ten minutes, after which both are compared again.
        """
        with self._lock:
            ours_s = self._seconds / max(self._samples, 1)
            self._samples, self._seconds = 0, 0.0
            self._slower = self._slower + 1 if ours_s > _FASTER * raw_s else 0
            if self._slower < _TIMES:
                return ""
            self._slower = 0
            self._aside_until = self._clock.monotonic() + _ASIDE_S
        return f"{1e3 * ours_s:.1f} ms a sample where its small files take {1e3 * raw_s:.1f} ms"
