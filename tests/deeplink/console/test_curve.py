"""The curve that is drawn: thinned without losing peaks, growing at its end only."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from deeplink.console.curve import MOST_POINTS, Point, drawn, rate, thin
from deeplink.console.jobs import repeated
from deeplink.core.types import Attempt
from deeplink.scheduler.recovery.records import ProgressPoint

FIRST, SECOND = Attempt(7, 0, 0), Attempt(7, 0, 1)


def line(attempt: Attempt, steps: range, value: float = 1.0) -> list[Point]:
    return [Point(attempt, step, 100.0 + step, value) for step in steps]


def test_a_short_curve_keeps_its_peaks_and_both_ends_of_each_attempt() -> None:
    points = [*line(FIRST, range(40)), *line(SECOND, range(30, 60))]
    kept = thin(points, [FIRST, SECOND])
    assert {(step, attempt) for step, _, attempt in kept} >= {(0, 0), (39, 0), (30, 1), (59, 1)}


def test_a_long_curve_is_bounded_and_a_single_spike_survives() -> None:
    points = line(FIRST, range(50_000))
    points[31_337] = Point(FIRST, 31_337, 1.0, 99.0)
    kept = thin(points, [FIRST])
    assert len(kept) <= MOST_POINTS + 2
    assert (31_337, 99.0, 0) in kept
    assert kept[0][0] == 0
    assert kept[-1][0] == 49_999


def test_what_was_drawn_stays_when_points_come() -> None:
    points = [Point(FIRST, step, float(step), math.sin(step)) for step in range(2_000)]
    shorter, longer = thin(points[:1_500], [FIRST]), thin(points[:1_600], [FIRST])
    settled = len(shorter) - 3  # the stretch at the end was not full yet
    assert longer[:settled] == shorter[:settled]


def test_values_that_are_no_numbers_are_kept_as_gaps() -> None:
    points = line(FIRST, range(10))
    points[4] = Point(FIRST, 4, 1.0, math.nan)
    points[7] = Point(FIRST, 7, 1.0, math.inf)
    kept = thin(points, [FIRST])
    assert [step for step, value, _ in kept if value is None] == [4, 7]


@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), min_size=1, max_size=3_000),
)
def test_extremes_are_never_thinned_away(values: list[float]) -> None:
    points = [Point(FIRST, step, float(step), value) for step, value in enumerate(values)]
    kept = thin(points, [FIRST])
    finite = [float(f"{value:.6g}") for value in values if math.isfinite(value)]
    drawn_values = [value for _, value, _ in kept if value is not None]
    if finite:
        assert min(drawn_values) == min(finite)
        assert max(drawn_values) == max(finite)
    assert [step for step, _, _ in kept] == sorted({step for step, _, _ in kept})


def test_rate_is_of_the_newest_attempt_alone() -> None:
    points = [*line(FIRST, range(10)), *(Point(SECOND, step, 1_000.0 + step * 0.5, 1.0) for step in range(5, 15))]
    assert rate(points) == 2.0
    assert rate(points[:11]) is None, "one report of an attempt is no rate"
    assert rate([]) is None


def test_loss_is_drawn_or_else_the_first_metric_and_only_of_rank_zero() -> None:
    reports = [
        ProgressPoint(attempt=FIRST, step=1, unix=1.0, metrics={"loss": 2.0, "acc": 0.1}),
        ProgressPoint(attempt=FIRST, step=1, unix=1.0, rank=3, metrics={"loss": 9.0}),
    ]
    assert drawn(reports) == ("loss", (Point(FIRST, 1, 1.0, 2.0),))
    other = [ProgressPoint(attempt=FIRST, step=1, unix=1.0, metrics={"ppl": 3.0, "acc": 0.1})]
    assert drawn(other)[0] == "acc"


def test_repeated_steps_of_several_attempts() -> None:
    assert repeated([]) == 0
    assert repeated([(0, 100), (81, 150), (141, 160)]) == 30
    assert repeated([(0, 100), (51, 60), (51, 120)]) == 60, "an attempt that died early repeated too"
    assert repeated([(0, 100), (101, 200)]) == 0
