"""The goodput benchmark: the simulation is what the formulas say, and says which side loses less."""

from __future__ import annotations

import random

import pytest

from benchmarks.watchdog.goodput import (
    HOUR_S,
    MTTF_S,
    STOCK_DEFAULT_S,
    STOCK_S,
    Course,
    assumed,
    main,
    measured,
    sides,
    simulated,
)


def dice() -> random.Random:
    return random.Random(1)  # noqa: S311 - no secret


@pytest.mark.parametrize("mttf_s", MTTF_S.values())
def test_the_simulation_is_what_the_exact_mean_says(mttf_s: float) -> None:
    for course in sides(mttf_s, save_s=60.0, stall_share=0.04, restart_s=10.0).values():
        assert simulated(course, 20_000, dice()) == pytest.approx(course.exact(), abs=0.01)


def test_a_job_that_fails_before_its_first_save_does_nothing() -> None:
    course = Course(interval_s=HOUR_S, stall_s=1.0, save_s=60.0, mttf_s=1.0, restart_s=10.0)
    assert simulated(course, 1_000, dice()) == 0.0


def test_what_is_not_whole_yet_is_lost() -> None:
    quick = Course(interval_s=600.0, stall_s=2.0, save_s=2.0, mttf_s=3_600.0, restart_s=10.0)
    slow = Course(interval_s=600.0, stall_s=2.0, save_s=500.0, mttf_s=3_600.0, restart_s=10.0)
    assert simulated(slow, 5_000, dice()) < simulated(quick, 5_000, dice()) - 0.01


def test_a_restart_that_is_as_slow_as_stock_gains_only_by_the_stall() -> None:
    rows = {row.row: row for row in measured(5_000, 2, stall_share=1.0, restart_s=STOCK_S)}
    for gpus in ("1,024", "16,384"):
        assert rows[f"{gpus} GPUs: time lost, ours at best over stock, best interval"].value == pytest.approx(1.0)


def test_what_is_assumed_is_told() -> None:
    told = "\n".join(assumed(save_s=61.0, stall_share=0.05, restart_s=11.0))
    restarts = {name: course.restart_s for name, course in sides(HOUR_S, 61.0, 0.05, 11.0).items()}
    assert restarts["stock, hourly saves"] == STOCK_S
    assert restarts["stock, default timeout, hourly saves"] == STOCK_DEFAULT_S == STOCK_S + 290.0
    for figure in ("7.9 h", "1.8 h", "61 s", "0.05", f"{STOCK_S:g} s", f"{STOCK_DEFAULT_S:g} s", "11 s"):
        assert figure in told


@pytest.mark.parametrize("wrong", [["--save-s", "0"], ["--stall-share", "1.5"], ["--restart-s", "-1"]])
def test_times_that_cannot_be_are_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(wrong)
