"""How far a run is, over its attempts."""

from __future__ import annotations

from deeplink.core.types import Attempt
from deeplink.scheduler.launch.history import LONG_RUN_S, Progress
from deeplink.scheduler.recovery.records import ProgressPoint

FIRST, SECOND = Attempt(7, 0, 0), Attempt(7, 0, 1)


def point(step: int, attempt: Attempt) -> ProgressPoint:
    return ProgressPoint(attempt=attempt, step=step, unix=0.0)


def test_the_first_step_of_an_attempt_is_told_once() -> None:
    progress = Progress()
    progress.begin(0.0, relaunch=False)
    assert progress.stuck_s(5.0) is None
    assert progress.take([point(1, FIRST), point(2, FIRST)], FIRST, 5.0)
    assert not progress.take([point(3, FIRST)], FIRST, 6.0)
    assert (progress.best, progress.first, progress.stuck_s(10.0)) == (3, 1, 4.0)


def test_steps_done_again_are_counted() -> None:
    progress = Progress()
    progress.begin(0.0, relaunch=False)
    progress.take([point(step, FIRST) for step in range(1, 58)], FIRST, 1.0)
    progress.begin(2.0, relaunch=True)
    assert progress.take([point(51, SECOND)], SECOND, 3.0)
    assert progress.repeated == 7


def test_reports_of_a_fenced_attempt_do_not_count() -> None:
    progress = Progress()
    progress.begin(0.0, relaunch=True)
    assert not progress.take([point(99, FIRST)], SECOND, 1.0)
    assert progress.best is None


def test_relaunches_are_fruitless_until_a_newer_step_than_ever() -> None:
    progress = Progress()
    progress.begin(0.0, relaunch=False)
    progress.take([point(10, FIRST)], FIRST, 1.0)
    progress.begin(2.0, relaunch=True)
    progress.take([point(5, SECOND)], SECOND, 3.0)
    progress.begin(4.0, relaunch=True)
    assert progress.fruitless == 2
    progress.take([point(11, SECOND)], SECOND, 5.0)
    assert progress.fruitless == 0


def test_the_same_step_reported_again_is_no_progress() -> None:
    progress = Progress()
    progress.begin(0.0, relaunch=False)
    progress.take([point(4, FIRST)], FIRST, 1.0)
    progress.take([point(4, FIRST)], FIRST, 8.0)
    assert progress.stuck_s(9.0) == 8.0


def test_a_job_that_reports_nothing_may_run_for_days_and_lose_many_nodes() -> None:
    progress = Progress()
    for number in range(5):
        progress.begin(number * 2 * LONG_RUN_S, relaunch=number > 0)
    assert progress.fruitless == 1
