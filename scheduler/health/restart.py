"""When to start slurmd anew: a bounded number of tries with pauses; pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

PAUSES_S = (0.0, 5.0, 30.0)
"""Pauses before the first, second and every further try."""
STABLE_S = 600.0
"""Once it has lived for so long its earlier deaths no longer count."""


class RestartStep(Enum):
    """What to do now."""

    NOTHING = "nothing"
    WAIT = "wait"
    RESTART = "restart"
    GIVEN_UP = "given up"


@dataclass(frozen=True, slots=True)
class Restarts:
    """What was done so far.

    Attributes:
        tries: since it last lived for `STABLE_S`.
        dead_since: monotonic time; None while it lives.
        alive_since: monotonic time; None while it is dead, or before it was seen.
        tried_at: monotonic time of the last try; None before the first.
    """

    tries: int = 0
    dead_since: float | None = None
    alive_since: float | None = None
    tried_at: float | None = None


def next_step(before: Restarts, *, alive: bool, now: float, most: int) -> tuple[RestartStep, Restarts]:
    """Return what to do, and what is to be remembered once it is done; a try counts when it is returned.

    Args:
        before: what was remembered.
        alive: whether slurmd was seen just now.
        now: monotonic time.
        most: tries before it is given up.
    """
    if alive:
        since = now if before.alive_since is None else before.alive_since
        after = replace(before, alive_since=since, dead_since=None)
        return RestartStep.NOTHING, Restarts(alive_since=since) if now - since >= STABLE_S else after
    dead = now if before.dead_since is None else before.dead_since
    after = replace(before, alive_since=None, dead_since=dead)
    if before.dead_since is None:  # seen once: it may be starting itself anew
        return RestartStep.WAIT, after
    if before.tries >= most:
        return RestartStep.GIVEN_UP, after
    pause = PAUSES_S[min(before.tries, len(PAUSES_S) - 1)]
    if now - (dead if before.tried_at is None else before.tried_at) < pause:
        return RestartStep.WAIT, after
    return RestartStep.RESTART, replace(after, tries=before.tries + 1, tried_at=now)
