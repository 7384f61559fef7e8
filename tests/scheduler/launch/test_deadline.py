"""Before the time limit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.core import process_metrics
from deeplink.core.types import Attempt
from deeplink.scheduler.launch.slurm_monitor import (
    END_S,
    LEAD_S,
    LEAST_MARGIN_S,
    MOST_MARGIN_S,
    MOVED_S,
    Deadline,
    DeadlineAction,
)
from deeplink.scheduler.recovery.records import ProgressPoint


def point(step: int, unix: float, metrics: dict[str, float] | None = None, *, rank: int = 0) -> ProgressPoint:
    return ProgressPoint(attempt=Attempt(7, 0, 0), step=step, unix=unix, rank=rank, metrics=metrics or {})


def saved(step: int, unix: float) -> dict[str, float]:
    return {process_metrics.CHECKPOINT_STEP: step, process_metrics.CHECKPOINT_UNIX: unix}


def test_who_never_said_how_far_it_is_is_told_nothing() -> None:
    assert Deadline().look(0.0) is DeadlineAction.NOTHING


def test_without_a_limit_there_is_nothing_to_do() -> None:
    deadline = Deadline()
    deadline.take([point(1, 0.0)])
    assert deadline.look(None) is DeadlineAction.NOTHING


def test_all_ranks_save_at_one_step_ahead_of_the_newest() -> None:
    deadline = Deadline()
    deadline.take([point(10, 100.0), point(30, 102.0)])
    assert deadline.look(LEAST_MARGIN_S + 1.0) is DeadlineAction.NOTHING
    assert deadline.look(LEAST_MARGIN_S) is DeadlineAction.SAVE
    assert deadline.told() == 30 + 1 + 10 * LEAD_S
    assert deadline.look(LEAST_MARGIN_S - 1.0) is DeadlineAction.NOTHING, "once an attempt"
    deadline.take([point(62, 106.0, saved(60, 105.5))])
    assert deadline.look(50.0) is DeadlineAction.NOTHING, "an older checkpoint"
    deadline.take([point(64, 107.0, saved(61, 106.5))])
    assert deadline.look(50.0) is DeadlineAction.END


def test_slow_steps_are_told_the_next_one() -> None:
    deadline = Deadline()
    deadline.take([point(1, 0.0), point(2, 60.0)])
    assert deadline.told() == 4


def test_a_save_that_does_not_end_is_not_waited_for_beyond_the_end() -> None:
    deadline = Deadline()
    deadline.take([point(1, 0.0)])
    deadline.told()
    assert deadline.look(END_S + 1.0) is DeadlineAction.NOTHING
    assert deadline.look(END_S - 1.0) is DeadlineAction.END


def test_the_margin_is_learned_from_how_long_saves_take() -> None:
    deadline = Deadline()
    deadline.take([point(99, 10.0), point(100, 11.0), point(101, 12.0)])
    assert deadline.margin == LEAST_MARGIN_S
    deadline.take([point(140, 51.0, saved(100, 51.0))])
    assert deadline.save_s == 40.0
    assert 3 * 40.0 < deadline.margin < MOST_MARGIN_S
    deadline.take([point(150, 61.0, saved(150, 62.0))])
    assert deadline.save_s == 40.0, "the longest counts"


def test_the_margin_can_be_said() -> None:
    deadline = Deadline(margin_s=5.0)
    deadline.take([point(1, 0.0)])
    assert deadline.look(5.5) is DeadlineAction.NOTHING
    assert deadline.look(5.0) is DeadlineAction.SAVE
    deadline.told()
    assert deadline.look(3.0) is DeadlineAction.NOTHING, "half of it is for the save"
    assert deadline.look(2.0) is DeadlineAction.END


def test_other_ranks_say_nothing_about_saves() -> None:
    deadline = Deadline()
    deadline.take([point(9, 1.0, saved(9, 1.0), rank=3)])
    assert deadline.saved is None


@given(st.lists(st.tuples(st.integers(0, 1000), st.floats(0, 1e6), st.booleans()), max_size=40))
def test_whatever_is_heard_the_margin_is_bounded_and_the_step_lies_ahead(
    heard: list[tuple[int, float, bool]],
) -> None:
    deadline = Deadline()
    for step, unix, is_saved in heard:
        deadline.take([point(step, unix, saved(step, unix) if is_saved else None)])
    assert LEAST_MARGIN_S <= deadline.margin <= MOST_MARGIN_S
    if heard:
        assert deadline.told() > heard[-1][0]


@pytest.mark.parametrize("left_s", [0.0, -5.0])
def test_a_limit_that_is_over_still_asks_for_a_save(left_s: float) -> None:
    deadline = Deadline()
    deadline.take([point(1, 0.0)])
    assert deadline.look(left_s) is DeadlineAction.SAVE


def test_what_was_told_for_one_limit_does_not_count_for_a_later_one() -> None:
    deadline = Deadline()
    deadline.take([point(1, 0.0)])
    assert deadline.look(40.0) is DeadlineAction.SAVE
    wanted = deadline.told()
    deadline.take([point(9, 1.0, saved(wanted, 1.0))])
    assert deadline.look(39.0 + MOVED_S) is DeadlineAction.END, "so much Slurm's answers may be late"
    assert deadline.look(3600.0) is DeadlineAction.NOTHING
    assert deadline.look(LEAST_MARGIN_S) is DeadlineAction.SAVE
