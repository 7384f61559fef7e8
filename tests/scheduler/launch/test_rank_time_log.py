"""Rows of the ranks' own part of a step, from their reports."""

from __future__ import annotations

import pytest

from deeplink.core import process_metrics as names
from deeplink.core.types import Attempt
from deeplink.scheduler.launch.status_reporter import EVERY_S, MOST_NUMBERS, RankTimesLog
from deeplink.v1 import common_pb2

FIRST, AGAIN = Attempt(7, 0, 0), Attempt(7, 0, 1)


def said(
    rank: int,
    steps: float,
    own: float = 0.0,
    data: float = 0.0,
    *,
    attempt: Attempt = FIRST,
    work: float = 0.0,
) -> common_pb2.Progress:
    metrics = {names.STEPS: steps, names.COMPUTE_S: own - data, names.DATA_S: data} if steps else {}
    wire = common_pb2.Attempt(job=attempt.job, restart=attempt.restart, relaunch=attempt.relaunch)
    return common_pb2.Progress(rank=rank, attempt=wire, step=int(steps), metrics=metrics, work_s=work)


def test_a_row_every_ten_seconds_with_what_was_since() -> None:
    log = RankTimesLog()
    assert log.take([said(0, 1, 1.0), said(1, 1, 2.0)], FIRST, 100.0) is None
    row = log.take([said(0, 100, 10.0, 1.0), said(1, 100, 30.0, 25.0)], FIRST, 100.0 + EVERY_S)
    assert row is not None
    assert (row.own_s, row.data_s, row.ranks_each) == ((0.1, 0.3), (0.01, 0.25), 1)
    assert log.take([said(0, 150, 11.0)], FIRST, 105.0 + EVERY_S) is None
    row = log.take([said(0, 200, 12.0, 1.0)], FIRST, 101.0 + 2 * EVERY_S)
    assert row is not None
    assert row.own_s == (0.02, 0.0), "the other one has said nothing since"
    assert row.span_s == EVERY_S + 1


def test_another_attempt_begins_anew_and_reports_of_the_old_one_do_not_count() -> None:
    log = RankTimesLog()
    log.take([said(0, 1000, 100.0)], FIRST, 0.0)
    assert log.take([said(0, 2000, 100.0)], AGAIN, 50.0) is None
    row = log.take([said(0, 3000, 1.0), said(0, 10, 5.0, attempt=AGAIN)], AGAIN, 61.0)
    assert row is not None
    assert (row.attempt, row.own_s) == (AGAIN, (0.5,))


def test_ranks_that_count_nothing_are_known_by_their_own_word() -> None:
    log = RankTimesLog()
    log.take([], FIRST, 0.0)
    assert log.take([said(0, 0)], FIRST, 10.0) is None, "nothing is known"
    odd = [said(0, 5, float("inf")), said(2, 5, float("nan"))]
    assert log.take(odd, FIRST, 15.0) is None, "nor by what is no number"
    log.take([], AGAIN, 0.0)
    log.take([], FIRST, 10.0)
    row = log.take([said(2, 0, work=0.25)], FIRST, 20.0)
    assert row is not None
    assert row.own_s == (0.0, 0.0, 0.25)


@pytest.mark.parametrize("ranks", [MOST_NUMBERS, MOST_NUMBERS + 1, 3 * MOST_NUMBERS])
def test_of_many_ranks_several_share_a_number_the_slowest_ones(ranks: int) -> None:
    log = RankTimesLog()
    log.take([], FIRST, 0.0)
    row = log.take([said(rank, 10, 1.0 + rank) for rank in range(ranks)], FIRST, 10.0)
    assert row is not None
    assert len(row.own_s) <= MOST_NUMBERS
    assert row.own_s[-1] == pytest.approx(ranks / 10, rel=1e-3)
    assert row.own_s[0] == pytest.approx((row.ranks_each) / 10, rel=1e-3)
