from __future__ import annotations

import pytest

from deeplink.core.clock import ManualClock
from deeplink.core.finding import Severity
from deeplink.scheduler.node.host_checks import (
    ClockCheck,
    Compared,
    Comparison,
    judge_jump,
    judge_skew,
    read_clock,
)


def test_the_kernel_is_really_asked() -> None:
    reading = read_clock()
    assert reading is not None


def test_an_unsynchronised_clock_is_observed_and_unknown_is_not_bad() -> None:
    assert ClockCheck(ManualClock(), lambda: True).look().complaints == ()
    (told,) = ClockCheck(ManualClock(), lambda: False).look().complaints
    assert told.severity is Severity.NOTE
    dark = ClockCheck(ManualClock(), lambda: None).look()
    assert dark.complaints == ()
    assert dark.unknown


def test_a_jump_is_told_for_half_an_hour() -> None:
    clock = ManualClock()
    check = ClockCheck(clock, lambda: True)
    check.look()
    clock.sleep(60)
    assert check.look().complaints == ()
    clock.epoch -= 3600
    clock.sleep(60)
    (told,) = check.look().complaints
    assert (told.severity, told.problem) == (Severity.WARNING, "the clock jumped by -3600.0 s")
    clock.sleep(1800)
    assert check.look().complaints == ()


@pytest.mark.parametrize(("unix_s", "severity"), [(60.9, None), (62.0, Severity.NOTE), (-60, Severity.WARNING)])
def test_how_far_is_a_jump(unix_s: float, severity: Severity | None) -> None:
    found = judge_jump(unix_s, 60.0)
    assert (found and found.severity) == severity


@pytest.mark.parametrize(
    ("ahead_s", "within_s", "skewed"),
    [(0.9, 0.0, False), (-2.5, 2.0, False), (1.6, 0.1, True), (-3600.0, 0.1, True)],
)
def test_a_skew_is_observed_alone_since_the_watchdogs_clock_may_be_the_wrong_one(
    ahead_s: float, within_s: float, skewed: bool
) -> None:
    found = judge_skew(Comparison(ahead_s=ahead_s, within_s=within_s, at=0.0))
    assert [one.severity for one in found] == ([Severity.NOTE] if skewed else [])


def test_a_skew_is_told_as_long_as_the_watchdog_can_be_asked() -> None:
    clock, compared = ManualClock(), Compared()
    check = ClockCheck(clock, lambda: True, compared)
    assert check.look().complaints == ()
    compared.newest = Comparison(ahead_s=3.0, within_s=0.1, at=clock.monotonic())
    (told,) = check.look().complaints
    assert (told.subject, told.problem) == ("skew", "the clock is 3.0 s ahead of the watchdog's")
    clock.sleep(61)
    assert check.look().complaints == ()
