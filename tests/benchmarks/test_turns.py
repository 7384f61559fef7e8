"""Runs go side by side where they only wait, and whatever ends one of them ends all."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest

from benchmarks.watchdog import stand
from benchmarks.watchdog.scenarios import REPEATS, SCENARIOS, STOCK, STOCK_REPEATS, Scenario, StockCase, cases_of
from benchmarks.watchdog.stand import Stand, StandError, until
from benchmarks.watchdog.turns import estimate_s, longest_first, seconds, side_by_side
from tests.waiting import LIMIT_S


@pytest.fixture(autouse=True)
def others_go_on() -> Iterator[None]:
    yield
    stand._ended.clear()


def test_all_are_handed_over_as_they_come_and_one_starts_at_a_time() -> None:
    inside, most, waiting = 0, 0, threading.Barrier(3, timeout=LIMIT_S)

    def job(starting: AbstractContextManager[object]) -> int:
        nonlocal inside, most
        with starting:
            inside += 1
            most = max(most, inside)
            inside -= 1
        return waiting.wait()  # all three wait at once, or this breaks

    found: list[int] = []
    side_by_side([job] * 3, found.append, beside=3)
    assert (sorted(found), most) == ([0, 1, 2], 1)


def test_an_interrupt_lets_all_others_give_up_what_they_wait_for() -> None:
    ended: list[str] = []

    def waits(_starting: object) -> None:
        try:
            until(lambda: False, 3 * LIMIT_S)
        except StandError as why:
            ended.append(str(why))
            raise

    def first(_starting: object) -> None:
        """Return at once."""

    def interrupted(_came: None) -> None:
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        side_by_side([waits, first, waits, waits], interrupted, beside=2)
    assert ended
    assert set(ended) == {stand.TOLD_TO_END}
    assert time.monotonic() - began < 60
    with pytest.raises(StandError), Stand.up(SCENARIOS[0].shape):
        pytest.fail("no stand comes up any more")


def test_what_is_timed_has_the_machine_to_itself_and_all_of_it_takes_an_hour() -> None:
    assert {one.name for one in SCENARIOS if not one.timed} >= {"controller-down", "agents-silent"}
    assert all(one.timed for one in SCENARIOS if one.most_of_stock or one.first_step_s)
    cases = cases_of(SCENARIOS)
    assert {case.name for case in cases} == STOCK.keys()
    every: list[Scenario | StockCase] = [*SCENARIOS, *cases]
    assert longest_first(every)[0].about_s == max(one.about_s for one in every)
    assert estimate_s(SCENARIOS, cases, REPEATS, STOCK_REPEATS) < 3600
    assert estimate_s(SCENARIOS, [], 1, 0) <= sum(one.about_s for one in SCENARIOS)
    assert seconds([]) == 0.0
