"""Caches the result of a call that may hang, so that callers never block on it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from deeplink.clock import Clock

Value = TypeVar("Value")

WAIT_S = 0.2
"""So long a look that is under way is waited for by those who ask; after that they get what the last one saw."""


class CachedProbe(Generic[Value]):
    """What looks see, each in a thread of its own and never two at once. Thread-safe.

    Args:
        look: looks once; may hang, and must not raise.
        first: what is told until a look has ended.
        kept_s: a look is not repeated for so long.
        share: nor for so many times as long as it took.
    """

    def __init__(
        self, look: Callable[[], Value], first: Value, clock: Clock, *, kept_s: float, share: float
    ) -> None:
        self._look, self._value, self._clock = look, first, clock
        self._kept_s, self._share = kept_s, share
        self._lock = threading.Lock()
        self._ended: threading.Event | None = None  # of the look under way
        self._began = self._due = float("-inf")

    def __call__(self) -> Value:
        """Return what was seen last, within about WAIT_S."""
        with self._lock:
            now = self._clock.monotonic()
            if self._ended is None and now > self._due:
                self._begin(now)
            ended, left = self._ended, self._began + WAIT_S - now
        if ended is not None and left > 0:
            ended.wait(left)
        with self._lock:
            return self._value

    def _begin(self, now: float) -> None:
        ended = threading.Event()
        try:
            threading.Thread(target=self._run, args=(ended, now), name="deeplink-look", daemon=True).start()
        except RuntimeError:  # no more threads: the last look has to do
            return
        self._ended, self._began = ended, now

    def _run(self, ended: threading.Event, began: float) -> None:
        try:
            value = self._look()
            with self._lock:
                self._value = value
        finally:
            with self._lock:
                now = self._clock.monotonic()
                self._due = now + max(self._kept_s, self._share * (now - began))
                self._ended = None
            ended.set()
