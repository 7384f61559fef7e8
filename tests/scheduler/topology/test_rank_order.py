"""Rank order and choice of nodes, held against brute force."""

from __future__ import annotations

from itertools import combinations, permutations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deeplink.core.errors import DeepLinkError
from deeplink.core.types import NodeName
from deeplink.scheduler.slurm.parse import parse_topology
from deeplink.scheduler.topology.graph import Fabric, fabric_from_addresses, fabric_of
from deeplink.scheduler.topology.rank_order import (
    choose_active,
    ring_crossings,
    stock_order,
    tree_order,
)
from deeplink.scheduler.topology.sources.slurm_topology import read_switches
from tests.effort import examples

RECORDED = Path(__file__).parents[2] / "data" / "slurm" / "22.05.8" / "1-busy"


def names(count: int) -> list[NodeName]:
    return [NodeName(f"n{number}") for number in range(count)]


def interleaved(nodes: list[NodeName], leaves: int) -> Fabric:
    return Fabric({node: ("core", f"leaf{place % leaves}") for place, node in enumerate(nodes)})


@st.composite
def fabrics(draw: st.DrawFn) -> tuple[list[NodeName], Fabric]:
    nodes = names(draw(st.integers(1, 8)))
    spines = [draw(st.integers(0, 2)) for _ in range(4)]  # the spine above each leaf
    paths = {}
    for node in nodes:
        leaf = draw(st.integers(-1, 3))
        if leaf >= 0:
            paths[node] = ("core", f"spine{spines[leaf]}", f"leaf{leaf}")
    return nodes, Fabric(paths)


def test_interleaved_names_cross_on_2_of_8_hops_instead_of_8() -> None:
    nodes = names(8)
    fabric = interleaved(nodes, 2)
    assert ring_crossings(stock_order(nodes), fabric.leaf) == 8
    assert ring_crossings(tree_order(nodes, fabric), fabric.leaf) == 2


def test_the_order_is_natural_not_alphabetic() -> None:
    nodes = names(12)
    assert tree_order(nodes, Fabric({})) == tuple(nodes)
    assert stock_order(reversed(nodes)) == tuple(nodes)  # type: ignore[arg-type]


@given(fabrics())
@settings(max_examples=examples(40))
def test_no_permutation_crosses_less(drawn: tuple[list[NodeName], Fabric]) -> None:
    nodes, fabric = drawn
    least = min(ring_crossings(order, fabric.leaf) for order in permutations(nodes[:7]))
    assert ring_crossings(tree_order(nodes[:7], fabric), fabric.leaf) == least


def cost(active: tuple[NodeName, ...], fabric: Fabric) -> tuple[int, int]:
    leaves = {fabric.path(node) for node in active}
    return len(leaves), len({leaf[:2] for leaf in leaves if leaf})


@given(fabrics(), st.data())
@settings(max_examples=examples(150))
def test_no_other_choice_of_nodes_is_more_compact(
    drawn: tuple[list[NodeName], Fabric], data: st.DataObject
) -> None:
    nodes, fabric = drawn
    nodes = [node for node in nodes if fabric.path(node)] or nodes
    count = data.draw(st.integers(1, len(nodes)))
    choice = choose_active(nodes, count, fabric)
    assert len(choice.active) == count
    assert sorted(choice.active + choice.spares) == sorted(nodes)
    assert cost(choice.active, fabric) == min(cost(some, fabric) for some in combinations(nodes, count))


@given(fabrics(), st.data())
@settings(max_examples=examples(100))
def test_the_choice_depends_on_nothing_but_the_set(
    drawn: tuple[list[NodeName], Fabric], data: st.DataObject
) -> None:
    nodes, fabric = drawn
    count = data.draw(st.integers(1, len(nodes)))
    assert choose_active(nodes, count, fabric) == choose_active(data.draw(st.permutations(nodes)), count, fabric)


