"""From graph to tree: held against reachability by brute force, and against Slurm's own trees."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from deeplink.core.types import NodeName
from deeplink.scheduler.slurm.parse import SwitchRow
from deeplink.scheduler.topology.graph import fabric_of, parts_of, rails_of, tree_of
from deeplink.scheduler.topology.network import Cable, FabricLink, Network, Node, Role, Switch
from deeplink.scheduler.topology.sources.slurm_topology import read_switches
from tests.effort import examples
from tests.scheduler.topology.fabrics import networks


def network(levels: dict[str, int], trunks: list[tuple[str, str]], hosts: list[tuple[str, str]]) -> Network:
    """Make a graph; the rails of a host are in the order of `hosts`."""
    links = [FabricLink(below, above, False, (Cable(),)) for below, above in trunks]
    links += [FabricLink(below, above, True, (Cable(),)) for below, above in hosts]
    return Network(
        {NodeName(name): Node(NodeName(name)) for name, _ in hosts},
        {name: Switch(name, level) for name, level in levels.items()},
        tuple(links),
    )


@st.composite
def slurm_trees(draw: st.DrawFn) -> list[SwitchRow]:
    """Trees as scontrol tells them: each switch below at most one other, each node on one leaf."""
    leaves = [f"leaf{number}" for number in range(draw(st.integers(1, 5)))]
    spines: dict[str, list[str]] = {}
    for leaf in leaves:
        spine = draw(st.sampled_from(["", "spine0", "spine1"]))
        if spine:
            spines.setdefault(spine, []).append(leaf)
    nodes: dict[str, list[NodeName]] = {leaf: [] for leaf in leaves}
    for number in range(draw(st.integers(0, 9))):
        nodes[draw(st.sampled_from(leaves))].append(NodeName(f"n{number}"))
    rows = [SwitchRow(leaf, 0, tuple(nodes[leaf]), ()) for leaf in leaves]
    below = {spine: tuple(node for leaf in under for node in nodes[leaf]) for spine, under in spines.items()}
    rows += [SwitchRow(spine, 1, below[spine], tuple(under)) for spine, under in spines.items()]
    with_core = draw(st.booleans())
    if spines and with_core:
        everyone = tuple(node for found in below.values() for node in found)
        rows.append(SwitchRow("core", 2, everyone, tuple(spines)))
    return rows


@given(slurm_trees())
def test_on_a_tree_of_slurms_a_nodes_path_is_the_switches_that_name_it(rows: list[SwitchRow]) -> None:
    reading = read_switches(rows, "scontrol")
    assert reading.findings == ()
    paths = fabric_of(reading.network).paths
    # What `scontrol show topology NODE` prints: every switch above a node names it, the root last.
    above = sorted(rows, key=lambda row: -row.level)
    assert paths == {node: tuple(row.name for row in above if node in row.nodes) for node in paths}
    assert set(paths) == {node for row in rows for node in row.nodes}


def reachable(graph: Network, one: str, other: str, level: int) -> bool:
    """Tell by walking whether two switches reach each other over switches of at most a level."""
    known, edge = {one}, {one}
    while edge:
        edge = {
            to
            for link in graph.trunks()
            for here, to in ((link.below, link.above), (link.above, link.below))
            if here in edge and to not in known and graph.switches[to].level <= level
        }
        known |= edge
    return other in known


@given(networks(rails=1))
@settings(max_examples=examples(150))
def test_nodes_are_as_near_as_the_lowest_level_at_which_they_reach_each_other(graph: Network) -> None:
    fabric, rails = fabric_of(graph), rails_of(graph)
    levels = {branch.name: branch.level for branch in tree_of(graph).walk()}
    for one, other in combinations(rails, 2):
        common = [a for a, b in zip(fabric.path(one), fabric.path(other), strict=False) if a == b]
        ends = rails[one][0], rails[other][0]
        start = max(graph.switches[end].level for end in ends)
        meeting = next((level for level in range(start, 4) if reachable(graph, *ends, level)), None)
        if ends[0] == ends[1]:
            assert fabric.path(one) == fabric.path(other)
        else:
            assert (levels[common[-1]] if common else None) == meeting


@given(networks())
@settings(max_examples=examples(150))
def test_every_node_is_in_the_tree_once_or_loose(graph: Network) -> None:
    tree = tree_of(graph)
    on_branches = [node for branch in tree.walk() for node in branch.nodes]
    assert sorted([*on_branches, *tree.loose]) == sorted(graph.nodes)
    assert set(fabric_of(graph).paths) == set(on_branches)
    switches = [switch for branch in tree.walk() for switch in branch.switches]
    assert sorted(switches) == sorted(graph.switches)
    assert [branch.populated for branch in tree.roots] == [
        any(below.nodes for below in root.walk()) for root in tree.roots
    ]


@given(networks(), st.data())
@settings(max_examples=examples(100))
def test_the_tree_does_not_depend_on_the_order_of_the_source(graph: Network, data: st.DataObject) -> None:
    links = tuple(data.draw(st.permutations(graph.links)))
    switches = dict(data.draw(st.permutations(list(graph.switches.items()))))
    assert tree_of(Network(graph.nodes, switches, links)) == tree_of(graph)


def test_spines_that_all_leaves_reach_are_one_branch_also_where_a_cable_is_missing() -> None:
    full = [(leaf, spine) for leaf in ("leaf0", "leaf1", "leaf2") for spine in ("spine0", "spine1")]
    full.remove(("leaf2", "spine0"))
    levels = {"leaf0": 0, "leaf1": 0, "leaf2": 0, "spine0": 1, "spine1": 1}
    fabric = fabric_of(network(levels, full, [("n0", "leaf0"), ("n1", "leaf1"), ("n2", "leaf2")]))
    assert {path[:-1] for path in fabric.paths.values()} == {("spine0",)}


def test_leaves_of_the_same_hosts_rails_are_one_leaf() -> None:
    levels = {"a1": 0, "a2": 0, "b1": 0, "b2": 0, "top": 1}
    hosts = [(f"n{n}", rail) for n in (0, 1) for rail in ("a1", "a2")] + [("n2", "b1"), ("n2", "b2"), ("n3", "b2")]
    fabric = fabric_of(network(levels, [(leaf, "top") for leaf in ("a1", "a2", "b1", "b2")], hosts))
    assert fabric.path(NodeName("n0")) == fabric.path(NodeName("n1")) == ("top", "a1")
    assert fabric.path(NodeName("n2")) == fabric.path(NodeName("n3")) == ("top", "b1")


def test_a_cable_in_the_wrong_rack_does_not_make_two_groups_one() -> None:
    levels = {"a1": 0, "a2": 0, "b1": 0, "b2": 0}
    hosts = [("n0", "a1"), ("n0", "a2"), ("n1", "a1"), ("n1", "b2"), ("n2", "b1"), ("n2", "b2")]
    fabric = fabric_of(network(levels, [], hosts))
    assert fabric.path(NodeName("n0")) == fabric.path(NodeName("n1")) == ("a1",)
    assert fabric.path(NodeName("n2")) == ("b1",)


def test_a_port_to_storage_hangs_a_node_nowhere() -> None:
    link = FabricLink("n0", "depot", True, (Cable(role=Role.STORAGE),))
    graph = Network({NodeName("n0"): Node(NodeName("n0"))}, {"depot": Switch("depot", 0)}, (link,))
    assert tree_of(graph).loose == ("n0",)
    assert parts_of(graph) == (frozenset({"depot"}),)


def test_leaves_with_a_cable_between_them_stay_two() -> None:
    fabric = fabric_of(network({"a": 0, "b": 0}, [("a", "b")], [("n0", "a"), ("n1", "b")]))
    assert fabric.paths == {"n0": ("a-joined", "a"), "n1": ("a-joined", "b")}


def test_a_host_on_the_one_spine_does_not_tear_its_leaves_apart() -> None:
    # Readers that level by distance from hosts then take the spine for a leaf.
    trunks = [("a", "top"), ("b", "top"), ("c", "d")]
    graph = network(
        dict.fromkeys(("a", "b", "top", "c", "d"), 0), trunks, [("n0", "a"), ("n1", "b"), ("n2", "top")]
    )
    tree = tree_of(graph)
    assert [(root.name, root.level, root.switches) for root in tree.roots] == [
        ("a-joined", 1, ()),
        ("c-joined", 1, ()),
    ]
    assert [branch.name for branch in tree.roots[0].below] == ["a", "b", "top"]


def test_parts_are_joined_by_hosts_too_and_the_biggest_is_first() -> None:
    graph = network({"a": 0, "b": 0, "c": 0}, [], [("n0", "a"), ("n0", "b"), ("n1", "c")])
    assert parts_of(graph) == (frozenset({"a", "b"}), frozenset({"c"}))


def test_eight_thousand_nodes_take_no_time_worth_a_thought() -> None:
    hosts = [(f"n{node}", f"leaf{node // 32}") for node in range(8192)]
    levels = {f"leaf{leaf}": 0 for leaf in range(256)} | {f"spine{spine}": 1 for spine in range(16)}
    trunks = [(f"leaf{leaf}", f"spine{leaf // 16}") for leaf in range(256)]
    assert len(fabric_of(network(levels, trunks, hosts)).paths) == 8192
