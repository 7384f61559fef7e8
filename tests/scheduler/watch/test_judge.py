"""Evidence to verdict: tables of cases, and what must hold whatever is seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deeplink.scheduler.slurm.states import JobState
from deeplink.scheduler.watch.evidence import Answer, JobSight, NodeSight, Policy, Sight, targets, tense
from deeplink.scheduler.watch.judge import judge
from deeplink.scheduler.watch.records import Kind, Phase
from deeplink.scheduler.watch.verdict import Remedy, Verdict
from deeplink.types import Attempt, NodeName

POLICY = Policy()
NAMES = tuple(NodeName(f"n{number}") for number in range(8))
ACTS = {Remedy.DRAIN, Remedy.DRAIN_DOWN, Remedy.RESTART}


def up(name: str) -> NodeSight:
    return NodeSight(
        name=NodeName(name), leaf=f"leaf{int(name[1:]) // 4}", slurmd=Answer.ANSWERS, answering_s=5.0, idle=True
    )


def gone(name: str, away_s: float = 4.0, answer: Answer = Answer.SILENT) -> NodeSight:
    return replace(
        up(name), slurmd=answer, away_s=away_s, away_probes=int(away_s / 0.5), answering_s=0.0, idle=False
    )


def cluster(*others: NodeSight) -> dict[NodeName, NodeSight]:
    return {name: up(name) for name in NAMES} | {node.name: node for node in others}


def job(**changes: object) -> JobSight:
    """A job on n0, n1 and n4, all well, its batch host n0."""
    well = JobSight(
        attempt=Attempt(17, 0, 0),
        phase=Phase.RUNNING,
        state=JobState.RUNNING,
        nodes=(NAMES[0], NAMES[1], NAMES[4]),
        rank_nodes=(NAMES[0], NAMES[1], NAMES[4]),
        batch_host=NAMES[0],
        beat_age_s=0.5,
        agents_silent={NAMES[0]: 0.1, NAMES[1]: 0.1, NAMES[4]: 0.1},
        progress_age_s=0.5,
        step_timeout_s=10.0,
    )
    return replace(well, **changes)  # type: ignore[arg-type] # each test names fields of JobSight


def missing(name: NodeName, silent_s: float = 4.0) -> Mapping[NodeName, float]:
    return {**job().agents_silent, name: silent_s}


STRANDED = job(phase=Phase.STRANDED, agents_silent=missing(NAMES[1]))


def brief(verdicts: tuple[Verdict, ...]) -> list[tuple[str, str, str]]:
    return [(verdict.kind, verdict.node or verdict.leaf, verdict.remedy) for verdict in verdicts]


CASES: dict[str, tuple[Sight, list[tuple[str, str, str]]]] = {
    "all is well": (Sight(jobs=(job(),), nodes=cluster()), []),
    "nothing was looked at": (Sight(jobs=(STRANDED,), nodes={}), []),
    "a dead node strands its job": (
        Sight(jobs=(STRANDED,), nodes=cluster(gone("n1"))),
        [("node-dead", "n1", "drain-down"), ("job-stranded", "n1", "restart")],
    ),
    "a host that refuses and whose agent is missed is dead too": (
        Sight(jobs=(STRANDED,), nodes=cluster(gone("n1", answer=Answer.REFUSES))),
        [("node-dead", "n1", "drain-down"), ("job-stranded", "n1", "restart")],
    ),
    "the launcher still recovers by itself: the node is kept from others, no more": (
        Sight(jobs=(job(phase=Phase.RECOVERING, agents_silent=missing(NAMES[1])),), nodes=cluster(gone("n1"))),
        [("node-dead", "n1", "drain")],
    ),
    "the probe alone is no proof": (Sight(jobs=(job(),), nodes=cluster(gone("n1"))), []),
    "the launcher alone is no proof, and a requeue would hang": (
        Sight(jobs=(STRANDED,), nodes=cluster(replace(up("n1"), slurmd=Answer.UNKNOWN))),
        [],
    ),
    "silent for too short a time": (Sight(jobs=(STRANDED,), nodes=cluster(gone("n1", away_s=1.0))), []),
    "missed for too short a time": (
        Sight(jobs=(replace(STRANDED, agents_silent=missing(NAMES[1], 2.0)),), nodes=cluster(gone("n1"))),
        [],
    ),
    "slurmd is dead, its job lives": (
        Sight(jobs=(job(),), nodes=cluster(replace(gone("n1", answer=Answer.REFUSES), responding=False))),
        [],
    ),
    "the batch host dies, and the launcher with it": (
        Sight(jobs=(job(beat_age_s=4.0),), nodes=cluster(gone("n0"))),
        [("node-dead", "n0", "drain-down"), ("launcher-lost", "n0", "restart")],
    ),
    "the launcher is silent, every node answers: not at once": (
        Sight(jobs=(job(beat_age_s=10.0),), nodes=cluster()),
        [],
    ),
    "the launcher is silent for long, every node answers": (
        Sight(jobs=(job(beat_age_s=25.0),), nodes=cluster()),
        [("launcher-lost", "", "restart")],
    ),
    "a launcher not heard since we came back may have ended meanwhile": (
        Sight(jobs=(job(beat_age_s=25.0, heard=False),), nodes=cluster()),
        [],
    ),
    "but one whose host is dead did not": (
        Sight(jobs=(job(beat_age_s=4.0, heard=False),), nodes=cluster(gone("n0"))),
        [("node-dead", "n0", "drain-down"), ("launcher-lost", "n0", "restart")],
    ),
    "stranded though every node answers": (
        Sight(jobs=(STRANDED,), nodes=cluster()),
        [("job-stranded", "", "restart")],
    ),
    "the ranks hang": (
        Sight(jobs=(job(progress_age_s=14.0),), nodes=cluster()),
        [("ranks-hung", "", "restart")],
    ),
    "the ranks hang, or a node is lost: wait for proof": (
        Sight(jobs=(job(progress_age_s=14.0),), nodes=cluster(gone("n1", away_s=0.5))),
        [],
    ),
    "no step yet: it may be importing": (Sight(jobs=(job(progress_age_s=None),), nodes=cluster()), []),
    "steps are not watched": (Sight(jobs=(job(progress_age_s=900.0, step_timeout_s=0.0),), nodes=cluster()), []),
    "a whole leaf is silent: the switch is named, no node is touched": (
        Sight(jobs=(STRANDED,), nodes=cluster(gone("n0"), gone("n1"), gone("n2"), gone("n3"))),
        [("switch-suspect", "leaf0", "nothing")],
    ),
    "a mate drained by us before does not make it a switch": (
        Sight(
            jobs=(STRANDED,),
            nodes=cluster(
                *(replace(gone(name), ours=True, drained=True) for name in ("n0", "n2", "n3")), gone("n1")
            ),
        ),
        [("node-dead", "n1", "drain-down")],
    ),
    "most are silent: it is us": (
        Sight(jobs=(STRANDED,), nodes=cluster(*(gone(name) for name in NAMES[:5]))),
        [("self-in-doubt", "", "nothing")],
    ),
    "the controller does not answer": (
        Sight(jobs=(STRANDED,), nodes=cluster(gone("n1")), controller=False, controller_problem="frozen"),
        [("self-in-doubt", "", "nothing")],
    ),
    "every launcher is silent though their hosts answer: our ears": (
        Sight(jobs=(job(beat_age_s=30.0), job(attempt=Attempt(18, 0, 0), beat_age_s=30.0)), nodes=cluster()),
        [("self-in-doubt", "", "nothing")],
    ),
    "a stranger's job runs on the dead node: not downed": (
        Sight(jobs=(STRANDED,), nodes=cluster(replace(gone("n1"), strangers=1))),
        [("node-dead", "n1", "drain"), ("job-stranded", "n1", "restart")],
    ),
    "more dead than can be believed: the brake": (
        Sight(jobs=(STRANDED,), nodes=cluster(gone("n1")), dead_lately=frozenset({NAMES[5], NAMES[6]})),
        [("node-dead", "n1", "nothing")],
    ),
    "a job that Slurm started anew and that has not beaten yet": (
        Sight(jobs=(replace(STRANDED, restarts=1),), nodes=cluster(gone("n1"))),
        [],
    ),
    "requeued by Slurm and held, because of what went wrong": (
        Sight(
            jobs=(job(state=JobState.PENDING, restarts=1, nodes=(), reason="BeginTime", rescued=True),),
            nodes=cluster(),
        ),
        [("requeue-held", "", "restart")],
    ),
    "requeued by its user: his business": (
        Sight(jobs=(job(state=JobState.PENDING, restarts=1, nodes=(), reason="BeginTime"),), nodes=cluster()),
        [],
    ),
    "may not be requeued": (
        Sight(jobs=(replace(STRANDED, requeueable=False),), nodes=cluster()),
        [("job-stranded", "", "nothing")],
    ),
    "ended": (Sight(jobs=(replace(STRANDED, phase=Phase.FAILED),), nodes=cluster(gone("n1"))), []),
}


@pytest.mark.parametrize("case", CASES)
def test_each_case_has_its_verdict(case: str) -> None:
    sight, expected = CASES[case]
    assert brief(judge(sight, POLICY)) == expected


def test_a_hung_job_leaves_all_its_nodes_when_there_is_room_elsewhere_and_none_when_there_is_not() -> None:
    hung = job(progress_age_s=14.0)
    (verdict,) = judge(Sight(jobs=(hung,), nodes=cluster()), POLICY)
    assert verdict.exclude == hung.nodes
    busy = {name: replace(node, idle=False) for name, node in cluster().items()}
    (verdict,) = judge(Sight(jobs=(hung,), nodes=busy), POLICY)
    assert verdict.exclude == ()
    (verdict,) = judge(Sight(jobs=(replace(hung, suspects=(NAMES[4],)),), nodes=cluster()), POLICY)
    assert verdict.exclude == (NAMES[4],)


def test_by_policy_the_nodes_of_a_silent_leaf_are_given_up_in_the_leafs_name() -> None:
    nodes = {name: node for name, node in cluster().items() if name != NAMES[3]}
    wide = nodes | {NodeName(f"m{number}"): replace(up("n4"), name=NodeName(f"m{number}")) for number in range(4)}
    away = wide | {name: gone(name) for name in NAMES[:3]}
    verdicts = judge(Sight(jobs=(STRANDED,), nodes=away), replace(POLICY, act_on_switch=True))
    assert brief(verdicts) == [
        ("switch-suspect", "leaf0", "nothing"),
        ("switch-suspect", "n0", "drain-down"),
        ("switch-suspect", "n1", "drain-down"),
        ("job-stranded", "n0", "restart"),
    ]
    assert all("leaf0" in " ".join(verdict.reasons) for verdict in verdicts[:3])


def test_only_nodes_that_we_drained_come_back_and_only_by_policy() -> None:
    back = replace(up("n1"), drained=True, answering_s=11.0)
    ours = Sight(nodes=cluster(replace(back, ours=True)))
    assert judge(ours, POLICY) == ()
    assert brief(judge(ours, replace(POLICY, resume=True))) == [("node-back", "n1", "resume")]
    assert judge(Sight(nodes=cluster(back)), replace(POLICY, resume=True)) == ()
    too_soon = replace(back, ours=True, answering_s=3.0)
    assert judge(Sight(nodes=cluster(too_soon)), replace(POLICY, resume=True)) == ()


def test_one_node_one_incident_whichever_verdict_names_it() -> None:
    verdicts = judge(Sight(jobs=(STRANDED,), nodes=cluster(gone("n1"))), POLICY)
    assert {verdict.incident for verdict in verdicts} == {"17.0.0-node-dead-n1"}
    assert len({verdict.key for verdict in verdicts}) == 2


def test_in_calm_nobody_is_probed_and_under_suspicion_neighbours_and_others_too() -> None:
    assert tense((job(),), POLICY) == ()
    assert targets((), cluster(), POLICY) == ()
    suspicious = tense((job(agents_silent=missing(NAMES[4], 0.8), nodes=(NAMES[4],)),), POLICY)
    assert len(suspicious) == 1
    probed = targets(suspicious, cluster(), POLICY)
    assert set(NAMES[4:]) <= set(probed), "the whole leaf"
    assert set(NAMES[:4]) & set(probed), "and somebody elsewhere"


answers = st.sampled_from(list(Answer))
seconds = st.floats(0, 60)
ages = st.floats(0, 60)


@st.composite
def nodes_seen(draw: st.DrawFn) -> dict[NodeName, NodeSight]:
    seen = {}
    for name in NAMES:
        answer = draw(answers)
        seen[name] = NodeSight(
            name=name,
            leaf=draw(st.sampled_from(["", "leaf0", "leaf1"])),
            slurmd=answer,
            away_s=draw(seconds) if answer.away else 0.0,
            away_probes=draw(st.integers(0, 20)) if answer.away else 0,
            responding=draw(st.booleans()),
            down=draw(st.booleans()),
            drained=draw(st.booleans()),
            ours=draw(st.booleans()),
            idle=draw(st.booleans()),
            strangers=draw(st.integers(0, 1)),
        )
    return seen


@st.composite
def jobs_seen(draw: st.DrawFn) -> JobSight:
    nodes = tuple(draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True)))
    return JobSight(
        attempt=Attempt(draw(st.integers(1, 3)), 0, 0),
        phase=draw(st.sampled_from(list(Phase))),
        state=draw(st.sampled_from([JobState.RUNNING, JobState.PENDING, JobState.COMPLETED, JobState.COMPLETING])),
        nodes=nodes,
        rank_nodes=nodes,
        batch_host=nodes[0],
        beat_age_s=draw(ages),
        restarts=draw(st.integers(0, 1)),
        agents_silent=draw(st.dictionaries(st.sampled_from(NAMES), seconds)),
        progress_age_s=draw(st.none() | seconds),
        step_timeout_s=draw(st.sampled_from([0.0, 5.0])),
        heard=draw(st.booleans()),
        rescued=draw(st.booleans()),
        reason=draw(st.sampled_from(["", "BeginTime", "Resources"])),
    )


sights = st.builds(
    Sight,
    jobs=st.lists(jobs_seen(), max_size=2).map(tuple),
    nodes=nodes_seen(),
    controller=st.booleans(),
    dead_lately=st.frozensets(st.sampled_from(NAMES), max_size=2),
)
policies = st.sampled_from([POLICY, replace(POLICY, act_on_switch=True, resume=True)])


@settings(deadline=None, max_examples=100)
@given(sight=sights, policy=policies)
def test_nothing_is_done_while_we_are_in_doubt(sight: Sight, policy: Policy) -> None:
    tried = [node for node in sight.nodes.values() if node.slurmd is not Answer.UNKNOWN and not node.down]
    mostly_away = sum(node.slurmd.away for node in tried) * 2 > len(tried)
    verdicts = judge(sight, policy)
    if mostly_away or not sight.controller:
        assert all(verdict.remedy is Remedy.NOTHING for verdict in verdicts)
        assert [verdict.kind for verdict in verdicts] == [Kind.SELF_IN_DOUBT]


@settings(deadline=None, max_examples=100)
@given(sight=sights, policy=policies)
def test_no_node_is_condemned_that_was_not_tried_or_that_answers(sight: Sight, policy: Policy) -> None:
    for verdict in judge(sight, policy):
        if verdict.remedy in {Remedy.DRAIN, Remedy.DRAIN_DOWN} and verdict.node:
            node = sight.nodes[verdict.node]
            assert node.slurmd.away
            assert node.away_probes >= policy.away_probes
            assert not node.down
            assert any(verdict.node in seen.nodes and not seen.phase.ended for seen in sight.jobs)
            assert verdict.remedy is Remedy.DRAIN or not node.strangers


@settings(deadline=None, max_examples=100)
@given(sight=sights, policy=policies)
def test_no_job_is_requeued_while_a_node_of_it_may_hang(sight: Sight, policy: Policy) -> None:
    verdicts = judge(sight, policy)
    condemned = {verdict.node for verdict in verdicts if verdict.remedy in ACTS}
    for verdict in verdicts:
        if verdict.remedy is Remedy.RESTART and verdict.kind is not Kind.REQUEUE_HELD:
            candidates = [seen for seen in sight.jobs if seen.attempt == verdict.attempt and seen.running]
            assert any(
                all(
                    name in condemned or sight.nodes[name].down or sight.nodes[name].slurmd is Answer.ANSWERS
                    for name in seen.nodes
                )
                for seen in candidates
            )


@settings(deadline=None, max_examples=80)
@given(sight=sights)
def test_more_silence_never_clears_a_node(sight: Sight) -> None:
    before = {verdict.node for verdict in judge(sight, POLICY) if verdict.kind is Kind.NODE_DEAD}
    longer = {
        name: replace(node, away_s=node.away_s + 5, away_probes=node.away_probes + 5) if node.slurmd.away else node
        for name, node in sight.nodes.items()
    }
    after = judge(replace(sight, nodes=longer), POLICY)
    blamed = {verdict.node for verdict in after if verdict.kind is Kind.NODE_DEAD}
    assert before <= blamed
