"""A figure of several runs: its mean, and how sure that is; pure."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# Student's t, 97.5 %, by degrees of freedom from 1 on.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_NORMAL = 1.96


@dataclass(frozen=True, slots=True)
class FigureSpread:
    """Several runs of one figure.

    Attributes:
        mean: of the runs.
        half: half of the 95 % interval of the mean; infinite where there is one run.
        runs: how many.
    """

    mean: float
    half: float
    runs: int

    @property
    def low(self) -> float:
        """The lower end of the interval."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """The upper end of the interval."""
        return self.mean + self.half


def spread_of(runs: Sequence[float]) -> FigureSpread:
    """Return the mean of independent runs with its 95 % interval (Student's t).

    >>> spread_of([1.0, 2.0, 3.0]).mean, round(spread_of([1.0, 2.0, 3.0]).half, 2)
    (2.0, 2.48)
    """
    mean = statistics.fmean(runs)
    if len(runs) == 1:
        return FigureSpread(mean, math.inf, 1)
    freedom = len(runs) - 1
    t = _T[freedom - 1] if freedom <= len(_T) else _NORMAL + 2.4 / freedom  # right to three digits
    return FigureSpread(mean, t * statistics.stdev(runs) / math.sqrt(len(runs)), len(runs))


def difference(ours: Sequence[float], theirs: Sequence[float]) -> FigureSpread:
    """Return the spread of ours minus theirs, run by run: the same seed is the same jobs at the same times."""
    return spread_of([one - other for one, other in zip(ours, theirs, strict=True)])


def quantile(sorted_values: Sequence[float], share: float) -> float:
    """Return the value below which a share of sorted values lies, between two by proportion.

    >>> quantile([0.0, 10.0], 0.5)
    5.0
    """
    place = share * (len(sorted_values) - 1)
    below = math.floor(place)
    above = min(below + 1, len(sorted_values) - 1)
    return sorted_values[below] + (place - below) * (sorted_values[above] - sorted_values[below])
