"""A job's reports as a curve: one metric, thinned to what a screen can show; pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from deeplink.core import process_metrics

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deeplink.core.types import Attempt
    from deeplink.scheduler.recovery.records import ProgressPoint

MOST_POINTS = 600
_RATE_POINTS = 32


@dataclass(frozen=True, slots=True)
class Point:
    """One report, reduced to the metric that is drawn."""

    attempt: Attempt
    step: int
    unix: float
    value: float


CurvePoint = tuple[int, float | None, int]
"""Step, value (None: not a number, or infinite), index of the attempt."""


def drawn(reports: Sequence[ProgressPoint]) -> tuple[str, tuple[Point, ...]]:
    """Return the metric that is drawn (`loss`, else the first by name), and rank 0's points of it."""
    named = {name for report in reports for name in report.metrics if not name.startswith(process_metrics.PREFIX)}
    metric = "loss" if "loss" in named or not named else min(named)
    return metric, tuple(
        Point(report.attempt, report.step, report.unix, report.metrics[metric])
        for report in reports
        if report.rank == 0 and metric in report.metrics
    )


def thin(points: Sequence[Point], order: Sequence[object]) -> tuple[CurvePoint, ...]:
    """Return what is kept of the points as step, value and number of the attempt."""
    return tuple((point.step, finite(point.value), attempt) for point, attempt in kept(points, order))


def kept(points: Sequence[Point], order: Sequence[object]) -> list[tuple[Point, int]]:
    """Return at most about `MOST_POINTS` of the points: of each stretch the least and the greatest, never an end.

    Each with the number of its attempt in `order`. The stretch is a power of two, so that more points leave what
    was drawn as it is until it doubles.
    """
    stretch = 1
    while 2 * len(points) / stretch > MOST_POINTS and stretch < len(points):
        stretch *= 2
    index = {attempt: number for number, attempt in enumerate(order)}
    found: list[tuple[Point, int]] = []
    for attempt, run in groupby(points, key=lambda point: point.attempt):
        if attempt in index:
            found.extend((point, index[attempt]) for point in _thin_run(list(run), stretch))
    return found


def _thin_run(run: list[Point], stretch: int) -> list[Point]:
    chosen: dict[int, None] = {0: None}
    for start in range(0, len(run), stretch):
        window = range(start, min(start + stretch, len(run)))
        strange = [at for at in window if not math.isfinite(run[at].value)]
        known = [at for at in window if math.isfinite(run[at].value)]
        if known:
            chosen[min(known, key=lambda at: run[at].value)] = None
            chosen[max(known, key=lambda at: run[at].value)] = None
        if strange:
            chosen[strange[0]] = None
    chosen[len(run) - 1] = None
    return [run[at] for at in sorted(chosen)]


def finite(value: float) -> float | None:
    """Return what a screen can show of a value; None where it is no number, or infinite."""
    # Six digits are more than a screen shows, and half the bytes.
    return float(f"{value:.6g}") if math.isfinite(value) else None


def rate(points: Sequence[Point]) -> float | None:
    """Return steps per second over the newest reports of the newest attempt; None without two of them."""
    if not points:
        return None
    newest = points[-1].attempt
    recent = [point for point in points[-_RATE_POINTS:] if point.attempt == newest]
    seconds = recent[-1].unix - recent[0].unix
    steps = recent[-1].step - recent[0].step
    return steps / seconds if seconds > 0 and steps > 0 else None


@dataclass(frozen=True, slots=True)
class CurveView:
    """The curve of a job."""

    metric: str
    points: tuple[CurvePoint, ...]

    @classmethod
    def of(cls, reports: Sequence[ProgressPoint], order: Sequence[Attempt]) -> CurveView:
        """Return the curve of a job's reports; `order`: its attempts."""
        metric, points = drawn(reports)
        return cls(metric, thin(points, order))
