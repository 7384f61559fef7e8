"""A budget of starts by progress: what counts as a start that failed by itself, and what does not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.core.types import Attempt
from deeplink.scheduler.recovery.records import AttemptRecord, Incident, JobRecord, Phase
from deeplink.scheduler.watch.memory import fruitless_starts

FAILED, LOST = "rank-failed", "node-dead"


def job(*reached: int | None) -> JobRecord:
    """A job whose starts came so far."""
    attempts = tuple(
        AttemptRecord(attempt=Attempt(17, start, 0), phase=Phase.FAILED, last_step=step)
        for start, step in enumerate(reached)
    )
    return JobRecord(job=17, name="", user="", attempts=attempts)


def blamed(*kinds: str) -> list[Incident]:
    """One incident for each start."""
    return [
        Incident(id=f"{start}", kind=kind, attempt=Attempt(17, start, 0), began_unix=1.0, detected_unix=1.0)
        for start, kind in enumerate(kinds)
        if kind
    ]


CASES = {
    "its first start came somewhere": (job(20), blamed(FAILED), 0),
    "always at the same step": (job(20, 20, 20, 20), blamed(*[FAILED] * 4), 3),
    "each comes a little further": (job(20, 21, 22, 23), blamed(*[FAILED] * 4), 0),
    "one came further": (job(20, 20, 25, 20), blamed(*[FAILED] * 4), 1),
    "no step at all, and its ranks fail each time": (job(None, None, None), blamed(*[FAILED] * 3), 3),
    "no step at all, and nobody knows why": (job(None, None, None), [], 1),
    "a node was lost": (job(20, 20, 20), blamed(FAILED, FAILED, LOST), 0),
    "a node was lost in between": (job(20, 20, 20, 20), blamed(FAILED, LOST, FAILED, FAILED), 2),
    "of the newest nothing is on record yet": (job(20, 20, 20), blamed(FAILED, FAILED), 2),
    "hung": (job(20, 20, 20), blamed(*["ranks-hung"] * 3), 2),
    "out of time": (job(20, 20, 20), blamed(FAILED, "time-limit", FAILED), 1),
}


@pytest.mark.parametrize("case", CASES)
def test_starts_that_failed_by_themselves_without_a_new_step_are_counted(case: str) -> None:
    record, incidents, expected = CASES[case]
    assert fruitless_starts(record, incidents) == expected


kinds = st.lists(
    st.sampled_from(["", FAILED, "ranks-hung", LOST, "preempted", "straggler"]), min_size=1, max_size=6
)


@given(kinds=kinds, reached=st.data())
def test_a_newest_start_that_came_further_than_all_before_owes_nothing(
    kinds: list[str], reached: st.DataObject
) -> None:
    steps = [reached.draw(st.none() | st.integers(0, 99)) for _ in kinds]
    assert fruitless_starts(job(*steps, 100), blamed(*kinds)) == 0
    assert 0 <= fruitless_starts(job(*steps), blamed(*kinds)) <= len(steps)
