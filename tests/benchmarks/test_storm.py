"""A seed gives the same cases, their text is read back, shrinking ends, and each invariant says what breaks it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.storm.__main__ import Result, summary
from benchmarks.storm.case import KINDS, CaseTextError, StormCase
from benchmarks.storm.drawing import case_of, size, smaller, smallest
from benchmarks.storm.invariants import (
    INVARIANTS,
    CaseFacts,
    Injected,
    Violation,
    drained_used,
    fed_wrongly,
    fences,
    violations,
)
from benchmarks.watchdog.facts import Line, Told
from deeplink.core.types import Attempt
from deeplink.data.digest import DeliveryDigest, receipt
from deeplink.scheduler.recovery.records import IncidentOutcome
from deeplink.scheduler.testbed.lab.faults import FAULTS

CASES = st.builds(case_of, st.integers(0, 1 << 30), st.integers(0, 10_000))


def test_every_kind_is_a_fault_of_the_laboratory_and_every_fault_a_kind() -> None:
    assert KINDS.keys() == FAULTS.keys()


@given(CASES)
def test_a_case_is_read_back_from_its_text(case: StormCase) -> None:
    assert StormCase.parse(str(case)) == case
    assert all(StormCase.parse(str(one)) == one for one in smaller(case))


@given(st.integers(0, 1 << 30), st.integers(0, 10_000))
def test_a_seed_is_a_storm(seed: int, number: int) -> None:
    case = case_of(seed, number)
    assert case == case_of(seed, number)
    for one in case.injections:
        low, high = KINDS[one.what].hold_s
        assert low - 0.5 <= one.hold_s <= high + 0.5
        assert one.place in KINDS[one.what].places


def test_some_hours_have_every_fault_and_another_seed_is_another_storm() -> None:
    assert {one.what for number in range(400) for one in case_of(7, number).injections} == KINDS.keys()
    assert case_of(7, 0) != case_of(8, 0)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "3 operator",
            "0+1 operator",
            "9+0 none",
            "3+2 none array",
            "2+0 none children array",
            "2+0 root",
            "2+0 user standing",
        ),
        *("2+0 none; node-lost last @0+1", "2+0 none; node-killed ctl @0+1", "2+0 none; node-killed last"),
    ],
)
def test_a_text_that_is_no_case_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(CaseTextError, match="node-killed last @40"):
        StormCase.parse(text)


@given(CASES)
def test_whatever_is_tried_next_is_smaller(case: StormCase) -> None:
    assert all(size(one) < size(case) for one in smaller(case))


def _fails(_case: StormCase) -> bool:
    """Stand in for a case that is played."""
    return True


@given(CASES, st.functions(like=_fails, returns=st.booleans(), pure=True), st.integers(0, 40))
def test_shrinking_ends_within_its_tries_at_a_case_that_fails(
    case: StormCase, fails: Callable[[StormCase], bool], tries: int
) -> None:
    asked: list[StormCase] = []

    def noted(one: StormCase) -> bool:
        asked.append(one)
        return fails(one)

    found = smallest(case, noted, tries)
    assert len(asked) == len(set(asked)) <= tries
    assert found == case or fails(found)


def test_shrinking_finds_the_one_fault_that_matters() -> None:
    case = StormCase.parse(
        "4+2 operator; node-drained last @0+3 for 30; node-killed batch @80+4 for 20; slow-rank last @80+5 for 20"
    )
    found = smallest(case, lambda one: any(hit.what == "node-killed" for hit in one.injections), 100)
    assert str(found) == "2+0 operator; node-killed batch @20+0 for 1"


# -- invariants


def line(attempt: str, what: str, unix: float, node: str = "n0", rank: int = 0) -> Line:
    return Line(attempt=Attempt.parse(attempt), rank=rank, what=what, unix=unix, step=1, node=node)


INJECTION = StormCase.parse("3+1 operator; node-killed last @40+3 for 20").injections[0]
KILLED = Injected(injection=INJECTION, target="n3", began_unix=10, hit_unix=11, over_unix=30)
DRAINED = replace(
    KILLED, injection=replace(INJECTION, what="node-drained"), target="n2", hit_unix=10, over_unix=60
)
TOLD = Told(
    by="watchdog",
    id="5.0.0-node-dead-n3",
    kind="node-dead",
    node="n3",
    attempt="5.0.0",
    began_unix=10,
    detected_unix=12,
    action="drain-down",
    outcome=IncidentOutcome.RECOVERED,
    evidence="",
)
WELL = CaseFacts(
    injected=(KILLED,),
    state="COMPLETED",
    ended_unix=50,
    lines=(
        *(line("5.0.0", "resumed", 1), line("5.0.0", "step", 9)),
        *(line("5.0.1", "process", 14), line("5.0.1", "resumed", 15), line("5.0.1", "step", 16)),
        line("5.0.1", "end", 45),
    ),
    incidents=(TOLD,),
    jobs=("5",),
)
OF_THE_OLD = line("5.0.0", "step", 15)
THIRD = (line("5.0.2", "process", 46), line("5.0.2", "step", 47))


def test_nothing_is_said_of_a_case_that_went_well() -> None:
    assert violations(WELL) == []


@pytest.mark.parametrize(
    ("word", "facts"),
    [
        ("ends", replace(WELL, state="RUNNING")),
        ("ends", replace(WELL, state="PENDING", reason="JobHeldUser")),
        ("samples", replace(WELL, fed=("epoch 0: 3 samples less",))),
        ("fence", replace(WELL, late=("5.0.0 saved step-40 after its fence",))),
        ("alone", replace(WELL, lines=(*WELL.lines, OF_THE_OLD))),
        ("held", replace(WELL, ended_unix=80)),
        ("held", replace(WELL, gpus_s=31)),
        ("same-id", replace(WELL, jobs=("5", "6"))),
        ("healthy", replace(WELL, lines=(*WELL.lines, *THIRD))),
        ("healthy", replace(WELL, injected=(replace(DRAINED, over_unix=12),))),
        ("incidents", replace(WELL, incidents=(TOLD, replace(TOLD, id="x")))),
        ("incidents", replace(WELL, incidents=(replace(TOLD, detected_unix=9),))),
        ("incidents", replace(WELL, incidents=())),
        ("beside", replace(WELL, beside="5_0 is PENDING")),
        ("text", replace(WELL, escapes=("the job's",))),
        ("left", replace(WELL, left=("sleep 9 on n1",))),
    ],
)
def test_each_invariant_is_told_alone(word: str, facts: CaseFacts) -> None:
    assert [one.invariant for one in violations(facts)] == [word]
    assert word in INVARIANTS


def test_an_old_rank_on_another_node_is_beside_nobody() -> None:
    assert violations(replace(WELL, lines=(*WELL.lines, line("5.0.0", "step", 20, node="n9")))) == []


def test_who_ended_before_it_resumed_fences_nobody() -> None:
    lines = [
        *(line("1.0.0", "resumed", 1.0), line("1.0.0", "step", 2.0)),
        line("1.0.1", "process", 3.0),
        *(line("1.0.2", "process", 4.0), line("1.0.2", "imported", 5.0)),
        *(line("1.0.3", "resumed", 7.0), line("1.0.3", "resumed", 7.5, rank=1), line("1.0.3", "step", 8.0)),
        line("1.0.4", "process", 9.0),
    ]
    assert fences(lines) == [(Attempt(1, 0, number), 7.5) for number in range(3)]
    assert fences([line("1.0.0", "process", 1.0), line("1.0.1", "process", 2.0)]) == []
    assert fences([]) == []


def test_a_drained_node_is_used_only_where_no_other_spare_is_left() -> None:
    nodes = {0: {"n0", "n1", "n2", "n3"}}
    before = [line("1.0.0", "step", 1, "n0"), line("1.0.0", "step", 1, "n1")]
    wrong = [*before, line("1.0.1", "step", 20, "n0"), line("1.0.1", "step", 20, "n2")]
    assert drained_used(wrong, [DRAINED], nodes) == ["attempt 1.0.1 has ranks on n2, which is drained, not on n3"]
    well = [*before, line("1.0.1", "step", 20, "n0"), line("1.0.1", "step", 20, "n3")]
    assert drained_used(well, [DRAINED], nodes) == []
    later = [*wrong, line("1.0.2", "step", 30, "n3")]
    assert len(drained_used(later, [DRAINED], nodes)) == 1, "though the other one was used later"
    last = [*well, line("1.0.2", "step", 30, "n2"), line("1.0.2", "step", 30, "n3")]
    assert drained_used(last, [DRAINED], nodes) == [], "no other is left"
    assert drained_used(wrong, [replace(DRAINED, hit_unix=25)], nodes) == [], "drained since"
    assert drained_used(wrong, [DRAINED, KILLED], nodes) == [], "the other one was lost"
    elsewhere = [*before, line("1.1.0", "step", 20, "n2")]
    assert drained_used(elsewhere, [DRAINED], {**nodes, 1: {"n2", "n3"}}) == [], "Slurm's own choice"


def digest(*samples: int) -> DeliveryDigest:
    made = DeliveryDigest()
    made.add(0, [receipt(row, b"%d" % row) for row in samples])
    return made


def test_a_job_without_a_digest_or_with_a_sample_twice_was_fed_wrongly(tmp_path: Path) -> None:
    assert fed_wrongly(tmp_path, digest(1, 2)) == ["it left no digest"]
    kept = tmp_path / "digest.json"
    kept.write_text(json.dumps(digest(2, 1).state_dict()))
    assert fed_wrongly(tmp_path, digest(1, 2)) == []
    kept.write_text(json.dumps(digest(1, 1, 2).state_dict()))
    assert fed_wrongly(tmp_path, digest(1, 2)) != []


def test_the_summary_has_a_line_that_runs_a_failed_case_again() -> None:
    case = StormCase.parse("3+1 operator; node-killed last @40+3 for 20; fast-reboot spare @40+4")
    failed = Result(case=case, violations=(Violation("ends", "it is RUNNING"),), took_s=9)
    shrunk = StormCase.parse("2+0 operator; node-killed last @20+0 for 1")
    well = Result(case=StormCase.parse("2+0 none"), violations=(), took_s=9)
    text = summary([well, replace(failed, smallest=shrunk)])
    assert "2 cases, 1 of them well" in text
    lines = [*takewhile(lambda one: not one.startswith("CASE="), text.splitlines())]
    assert f"CASE='{shrunk}'" in text.splitlines()[len(lines)]
    assert f"first as: {case}" in text
    assert "1 x ends: " in text
