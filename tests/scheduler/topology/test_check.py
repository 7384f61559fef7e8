"""What is found wrong with a graph."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings

from deeplink.core.finding import Severity
from deeplink.core.types import NodeName
from deeplink.scheduler.topology.graph import checked
from deeplink.scheduler.topology.network import DeviceHealth, Inside, Join, Joined, Network, TopologyCheck
from deeplink.scheduler.topology.sources.document import read_document
from tests.effort import examples
from tests.scheduler.topology.fabrics import INSIDE, networks


def found(text: str, cluster: list[str] | None = None) -> list[tuple[str, str]]:
    reading = read_document(text, "fabric")
    assert reading.findings == ()
    names = None if cluster is None else [NodeName(name) for name in cluster]
    return [(finding.check, finding.text) for finding in checked(reading.network, names)]


WHOLE = """
switches:
  top: {switches: [a, b], gbps: 400}
  a: {nodes: "n[0-1]", gbps: 400}
  b: {nodes: "n[2-3]", gbps: 400}
"""


def test_nothing_is_wrong_with_a_whole_fabric() -> None:
    assert found(WHOLE) == []
    assert found(WHOLE, ["n0", "n1", "n2", "n3"]) == []


def test_missing_and_unknown_nodes_are_named_folded() -> None:
    assert found(WHOLE, ["n0", "n1", "n7", "n8"]) == [
        (TopologyCheck.MISSING, "2 nodes (n[7-8]) of Slurm not in the topology"),
        (TopologyCheck.UNKNOWN, "2 nodes (n[2-3]) in the topology, and no node of Slurm"),
    ]


def test_parts_without_a_cable_between_them_are_told_with_their_nodes() -> None:
    assert found("switches: {a: {nodes: 'n[0-1]'}, b: {nodes: n2}}") == [
        (TopologyCheck.DISCONNECTED, "2 parts that no cable joins: 2 nodes below a; 1 node below b")
    ]


def test_a_node_on_no_switch_is_loose_only_where_there_are_switches() -> None:
    assert found(WHOLE + "nodes: [n9]") == [(TopologyCheck.LOOSE, "1 node (n9) on no switch")]
    assert found("nodes: 'n[0-3]'") == []


def test_a_degraded_cable_is_told_with_both_ends_and_what_is_usual() -> None:
    text = """
    switches: {leaf: {nodes: n0}, s0: {level: 1}, s1: {level: 1}}
    links:
    - {below: leaf, above: s0, ports: ["33", "1"], gbps: [100, 400], usual_gbps: 400}
    - {below: leaf, above: s1, ports: ["34", "1"], gbps: 100, usual_gbps: 400}
    - {below: leaf, above: s1, health: down}
    """
    assert [told for _, told in found(text)] == [
        "leaf port 33 - s0 port 1: 100 Gb/s at its lower end, 400 at its upper; usual here 400",
        "leaf port 34 - s1 port 1: 100 Gb/s, told by both ends; usual here 400",
        "leaf - s1: down",
    ]


def test_an_end_that_was_not_heard_is_told_once_for_each_link() -> None:
    text = """
    switches: {leaf: {nodes: n0}, top: {level: 1}}
    links:
    - {below: leaf, above: top, ports: ["1", "7"], told: [true, false]}
    - {below: leaf, above: top, ports: ["2", "8"], told: [true, false]}
    """
    assert found(text) == [(TopologyCheck.ONE_SIDED, "top port 7 was not heard; leaf - top, 2 cables")]
    assert found(text.replace("[true, false]", "[false, true]"))[0][1].startswith("leaf port 1 was not heard")


def test_fewer_cables_up_than_the_others_is_worth_knowing() -> None:
    text = """
    switches: {a: {nodes: n0}, b: {nodes: n1}, c: {nodes: n2}, top: {level: 1}}
    links:
    - {below: a, above: top, cables: 4}
    - {below: b, above: top, cables: 4}
    - {below: c, above: top, cables: 3}
    """
    assert found(text) == [(TopologyCheck.UNEVEN, "leaf c has 3 cables up, most have 4")]


def test_a_switch_with_nothing_below_is_worth_knowing() -> None:
    assert found("switches: {top: {switches: [a, b]}, a: {nodes: n0}}") == [
        (TopologyCheck.EMPTY, "leaf b has nothing below it")
    ]


def test_a_sick_node_is_told() -> None:
    assert found(WHOLE + "nodes: {n0: {health: degraded}, n1: {health: ok}}") == [
        (TopologyCheck.DEGRADED, "node n0 is degraded")
    ]


def test_a_gpu_with_fewer_nvlinks_than_the_others_is_told() -> None:
    graph = read_document(WHOLE, "fabric").network
    pairs = {("A", "B"): Joined(Join.NVLINK, 4), ("A", "C"): Joined(Join.NVLINK, 4), ("B", "C"): Joined(Join.SYS)}
    gpus = tuple(replace(INSIDE.gpus[0], name=name) for name in "ABC")
    nodes = {name: replace(node, inside=Inside(gpus, (), pairs)) for name, node in graph.nodes.items()}
    told = [finding.text for finding in checked(replace(graph, nodes=nodes))]
    assert told[:2] == ["n0 B has 4 NVLinks, others 8", "n0 C has 4 NVLinks, others 8"]


@given(networks())
@settings(max_examples=examples(100))
def test_problems_come_first_and_every_bad_cable_is_told(graph: Network) -> None:
    findings = checked(graph)
    problems = [finding.severity > Severity.NOTE for finding in findings]
    assert problems == sorted(problems, reverse=True)
    bad = sum(
        cable.health in {DeviceHealth.DEGRADED, DeviceHealth.DOWN} for link in graph.links for cable in link.cables
    )
    sick = sum(node.health in {DeviceHealth.DEGRADED, DeviceHealth.DOWN} for node in graph.nodes.values())
    assert sum(finding.check == TopologyCheck.DEGRADED for finding in findings) == bad + sick
