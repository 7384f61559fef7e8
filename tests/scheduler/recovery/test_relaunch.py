"""Verdicts: what is seen, and what is to be done about it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.core.types import NodeName
from deeplink.scheduler.recovery.rank_failure import Cause, Failed, Setback, Tried
from deeplink.scheduler.recovery.records import IncidentKind
from deeplink.scheduler.recovery.relaunch import (
    AGAIN_CODE,
    AttemptEvidence,
    AttemptVerdict,
    NextMove,
    RelaunchPolicy,
    Silence,
    decide,
    is_alone,
    too_few,
)

POLICY = RelaunchPolicy()
WELL = Silence(answer_s=0.2, contact_s=0.2, question_s=0.3)
GONE = Silence(answer_s=3.2, contact_s=3.2, question_s=3.4)
DOUBTFUL = Silence(answer_s=2.0, contact_s=2.0, question_s=2.1)
STARVED = Silence(answer_s=9.0, contact_s=0.4, question_s=9.2, deaf_s=9.0)
DEAF = Silence(answer_s=91.0, contact_s=0.4, question_s=91.2, deaf_s=91.0)


def seen(active: str, spares: str = "", silent: dict[str, Silence] | None = None, **more: Any) -> AttemptEvidence:
    nodes = (*active.split(), *spares.split())
    return AttemptEvidence(
        active=tuple(NodeName(node) for node in active.split()),
        spares=tuple(NodeName(node) for node in spares.split()),
        silence={NodeName(node): (silent or {}).get(node, WELL) for node in nodes},
        **more,
    )


def test_all_is_well() -> None:
    assert decide(seen("a b c", "d"), POLICY).move is NextMove.CONTINUE


def test_ranks_that_ended_well_ended_well_whoever_is_silent() -> None:
    assert decide(seen("a b", silent={"a": GONE}, exit_code=0), POLICY).move is NextMove.SUCCEEDED


def test_a_lost_node_and_a_spare_is_a_relaunch() -> None:
    verdict = decide(seen("a b c", "d", {"b": GONE}), POLICY)
    assert (verdict.move, verdict.lost) == (NextMove.RELAUNCH, ("b",))
    assert "b" in verdict.because


def test_where_slurm_took_nodes_and_too_few_are_left_those_that_had_an_agent_are_lost_too() -> None:
    a, b, late = NodeName("a"), NodeName("b"), NodeName("late")
    verdict = too_few(
        AttemptVerdict(move=NextMove.RELAUNCH, because="b is silent", lost=(b,)), (a, b, late), {a, b}
    )
    assert (verdict.move, verdict.kind, verdict.lost) == (NextMove.STRANDED, IncidentKind.JOB_STRANDED, (b, a))
    assert verdict.because == "b is silent; too few nodes are left to the job"


def test_it_makes_no_difference_that_the_ranks_failed_of_it_first() -> None:
    assert decide(seen("a b c", "d", {"b": GONE}, exit_code=1, exited_for_s=9.0), POLICY).move is NextMove.RELAUNCH


@pytest.mark.parametrize(
    ("active", "silent", "alone"),
    [
        ("a b", {"b": DOUBTFUL}, True),
        ("a b", {}, False),
        ("a b", {"a": GONE}, False),  # our own agent: we run, and so does our node
        ("a b c", {"b": GONE}, False),
        ("a b c", {"b": GONE, "c": GONE}, True),
        ("a", {}, False),
    ],
)
def test_who_hears_nobody_beyond_its_own_node_is_alone(
    active: str, silent: dict[str, Silence], alone: bool
) -> None:
    assert is_alone(seen(active, silent=silent, here=NodeName("a")), POLICY) is alone
    assert not is_alone(seen(active, silent=silent), POLICY), "outside of the allocation there is no such node"


def test_a_lost_node_and_no_spare_is_stranded() -> None:
    verdict = decide(seen("a b c", "", {"b": GONE}), POLICY)
    assert (verdict.move, verdict.lost) == (NextMove.STRANDED, ("b",))


def test_a_lost_spare_is_no_reason_to_start_again() -> None:
    verdict = decide(seen("a b c", "d", {"d": GONE}), POLICY)
    assert (verdict.move, verdict.lost) == (NextMove.DROP_SPARES, ("d",))


def test_no_rank_is_put_on_a_node_in_doubt() -> None:
    verdict = decide(seen("a b c d", "e", {"b": GONE, "e": DOUBTFUL}), POLICY)
    assert verdict.move is NextMove.WAIT


def test_an_agent_too_starved_to_answer_is_not_a_lost_node() -> None:
    assert decide(seen("a b c", "d", {"b": STARVED}), POLICY).move is NextMove.CONTINUE


def test_an_agent_that_starves_for_long_is_where_no_rank_makes_a_step_meanwhile() -> None:
    assert decide(seen("a b c", "d", {"b": DEAF}), POLICY).move is NextMove.RELAUNCH
    assert decide(seen("a b c", "d", {"b": DEAF}, stepped_s=70.0), POLICY).move is NextMove.RELAUNCH


def test_steps_that_go_on_clear_a_node_whose_agent_alone_is_silent_however_long() -> None:
    assert decide(seen("a b c", "d", {"b": DEAF}, stepped_s=1.0), POLICY).move is NextMove.CONTINUE
    assert decide(seen("a b c", "d", {"b": GONE}, stepped_s=1.0), POLICY).move is NextMove.RELAUNCH, (
        "two witnesses"
    )


def test_ranks_that_make_no_steps_are_the_second_witness_against_a_silent_agent() -> None:
    verdict = decide(seen("a b c", "d", {"b": STARVED}, hung="no progress"), POLICY)
    assert (verdict.move, verdict.lost) == (NextMove.RELAUNCH, ("b",))


def test_time_out_of_reach_makes_no_agent_starve() -> None:
    back = Silence(answer_s=31.0, contact_s=0.1, question_s=31.2, deaf_s=0.8)
    assert decide(seen("a b c", "", {"b": back}), POLICY).move is NextMove.CONTINUE


def test_agents_that_fall_silent_with_most_others_are_let_be_for_as_long_as_their_machines_answer() -> None:
    verdict = decide(seen("a b c", "", {"a": DEAF, "b": DEAF, "c": DEAF}), POLICY)
    assert (verdict.move, verdict.kind) == (NextMove.WAIT, IncidentKind.AGENTS_SILENT)
    verdict = decide(seen("a b c", "", {"a": DEAF, "b": DEAF, "c": DEAF}, exit_code=5, exited_for_s=40.0), POLICY)
    assert verdict.move is NextMove.RELAUNCH, "the ranks themselves have ended"


def test_a_node_that_booted_anew_has_lost_its_ranks() -> None:
    verdict = decide(seen("a b c", "", {}, rebooted=(NodeName("b"),)), POLICY)
    assert (verdict.move, verdict.cause, verdict.lost) == (NextMove.RELAUNCH, Cause.NODE_LOST, ())
    assert verdict.suspects == ("b",)


def test_most_nodes_silent_at_once_is_not_many_bad_nodes() -> None:
    verdict = decide(seen("a b c", "d", {"a": GONE, "b": GONE, "c": DOUBTFUL}), POLICY)
    assert (verdict.move, verdict.lost) == (NextMove.WAIT, ())


def test_slurms_word_that_they_are_down_ends_the_doubt() -> None:
    lost = {"a": GONE, "b": GONE, "c": GONE}
    told = frozenset(map(NodeName, "abc"))
    assert decide(seen("a b c d", "", lost, taken=told - {"c"}), POLICY).move is not NextMove.WAIT
    verdict = decide(seen("a b c d", "", lost, taken=told), POLICY)
    assert (verdict.move, verdict.lost) == (NextMove.STRANDED, ("a", "b", "c"))
    assert decide(seen("a b c d", "", lost, taken=told, fewest=1), POLICY).move is NextMove.RELAUNCH
    assert decide(seen("a b c d", "", lost | {"d": GONE}, taken={NodeName("a")}), POLICY).move is NextMove.WAIT


def test_but_not_for_ever() -> None:
    lost = Silence(answer_s=61.0, contact_s=61.0, question_s=61.0)
    assert decide(seen("a b c", "d", {"a": lost, "b": lost, "c": lost}), POLICY).move is NextMove.STRANDED


def test_the_node_we_run_on_is_alive_since_we_are() -> None:
    assert decide(seen("a", "", {"a": GONE}, here=NodeName("a")), POLICY).move is NextMove.CONTINUE


@pytest.mark.parametrize("exited_for_s", [0.0, 0.3, 0.6])
def test_failed_ranks_wait_for_an_answer_to_a_question_asked_after_the_failure(exited_for_s: float) -> None:
    answered_before = Silence(answer_s=0.1, contact_s=0.1, question_s=0.7)
    evidence = seen("a b", "", {"b": answered_before}, exit_code=5, exited_for_s=exited_for_s)
    assert decide(evidence, POLICY).move is NextMove.WAIT


def test_but_not_for_longer_than_an_agent_may_be_starved() -> None:
    starved = Silence(answer_s=19.0, contact_s=0.1, question_s=19.2, deaf_s=19.0)
    evidence = seen("a b", "", {"b": starved}, exit_code=5, exited_for_s=18.0)
    assert decide(evidence, POLICY).move is NextMove.WAIT
    longer = Silence(answer_s=20.0, contact_s=0.1, question_s=20.2, deaf_s=20.0)
    assert decide(seen("a b", "", {"b": longer}, exit_code=5, exited_for_s=19.0), POLICY).move is NextMove.RELAUNCH


FAILED = Failed(said="rank 1 on b: exit 5", node=NodeName("b"))


def tried(*setbacks: Setback, **more: Any) -> Tried:
    return Tried(since_progress=setbacks, relaunches=len(setbacks), **more)


def test_ranks_that_fail_once_on_nodes_that_all_answer_are_started_again_elsewhere_if_possible() -> None:
    verdict = decide(seen("a b", exit_code=5, exited_for_s=1.0, failed=FAILED), POLICY)
    assert (verdict.move, verdict.code, verdict.because) == (NextMove.RELAUNCH, 5, "rank 1 on b: exit 5")
    assert (verdict.suspects, verdict.lost, verdict.kind) == (("b",), (), IncidentKind.RANK_FAILED)


def test_the_same_failure_again_without_a_new_step_is_the_applications() -> None:
    again = tried(Setback(Cause.UNKNOWN, 5), best=12)
    verdict = decide(seen("a b", exit_code=5, exited_for_s=1.0, failed=FAILED, tried=again), POLICY)
    assert (verdict.move, verdict.code, verdict.kind) == (NextMove.FAILED, 5, IncidentKind.APPLICATION_FAILED)
    assert verdict.because == "rank 1 on b: exit 5; exit code 5 again at step 12: the application"


@pytest.mark.parametrize(
    ("fewest", "move"), [(None, NextMove.STRANDED), (3, NextMove.STRANDED), (2, NextMove.RELAUNCH)]
)
def test_an_elastic_job_goes_on_with_fewer_nodes(fewest: int | None, move: NextMove) -> None:
    assert decide(seen("a b c", "", {"b": GONE}, fewest=fewest), POLICY).move is move


def test_but_not_while_one_that_would_make_it_whole_is_only_in_doubt() -> None:
    assert decide(seen("a b c d", "e", {"b": GONE, "e": DOUBTFUL}, fewest=1), POLICY).move is NextMove.WAIT


def test_ranks_without_progress_are_started_again() -> None:
    verdict = decide(seen("a b", "c", hung="no progress", suspects=("b",)), POLICY)
    assert (verdict.move, verdict.lost, verdict.suspects) == (NextMove.RELAUNCH, (), ("b",))


def test_nobody_is_said_to_hang_while_a_node_is_in_doubt() -> None:
    assert decide(seen("a b", "c", {"a": DOUBTFUL}, hung="no progress"), POLICY).move is NextMove.WAIT


def test_a_straggler_is_replaced_where_a_spare_is_left() -> None:
    verdict = decide(seen("a b", "c", slow="rank 1 is slow", suspects=("b",)), POLICY)
    assert (verdict.move, verdict.suspects, verdict.kind) == (NextMove.RELAUNCH, ("b",), IncidentKind.STRAGGLER)


@pytest.mark.parametrize(
    "evidence",
    [
        seen("a b", slow="rank 1 is slow", suspects=("b",)),
        seen("a b", "c", {"c": DOUBTFUL}, slow="rank 1 is slow", suspects=("b",)),
        seen("a b", "c", slow="rank 1 is slow", suspects=("b",), tried=tried(Setback(Cause.HANG))),
    ],
)
def test_slow_is_better_than_not_at_all(evidence: AttemptEvidence) -> None:
    assert decide(evidence, POLICY).move is NextMove.CONTINUE


@pytest.mark.parametrize(
    ("evidence", "code"),
    [
        (seen("a b c", "d", {"b": GONE}, tried=tried(Setback(Cause.HANG), Setback(Cause.HANG))), AGAIN_CODE),
        (seen("a b c", hung="no progress", tried=tried(Setback(Cause.NODE_LOST), Setback(Cause.HANG))), 1),
    ],
)
def test_again_and_again_from_one_point_is_given_up(evidence: AttemptEvidence, code: int) -> None:
    verdict = decide(evidence, POLICY)
    assert (verdict.move, verdict.code) == (NextMove.FAILED, code)
    assert "giving up" in verdict.because


seconds = st.floats(0, 200)


@st.composite
def evidences(draw: st.DrawFn) -> AttemptEvidence:
    nodes = [NodeName(f"n{number}") for number in range(draw(st.integers(1, 6)))]
    active = draw(st.integers(1, len(nodes)))
    silence = {}
    for node in nodes:
        answer = draw(seconds)
        silence[node] = Silence(
            answer,
            draw(st.floats(0, answer)),
            answer + draw(st.floats(0, 4)),
            deaf_s=draw(st.floats(0, answer)),
        )
    return AttemptEvidence(
        active=tuple(nodes[:active]),
        spares=tuple(nodes[active:]),
        silence=silence,
        exit_code=draw(st.none() | st.integers(0, 255)),
        exited_for_s=draw(seconds),
        stepped_s=draw(seconds),
        hung=draw(st.sampled_from(["", "no progress"])),
        slow=draw(st.sampled_from(["", "slow"])),
        fewest=draw(st.none() | st.integers(1, active)),
        tried=Tried(
            since_progress=tuple(
                Setback(*one)
                for one in draw(st.lists(st.tuples(st.sampled_from(Cause), st.integers(0, 3)), max_size=3))
            )
        ),
    )


@given(evidences())
def test_what_holds_of_every_verdict(evidence: AttemptEvidence) -> None:
    verdict = decide(evidence, POLICY)
    for silence in (evidence.silence[node] for node in verdict.lost):
        assert silence.answer_s >= POLICY.silence_s, "an agent that answers clears its node"
        witnesses = (silence.contact_s >= POLICY.silence_s) + bool(evidence.hung)
        assert witnesses or silence.deaf_s >= POLICY.brake_s
    if verdict.move is NextMove.RELAUNCH:
        left = [node for node in evidence.silence if node not in verdict.lost]
        assert len(left) >= (evidence.fewest or len(evidence.active)), "there are nodes to run on"
        assert len(evidence.tried.since_progress) < POLICY.limits.most_fruitless
    if verdict.move in {NextMove.RELAUNCH, NextMove.FAILED, NextMove.STRANDED}:
        assert verdict.kind
        assert verdict.cause
    if verdict.move is NextMove.SUCCEEDED:
        assert evidence.exit_code == 0
    if verdict.move is NextMove.FAILED:
        assert verdict.code
    if verdict.move is not NextMove.CONTINUE and verdict.move is not NextMove.SUCCEEDED:
        assert verdict.because
