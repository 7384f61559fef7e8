"""Our own description: every key, and what is wrong with it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.core.types import NodeName
from deeplink.scheduler.topology.graph import fabric_of
from deeplink.scheduler.topology.network import (
    Cable,
    DeviceHealth,
    End,
    FabricLink,
    Node,
    Other,
    Role,
    Switch,
    TopologyCheck,
)
from deeplink.scheduler.topology.sources.document import read_document
from tests.scheduler.topology.fabrics import INSIDE


def test_the_short_form_says_it_once_for_all_cables_down() -> None:
    text = """
switches:
  core:  {switches: "leaf[0-1]", gbps: 400, latency_us: 2}
  leaf0: {nodes: "n[0-1]", gbps: 200, health: degraded, link_speed: 100, id: S-01}
  leaf1: {nodes: [n2, "n[3-4]"]}
"""
    reading = read_document(text, "fabric.yaml")
    assert reading.findings == ()
    network = reading.network
    assert network.switches["leaf0"] == Switch("leaf0", 0, "S-01", 100)
    assert network.switches["core"].level == 1
    up = Cable(lower=End(gbps=400.0), upper=End(gbps=400.0), latency_us=2.0)
    assert FabricLink("leaf0", "core", False, (up,)) in network.links
    down = Cable(lower=End(gbps=200.0), upper=End(gbps=200.0), said=DeviceHealth.DEGRADED)
    assert FabricLink("n0", "leaf0", True, (down,)) in network.links
    assert fabric_of(network).paths["n4"] == ("core", "leaf1")  # type: ignore[index]


def test_blocks_are_leaves_with_nvlink_domains() -> None:
    text = """
switches:
  S1: {switches: [S2, S3], labels: {zone: z1}}
blocks:
- switch: S2
  nodes: ["I[21-22]", 0025]
  annotations: {accelerator.topology.example/domain: nvl2}
- {switch: S3, nodes: I34, domain: nvl3}
"""
    reading = read_document(text, "model.yaml")
    assert reading.findings == ()
    assert {node.name: node.domain for node in reading.network.nodes.values()} == {
        "I21": "nvl2", "I22": "nvl2", "0025": "nvl2", "I34": "nvl3",
    }  # fmt: skip


def test_links_replace_what_the_short_form_said_of_a_pair() -> None:
    text = """
switches: {leaf: {nodes: n0, gbps: 400}, top: {level: 1}}
links:
- {below: n0, above: leaf, gbps: [400, 100], ports: [mlx5_0, 7], usual_gbps: 400, told: [true, false]}
- {below: n0, above: leaf, gbps: 400, cables: 2}
- {below: leaf, above: top}
- {below: n1, above: top}
"""
    reading = read_document(text, "fabric.yaml")
    assert reading.findings == ()
    first = Cable(lower=End("mlx5_0", 400.0), upper=End("7", 100.0, told=False), usual_gbps=400.0)
    more = Cable(lower=End(gbps=400.0), upper=End(gbps=400.0))
    assert reading.network.links == (
        FabricLink("n0", "leaf", True, (first, more, more)),
        FabricLink("leaf", "top", False, (Cable(),)),
        FabricLink("n1", "top", True, (Cable(),)),
    )


def test_nodes_their_insides_and_others() -> None:
    text = """
switches: {leaf: {}}
nodes:
  "n[0-1]": {domain: rack-1, health: ok}
  n2:
inside:
- nodes: [n0, n2]
  gpus: [{name: GPU0, cpus: 0-15, numa: 0}, {name: GPU1, cpus: 16-31, numa: 1}]
  nics: [{name: mlx5_0}, {name: mlx5_1, device: mlx5_1}, {name: mlx5_2}]
  joins:
  - [GPU0, GPU1, NV12]
  - [GPU0, mlx5_0, PXB]
  - [GPU0, mlx5_1, SYS]
  - [GPU0, mlx5_2, SYS]
  - [mlx5_0, GPU1, SYS]
  - [GPU1, mlx5_1, PIX]
  - [GPU1, mlx5_2, SYS]
  - [mlx5_0, mlx5_1, SYS]
  - [mlx5_0, mlx5_2, SYS]
  - [mlx5_1, mlx5_2, SYS]
