"""A job's course: bounded however often it began, and made where nobody waits for it but who asked."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.console import feed
from deeplink.console.collect import Collector
from deeplink.console.jobs import Point, drawn, finite, repeated
from deeplink.console.timeline import MOST_POINTS, MOST_RANK_ROWS, kept, measurements
from deeplink.core.types import Attempt
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.recovery.records import AttemptRecord, JobRecord, Phase, ProgressPoint, RankTimes

RANKS = 8

FIRST, SECOND = Attempt(7, 0, 0), Attempt(7, 0, 1)


def course(attempts: int, rows: int) -> tuple[JobRecord, list[RankTimes]]:
    tried = [Attempt(17, restart, 0) for restart in range(attempts)]
    record = JobRecord(
        job=17,
        name="x",
        user="ada",
        attempts=tuple(AttemptRecord(attempt=each, phase=Phase.RUNNING, world_size=RANKS) for each in tried),
    )
    times = [
        RankTimes(
            attempt=each,
            unix=1000.0 * each.restart + number,
            span_s=1.0,
            own_s=(0.123456789,) * (RANKS - 1) + (1.0 + number,),
        )
        for each in tried
        for number in range(rows)
    ]
    return record, times


@pytest.mark.parametrize(
    ("attempts", "rows"), [(1, 3), (1, 1000), (10, 160), (10, 7), (160, 2), (159, 3), (400, 1)]
)
def test_the_rows_of_ranks_are_bounded_over_all_attempts(attempts: int, rows: int) -> None:
    record, times = course(attempts, rows)
    ranks = measurements(record, (), times)["ranks"]
    assert len(ranks) <= MOST_RANK_ROWS
    named = {row["attempt"] for row in ranks}
    assert named == {f"17.{restart}.0" for restart in range(attempts)[-MOST_RANK_ROWS:]}, "each has a row"
    if attempts * rows <= MOST_RANK_ROWS:
        assert len(ranks) == attempts * rows, "nothing is joined without need"
    assert max(row["own_s"][-1] for row in ranks) == float(rows), "the slowest is never lost"
    assert {row["own_s"][0] for row in ranks} == {0.1235}, "four digits"
    newest = [row for row in ranks if row["attempt"] == f"17.{attempts - 1}.0"]
    assert sum(row["span_s"] for row in newest) == pytest.approx(rows)


def test_a_course_is_written_and_packed_beside_the_loop_that_serves_all(
    filled: Journal,
    collector: Collector,
    serve: Callable[..., Any],
    eventually: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_loop: list[bool] = []

    def encode(value: Any) -> bytes:
        if "timeline" in value:
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                in_loop.append(False)
            else:
                in_loop.append(True)
        return feed.encode(value)

    monkeypatch.setattr("deeplink.console.app.encode", encode)
    served = serve(collector)
    eventually(lambda: served.get("/api/v1/jobs/17/timeline")[0] == 200)
    headers = served.get("/api/v1/jobs/17/timeline", accept_encoding="gzip")[1]
    assert headers["content-encoding"] == "gzip"
    assert in_loop
    assert not any(in_loop)


def thin(points: list[Point], order: list[Attempt]) -> list[tuple[int, float | None, int]]:
    return [(point.step, finite(point.value), attempt) for point, attempt in kept(points, order)]


def line(attempt: Attempt, steps: range, value: float = 1.0) -> list[Point]:
    return [Point(attempt, step, 100.0 + step, value) for step in steps]


def test_a_short_curve_keeps_its_peaks_and_both_ends_of_each_attempt() -> None:
    points = [*line(FIRST, range(40)), *line(SECOND, range(30, 60))]
    left = thin(points, [FIRST, SECOND])
    assert {(step, attempt) for step, _, attempt in left} >= {(0, 0), (39, 0), (30, 1), (59, 1)}


def test_a_long_curve_is_bounded_and_a_single_spike_survives() -> None:
    points = line(FIRST, range(50_000))
    points[31_337] = Point(FIRST, 31_337, 1.0, 99.0)
    left = thin(points, [FIRST])
    assert len(left) <= MOST_POINTS + 2
    assert (31_337, 99.0, 0) in left
    assert left[0][0] == 0
    assert left[-1][0] == 49_999


def test_what_was_drawn_stays_when_points_come() -> None:
    points = [Point(FIRST, step, float(step), math.sin(step)) for step in range(2_000)]
    shorter, longer = thin(points[:1_500], [FIRST]), thin(points[:1_600], [FIRST])
    settled = len(shorter) - 3  # the stretch at the end was not full yet
    assert longer[:settled] == shorter[:settled]


def test_values_that_are_no_numbers_are_kept_as_gaps() -> None:
    points = line(FIRST, range(10))
    points[4] = Point(FIRST, 4, 1.0, math.nan)
    points[7] = Point(FIRST, 7, 1.0, math.inf)
    left = thin(points, [FIRST])
    assert [step for step, value, _ in left if value is None] == [4, 7]


@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), min_size=1, max_size=3_000),
)
def test_extremes_are_never_thinned_away(values: list[float]) -> None:
    points = [Point(FIRST, step, float(step), value) for step, value in enumerate(values)]
    left = thin(points, [FIRST])
    known = [float(f"{value:.6g}") for value in values if math.isfinite(value)]
    drawn_values = [value for _, value, _ in left if value is not None]
    if known:
        assert min(drawn_values) == min(known)
        assert max(drawn_values) == max(known)
    assert [step for step, _, _ in left] == sorted({step for step, _, _ in left})


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
