"""`ibnetdiscover`: rails, names, what is no node, and cables seen from both ends."""

from __future__ import annotations

import pytest

from deeplink.core.finding import Severity
from deeplink.scheduler.topology.graph import checked, fabric_of, rails_of
from deeplink.scheduler.topology.network import Network, Role, TopologyCheck
from deeplink.scheduler.topology.sources.assemble import assembled
from deeplink.scheduler.topology.sources.ibnet import rate, read_ibnetdiscover
from tests.scheduler.topology.fabrics import RAILS_NAMES, RAILS_PLUGS, Plug, ibnetdiscover, rails

FIRST_TRUNK = RAILS_PLUGS[12]  # leaf-1-1 port 18 to spine-1


def told(text: str, **options: tuple[str, ...]) -> list[tuple[str, str]]:
    reading = assembled([read_ibnetdiscover(text, "fabric", **options)])
    return [(one.check, one.text) for one in (*reading.findings, *checked(reading.network))]


def test_hosts_with_several_rails_are_one_node_each() -> None:
    network = read_ibnetdiscover(rails(), "fabric").network
    assert sorted(network.nodes) == [f"gpu-{number}" for number in range(1, 7)]
    assert rails_of(network)[network.nodes[next(iter(network.nodes))].name] == ("leaf-1-1", "leaf-1-2")
    assert set(fabric_of(network).paths.values()) == {("spine-1", "leaf-1-1"), ("spine-1", "leaf-2-1")}


def test_switches_are_levelled_by_their_distance_from_compute_nodes() -> None:
    levels = {one.name: one.level for one in read_ibnetdiscover(rails(), "fabric").network.switches.values()}
    assert levels == {
        "leaf-1-1": 0, "leaf-1-2": 0, "leaf-2-1": 0, "leaf-2-2": 0, "spine-1": 1, "spine-2": 1, "depot": 0,
    }  # fmt: skip


def test_what_is_no_node_is_kept_apart_and_told() -> None:
    network = read_ibnetdiscover(rails(), "fabric").network
    assert {(one.name, one.role) for one in network.others} == {
        ("oss1 HCA-1", Role.STORAGE),
        ("MT4129 ConnectX7   Mellanox Technologies", Role.UNNAMED),
        ("Mellanox Technologies Aggregation Node", Role.AGGREGATION),
        ("R1-UFM-01 mlx5_0", Role.MANAGEMENT),
        ("localhost HCA-1", Role.UNNAMED),
    }
    assert [kind for kind, _ in told(rails())] == [TopologyCheck.UNNAMED, *[TopologyCheck.APART] * 4]


def test_a_port_name_that_is_slower_on_all_hosts_of_a_kind_leads_to_storage() -> None:
    network = read_ibnetdiscover(rails(), "fabric").network
    roles = {link.above: cable.role for link in network.links if link.host for cable in link.cables}
    assert roles == dict.fromkeys(("leaf-1-1", "leaf-1-2", "leaf-2-1", "leaf-2-2"), Role.COMPUTE) | {
        "depot": Role.STORAGE
    }


def test_storage_can_be_named_by_patterns() -> None:
    names = {"S1": "leaf", "S2": "depot", "H1": "a mlx5_0", "H2": "a mlx5_1", "H3": "b mlx5_0"}
    plugs = [Plug(("S1", 1), ("H1", 1)), Plug(("S2", 1), ("H2", 1)), Plug(("S1", 2), ("H3", 1))]
    text = ibnetdiscover(names, plugs)
    assert rails_of(read_ibnetdiscover(text, "f").network) == {"a": ("leaf", "depot"), "b": ("leaf",)}
    network = read_ibnetdiscover(text, "f", storage=("* mlx5_1",)).network
    assert rails_of(network) == {"a": ("leaf",), "b": ("leaf",)}
    assert sorted(read_ibnetdiscover(text, "f", storage=("b *",)).network.nodes) == ["a"]


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        (("4xDDR", "4xDDR"), "leaf-1-1 port 18 - spine-1 port 6: 16 Gb/s, told by both ends; usual here 400"),
        (("1xNDR", "1xNDR"), "leaf-1-1 port 18 - spine-1 port 6: 100 Gb/s, told by both ends; usual here 400"),
        (
            ("4xHDR", "4xNDR"),
            "leaf-1-1 port 18 - spine-1 port 6: 200 Gb/s at its lower end, 400 at its upper; usual here 400",
        ),
    ],
)
def test_a_cable_with_less_width_or_speed_is_degraded(rates: tuple[str, str], expected: str) -> None:
    slow = Plug(FIRST_TRUNK.one, FIRST_TRUNK.other, *rates)
    findings = told(rails(without=[FIRST_TRUNK], besides=[slow]))
    assert [text for kind, text in findings if kind == TopologyCheck.DEGRADED] == [expected]


def test_a_host_whose_port_is_slow_is_degraded_and_not_storage() -> None:
    plug = RAILS_PLUGS[0]
    findings = told(rails(without=[plug], besides=[Plug(plug.one, plug.other, "4xHDR")]))
    assert [text for kind, text in findings if kind == TopologyCheck.DEGRADED] == [
        "gpu-1 port mlx5_0/1 - leaf-1-1 port 1: 200 Gb/s, told by both ends; usual here 400"
    ]


def test_a_cable_whose_other_end_was_not_heard_is_told() -> None:
    lines = rails().splitlines()
    at = next(n for n, line in enumerate(lines) if "spine-1:" in line and line.startswith("Switch"))
    silent = [
        line for n, line in enumerate(lines) if not (n > at and n < at + 40 and '"S-' in line and line[0] == "[")
    ]
    kinds = {kind for kind, _ in told("\n".join(silent))}
    assert TopologyCheck.ONE_SIDED in kinds
    assert TopologyCheck.UNREADABLE not in kinds