def test_the_spare_is_the_node_that_is_alone_on_its_leaf() -> None:
    fabric = fabric_from_addresses(
        {NodeName(name): f"core.{leaf}.{name}" for name, leaf in [("n0", "a"), ("n1", "b"), ("n2", "b")]}
    )
    choice = choose_active(names(3), 2, fabric)
    assert choice.active == ("n1", "n2")
    assert choice.spares == ("n0",)


def test_among_equals_the_preferred_run() -> None:
    choice = choose_active(names(3), 2, Fabric({}), preferred=[NodeName("n2"), NodeName("n1")])
    assert choice.active == ("n1", "n2")


@given(fabrics(), st.data())
@settings(max_examples=examples(150))
def test_no_choice_that_is_as_compact_has_more_of_the_preferred(
    drawn: tuple[list[NodeName], Fabric], data: st.DataObject
) -> None:
    nodes, fabric = drawn
    count = data.draw(st.integers(1, len(nodes)))
    liked = data.draw(st.sets(st.sampled_from(nodes)))

    def worth(active: tuple[NodeName, ...]) -> tuple[int, ...]:
        paths = {fabric.path(node)[:depth] for node in active for depth in range(len(fabric.path(node)) + 1)}
        levels = [sum(len(path) == depth for path in paths) for depth in (3, 2, 1)]
        return (*levels, sum(node not in liked for node in active))

    choice = choose_active(nodes, count, fabric, liked)
    assert worth(choice.active) == min(worth(some) for some in combinations(nodes, count))


def test_too_few_nodes_is_an_error_with_both_numbers() -> None:
    with pytest.raises(DeepLinkError, match=r"^3 nodes wanted for ranks and spares; the job has 2"):
        choose_active(names(2), 3, Fabric({}))


def test_a_thousand_nodes_with_spares() -> None:
    nodes = names(1000)
    fabric = Fabric({node: ("core", f"s{place % 7}", f"leaf{place % 70}") for place, node in enumerate(nodes)})
    choice = choose_active(nodes, 980, fabric)
    assert len({fabric.leaf(node) for node in choice.active}) == 69  # one whole leaf (14 or 15 nodes) rests


def told_by_scontrol(text: str) -> Fabric:
    return fabric_of(read_switches(parse_topology(text), "scontrol").network)


def test_scontrol_and_the_topology_address_name_the_same_tree() -> None:
    fabric = told_by_scontrol((RECORDED / "scontrol-show-topology.txt").read_text())
    told = fabric_from_addresses({NodeName("n3"): "core.spine0.leaf1.n3", NodeName("n6"): "core.spine1.leaf3.n6"})
    assert {node: fabric.path(node) for node in told.paths} == told.paths


def test_no_topology_plugin_means_one_flat_leaf() -> None:
    fabric = fabric_from_addresses({NodeName("n3"): "n3", NodeName("n4"): "n4"})
    assert fabric.leaf(NodeName("n3")) == fabric.leaf(NodeName("n4"))


def test_a_loop_of_switches_ends() -> None:
    text = "SwitchName=a Level=1 Nodes=n0 Switches=b\nSwitchName=b Level=1 Nodes=n0 Switches=a\n"
    text += "SwitchName=l Level=0 Nodes=n0\nSwitchName=c Level=1 Nodes=n0 Switches=l,a\n"
    assert told_by_scontrol(text).path(NodeName("n0")) == ("c", "l")


def test_where_a_quarter_of_4096_nodes_rests_it_is_the_smallest_leaves() -> None:
    sizes = [4 + place * 7 % 25 for place in range(256)]
    leaf_of = [leaf for leaf, size in enumerate(sizes) for _ in range(size)]
    nodes = names(len(leaf_of))
    fabric = Fabric({node: ("core", f"leaf{leaf}") for node, leaf in zip(nodes, leaf_of, strict=True)})
    choice = choose_active(nodes, len(nodes) - 1024, fabric)
    idle, left = 0, 1024
    for size in sorted(sizes):  # as many whole leaves as can be rest: the smallest ones
        idle, left = (idle + 1, left - size) if size <= left else (idle, left)
    assert len({fabric.leaf(node) for node in choice.active}) == len(sizes) - idle
