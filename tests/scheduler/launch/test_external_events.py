"""What comes from outside: told to end, preempted, out of time, started again elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.scheduler.launch.backend import JobStatus
from deeplink.scheduler.launch.slurm_monitor import (
    TERMINATED,
    WORD_S,
    DeadlineAction,
    ExternalEvents,
    look_outside,
)
from deeplink.scheduler.recovery.records import IncidentKind
from deeplink.scheduler.recovery.relaunch import NextMove

WELL = JobStatus(ours=True, runs=True, left_s=600.0, requeueable=True, word="RUNNING")
PREEMPTED = JobStatus(ours=True, runs=True, left_s=600.0, preempting=True, requeueable=True, word="RUNNING")
OVER = JobStatus(ours=True, runs=False, left_s=0.0, requeueable=True, word="COMPLETING TimeLimit")
CANCELLED = JobStatus(ours=True, runs=False, left_s=600.0, requeueable=True, word="CANCELLED")
LATER = JobStatus(ours=False, runs=True, left_s=600.0, requeueable=True, word="RUNNING")


def moved(**seen: Any) -> tuple[NextMove, IncidentKind | None] | None:
    verdict = look_outside(ExternalEvents(**seen))
    return None if verdict is None else (verdict.move, verdict.kind)


def test_all_is_well() -> None:
    assert moved() is None
    assert moved(status=WELL) is None


def test_ranks_that_failed_by_themselves_are_no_business_of_slurms() -> None:
    assert moved(code=1) is None


@pytest.mark.parametrize("code", [None, 1, 143])
def test_a_job_that_runs_elsewhere_is_let_go(code: int | None) -> None:
    assert moved(status=LATER, code=code) == (NextMove.SUPERSEDED, None)


def test_told_to_end_the_ranks_have_their_time() -> None:
    assert moved(told="SIGTERM") is None
    assert moved(told="SIGTERM", status=LATER) is None


@pytest.mark.parametrize(
    ("status", "code", "told"),
    [
        (WELL, 9, (NextMove.FAILED, None)),
        (WELL, 0, (NextMove.SUCCEEDED, None)),
        (CANCELLED, 143, (NextMove.FAILED, None)),
        (LATER, 143, (NextMove.FAILED, None)),
        (OVER, 143, (NextMove.FAILED, IncidentKind.TIME_LIMIT)),
        (PREEMPTED, 143, (NextMove.REQUEUE, IncidentKind.PREEMPTED)),
    ],
)
def test_told_to_end_for_a_reason(
    status: JobStatus, code: int, told: tuple[NextMove, IncidentKind | None]
) -> None:
    assert moved(told="SIGTERM", code=code, status=status, requeueable=True) == told


@pytest.mark.parametrize("code", [0, 143])
def test_out_of_time_the_job_starts_again_if_it_got_further(code: int) -> None:
    out = {"told": "SIGTERM", "code": code, "status": OVER, "gained": True}
    assert moved(**out, requeueable=True) == (NextMove.REQUEUE, IncidentKind.TIME_LIMIT)
    assert moved(**out) != (NextMove.REQUEUE, IncidentKind.TIME_LIMIT)


def test_in_a_preemption_agents_and_ranks_are_ended_and_we_are_not() -> None:
    assert moved(agents_gone=True) == (NextMove.WAIT, None)
    assert moved(agents_gone=True, status=PREEMPTED, asked_for_s=1.0) == (NextMove.WAIT, None)
    ended = {"agents_gone": True, "status": PREEMPTED, "code": TERMINATED}
    assert moved(**ended, requeueable=True) == (NextMove.REQUEUE, IncidentKind.PREEMPTED)
    assert moved(**ended) == (NextMove.FAILED, IncidentKind.PREEMPTED)


def test_ranks_that_somebody_terminated_are_a_failure_like_others() -> None:
    assert moved(code=TERMINATED) == (NextMove.WAIT, None)
    assert moved(code=TERMINATED, status=WELL) is None
    assert moved(code=TERMINATED, asked_for_s=WORD_S) is None, "Slurm does not answer"


@pytest.mark.parametrize(
    ("gained", "requeueable", "code", "again"),
    [(True, True, None, True), (False, True, None, False), (True, False, None, False), (True, True, 0, False)],
)
def test_before_the_time_limit(*, gained: bool, requeueable: bool, code: int | None, again: bool) -> None:
    found = moved(now=DeadlineAction.END, gained=gained, requeueable=requeueable, code=code)
    assert (found == (NextMove.REQUEUE, IncidentKind.TIME_LIMIT)) is again


@given(
    st.builds(
        ExternalEvents,
        told=st.sampled_from(["", "SIGTERM"]),
        code=st.none() | st.sampled_from([0, 1, TERMINATED]),
        agents_gone=st.booleans(),
        status=st.sampled_from([None, WELL, PREEMPTED, OVER, CANCELLED, LATER]),
        asked_for_s=st.floats(0, 20),
        now=st.sampled_from(DeadlineAction),
        gained=st.booleans(),
        requeueable=st.booleans(),
    )
)
def test_what_holds_whatever_is_seen(seen: ExternalEvents) -> None:
    verdict = look_outside(seen)
    if verdict is None:
        return
    assert verdict.because
    if verdict.move is NextMove.REQUEUE:
        assert seen.requeueable
        assert seen.gained or verdict.kind is IncidentKind.PREEMPTED, "or it would start again for ever"
    if verdict.move in {NextMove.FAILED, NextMove.SUCCEEDED}:
        assert verdict.code == seen.code
    if verdict.move is NextMove.WAIT and seen.status is None:
        assert seen.asked_for_s < WORD_S
