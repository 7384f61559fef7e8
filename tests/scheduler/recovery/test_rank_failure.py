"""Why ranks failed, and whether another attempt makes sense."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.core.finding import Finding, Severity
from deeplink.core.types import NodeName
from deeplink.scheduler.recovery.rank_failure import (
    Cause,
    Clue,
    Failed,
    Ran,
    RelaunchLimits,
    Setback,
    Tried,
    diagnose,
    hints_in,
    stop_for,
)
from deeplink.scheduler.recovery.records import IncidentKind
from deeplink.scheduler.recovery.relaunch import AttemptEvidence, RelaunchPolicy, Silence, decide

A, B = NodeName("a"), NodeName("b")
RAN = {NodeName(node): Ran(2_000.0, 2_600.0) for node in "ab"}


def killed(unix: float) -> Finding:
    said = "1 process here killed for want of memory: python (41)"
    return Finding(check="memory", severity=Severity.NOTE, text=said, since_unix=unix)


KILLED = killed(2_599.0)
BROKEN = Finding(check="gpu", severity=Severity.ERROR, text="XID 79")


@pytest.mark.parametrize(
    ("written", "hint"),
    [
        (b"slurmstepd: error: Detected 1 oom-kill event(s) in StepId=9.1. Some of", Clue.OUT_OF_MEMORY),
        (b"slurmstepd: error: Detected 1 oom_kill event in StepId=9.1.", Clue.OUT_OF_MEMORY),
        (b"srun: error: n1: task 0: Out Of Memory", Clue.OUT_OF_MEMORY),
        (b"torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", Clue.OUT_OF_MEMORY),
        (b"torch.OutOfMemoryError: HIP out of memory", Clue.OUT_OF_MEMORY),
        (
            b"RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you",
            Clue.OUT_OF_MEMORY,
        ),
        (b"Traceback\n  File x\nMemoryError\n", Clue.OUT_OF_MEMORY),
        (b"OSError: [Errno 5] Input/output error: '/data/x'", Clue.IO_ERROR),
        (b"RuntimeError: CUDA error: uncorrectable ECC error encountered", Clue.GPU_FAULT),
    ],
)
def test_what_is_overheard(written: bytes, hint: Clue) -> None:
    assert hints_in(b"epoch 3\n" + written) == {hint}


@pytest.mark.parametrize("written", [b"", b"no MemoryError here, thank you", b"rank 3 exits", b"\xff\xfe"])
def test_what_hints_at_nothing(written: bytes) -> None:
    assert not hints_in(written)


@pytest.mark.parametrize(
    ("code", "failed", "health", "cause", "kind"),
    [
        (1, Failed(), {}, Cause.UNKNOWN, IncidentKind.RANK_FAILED),
        (139, Failed(node=A), {}, Cause.UNKNOWN, IncidentKind.RANK_FAILED),
        (137, Failed(node=A), {}, Cause.INFRASTRUCTURE, IncidentKind.RANK_FAILED),
        (137, Failed(node=A), {A: (KILLED,)}, Cause.OUT_OF_MEMORY, IncidentKind.OUT_OF_MEMORY),
        (137, Failed(node=A), {B: (KILLED,)}, Cause.INFRASTRUCTURE, IncidentKind.RANK_FAILED),
        # Somebody else's, of minutes ago: such a finding stands for ten.
        (137, Failed(node=A), {A: (killed(2_100.0),)}, Cause.INFRASTRUCTURE, IncidentKind.RANK_FAILED),
        (137, Failed(node=A), {A: (killed(0.0),)}, Cause.INFRASTRUCTURE, IncidentKind.RANK_FAILED),
        (1, Failed(node=A), {A: (KILLED,)}, Cause.UNKNOWN, IncidentKind.RANK_FAILED),
        (
            1,
            Failed(hints=frozenset({Clue.OUT_OF_MEMORY})),
            {},
            Cause.OUT_OF_MEMORY,
            IncidentKind.OUT_OF_MEMORY,
        ),
        (1, Failed(hints=frozenset({Clue.IO_ERROR})), {}, Cause.INFRASTRUCTURE, IncidentKind.RANK_FAILED),
        (135, Failed(node=A), {}, Cause.INFRASTRUCTURE, IncidentKind.RANK_FAILED),
        (1, Failed(node=A), {A: (BROKEN,)}, Cause.INFRASTRUCTURE, IncidentKind.NODE_SICK),
        (1, Failed(node=A), {B: (BROKEN,)}, Cause.UNKNOWN, IncidentKind.RANK_FAILED),
        (1, Failed(), {B: (BROKEN,)}, Cause.INFRASTRUCTURE, IncidentKind.NODE_SICK),
        (127, Failed(), {}, Cause.NO_COMMAND, IncidentKind.APPLICATION_FAILED),
    ],
)
def test_diagnoses(
    code: int, failed: Failed, health: dict[NodeName, tuple[Finding, ...]], cause: Cause, kind: IncidentKind
) -> None:
    found = diagnose(code, failed, (A, B), health, RAN)
    assert (found.cause, found.kind) == (cause, kind)
    assert found.because
    if failed.node:
        assert set(found.suspects) <= {failed.node}


def test_a_kill_before_the_ranks_were_started_or_by_an_unknown_clock_ended_none_of_them() -> None:
    started_since = {A: Ran(2_580.0, 2_600.0)}
    early, late = {A: (killed(2_570.0),)}, {A: (killed(2_590.0),)}
    assert diagnose(137, Failed(node=A), (A,), early, started_since).cause is Cause.INFRASTRUCTURE
    assert diagnose(137, Failed(node=A), (A,), late, started_since).cause is Cause.OUT_OF_MEMORY
    assert diagnose(137, Failed(node=A), (A,), late, {}).cause is Cause.INFRASTRUCTURE


def test_a_verdict_holds_the_kill_against_when_the_ranks_ran_by_the_nodes_own_clock() -> None:
    # Its clock shows 5,000; the ranks ran for ten minutes, until two seconds ago.
    well = Silence(answer_s=0.2, contact_s=0.2, question_s=0.3)
    seen = AttemptEvidence(
        active=(A,), spares=(), silence={A: well}, exit_code=137, exited_for_s=2.0, ran_for_s=602.0
    )
    seen = replace(seen, failed=Failed(node=A), unix={A: 5_000.0})
    theirs, earlier = {A: (killed(4_997.0),)}, {A: (killed(4_700.0),)}
    assert decide(replace(seen, health=theirs), RelaunchPolicy()).cause is Cause.OUT_OF_MEMORY
    assert decide(replace(seen, health=earlier), RelaunchPolicy()).cause is Cause.INFRASTRUCTURE


def test_memory_that_runs_out_is_tried_again_once_and_then_says_what_helps() -> None:
    once = Tried(since_progress=(Setback(Cause.OUT_OF_MEMORY, 137),), relaunches=1, best=7)
    assert stop_for(Cause.OUT_OF_MEMORY, 137, IncidentKind.OUT_OF_MEMORY, Tried(), RelaunchLimits()) is None
    stop = stop_for(Cause.OUT_OF_MEMORY, 137, IncidentKind.OUT_OF_MEMORY, once, RelaunchLimits())
    assert stop is not None
    assert "--mem" in stop[1]


def test_another_exit_code_is_another_failure_but_not_for_ever() -> None:
    one, two = Setback(Cause.UNKNOWN, 1), Setback(Cause.UNKNOWN, 2)
    assert (
        stop_for(Cause.UNKNOWN, 3, IncidentKind.RANK_FAILED, Tried(since_progress=(one,)), RelaunchLimits())
        is None
    )
    stop = stop_for(Cause.UNKNOWN, 3, IncidentKind.RANK_FAILED, Tried(since_progress=(one, two)), RelaunchLimits())
    assert stop is not None
    assert stop[0] is IncidentKind.APPLICATION_FAILED


@pytest.mark.parametrize(
    ("limits", "code", "stops"),
    [
        (RelaunchLimits(), 1, False),
        (RelaunchLimits(retries=False), 1, True),
        (RelaunchLimits(final_codes=frozenset({17})), 17, True),
        (RelaunchLimits(final_codes=frozenset({17})), 18, False),
        (RelaunchLimits(most_relaunches=0), 1, True),
        (RelaunchLimits(most_relaunches=1), 1, False),
    ],
)
def test_who_wants_his_scripts_failure_at_once_gets_it(limits: RelaunchLimits, code: int, *, stops: bool) -> None:
    assert (stop_for(Cause.UNKNOWN, code, IncidentKind.RANK_FAILED, Tried(), limits) is not None) is stops


def test_lost_nodes_are_replaced_where_failures_are_not_retried() -> None:
    assert stop_for(Cause.NODE_LOST, 0, IncidentKind.NODE_SILENT, Tried(), RelaunchLimits(retries=False)) is None


endings = st.tuples(
    st.sampled_from([cause for cause in Cause if cause is not Cause.NO_COMMAND]), st.integers(0, 5)
)


@given(st.lists(endings, min_size=3))
def test_no_row_of_setbacks_without_progress_goes_on_for_ever(row: list[tuple[Cause, int]]) -> None:
    limits = RelaunchLimits()
    since: tuple[Setback, ...] = ()
    for cause, code in row:
        tried = Tried(since_progress=since, relaunches=len(since))
        if stop_for(cause, code, IncidentKind.RANK_FAILED, tried, limits) is not None:
            break
        since = (*since, Setback(cause, code))
    assert len(since) <= limits.most_fruitless


@given(endings, st.integers(0, 10_000))
def test_progress_always_allows_another(ending: tuple[Cause, int], relaunches: int) -> None:
    assert (
        stop_for(*ending, IncidentKind.RANK_FAILED, Tried(relaunches=relaunches, best=3), RelaunchLimits()) is None
    )


@pytest.mark.parametrize(
    ("node", "sick", "suspects", "kind"),
    [
        (A, {}, (A,), IncidentKind.LAUNCH_FAILED),
        (A, {A: (BROKEN,)}, (A,), IncidentKind.NODE_SICK),
        (A, {B: (BROKEN,)}, (A,), IncidentKind.LAUNCH_FAILED),
        (None, {B: (BROKEN,)}, (B,), IncidentKind.NODE_SICK),
    ],
)
def test_a_node_that_ranks_cannot_be_started_on_is_better_left_out(
    node: NodeName | None,
    sick: dict[NodeName, tuple[Finding, ...]],
    suspects: tuple[NodeName, ...],
    kind: IncidentKind,
) -> None:
    found = diagnose(1, Failed(said="srun itself exited 1", node=node, is_of_rank=False), (A, B), sick, RAN)
    assert (found.cause, found.kind, found.suspects) == (Cause.NOT_STARTED, kind, suspects)
    assert stop_for(found.cause, 1, found.kind, Tried(), RelaunchLimits(retries=False)) is None


def test_ranks_that_were_not_started_say_nothing_against_the_application() -> None:
    launches = (Setback(Cause.NOT_STARTED, 1), Setback(Cause.NOT_STARTED, 1))
    for recent in (launches, (launches[0], Setback(Cause.UNKNOWN, 2)), (Setback(Cause.HANG), launches[0])):
        stop = stop_for(
            Cause.UNKNOWN,
            1,
            IncidentKind.RANK_FAILED,
            Tried(since_progress=recent, relaunches=2),
            RelaunchLimits(),
        )
        assert stop is not None
        assert stop[0] is IncidentKind.RANK_FAILED


@given(st.integers(1, 255), st.frozensets(st.sampled_from(Clue)), st.integers(0, 5), st.booleans())
def test_what_starts_the_ranks_is_never_the_application(
    code: int, hints: frozenset[Clue], before: int, retries: bool
) -> None:
    found = diagnose(code, Failed(said="srun itself exited", hints=hints, is_of_rank=False), [A, B], {}, RAN)
    assert (found.cause, found.kind, found.suspects) == (Cause.NOT_STARTED, IncidentKind.LAUNCH_FAILED, ())
    tried = Tried(since_progress=(Setback(Cause.NOT_STARTED, code),) * before, relaunches=before)
    stop = stop_for(
        found.cause, code, found.kind, tried, RelaunchLimits(retries=retries, final_codes=frozenset({code}))
    )
    assert (stop is None) == (before < RelaunchLimits().most_fruitless)
    assert stop is None or stop[0] is IncidentKind.LAUNCH_FAILED
