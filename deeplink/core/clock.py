"""Time as an argument: code that waits or measures takes a Clock, so tests move a variable and never sleep."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Callable


class Clock(Protocol):
    """A source of time.

    `monotonic` never goes back and means nothing across machines or processes; use it for every duration and
    deadline. `unix` is for people and for records only.
    """

    def monotonic(self) -> float:
        """Seconds since some fixed moment."""
        ...

    def unix(self) -> float:
        """Seconds since 1970, UTC; may jump."""
        ...

    def sleep(self, seconds: float) -> None:
        """Return once `seconds` have passed."""
        ...


@dataclass(frozen=True, slots=True)
class SystemClock(Clock):
    """The machine's own clocks."""

    # The function itself: a batch from other nodes asks some thirty times.
    monotonic = staticmethod(time.monotonic)

    @override
    def unix(self) -> float:
        return time.time()

    @override
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@dataclass(slots=True)
class ManualClock(Clock):
    """A clock that a test moves: `sleep` returns at once and moves it on by as much."""

    now: float = 1_000.0
    epoch: float = 1_700_000_000.0

    @override
    def monotonic(self) -> float:
        return self.now

    @override
    def unix(self) -> float:
        return self.epoch + self.now

    @override
    def sleep(self, seconds: float) -> None:
        self.now += seconds


def wait_until(holds: Callable[[], bool], clock: Clock, wait_s: float, pause_s: float = 0.02) -> bool:
    """Return once something holds (True), or once `wait_s` seconds are over (False); look every `pause_s`."""
    deadline = clock.monotonic() + wait_s
    while not holds():
        if clock.monotonic() >= deadline:
            return False
        clock.sleep(pause_s)
    return True
