"""Copies of shards on leaves and racks that fail apart, held against every choice there is."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deeplink.scheduler.placement.replicas import Replicas, lost_with, spread_replicas
from deeplink.scheduler.placement.request import PlacementValueError
from deeplink.scheduler.topology.graph import Fabric
from deeplink.types import NodeName


def names(count: int) -> list[NodeName]:
    return [NodeName(f"n{number}") for number in range(count)]


@st.composite
def sites(draw: st.DrawFn) -> tuple[list[NodeName], Fabric, dict[NodeName, str] | None]:
    nodes = names(draw(st.integers(1, 8)))
    leaves = {node: draw(st.integers(0, 3)) for node in nodes}
    fabric = Fabric({node: ("core", f"leaf{leaf}") for node, leaf in leaves.items() if leaf})
    racks = {node: f"rack{draw(st.integers(0, 2))}" for node in nodes} if draw(st.booleans()) else None
    return draw(st.permutations(nodes)), fabric, racks


@given(sites(), st.integers(1, 4))
@settings(max_examples=300, deadline=None)
def test_no_choice_survives_more(
    site: tuple[list[NodeName], Fabric, dict[NodeName, str] | None], copies: int
) -> None:
    ranked, fabric, racks = site

    def rack_of(node: NodeName) -> object:
        return fabric.leaf(node) if racks is None else racks[node]

    def survives(nodes: tuple[NodeName, ...]) -> tuple[bool, bool]:
        return len({fabric.leaf(node) for node in nodes}) > 1, len({rack_of(node) for node in nodes}) > 1

    found = spread_replicas(ranked, copies, fabric, racks)
    assert len(set(found.nodes)) == len(found.nodes) == min(copies, len(ranked))
    assert (found.survive_leaf, found.survive_rack) == survives(found.nodes)
    best = max((all(survives(some)), *survives(some)) for some in combinations(ranked, len(found.nodes)))
    assert (found.survive_leaf and found.survive_rack, found.survive_leaf, found.survive_rack) == best
    assert list(found.nodes) == sorted(found.nodes, key=ranked.index)
    if copies != 2:
        assert found.nodes[0] == ranked[0]


def test_the_most_preferred_stay_where_they_fail_apart() -> None:
    fabric = Fabric({node: ("core", f"leaf{place % 2}") for place, node in enumerate(names(6))})
    assert spread_replicas(names(6), 2, fabric) == Replicas(
        (NodeName("n0"), NodeName("n1")), survive_leaf=True, survive_rack=True
    )
    assert spread_replicas(names(6)[::2] + names(6)[1::2], 2, fabric).nodes == ("n0", "n1")


def test_further_copies_go_to_leaves_without_one() -> None:
    fabric = Fabric({node: ("core", f"leaf{place // 3}") for place, node in enumerate(names(9))})
    assert spread_replicas(names(9), 3, fabric).nodes == ("n0", "n3", "n6")


def test_two_copies_part_from_leaf_and_rack_at_once_if_any_two_do() -> None:
    # n0's leaf is rack a alone, and whoever is on another leaf is in rack a too: but n1 and n3 fail apart.
    fabric = Fabric(dict(zip(names(4), [("l0",), ("l1",), ("l1",), ("l0",)], strict=True)))
    racks = dict(zip(names(4), ["a", "a", "a", "b"], strict=True))
    assert spread_replicas(names(4), 2, fabric, racks) == Replicas(
        (NodeName("n1"), NodeName("n3")), survive_leaf=True, survive_rack=True
    )


def test_shards_that_one_leaf_would_take_along_are_counted() -> None:
    fabric = Fabric({node: ("core", f"leaf{place // 2}") for place, node in enumerate(names(6))})
    n = names(6)
    holders = {"a": n[:2], "b": [n[0], n[2]], "c": [n[1]], "d": n[4:]}
    assert lost_with(holders, fabric.leaf) == {("core", "leaf0"): 2, ("core", "leaf2"): 1}
    spread = {shard: spread_replicas(n[turn:] + n[:turn], 2, fabric).nodes for turn, shard in enumerate("abcdef")}
    assert lost_with(spread, fabric.leaf) == {}


def test_no_copy_at_all_is_refused() -> None:
    with pytest.raises(PlacementValueError):
        spread_replicas(names(2), 0, Fabric({}))
