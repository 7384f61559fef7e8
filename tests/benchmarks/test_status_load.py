"""The rows of the load of watchers: queries of many are held against those of one."""

from __future__ import annotations

import pytest

from benchmarks.scheduler.status_load import rows_of


@pytest.mark.parametrize(("many", "reached"), [(25, True), (26, False)])
def test_more_queries_with_many_than_with_one_are_short_of_the_goal(many: int, reached: bool) -> None:
    found = {
        1: {"calls": {"REQUEST_JOB_INFO": 20, "REQUEST_NODE_INFO": 5}, "looks": 6, "alive": 1},
        200: {"calls": {"REQUEST_JOB_INFO": many}, "looks": 1200, "alive": 200},
    }
    rows = rows_of(found, 60.0)
    assert [row.value for row in rows[:4]] == [25, 6, many, 1200]
    assert (rows[-1].reached, rows[-1].goal) == (reached, 1.0)
