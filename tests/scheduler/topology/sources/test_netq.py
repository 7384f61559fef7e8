"""NetQ's link graph and compute trays (written by hand after NetQ's own form)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deeplink.core.types import NodeName
from deeplink.scheduler.topology.graph import fabric_of
from deeplink.scheduler.topology.network import DeviceHealth, Network, Node, TopologyCheck
from deeplink.scheduler.topology.sources.nvidia import read_netq
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
        ("{", [TopologyCheck.UNREADABLE]),
        ("3", [TopologyCheck.UNREADABLE]),
        ('[{"what": 1}]', [TopologyCheck.UNREADABLE]),
        ('[{"Name": ""}]', [TopologyCheck.UNREADABLE]),
        ('[{"Name": "a"}, {"Name": "a"}]', [TopologyCheck.DUPLICATE]),
        ('[{"Name": "a", "Health": "ODD"}]', [TopologyCheck.UNREADABLE]),
        (changed(links=[link("node0", "node77", 1)]), [TopologyCheck.UNKNOWN]),
        (changed(links=[link("node21", "node22", 1)]), [TopologyCheck.UNREADABLE]),
        (changed(links=[link("node0", "node21", 1)]), [TopologyCheck.DUPLICATE]),
        (changed(links=[{"id": "x", "interfaces": [{"node": "node0"}]}]), [TopologyCheck.UNREADABLE]),
        (changed(nodes=[device("node0", "leaf-1", 1)]), [TopologyCheck.DUPLICATE]),
        (changed(nodes=[{"id": "node50", "name": "a b", "tier": 1}]), [TopologyCheck.UNREADABLE]),
        (changed(nodes=[{"id": "node50", "name": "a", "tier": "high"}]), [TopologyCheck.UNREADABLE]),
        (changed(nodes=["?"], links=[None, 3]), [TopologyCheck.UNREADABLE, TopologyCheck.UNREADABLE]),
    ],
)
def test_dirt_is_noted_and_costs_nothing_else(text: str, kinds: list[TopologyCheck]) -> None:
    reading = read_netq(text, "graph.json")
    assert [finding.check for finding in reading.findings] == kinds
    if len(text) > 200:
        assert set(read_netq(json.dumps(graph()), "graph.json").network.links) <= set(reading.network.links)
    assert isinstance(reading.network, Network)


def test_a_finding_names_the_line_of_the_object() -> None:
    text = changed(links=[link("node0", "node77", 1)])
    finding = read_netq(text, "graph.json").findings[0]
    assert "node77" in "\n".join(text.splitlines()[finding.line - 1 : finding.line + 5])


def test_a_host_with_the_name_of_a_switch_is_told() -> None:
    findings = read_netq(changed(nodes=[device("node50", "leaf-1", -1)]), "graph.json").findings
    assert [finding.check for finding in findings] == [TopologyCheck.DUPLICATE]
