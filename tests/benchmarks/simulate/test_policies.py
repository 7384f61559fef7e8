"""Who chooses which nodes, in a state where they differ."""

from __future__ import annotations

import random

import pytest

from benchmarks.simulate.floor import Floor
from benchmarks.simulate.policies import SchedulingPolicy, chooser
from benchmarks.simulate.state import FreeGpuState, JobShape
from deeplink.core.types import NodeName
from deeplink.scheduler.placement.request import PlacementCluster, PlacementRequest
from deeplink.scheduler.placement.search import place
from deeplink.scheduler.topology.graph import Fabric
from deeplink.scheduler.topology.rank_order import ring_crossings

PART, WIDE = JobShape(1, 1, whole=False), JobShape(4, 4, whole=True)


def state() -> FreeGpuState:
    """Three leaves of four nodes, names dealt over them; n0 half full, n5 full but for one GPU."""
    names = [NodeName(f"n{number}") for number in range(12)]
    fabric = Fabric({name: ("core", f"leaf{number % 3}") for number, name in enumerate(names)})
    found = FreeGpuState(Floor(names, fabric), [4] * 12)
    found.take(1 << 0, JobShape(1, 2, whole=False))
    found.take(1 << 5, JobShape(1, 3, whole=False))
    return found


def chosen(policy: SchedulingPolicy, shape: JobShape, shut: int = 0) -> tuple[NodeName, ...]:
    there = state()
    nodes = chooser(policy, random.Random(1)).choose(there, shape, shut)  # noqa: S311
    assert nodes is not None
    return there.floor.names(nodes)


def test_pack_takes_the_fullest_node_and_slurm_the_first_of_the_tightest_leaf() -> None:
    assert chosen(SchedulingPolicy.PACK, PART) == ("n5",)
    assert chosen(SchedulingPolicy.SLURM_TREE, PART) == ("n0",)


def test_deeplink_opens_no_idle_node_for_a_part_of_one() -> None:
    assert chosen(SchedulingPolicy.DEEPLINK, PART)[0] in {"n0", "n5"}


def test_wide_jobs_by_name_or_on_the_leaf_that_has_room() -> None:
    assert chosen(SchedulingPolicy.PACK, WIDE) == ("n1", "n2", "n3", "n4")
    assert (
        chosen(SchedulingPolicy.SLURM_TREE, WIDE)
        == chosen(SchedulingPolicy.DEEPLINK, WIDE)
        == ("n1", "n4", "n7", "n10")
    )


def test_deeplink_is_what_production_chooses() -> None:
    there = state()
    cluster = PlacementCluster(fabric=there.floor.fabric, rooms=there.rooms)
    shut = there.floor.chosen([NodeName("n1")])
    request = PlacementRequest(nodes=3, gpus_per_node=4, excluded=frozenset({NodeName("n1")}))
    assert chosen(SchedulingPolicy.DEEPLINK, JobShape(3, 4, whole=True), shut) == tuple(
        sorted(place(cluster, request)[0].nodes, key=there.floor.nodes.index)
    )


@pytest.mark.parametrize("policy", list(SchedulingPolicy))
def test_nobody_takes_what_is_shut_or_too_little(policy: SchedulingPolicy) -> None:
    there = state()
    who = chooser(policy, random.Random(1))  # noqa: S311
    everyone = there.floor.everyone
    for shape in (PART, WIDE):
        open_nodes = there.floor.chosen([NodeName(f"n{number}") for number in (1, 2, 3, 4, 5)])
        nodes = who.choose(there, shape, everyone & ~open_nodes)
        assert nodes is not None
        assert not nodes & ~open_nodes
        assert who.choose(there, shape, everyone) is None
    assert who.choose(there, JobShape(11, 4, whole=True), 0) is None
    assert who.choose(there, JobShape(1, 5, whole=False), 0) is None


def test_ranks_go_by_name_but_with_deeplink_along_the_tree() -> None:
    floor = state().floor
    six = floor.chosen([NodeName(f"n{number}") for number in range(6)])
    for policy in SchedulingPolicy:
        order = chooser(policy, random.Random(1)).order(floor, six)  # noqa: S311
        assert sorted(order) == sorted(floor.names(six))
        assert ring_crossings(order, floor.fabric.leaf) == (3 if policy is SchedulingPolicy.DEEPLINK else 6)
