"""What is slow in a graph, as placement wants it."""

from __future__ import annotations

import pytest

from deeplink.scheduler.placement.predicted import SAID_SLOW, slow_of
from deeplink.scheduler.topology.network import Network
from deeplink.scheduler.topology.sources.assemble import assembled, format_of, read

TREE = """
switches:
  spine0: {switches: "leaf[0-2]", gbps: 400}
  spine1: {switches: "leaf[0-2]", gbps: 400}
  leaf0: {nodes: "n[0-3]", gbps: 400}
  leaf1: {nodes: "n[4-7]", gbps: 400}
  leaf2: {nodes: "n[8-11]", gbps: 400}
"""


def network(text: str) -> Network:
    return assembled([read(text, "test", format_of(text))]).network


def test_a_sound_fabric_has_nothing_slow() -> None:
    found = slow_of(network(TREE))
    assert (found.speeds.nodes, found.speeds.links, found.dead) == ({}, {}, frozenset())


def test_a_slow_uplink_is_a_share_of_the_leafs_way_up() -> None:
    link = "links: [{below: leaf1, above: spine0, gbps: 100, usual_gbps: 400, cables: 1}]\n"
    assert slow_of(network(TREE + link)).speeds.links == {("spine0", "leaf1"): pytest.approx(500 / 800)}


def test_a_slow_and_a_dead_port_of_a_node() -> None:
    links = """links:
  - {below: n1, above: leaf0, gbps: 100, usual_gbps: 400}
  - {below: n2, above: leaf0, gbps: 0, usual_gbps: 400}
"""
    found = slow_of(network(TREE + links))
    assert found.speeds.nodes == {"n1": 0.25}
    assert found.dead == {"n2"}


def test_what_its_source_calls_degraded_or_down_counts_without_a_rate() -> None:
    text = TREE + "nodes:\n  n0: {health: degraded}\n  n5: {health: down}\n"
    text += "links: [{below: leaf2, above: spine1, health: degraded}]\n"
    found = slow_of(network(text))
    assert found.speeds.nodes == {"n0": SAID_SLOW}
    assert found.dead == {"n5"}
    assert found.speeds.links == {("spine0", "leaf2"): pytest.approx(0.75, abs=0.26)}


def test_one_rail_of_two_that_is_dead_halves_the_node() -> None:
    text = """
switches: {s: {switches: [a, b]}, a: {nodes: "n[0-1]", gbps: 200}, b: {nodes: "n[0-1]", gbps: 200}}
links: [{below: n1, above: b, gbps: 0, usual_gbps: 200}]
"""
    assert slow_of(network(text)).speeds.nodes == {"n1": 0.5}


IBNET = """
vendid=0x2c9
switchguid=0x1(1)
Switch 4 "S-0001" # "leaf0" base port 0 lid 1 lmc 0
[1] "H-0011"[1](11) # "n0 HCA-1" lid 11 4xEDR
[2] "H-0012"[1](12) # "n1 HCA-1" lid 12 4xEDR
[3] "S-0009"[1] # "spine0" lid 9 4xEDR
[4] "S-0009"[2] # "spine0" lid 9 4xDDR

vendid=0x2c9
switchguid=0x2(2)
Switch 4 "S-0002" # "leaf1" base port 0 lid 2 lmc 0
[1] "H-0021"[1](21) # "n2 HCA-1" lid 21 4xEDR
[2] "H-0022"[1](22) # "n3 HCA-1" lid 22 4xEDR
[3] "S-0009"[3] # "spine0" lid 9 4xEDR
[4] "S-0009"[4] # "spine0" lid 9 4xEDR

vendid=0x2c9
switchguid=0x9(9)
Switch 4 "S-0009" # "spine0" base port 0 lid 9 lmc 0
[1] "S-0001"[3] # "leaf0" lid 1 4xEDR
[2] "S-0001"[4] # "leaf0" lid 1 4xDDR
[3] "S-0002"[3] # "leaf1" lid 2 4xEDR
[4] "S-0002"[4] # "leaf1" lid 2 4xEDR

caguid=0x11
Ca 1 "H-0011" # "n0 HCA-1"
[1](11) "S-0001"[1] # lid 11 lmc 0 "leaf0" lid 1 4xEDR

caguid=0x12
Ca 1 "H-0012" # "n1 HCA-1"
[1](12) "S-0001"[2] # lid 12 lmc 0 "leaf0" lid 1 4xEDR

caguid=0x21
Ca 1 "H-0021" # "n2 HCA-1"
[1](21) "S-0002"[1] # lid 21 lmc 0 "leaf1" lid 2 4xEDR

caguid=0x22
Ca 1 "H-0022" # "n3 HCA-1"
[1](22) "S-0002"[2] # lid 22 lmc 0 "leaf1" lid 2 4xEDR
"""


def test_a_cable_that_trained_at_a_lower_rate_as_ibnetdiscover_tells_it() -> None:
    found = slow_of(network(IBNET))
    assert found.speeds.links == {("spine0", "leaf0"): pytest.approx((100 + 16) / 200, rel=0.05)}
    assert not found.speeds.nodes
    assert not found.dead
