"""When a second member is asked, and whom to leave alone: by what was seen, within bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deeplink.cache.membership import Breaker, LatencyTracker
from deeplink.core.types import NodeName

ONE, TWO = NodeName("n1"), NodeName("n2")


def test_patience_follows_the_95th_percentile_within_bounds() -> None:
    pace = LatencyTracker(0.5)
    assert pace.patience_s(ONE) == 0.1  # nothing is known yet
    for number in range(64):
        pace.began(ONE, 0.2 if number % 10 == 0 else 0.03)
        pace.began(TWO, 0.001)
    assert pace.patience_s(ONE) == 0.2
    assert pace.patience_s(TWO) == 0.02
    for _ in range(200):
        pace.began(ONE, 3.0)
    assert pace.patience_s(ONE) == 0.5


@given(st.lists(st.booleans(), max_size=300))
def test_second_requests_are_a_twentieth_at_most_but_for_a_few(moves: list[bool]) -> None:
    pace = LatencyTracker(0.5)
    first = second = 0
    for is_first in moves:
        if is_first:
            pace.asked()
            first += 1
        else:
            second += pace.may_ask_twice()
    assert second <= 4 + first / 20


def test_a_member_that_failed_is_tried_by_one_batch_and_trusted_when_it_answers() -> None:
    breaker = Breaker()
    assert breaker.failed(ONE, 100.0) == 5.0
    assert breaker.failed(ONE, 101.0) == 4.0  # another thread met the same silence
    assert breaker.skipped(104.9) == {ONE}
    assert breaker.skipped(105.1) == set()  # this one tries
    assert breaker.skipped(105.2) == {ONE}  # the others wait for it
    assert breaker.failed(ONE, 107.0) == 10.0
    assert breaker.skipped(116.9) == {ONE}
    assert breaker.skipped(117.1) == set()
    breaker.answered(ONE)
    assert breaker.skipped(117.2) == set()
    assert breaker.failed(ONE, 118.0) == 5.0


def test_pauses_double_up_to_a_minute() -> None:
    breaker, now, pauses = Breaker(), 0.0, []
    for _ in range(7):
        pauses.append(breaker.failed(ONE, now))
        now += pauses[-1] + 0.1
        assert breaker.skipped(now) == set()
    assert pauses == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0, 60.0]


def test_a_member_overtaken_three_times_without_an_answer_is_left_alone() -> None:
    breaker = Breaker()
    assert [breaker.overtaken(ONE, 0.0), breaker.overtaken(ONE, 0.0)] == [0.0, 0.0]
    breaker.answered(ONE)
    assert [breaker.overtaken(ONE, 1.0) for _ in range(3)] == [0.0, 0.0, 5.0]
    assert breaker.skipped(2.0) == {ONE}
