"""Timelines united, stacks kept within bounds, steps timed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deeplink.scheduler.recovery.incident_merging import (
    MOST_MOMENTS,
    MOST_STACK_CHARACTERS,
    step_seconds,
    united,
    within_bounds,
)
from deeplink.scheduler.recovery.records import BEGAN, LONGEST_STACK, Moment, RankStack

moments = st.builds(
    Moment, st.floats(0, 100, allow_nan=False), st.sampled_from([BEGAN, "detected", "drained", "again"])
)
timelines = st.lists(moments, max_size=12)


@given(timelines, timelines)
def test_whoever_tells_first_the_timeline_is_the_same(one: list[Moment], two: list[Moment]) -> None:
    both = united(one, two)
    assert both == united(two, one) == united(both, two)
    assert list(both) == sorted(set(both))
    assert sum(moment.what == BEGAN for moment in both) <= 1
    assert {moment for moment in (*one, *two) if moment.what != BEGAN} <= set(both)


def test_of_too_many_moments_the_first_and_the_newest_stay() -> None:
    many = [Moment(float(at), "again") for at in range(1_000)]
    kept = united(many)
    assert (len(kept), kept[0], kept[-1]) == (MOST_MOMENTS, many[0], many[-1])
    assert united(kept, many[500:]) == united(many)


@given(st.lists(st.integers(0, 3 * LONGEST_STACK), max_size=40))
def test_stacks_have_room_together_and_the_longest_lose_most(lengths: list[int]) -> None:
    stacks = [RankStack(rank=rank, text="x" * length) for rank, length in enumerate(lengths)]
    kept = [len(stack.text) for stack in within_bounds(stacks)]
    assert sum(kept) <= MOST_STACK_CHARACTERS
    assert max(kept, default=0) <= LONGEST_STACK
    longest = max(kept, default=0)
    assert all(now in {was, longest} for now, was in zip(kept, lengths, strict=True))


def test_a_step_is_timed_by_the_median_and_not_where_there_is_none() -> None:
    assert step_seconds([]) == 0.0
    assert step_seconds([(3, 1.0)]) == 0.0
    assert step_seconds([(0, 0.0), (10, 5.0), (20, 10.0), (21, 90.0)]) == 0.5
    assert step_seconds([(0, 10.0), (1, 9.0)]) == 0.0  # a clock that went back
