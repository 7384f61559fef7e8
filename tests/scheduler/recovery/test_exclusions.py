"""Exclusions: bounded, known to the cluster, and forgotten when there is no reason for them any more."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from deeplink.core.finding import Finding, Severity
from deeplink.core.types import NodeName
from deeplink.scheduler.recovery.records import NodeRecord
from deeplink.scheduler.recovery.recovery_steps import (
    KEPT_OFF_S,
    LEAST,
    LOOKED_AT_S,
    bounded,
    required_without,
    still_suspected,
)
from deeplink.scheduler.slurm.parse import JobPlace, NodeRow
from deeplink.scheduler.slurm.states import NodeFlag, NodeState


def named(*numbers: int) -> tuple[NodeName, ...]:
    return tuple(NodeName(f"n{number}") for number in numbers)


def cluster(count: int, down: frozenset[int] = frozenset()) -> dict[NodeName, NodeRow]:
    return {
        name: NodeRow(
            name=name,
            address=name,
            host=name,
            port=None,
            state=NodeState.DOWN if number in down else NodeState.IDLE,
            flags=frozenset[NodeFlag](),
            reason="",
            reason_by="",
            boot_time="",
            gpus=0,
        )
        for number, name in enumerate(named(*range(count)))
    }


def place(nodes: int, excluded: tuple[NodeName, ...] = (), required: tuple[NodeName, ...] = ()) -> JobPlace:
    return JobPlace(partitions=("main",), nodes=nodes, excluded=excluded, required=required)


def test_at_most_a_tenth_of_the_partition_is_excluded_the_first_ones_first() -> None:
    nodes = cluster(80)
    assert bounded(named(*range(40, 70)), place(8), frozenset(nodes), nodes) == named(*range(40, 48))


def test_never_so_many_that_the_job_could_not_start() -> None:
    nodes = cluster(8)
    assert bounded(named(1, 2, 3), place(6), frozenset(nodes), nodes) == named(1, 2)
    assert bounded(named(1, 2, 3), place(6, excluded=named(7)), frozenset(nodes), nodes) == named(1)
    assert bounded(named(1), place(8), frozenset(nodes), nodes) == ()


def test_nodes_that_slurm_has_given_up_take_no_room() -> None:
    nodes = cluster(8, down=frozenset({1, 2}))
    assert bounded(named(1, 2, 3), place(6), frozenset(nodes), nodes) == named(1, 2)


def test_a_whole_leaf_that_is_cut_off_is_left_out_however_large() -> None:
    nodes = cluster(64)
    leaf = named(*range(32))
    assert bounded(leaf, place(8), frozenset(nodes), nodes, frozenset(leaf)) == leaf
    assert bounded(leaf, place(8), frozenset(nodes), nodes, frozenset(leaf[:20])) == leaf[:26]


def test_names_that_the_cluster_does_not_know_are_left_out() -> None:
    nodes = cluster(8)
    assert bounded((NodeName("gone"), *named(1, 1)), place(2), frozenset(nodes), nodes) == named(1)


@given(
    count=st.integers(1, 60),
    asked=st.integers(0, 60),
    wanted=st.lists(st.integers(0, 70)),
    users=st.sets(st.integers(0, 59)),
    down=st.frozensets(st.integers(0, 59)),
)
def test_what_is_left_is_enough_for_the_job_if_it_was_before(
    count: int, asked: int, wanted: list[int], users: set[int], down: frozenset[int]
) -> None:
    nodes = cluster(count, down)
    job = place(asked, excluded=named(*sorted(users)))
    ours = bounded(named(*wanted), job, frozenset(nodes), nodes)
    assert len([name for name in ours if not nodes[name].down and name not in job.excluded]) <= max(
        LEAST, count // 10
    )
    assert set(ours) <= set(nodes) & set(named(*wanted))
    serving = {name for name, row in nodes.items() if not row.down} - set(job.excluded)
    if len(serving) >= asked:
        assert len(serving - set(ours)) >= asked


def test_a_suspicion_ends_after_an_hour_or_when_the_node_is_found_well() -> None:
    since = dict(zip(named(1, 2, 3, 4), (100.0, 200.0, 300.0, 400.0), strict=True))
    well = NodeRecord(name=NodeName("n2"), seen_unix=201.0 + LOOKED_AT_S)
    sick = replace(
        well,
        name=NodeName("n3"),
        seen_unix=900.0,
        health=(Finding(check="disk", severity=Severity.WARNING, text="slow"),),
    )
    early = replace(well, name=NodeName("n4"), seen_unix=401.0)
    told = {node.name: node for node in (well, sick, early)}
    assert still_suspected(since, told, 500.0) == named(4, 3, 1)
    assert still_suspected(since, told, 100.0 + KEPT_OFF_S) == named(4, 3)
    assert still_suspected(since, told, 400.0 + KEPT_OFF_S) == ()
    silent = replace(well, silent_s=50.0)
    assert named(2)[0] in still_suspected(since, {silent.name: silent}, 500.0), "seen last before the suspicion"


def test_all_its_nodes_named_bind_it_no_more_and_of_some_the_rest_stays() -> None:
    assert required_without(place(2, required=named(1, 2)), {*named(3)}) is None
    assert required_without(place(2, required=named(1, 2)), {*named(2)}) == ()
    assert required_without(place(3, required=named(1, 2)), {*named(2)}) == named(1)
    assert required_without(place(3, required=named(2)), {*named(2)}) == ()
