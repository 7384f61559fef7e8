"""The one way in which a sandbox waits: look, pause, look again, until the time is up."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from deeplink.clock import Clock

PAUSE_S = 0.02


def until(holds: Callable[[], bool], clock: Clock, timeout_s: float) -> bool:
    """Return once something holds (True), or once the time is up (False)."""
    deadline = clock.monotonic() + timeout_s
    while not holds():
        if clock.monotonic() > deadline:
            return False
        clock.sleep(PAUSE_S)
    return True