others: [{name: oss1, role: storage, switch: leaf, port: 3, gbps: 200}]
"""
    reading = read_document(text, "fabric.yaml")
    assert reading.findings == ()
    assert reading.network.nodes == {
        "n0": Node(NodeName("n0"), "rack-1", DeviceHealth.OK, INSIDE),
        "n1": Node(NodeName("n1"), "rack-1", DeviceHealth.OK),
        "n2": Node(NodeName("n2"), inside=INSIDE),
    }
    assert reading.network.others == (Other("oss1", Role.STORAGE, "leaf", "3", 200.0),)


@pytest.mark.parametrize("text", ["nodes: [n0, 'n[1-2]']", "nodes: 'n[0-2]'", '{"nodes": ["n[0-2]"]}'])
def test_nodes_alone_are_names(text: str) -> None:
    reading = read_document(text, "fabric.yaml")
    assert reading.findings == ()
    assert sorted(reading.network.nodes) == ["n0", "n1", "n2"]


@pytest.mark.parametrize(
    ("text", "line", "kind"),
    [
        ("a: [", 1, TopologyCheck.UNREADABLE),
        ("- a", 1, TopologyCheck.UNREADABLE),
        ("nodes: [n0]\ncolour: red", 2, TopologyCheck.UNREADABLE),
        ("switches: [a]", 1, TopologyCheck.UNREADABLE),
        ("switches:\n  a: {colour: red}", 2, TopologyCheck.UNREADABLE),
        ("switches:\n  a: 3", 2, TopologyCheck.UNREADABLE),
        ("switches:\n  'a b': {}", 2, TopologyCheck.UNREADABLE),
        ("switches:\n  a: {nodes: 'n[0-'}", 2, TopologyCheck.UNREADABLE),
        ("switches:\n  a: {nodes: [{}]}", 2, TopologyCheck.UNREADABLE),
        ("switches:\n  a: {gbps: fast}", 2, TopologyCheck.UNREADABLE),
        ("switches:\n  a: {gbps: nan}", 2, TopologyCheck.UNREADABLE),
        ("switches:\n  a: {latency_us: -1}", 2, TopologyCheck.UNREADABLE),
        ("switches:\n  a: {level: 100000}", 2, TopologyCheck.UNREADABLE),
        ("switches:\n  a: {health: fine}", 2, TopologyCheck.UNREADABLE),
        ("switches:\n  a: {switches: [a]}", 2, TopologyCheck.UNREADABLE),
        ("switches:\n  a: {nodes: n0}\n  b: {nodes: n0}", 3, TopologyCheck.DUPLICATE),
        ("blocks: {switch: a}", 1, TopologyCheck.UNREADABLE),
        (
            "blocks:\n- {switch: a, nodes: [n0, n0, 'n[0-1]']}\n- {switch: a, nodes: n1}",
            3,
            TopologyCheck.DUPLICATE,
        ),
        ("switches: {a: {}}\nlinks:\n- {below: n0, above: b}", 3, TopologyCheck.UNKNOWN),
        ("switches: {a: {}}\nlinks:\n- {below: '', above: a}", 3, TopologyCheck.UNKNOWN),
        ("switches: {a: {}}\nlinks:\n- {below: a, above: a}", 3, TopologyCheck.UNKNOWN),
        ("switches: {a: {level: 1}, b: {}}\nlinks:\n- {below: a, above: b}", 3, TopologyCheck.UNREADABLE),
        ("switches: {a: {}}\nlinks:\n- {below: n0, above: a, cables: 9999}", 3, TopologyCheck.UNREADABLE),
        ("nodes: [n0]\ninside:\n- {gpus: [{name: a}, {name: a}]}", 3, TopologyCheck.DUPLICATE),
        ("nodes: [n0]\ninside:\n- gpus: [{name: a}]\n  joins: [[a, b, PIX]]", 4, TopologyCheck.UNREADABLE),
        ("switches: {a: {}}\nothers:\n- {role: storage, switch: b}", 3, TopologyCheck.UNREADABLE),
        ("nodes:\n  n0: {domain: a}\n  'n[0-1]': {domain: b}", 3, TopologyCheck.DUPLICATE),
        ("switches:\n  b: {}\n  a: {level: 0, switches: b}", 3, TopologyCheck.UNREADABLE),
        ("switches:\n  a: {nodes: n0}\n  a: {nodes: n1}", 3, TopologyCheck.DUPLICATE),
        ("switches:\n  a:\n    nodes: n0\n    nodes: n1", 4, TopologyCheck.DUPLICATE),
        ("nodes:\n  n0: {health: ok}\n  n0: {health: down}", 3, TopologyCheck.DUPLICATE),
        ("nodes: [n0]\nnodes: [n1]", 2, TopologyCheck.DUPLICATE),
        ("switches: {a: {}}\nlinks:\n- {below: n0, above: a, host: perhaps}", 3, TopologyCheck.UNREADABLE),
        ("switches: {a: {}}\nlinks:\n- {below: n0, above: a, told: [x, true]}", 3, TopologyCheck.UNREADABLE),
        ("switches: {a: {}}\nlinks:\n- {below: n0, above: a, ports: 33}", 3, TopologyCheck.UNREADABLE),
    ],
)
def test_dirt_is_noted_with_its_line(text: str, line: int, kind: TopologyCheck) -> None:
    findings = read_document(text, "fabric.yaml").findings
    assert (line, kind) in {(finding.line, finding.check) for finding in findings}


WORDS = st.sampled_from([
    "switches", "nodes", "blocks", "links", "inside", "others", "gpus", "joins", "below", "above", "gbps", "level",
    "a", "n[0-3]", "-1", "1e9", "told", "role", "storage", "cables", "health", "switch",
])  # fmt: skip
SHAPES = st.recursive(
    WORDS | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=25,
)


@given(st.dictionaries(WORDS, SHAPES, max_size=5))
def test_any_shape_of_values_is_read_or_noted(shape: dict[str, object]) -> None:
    import json

    reading = read_document(json.dumps(shape), "fabric.json")
    assert all(link.above in reading.network.switches for link in reading.network.links)


def test_what_is_said_of_a_node_later_takes_nothing_back() -> None:
    text = "nodes:\n  n0: {health: down, domain: a}\n  'n[0-1]': {domain: a}\n"
    reading = read_document(text, "fabric.yaml")
    assert reading.findings == ()
    assert reading.network.nodes["n0"] == Node(NodeName("n0"), "a", DeviceHealth.DOWN)  # type: ignore[index]


def test_yes_and_no_are_what_they_say() -> None:
    text = "switches: {a: {}}\nlinks:\n- {below: a, above: a, host: yes, told: [no, true]}"
    reading = read_document(text, "fabric.yaml")
    assert reading.findings == ()
    assert reading.network.links == (FabricLink("a", "a", True, (Cable(lower=End(told=False)),)),)


def test_one_wrong_word_is_told_once_and_a_port_may_be_called_anything() -> None:
    text = f"switches: {{a: {{}}}}\nlinks:\n- {{below: n0, above: a, gbps: fast, ports: [{'9' * 5000}, 1]}}"
    reading = read_document(text, "fabric.yaml")
    assert [(finding.line, finding.check) for finding in reading.findings] == [(3, TopologyCheck.UNREADABLE)]
    assert fabric_of(reading.network).paths == {"n0": ("a",)}


def test_a_switch_is_above_what_is_below_it_whatever_level_that_is_on() -> None:
    text = "switches: {core: {switches: spine}, spine: {level: 3, switches: leaf}, leaf: {nodes: n0}}"
    reading = read_document(text, "fabric.yaml")
    assert reading.findings == ()
    assert {name: switch.level for name, switch in reading.network.switches.items()} == {
        "core": 4, "spine": 3, "leaf": 0,
    }  # fmt: skip
