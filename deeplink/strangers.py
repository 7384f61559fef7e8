"""Remembers which addresses answered as no server of ours does, so that they are not shown the token again."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from deeplink.clock import SystemClock

if TYPE_CHECKING:
    from deeplink.clock import Clock

SILENT_S = 600.0
"""So long a token is not shown again: an agent that was given another token meanwhile is met without a restart."""
_MOST = 4096


class Strangers:
    """Who answered what, by address and the token that it was shown; bounded. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._lock, self._clock = threading.Lock(), clock
        self._known: dict[tuple[str, str], tuple[float, str]] = {}

    def note(self, address: str, token: str, answered: str) -> None:
        """Remember that what listens at an address was shown this token, and answered so."""
        with self._lock:
            self._known.pop((address, token), None)
            while len(self._known) >= _MOST:
                del self._known[next(iter(self._known))]
            self._known[address, token] = self._clock.monotonic() + SILENT_S, answered

    def answered(self, address: str, token: str) -> str:
        """Return what was answered there within `SILENT_S`; empty where the token may be shown."""
        until, answered = self._known.get((address, token), (0.0, ""))
        return answered if self._clock.monotonic() < until else ""

    def forget(self, address: str | None = None) -> None:
        """Forget what was answered at an address, where a server of ours is announced now; without one, all."""
        with self._lock:
            self._known = {key: one for key, one in self._known.items() if address not in {None, key[0]}}


STRANGERS = Strangers(SystemClock())
"""Those that this process met."""
