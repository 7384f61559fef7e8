"""Which rank is persistently slow; pure.

Ranks say how long their own work in a step takes, waiting for others left out (`deeplink.timed`). A window is so
many steps of every rank, and a rank's time in it the median of what it said: who writes a checkpoint, or a log,
every so many steps is not slow. A rank is slow in a window if its time is beyond the median of all by a quarter,
and by six deviations as ranks deviate (median of the absolute deviations, which a few odd ranks do not move). Who
is slow in four windows in a row, and for ten seconds, is a straggler; one hiccup makes none, nor do ranks that are
slow by turns.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

WINDOW = 16
"""Steps of every rank between two comparisons."""
IN_A_ROW = 4
LEAST_S = 10.0
"""Steps of a millisecond fill four windows before anybody could call that lasting."""
FACTOR = 1.25
DEVIATIONS = 6.0
SIGMA = 1.4826
"""So many times the median absolute deviation is the standard deviation of what is normally distributed."""
LEAST_RANKS = 3
"""Of two different ranks nobody can say which is the slow one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that the others wait for.

    Attributes:
        factor: how many times as long its work takes as that of the rank in the middle.
        work_s: how long, seconds.
        median_s: of all ranks.
        steps: for how many steps it has been slow.
    """

    rank: int
    factor: float
    work_s: float
    median_s: float
    steps: int


def slow_ranks(work_s: Mapping[int, float]) -> dict[int, float]:
    """Return the ranks that are slow in one window, and by which factor.

    More than a third of them are no stragglers: the job's ranks differ.
    """
    if len(work_s) < LEAST_RANKS:
        return {}
    middle = statistics.median(work_s.values())
    spread = SIGMA * statistics.median(abs(one - middle) for one in work_s.values())
    limit = max(FACTOR * middle, middle + DEVIATIONS * spread)
    slow = {rank: one / middle for rank, one in work_s.items() if one > limit and middle > 0}
    return slow if 3 * len(slow) <= len(work_s) else {}


class Stragglers:
    """Compares the ranks of an attempt, window after window."""

    def __init__(self) -> None:
        self._newest: dict[int, int] = {}
        self._said: dict[int, deque[float]] = {}  # in this window
        self._from: int | None = None
        self._through: set[int] = set()  # the ranks that are through with this window
        self._rows: dict[int, int] = {}
        self._since: dict[int, float] = {}  # the end of the first window in which each was slow
        self.found: dict[int, Straggler] = {}

    def take(self, rank: int, step: int, work_s: float, now: float) -> None:
        """Take in what a rank says of its own work; 0 where it does not measure it. `now` is monotonic."""
        if not 0 < work_s < float("inf"):
            return
        self._newest[rank] = step
        self._said.setdefault(rank, deque(maxlen=WINDOW)).append(work_s)
        if self._from is None:
            self._from = step
        elif step >= self._from + WINDOW:
            self._through.add(rank)
        if self._through and len(self._through) == len(self._newest):
            self._compare(now)
            self._from = max(self._newest.values())
            self._through.clear()
            self._said.clear()

    def _compare(self, now: float) -> None:
        # The lower one of two in the middle: half a window is not most of it.
        work_s = {rank: statistics.median_low(said) for rank, said in self._said.items()}
        slow = slow_ranks(work_s)
        self._rows = {rank: self._rows.get(rank, 0) + 1 for rank in slow}
        self._since = {rank: self._since.get(rank, now) for rank in slow}
        middle = statistics.median(work_s.values())
        self.found = {
            rank: Straggler(
                rank=rank,
                factor=factor,
                work_s=work_s[rank],
                median_s=middle,
                steps=self._rows[rank] * WINDOW,
            )
            for rank, factor in slow.items()
            if self._rows[rank] >= IN_A_ROW and now - self._since[rank] >= LEAST_S
        }
