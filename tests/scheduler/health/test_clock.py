from __future__ import annotations

import pytest

from deeplink.clock import ManualClock
from deeplink.scheduler.health.clock import ClockCheck, ClockReading, judge_jump, read_clock
from deeplink.scheduler.watch.records import Severity


def test_the_kernel_is_really_asked() -> None:
    reading = read_clock()
    assert reading.synchronised is not None
    assert reading.error_s >= 0


def test_an_unsynchronised_clock_is_observed_and_unknown_is_not_bad() -> None:
    assert ClockCheck(ManualClock(), lambda: ClockReading(synchronised=True)).look().complaints == ()
    (told,) = ClockCheck(ManualClock(), lambda: ClockReading(synchronised=False)).look().complaints
    assert told.severity is Severity.OBSERVE
    dark = ClockCheck(ManualClock(), ClockReading).look()
    assert dark.complaints == ()
    assert dark.unknown


def test_a_jump_is_told_for_half_an_hour() -> None:
    clock = ManualClock()
    check = ClockCheck(clock, lambda: ClockReading(synchronised=True))
    check.look()
    clock.sleep(60)
    assert check.look().complaints == ()
    clock.epoch -= 3600
    clock.sleep(60)
    (told,) = check.look().complaints
    assert (told.severity, told.problem) == (Severity.COMMENT, "the clock jumped by -3600.0 s")
    clock.sleep(1800)
    assert check.look().complaints == ()


@pytest.mark.parametrize(("unix_s", "severity"), [(60.9, None), (62.0, Severity.OBSERVE), (-60, Severity.COMMENT)])
def test_how_far_is_a_jump(unix_s: float, severity: Severity | None) -> None:
    found = judge_jump(unix_s, 60.0)
    assert (found and found.severity) == severity
