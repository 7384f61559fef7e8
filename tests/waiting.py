"""Waiting in tests for what real threads, processes and machines do in their own time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT_S = 120.0
"""How long a test waits for a state, at the most: ten times what the slowest one takes on a machine that has
nothing else to do. What takes long itself, a build or a training, has three times that."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 0.1


def until(holds: Callable[[], object], bound_s: float = LIMIT_S, told: Callable[[], object] = lambda: "") -> None:
    """Return once it holds; fail with what is `told` when it has not within the bound."""
    end, pause_s = time.monotonic() + bound_s, FIRST_PAUSE_S
    while not holds():
        assert time.monotonic() < end, f"it did not come about within {bound_s:g} s: {told()}"
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
