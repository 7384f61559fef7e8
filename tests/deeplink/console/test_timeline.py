"""A job's course: bounded however often it began, and made where nobody waits for it but who asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from deeplink.console import feed
from deeplink.console.collect import Collector
from deeplink.console.timeline import MOST_RANK_ROWS, measurements
from deeplink.core.types import Attempt
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.recovery.records import AttemptRecord, JobRecord, Phase, RankTimes

RANKS = 8


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