def test_a_guid_without_its_leading_zeros_is_the_same_guid() -> None:
    text = 'Switch 36 "S-0002c902" # "leaf" enhanced port 0 lid 1\n[1] "H-00ab"[1](ab) # "n0 HCA-1" lid 2 4xEDR\n'
    text += 'Ca 1 "H-ab" # "n0 HCA-1"\n[1](ab) "S-2c902"[1] # lid 2 lmc 0 "leaf" lid 1 4xEDR\n'
    network = read_ibnetdiscover(text, "fabric").network
    assert [(one.below, one.above, len(one.cables)) for one in network.links] == [("n0", "leaf", 1)]
    assert told(text) == []


def test_switches_with_one_description_or_none_stay_apart() -> None:
    names = {
        "S1": "MF0;big:SX6536/L01/U1",
        "S2": "MF0;big:SX6536/L02/U1",
        "S3": "Quantum Mellanox Technologies",
        "S4": "leaf",
        "S5": "leaf",
        "S6": 'no name "at all',
    }
    switches = read_ibnetdiscover(ibnetdiscover(names, []), "fabric").network.switches
    assert len(switches) == 6
    assert list(switches)[:3] == ["big", "big-L02-U1", "S-e09d730300000002"]


def test_a_host_alone_has_no_topology() -> None:
    reading = read_ibnetdiscover('Ca\t1 "H-b8e92403009ca838"\t\t# "gpu-01 HCA-1"\n', "fabric")
    assert reading.network == Network()


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ('[1]\t"H-zz"[1] # nonsense', TopologyCheck.UNREADABLE),
        ('Switch\t65 "X-1"', TopologyCheck.UNREADABLE),
        ("what is this", TopologyCheck.UNREADABLE),
    ],
)
def test_a_line_that_is_none_is_noted_and_costs_no_other(line: str, kind: TopologyCheck) -> None:
    lines = rails().splitlines()
    reading = read_ibnetdiscover("\n".join([*lines, line]), "fabric")
    assert (reading.findings[0].check, reading.findings[0].line) == (kind, len(lines) + 1)
    assert reading.network == read_ibnetdiscover(rails(), "fabric").network


def test_the_ports_of_a_device_whose_head_is_broken_go_to_no_other() -> None:
    text = rails()
    broken = text.replace('Switch\t65 "S-', 'witch\t65 "S-', 2).replace('witch\t65 "S-', 'Switch\t65 "S-', 1)
    assert broken.count("\nwitch") == 1
    reading = read_ibnetdiscover(broken, "fabric")
    assert [finding.check for finding in reading.findings if finding.severity > Severity.NOTE] == [
        TopologyCheck.UNREADABLE
    ]
    whole = {(link.below, link.above) for link in read_ibnetdiscover(text, "fabric").network.links}
    assert {(link.below, link.above) for link in reading.network.links} == whole


def test_a_device_or_port_that_is_there_twice_counts_once() -> None:
    reading = read_ibnetdiscover(rails() + rails(), "fabric")
    assert reading.network == read_ibnetdiscover(rails(), "fabric").network
    assert sum(one.check == TopologyCheck.DUPLICATE for one in reading.findings) == len(RAILS_NAMES)


def test_two_ends_that_contradict_each_other_are_told() -> None:
    text = 'Switch 36 "S-1" # "a"\n[1] "S-2"[1] # "b" lid 2 4xEDR\n'
    text += 'Switch 36 "S-2" # "b"\n[1] "S-3"[9] # "c" lid 2 4xEDR\n'
    findings = read_ibnetdiscover(text, "fabric").findings
    assert [(one.check, one.line) for one in findings] == [(TopologyCheck.UNREADABLE, 2)]


def test_rates_are_after_line_coding() -> None:
    assert rate("4xQDR") == 32
    assert rate("4xFDR10") == 40
    assert rate("4xEDR") == 100
    assert rate("8xXDR") == 1600
    assert rate("no rate") is None
    assert any(
        "no rate" in text for _, text in told('Switch 36 "S-1" # "a"\n[1] "H-2"[1](2) # "n0 HCA-1" lid 2 4xABC\n')
    )


def test_two_hosts_that_took_one_name_are_told() -> None:
    names = {"S1": "leaf-1", "S2": "leaf-2", "H1": "a mlx5_0", "H2": "a mlx5_1", "H3": "a.site mlx5_0"}
    plugs = [Plug(("S1", 1), ("H1", 1)), Plug(("S1", 2), ("H2", 1)), Plug(("S2", 1), ("H3", 1))]
    text = ibnetdiscover(names, plugs)
    findings = [one for one in read_ibnetdiscover(text, "f").findings if one.severity > Severity.NOTE]
    assert [(one.check, text.split("\n")[one.line - 1].split("# ")[1]) for one in findings] == [
        (TopologyCheck.DUPLICATE, '"a.site mlx5_0"')
    ]
    assert not [one for one in read_ibnetdiscover(rails(), "f").findings if one.check == TopologyCheck.DUPLICATE]


def test_an_adapter_may_be_called_anything() -> None:
    label = f"mlx5_{'9' * 5000}"
    text = ibnetdiscover({"S1": "leaf", "H1": f"a {label}"}, [Plug(("S1", 1), ("H1", 1))])
    assert rails_of(read_ibnetdiscover(text, "f").network) == {"a": ("leaf",)}
