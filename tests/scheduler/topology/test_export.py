"""topology.conf, read back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from deeplink.core.errors import DeepLinkError
from deeplink.scheduler.topology.graph import fabric_of, tree_of
from deeplink.scheduler.topology.network import Network
from deeplink.scheduler.topology.sources.document import read_document
from deeplink.scheduler.topology.sources.ibnet import read_ibnetdiscover
from deeplink.scheduler.topology.sources.slurm_topology import read_slurm, topology_conf
from tests.effort import examples
from tests.scheduler.topology.fabrics import networks, rails


@given(networks())
@settings(max_examples=examples(200))
def test_what_is_written_hangs_every_node_where_it_hung(graph: Network) -> None:
    fabric = fabric_of(graph)
    if not fabric.paths:
        with pytest.raises(DeepLinkError, match="nothing to write"):
            topology_conf(graph)
        return
    again = read_slurm(topology_conf(graph), "topology.conf")
    assert again.findings == ()
    # A branch with nodes and switches of its own gets a leaf for the nodes; else every path is the same.
    told = fabric_of(again.network).paths
    assert {
        node: tuple(part for part in path if "-own" not in part) for node, path in told.items()
    } == fabric.paths
    mixed = {branch.name for branch in tree_of(graph).walk() if branch.nodes and branch.below}
    for node, path in told.items():
        if path[-1].endswith("-own"):
            assert fabric.paths[node][-1] in mixed


def test_a_plain_tree_is_written_plainly() -> None:
    text = """
    switches:
      core: {switches: "spine[0-1]"}
      spine0: {switches: "leaf[0-1]"}
      spine1: {switches: leaf2}
      leaf0: {nodes: "n[0-1]", link_speed: 100}
      leaf1: {nodes: "n[2-3]"}
      leaf2: {nodes: n4}
    nodes: [n9]
    """
    assert topology_conf(read_document(text, "fabric").network).splitlines()[1:] == [
        "SwitchName=leaf0 Nodes=n[0-1] LinkSpeed=100",
        "SwitchName=leaf1 Nodes=n[2-3]",
        "SwitchName=leaf2 Nodes=n4",
        "SwitchName=spine0 Switches=leaf[0-1]",
        "SwitchName=spine1 Switches=leaf2",
        "SwitchName=core Switches=spine[0-1]",
        "# On no switch: n9",
    ]


def test_rails_and_planes_become_a_tree_slurm_can_read() -> None:
    assert topology_conf(read_ibnetdiscover(rails(), "fabric").network).splitlines()[1:] == [
        "# leaf-1-1 stands for leaf-1-1, leaf-1-2",
        "SwitchName=leaf-1-1 Nodes=gpu-[1-3]",
        "# leaf-2-1 stands for leaf-2-1, leaf-2-2",
        "SwitchName=leaf-2-1 Nodes=gpu-[4-6]",
        "# spine-1 stands for spine-1, spine-2",
        "SwitchName=spine-1 Switches=leaf-1-1,leaf-2-1",
        "# Without nodes, and left out: depot",
    ]


def test_nodes_beside_switches_get_a_leaf_of_their_own() -> None:
    text = "switches: {top: {switches: [a], nodes: n9}, a: {nodes: n0}, top-own: {nodes: n5}}"
    lines = topology_conf(read_document(text, "fabric").network).splitlines()
    assert "SwitchName=top-own- Nodes=n9" in lines
    assert "SwitchName=top Switches=a,top-own-" in lines


def test_leaves_that_only_a_cable_joins_get_a_switch_over_them() -> None:
    text = "switches: {a: {nodes: n0}, b: {nodes: n1}, a-joined: {nodes: n2}}\nlinks: [{below: a, above: b}]"
    assert topology_conf(read_document(text, "fabric").network).splitlines()[1:] == [
        "SwitchName=a-joined Nodes=n2",
        "SwitchName=a Nodes=n0",
        "SwitchName=b Nodes=n1",
        "# a-joined- is no switch: cables between those below join them",
        "SwitchName=a-joined- Switches=a,b",
    ]
