"""What is done about a waiting job's hint, rule by rule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deeplink.core.types import JobId, NodeName
from deeplink.scheduler.placement.hint.cluster_survey import WAIT_S, Row
from deeplink.scheduler.placement.hint.decision import Ask, Decision, HintKind, Why
from deeplink.scheduler.placement.hint.reconcile import (
    ASKED_AGAIN_S,
    MOST_REFUSALS,
    Deed,
    HintChange,
    Memory,
    Mine,
    SurveyedCluster,
    plan,
)
from deeplink.scheduler.slurm.states import JobState
from tests.scheduler.placement.hint.simulated import NODES, NOTHING, SITE, survey_of

ASK = Ask(nodes=2, exclusive=True)
N0, N1, N4 = NODES[0], NODES[1], NODES[4]  # n0 and n4 are of one leaf
PIN = Decision(kind=HintKind.NODES, why=Why.FREE_NOW, words="", nodes=(N0, N4))
FEW = Decision(kind=HintKind.SWITCHES, why=Why.BUSY, words="", switches=1, patience_s=60)
MARK = "deeplink-wish=n[0,4]"
BACK = {"ReqNodeList": "", "Comment": ""}
NOW = 1_000.0


def row(number: int = 7, *, reason: str = "Priority", priority: int = 5, nodes: int = 2, **more: object) -> Row:
    facts: dict[str, object] = {
        "label": str(number),
        "user": "me",
        "partitions": ("main",),
        "required": frozenset(),
        "excluded": frozenset(),
        "planned": frozenset(),
        "reservation": "",
        "state": JobState.PENDING,
    }
    facts |= more
    return Row(id=JobId(number), reason=reason, priority=priority, nodes=nodes, **facts)  # type: ignore[arg-type]


def mine(found: Row, wish: Decision = NOTHING, ask: Ask = ASK, memory: Memory | None = None) -> Mine:
    return Mine(row=found, ask=ask, wish=wish, wished_at=NOW, memory=memory or Memory())


def moved(
    job: Mine, *others: Row, busy: set[NodeName] | None = None, planned: set[NodeName] | None = None
) -> HintChange:
    survey = survey_of(busy or set(), planned or set())
    return plan([job], [job.row, *others], survey, NOW)[0]


def pinned(**more: object) -> Mine:
    return mine(row(required=frozenset(PIN.nodes), comment=MARK, **more), PIN)  # type: ignore[arg-type]


def test_the_best_free_nodes_are_wished_for_a_job_that_slurm_has_not_come_to() -> None:
    move = moved(mine(row()), busy={NODES[2]})
    assert move.deed is Deed.PIN
    assert len({SITE.slurm.leaf(node) for node in move.decision.nodes}) == 1
    assert move.fields == {"ReqNodeList": "n[0,4]", "Comment": "deeplink-wish=n[0,4]"}


def test_nothing_is_wished_where_slurms_own_choice_is_as_good() -> None:
    move = moved(mine(row()), busy=set(NODES[1:4]))  # the first two that are free are n0 and n4
    assert (move.deed, move.decision.why) == (Deed.LEAVE, Why.AS_GOOD)


def test_slurm_is_asked_for_its_own_choice_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    move = moved(mine(row()), busy=set(NODES[1:4]))
    monkeypatch.setattr(SurveyedCluster, "best", None)
    again = replace(mine(row(), move.decision), memory=move.memory)
    assert moved(again, busy=set(NODES[1:4])).decision == move.decision
    late = replace(again, memory=replace(move.memory, asked_at=NOW - ASKED_AGAIN_S))
    with pytest.raises(TypeError):
        moved(late, busy=set(NODES[1:4]))


def test_a_job_of_one_node_takes_the_one_that_slurm_gives_it() -> None:
    move = moved(mine(row(nodes=1), ask=replace(ASK, nodes=1)))
    assert (move.deed, move.decision.why) == (Deed.LEAVE, Why.NOTHING_TO_GAIN)


def test_a_job_whose_user_wants_no_wish_gets_none() -> None:
    off = replace(ASK, no_wish="--deeplink-place=off")
    assert moved(mine(row(), ask=off)).deed is Deed.LEAVE


def test_nodes_named_for_a_job_before_it_are_left_to_that() -> None:
    first = row(3, priority=9, required=frozenset({N0, N4}))
    move = moved(mine(row()), first)
    assert move.deed is Deed.PIN
    assert not set(move.decision.nodes) & {N0, N4}


def test_nothing_is_wished_where_there_is_no_choice_or_too_few_are_free() -> None:
    assert moved(mine(row()), busy=set(NODES[2:])).decision.why is Why.NOTHING_TO_GAIN
    left = moved(mine(row()), busy=set(NODES[1:]))
    assert (left.deed, left.decision.why, left.fields) == (Deed.LEAVE, Why.BUSY, {})


def test_a_wish_stays_while_its_nodes_are_free_and_slurm_has_not_looked() -> None:
    assert moved(pinned(reason="")).deed is Deed.LEAVE


@pytest.mark.parametrize("reason", ["Resources", "ReqNodeNotAvail, May be reserved for other job"])
def test_a_wish_that_slurm_did_not_fulfil_is_dropped_and_not_made_again_at_once(reason: str) -> None:
    move = moved(pinned(reason=reason))
    assert (move.deed, move.fields) == (Deed.DROP, BACK)
    again = moved(mine(row(reason=reason), move.decision, memory=move.memory))
    assert (again.deed, again.decision.why) == (Deed.LEAVE, Why.LATER_WITH_IT)


def test_a_wish_that_cannot_be_met_is_dropped_before_slurm_gives_the_job_up() -> None:
    move = moved(pinned(reason="BadConstraints", priority=0))
    assert move.fields == BACK


def test_a_wish_that_slurm_does_not_look_at_does_not_stand_for_ever() -> None:
    job = replace(pinned(reason=""), wished_at=NOW - WAIT_S)
    assert moved(job).deed is Deed.DROP


def test_nodes_kept_for_a_job_before_it_are_not_wished_and_given_up() -> None:
    first = row(3, priority=9, nodes=4, reason="Resources", planned=frozenset({N0, N1, N4, NODES[5]}))
    kept = {N0, N1, N4, NODES[5]}
    move = moved(mine(row()), first, planned=kept)
    assert move.deed is Deed.PIN
    assert not set(move.decision.nodes) & kept


def test_behind_a_job_that_may_be_given_any_node_nothing_is_wished() -> None:
    first = row(3, priority=9, reason="Resources", user="other")
    move = moved(mine(row()), first)
    assert (move.deed, move.decision.why) == (Deed.LEAVE, Why.STARTS_LATER)
    held = row(3, priority=9, reason="Dependency")
    assert moved(mine(row()), held).deed is Deed.PIN


def test_a_job_of_another_partition_may_come_first_whatever_its_priority() -> None:
    other = row(3, priority=1, partitions=("high",), reason="Resources")
    assert moved(mine(row()), other).deed is Deed.LEAVE
    behind = row(9, priority=1, reason="Priority")
    assert moved(mine(row()), behind).deed is Deed.PIN


def test_two_jobs_of_ours_are_never_wished_one_node() -> None:
    jobs = [mine(row(number)) for number in (7, 8, 9)]
    moves = plan(jobs, [job.row for job in jobs], survey_of(set()), NOW)
    named = [node for move in moves for node in move.decision.nodes]
    assert len(named) == len(set(named)) >= 4


def test_few_switches_are_dropped_at_sight_and_so_that_slurm_lets_the_job_go() -> None:
    move = moved(mine(row(reason="Resources"), FEW), busy=set(NODES[2:]))
    assert (move.deed, move.fields) == (Deed.DROP, {"Switches": "2@00:00:00"})
    assert move.decision.kind is HintKind.NOTHING
    better = moved(mine(row(reason="Resources"), FEW))
    assert better.fields == {"ReqNodeList": "n[0,4]", "Comment": MARK, "Switches": "2@00:00:00"}


def test_who_asked_for_patience_gets_it_from_when_nodes_were_free() -> None:
    patient = replace(ASK, patience_s=30)
    free = set(NODES[2:])
    early = moved(mine(row(reason="Resources"), FEW, patient), busy=free)
    assert early.deed is Deed.LEAVE
    assert early.memory.enough_since == NOW
    late = mine(row(reason="Resources"), FEW, patient, Memory(enough_since=NOW - 31))
    assert moved(late, busy=free).deed is Deed.DROP
    assert moved(mine(row(), FEW, patient), busy=set(NODES)).memory.enough_since is None


def test_what_somebody_else_named_is_left_alone() -> None:
    move = moved(mine(row(required=frozenset({N1})), PIN))
    assert (move.deed, move.fields) == (Deed.LEAVE, {})


@pytest.mark.parametrize(
    "odd",
    [{"label": "7+1"}, {"reservation": "r"}, {"partitions": ("main", "high")}, {"nodes": 3}],
    ids=str,
)
def test_what_is_not_understood_has_no_wish(odd: dict[str, object]) -> None:
    plain = moved(mine(row(**odd)))  # type: ignore[arg-type]
    assert (plain.deed, plain.decision.why) == (Deed.LEAVE, Why.NOT_UNDERSTOOD)
    assert moved(pinned(**odd)).deed is Deed.DROP


def test_tasks_of_an_array_wait_for_no_switches_and_get_no_nodes_by_name() -> None:
    tasks = {"label": "7_[1-4]"}
    assert moved(mine(row(**tasks))).deed is Deed.LEAVE  # type: ignore[arg-type]
    assert moved(mine(row(**tasks), FEW)).fields == {"Switches": "2@00:00:00"}  # type: ignore[arg-type]


def test_a_job_that_waits_for_something_else_keeps_no_nodes() -> None:
    move = moved(pinned(reason="Dependency"))
    assert (move.deed, move.decision.why) == (Deed.DROP, Why.STARTS_LATER)
    assert moved(mine(row(reason="QOSMaxNodePerUserLimit"))).deed is Deed.LEAVE


def test_a_job_whose_changes_slurm_refuses_gets_no_more_wishes() -> None:
    assert moved(mine(row(), memory=Memory(refusals=MOST_REFUSALS))).deed is Deed.LEAVE


def test_what_can_never_run_has_no_wish() -> None:
    move = moved(mine(row(nodes=9), ask=replace(ASK, nodes=9)))
    assert (move.deed, move.decision.why) == (Deed.LEAVE, Why.IMPOSSIBLE)
