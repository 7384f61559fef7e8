"""What an agent keeps of its ranks: seconds of ten minutes, ten seconds of the job, bounded."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from deeplink.core import process_metrics as names
from deeplink.core.types import Attempt
from deeplink.scheduler.node.measurements import (
    COARSE_ROWS,
    COARSE_S,
    FINE_ROWS,
    FINE_S,
    MOST_RANKS,
    ROW_BYTES,
    RankMeasurements,
)
from deeplink.v1 import common_pb2


def said(step: int, *, rank: int = 0, relaunch: int = 0, **metrics: float) -> common_pb2.Progress:
    attempt = common_pb2.Attempt(job=7, restart=0, relaunch=relaunch)
    return common_pb2.Progress(rank=rank, attempt=attempt, step=step, work_s=0.5, metrics=metrics)


def test_a_second_is_one_row_with_the_newest_counters() -> None:
    kept = RankMeasurements()
    assert kept.newest(7, 0) is None
    for number in range(40):  # four a second
        kept.take(said(number, deeplink_data_s=number / 10, loss=1.0), 1000 + number / 4)
    fine, coarse = kept.rows(7, 0, every_s=FINE_S), kept.rows(7, 0)
    assert [row.step for row in fine] == [3, 7, 11, 15, 19, 23, 27, 31, 35, 39]
    assert [row.step for row in coarse] == [39]
    assert fine[-1] == kept.newest(7, 0)
    assert fine[-1].counters[names.DATA_S] == 3.9
    assert fine[-1].work_s == 0.5
    assert set(fine[-1].counters) == set(names.MEASURED), "and none of the user's"
    assert len(kept.rows(7, 0, since_unix=1008, every_s=FINE_S)) == 2


def test_a_relaunch_goes_on_in_the_same_rows() -> None:
    kept = RankMeasurements()
    for relaunch in range(3):
        for number in range(30):
            kept.take(said(number, relaunch=relaunch), 100 * relaunch + number)
    rows = kept.rows(7, 0)
    assert [row.attempt for row in rows] == [Attempt(7, 0, each) for each in range(3) for _ in range(3)]


def test_a_week_of_a_job_takes_what_is_said() -> None:
    kept = RankMeasurements()
    for number in range(7 * 8640):
        kept.take(said(number), 10.0 * number)
    coarse = kept.rows(7, 0)
    assert COARSE_ROWS / 2 <= len(coarse) <= COARSE_ROWS
    assert coarse[-1].step == 7 * 8640 - 1
    assert coarse[0].unix < 200, "from the beginning"
    gaps = {round(after.unix - before.unix) for before, after in pairwise(coarse)}
    assert max(gaps) <= 16 * COARSE_S
    assert kept.nbytes() <= ROW_BYTES * (COARSE_ROWS + FINE_ROWS)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-1e9, 1e10), min_size=1, max_size=300))
def test_clocks_that_jump_keep_it_bounded_and_in_order_of_arrival(times: list[float]) -> None:
    kept = RankMeasurements()
    for number, unix in enumerate(times):
        kept.take(said(number), unix)
    for every_s in (FINE_S, COARSE_S):
        steps = [row.step for row in kept.rows(7, 0, since_unix=float("-inf"), every_s=every_s)]
        assert steps == sorted(steps)
        assert steps[-1] == len(times) - 1


def test_the_ranks_heard_of_longest_ago_go() -> None:
    kept = RankMeasurements()
    for rank in range(MOST_RANKS + 3):
        kept.take(said(1, rank=rank), 1.0)
    assert len(kept.ranks()) == MOST_RANKS
    assert kept.ranks()[0] == (7, 3)
