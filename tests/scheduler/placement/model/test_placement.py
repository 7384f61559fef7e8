"""What a placement does to its ports and uplinks, counted by hand and beside ring_crossings."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given

from deeplink.core.errors import DeepLinkError
from deeplink.scheduler.placement.model.job_profile import NodeShare, Placement
from tests.scheduler.placement.model.models import placement, placements

A, B, C = ("core", "s0", "a"), ("core", "s0", "b"), ("core", "s1", "c")


def nodes(*paths: tuple[str, ...]) -> tuple[NodeShare, ...]:
    return tuple(NodeShare(4, 4, path) for path in paths)


def test_ranks_nodes_and_neighbours_are_counted() -> None:
    assert (placement("1342").ranks, placement("1342").busiest, placement("1342").neighbours) == (10, 4, 2)
    assert [placement(shape).neighbours for shape in ("4", "22", "211")] == [0, 1, 2]


def test_one_leaf_uses_no_uplink() -> None:
    assert Placement(nodes(A, A, A)).uplink_loads() == (0, 0)
    assert placement("444").uplink_loads() == (0, 0)


def test_a_ring_in_order_crosses_each_leaf_once_and_interleaved_at_every_node() -> None:
    assert Placement(nodes(A, A, A, B, B, B)).uplink_loads() == (1, 0)
    assert Placement(nodes(A, B, A, B, A, B)).uplink_loads() == (3, 0)


def test_above_the_leaves_only_what_leaves_a_spine_counts() -> None:
    assert Placement(nodes(A, B, C)).uplink_loads() == (1, 1)
    assert Placement(nodes(A, C, B, C)).uplink_loads() == (2, 2)


def test_degraded_links_weigh_more() -> None:
    weak = Placement(nodes(A, A, B), uplink_health={B: 0.25})
    assert weak.uplink_loads() == (4, 0)
    assert Placement((NodeShare(1, 4), NodeShare(1, 4, health=0.5))).port_load() == 2
    assert Placement((NodeShare(1, 4, health=0.5),)).port_load() == 0


def test_a_node_without_a_path_is_outside_every_leaf() -> None:
    assert Placement(nodes(A, A, ())).uplink_loads() == (1, 1)


@given(placements)
def test_no_leaf_has_more_flows_than_the_ring_has_crossings(drawn: Placement) -> None:
    paths = [node.path for node in drawn.nodes]
    crossings = sum(a != b for a, b in pairwise([*paths, paths[0]]))
    assert drawn.uplink_loads()[0] <= crossings
    assert (drawn.uplink_loads() == (0, 0)) == (crossings == 0)


@pytest.mark.parametrize("gpus", [0, 5])
def test_more_gpus_than_there_are_or_none_are_refused(gpus: int) -> None:
    with pytest.raises(DeepLinkError, match="from 1 to its 4"):
        NodeShare(gpus, 4)


def test_no_nodes_and_no_health_are_refused() -> None:
    with pytest.raises(DeepLinkError, match="nodes"):
        Placement(())
    with pytest.raises(DeepLinkError, match="health"):
        NodeShare(1, 4, health=0)
    with pytest.raises(DeepLinkError, match=r"uplinks of core\.s0\.a"):
        Placement(nodes(A), uplink_health={A: 2.0})
