"""NetQ's link graph and compute trays (written by hand after NetQ's own form)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deeplink.scheduler.topology.finding import TopologyFindingKind
from deeplink.scheduler.topology.network import DeviceHealth, Network, Node
from deeplink.scheduler.topology.sources.netq import read_netq
from deeplink.scheduler.topology.tree import fabric_of
from deeplink.types import NodeName
from tests.scheduler.topology.fabrics import device, graph, link


def test_a_graph_is_read_cable_by_cable_whichever_end_comes_first() -> None:
    reading = read_netq(json.dumps(graph(), indent=1), "graph.json")
    assert reading.findings == ()
    assert {(one.below, one.above): len(one.cables) for one in reading.network.links} == {
        ("dgx-01", "leaf-1"): 4,
        ("dgx-02", "leaf-1"): 4,
        ("dgx-03", "leaf-2"): 4,
        ("dgx-04", "leaf-2"): 4,
        ("leaf-1", "spine-1"): 28,
        ("leaf-2", "spine-1"): 19,
    }
    ends = reading.network.links[1].cables[0]
    assert (ends.lower.port, ends.upper.port) == ("swp0", "eth0")  # node22 is the host here
    assert fabric_of(reading.network).paths["dgx-03"] == ("spine-1", "leaf-2")  # type: ignore[index]


def test_compute_trays_tell_domain_and_health() -> None:
    trays = [
        {"Name": "node1", "DomainUUID": "3fbf", "Health": "HEALTHY", "GpuIDList": ["a", "b"]},
        {"Name": "node2", "DomainUUID": "3fbf", "Health": "UNHEALTHY"},
        {"Name": "node3"},
    ]
    reading = read_netq(json.dumps(trays), "trays.json")
    assert reading.findings == ()
    assert list(reading.network.nodes.values()) == [
        Node(NodeName("node1"), "3fbf", DeviceHealth.OK),
        Node(NodeName("node2"), "3fbf", DeviceHealth.DEGRADED),
        Node(NodeName("node3")),
    ]


def test_hosts_are_called_as_slurm_calls_them() -> None:
    text = json.dumps(graph()).replace('"dgx-01"', '"dgx-01.site.example"')
    assert read_netq(text, "graph.json").network == read_netq(json.dumps(graph()), "graph.json").network


def changed(**fields: Any) -> str:
    whole = graph()
    for name, value in fields.items():
        whole[0][name] += value
    return json.dumps(whole, indent=1)


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("{", [TopologyFindingKind.UNREADABLE]),
        ("3", [TopologyFindingKind.UNREADABLE]),
        ('[{"what": 1}]', [TopologyFindingKind.UNREADABLE]),
        ('[{"Name": ""}]', [TopologyFindingKind.UNREADABLE]),
        ('[{"Name": "a"}, {"Name": "a"}]', [TopologyFindingKind.DUPLICATE]),
        ('[{"Name": "a", "Health": "ODD"}]', [TopologyFindingKind.UNREADABLE]),
        (changed(links=[link("node0", "node77", 1)]), [TopologyFindingKind.UNKNOWN]),
        (changed(links=[link("node21", "node22", 1)]), [TopologyFindingKind.UNREADABLE]),
        (changed(links=[link("node0", "node21", 1)]), [TopologyFindingKind.DUPLICATE]),
        (changed(links=[{"id": "x", "interfaces": [{"node": "node0"}]}]), [TopologyFindingKind.UNREADABLE]),
        (changed(nodes=[device("node0", "leaf-1", 1)]), [TopologyFindingKind.DUPLICATE]),
        (changed(nodes=[{"id": "node50", "name": "a b", "tier": 1}]), [TopologyFindingKind.UNREADABLE]),
        (changed(nodes=[{"id": "node50", "name": "a", "tier": "high"}]), [TopologyFindingKind.UNREADABLE]),
        (changed(nodes=["?"], links=[None, 3]), [TopologyFindingKind.UNREADABLE, TopologyFindingKind.UNREADABLE]),
    ],
)
def test_dirt_is_noted_and_costs_nothing_else(text: str, kinds: list[TopologyFindingKind]) -> None:
    reading = read_netq(text, "graph.json")
    assert [finding.kind for finding in reading.findings] == kinds
    if len(text) > 200:
        assert set(read_netq(json.dumps(graph()), "graph.json").network.links) <= set(reading.network.links)
    assert isinstance(reading.network, Network)


def test_a_finding_names_the_line_of_the_object() -> None:
    text = changed(links=[link("node0", "node77", 1)])
    finding = read_netq(text, "graph.json").findings[0]
    assert "node77" in "\n".join(text.splitlines()[finding.line - 1 : finding.line + 5])


def test_a_host_with_the_name_of_a_switch_is_told() -> None:
    findings = read_netq(changed(nodes=[device("node50", "leaf-1", -1)]), "graph.json").findings
    assert [finding.kind for finding in findings] == [TopologyFindingKind.DUPLICATE]
