"""Fabrics for tests: written as `ibnetdiscover` prints them (after its manual page), and drawn at random."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from deeplink.core.types import NodeName
from deeplink.scheduler.topology.network import (
    Cable,
    DeviceHealth,
    End,
    FabricLink,
    Gpu,
    Inside,
    Join,
    Joined,
    Network,
    Nic,
    Node,
    Other,
    Role,
    Switch,
)


@dataclass(frozen=True)
class Plug:
    """A cable: two ends (device, port), and the rate each of them tells."""

    one: tuple[str, int]
    other: tuple[str, int]
    rate: str = "4xNDR"
    other_rate: str = ""


def ibnetdiscover(names: Mapping[str, str], plugs: Iterable[Plug]) -> str:
    """Write a fabric. Devices are called S1, S2, ... and H1, H2, ...; `names` are their descriptions."""
    guids = {device: 0xE09D730300000000 + place for place, device in enumerate(names)}
    ports: dict[str, list[tuple[int, str, int, str]]] = {device: [] for device in names}
    for plug in plugs:
        ports[plug.one[0]].append((plug.one[1], *plug.other, plug.rate))
        ports[plug.other[0]].append((plug.other[1], *plug.one, plug.other_rate or plug.rate))
    lines = ["#", "# Topology file: generated on Sat Nov  1 12:00:00 2025", "#"]
    for device, name in names.items():
        guid = guids[device]
        lines += ["", "vendid=0x2c9", "devid=0xd2f2", f"sysimgguid=0x{guid:x}"]
        if device[0] == "S":
            lines += [f"switchguid=0x{guid:x}({guid:x})"]
            lines += [f'Switch\t65 "S-{guid:016x}"\t\t# "{name}" enhanced port 0 lid 1 lmc 0']
        else:
            lines += [f"caguid=0x{guid:x}", f'Ca\t1 "H-{guid:016x}"\t\t# "{name}"']
        for port, peer, peer_port, rate in sorted(ports[device]):
            far, told = guids[peer], f'"{names[peer]}" lid 1 {rate}'
            if device[0] == "H":
                lines += [f'[{port}]({guid:x}) \t"S-{far:016x}"[{peer_port}]\t\t# lid 2 lmc 0 {told}']
            elif peer[0] == "H":
                lines += [f'[{port}]\t"H-{far:016x}"[{peer_port}]({far:x}) \t\t# {told}']
            else:
                lines += [f'[{port}]\t"S-{far:016x}"[{peer_port}]\t\t# {told}']
    return "\n".join(lines) + "\n"


RAILS_NAMES = {
    **{f"S{rail}{group}": f"MF0;leaf-{group}-{rail}:MQM9701/U1" for group in (1, 2) for rail in (1, 2)},
    "S5": "MF0;spine-1:MQM9701/U1",
    "S6": "MF0;spine-2:MQM9701/U1",
    "S7": "MF0;depot:MQM9701/U1",
    **{f"H{host}{rail}": f"gpu-{host} mlx5_{rail - 1}" for host in range(1, 7) for rail in (1, 2, 3)},
    "H90": "oss1 HCA-1",
    "H91": "MT4129 ConnectX7   Mellanox Technologies",
    "H92": "Mellanox Technologies Aggregation Node",
    "H93": "R1-UFM-01 mlx5_0",
    "H94": "localhost HCA-1",
}
RAILS_PLUGS = (
    *(
        Plug((f"S{rail}{group}", host), (f"H{host + 3 * (group - 1)}{rail}", 1))
        for group in (1, 2)
        for rail in (1, 2)
        for host in (1, 2, 3)
    ),
    *(
        Plug((f"S{rail}{group}", 18 + 2 * spine + twin), (f"S{5 + spine}", 4 * group + 2 * rail + twin))
        for group in (1, 2)
        for rail in (1, 2)
        for spine in (0, 1)
        for twin in (0, 1)
    ),
    *(Plug(("S7", host), (f"H{host}3", 1), "4xHDR") for host in range(1, 7)),
    Plug(("S7", 20), ("S5", 40), "4xHDR"),
    Plug(("S7", 21), ("S6", 40), "4xHDR"),
    Plug(("S7", 30), ("H90", 1), "4xHDR"),
    Plug(("S11", 17), ("H91", 1)),
    Plug(("S11", 65), ("H92", 1)),
    Plug(("S12", 17), ("H93", 1)),
    Plug(("S12", 16), ("H94", 1)),
)
"""Two groups of three hosts, a leaf switch for each of two rails, two spines, two cables each; and a third port of
each host, slower, on a switch for storage. Besides what is on real fabrics and is no node."""


def rails(*, without: Iterable[Plug] = (), besides: Iterable[Plug] = ()) -> str:
    """Write that fabric, with some cables others."""
    gone = set(without)
    assert gone <= set(RAILS_PLUGS)
    return ibnetdiscover(RAILS_NAMES, [*(plug for plug in RAILS_PLUGS if plug not in gone), *besides])


MATRIX = """\
\tGPU0\tGPU1\tmlx5_0\tmlx5_1\tmlx5_2\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV12\tPXB\tSYS\tSYS\t0-15\t0
GPU1\tNV12\t X \tSYS\tPIX\tSYS\t16-31\t1
mlx5_0\tPXB\tSYS\t X \tSYS\tSYS
mlx5_1\tSYS\tPIX\tSYS\t X \tSYS
mlx5_2\tSYS\tSYS\tSYS\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
"""
INSIDE = Inside(
    (Gpu("GPU0", "0-15", 0), Gpu("GPU1", "16-31", 1)),
    (Nic("mlx5_0", "mlx5_0"), Nic("mlx5_1", "mlx5_1"), Nic("mlx5_2", "mlx5_2")),
    {
        ("GPU0", "GPU1"): Joined(Join.NVLINK, 12),
        ("GPU0", "mlx5_0"): Joined(Join.PXB),
        ("GPU0", "mlx5_1"): Joined(Join.SYS),
        ("GPU0", "mlx5_2"): Joined(Join.SYS),
        ("GPU1", "mlx5_0"): Joined(Join.SYS),
        ("GPU1", "mlx5_1"): Joined(Join.PIX),
        ("GPU1", "mlx5_2"): Joined(Join.SYS),
        ("mlx5_0", "mlx5_1"): Joined(Join.SYS),
        ("mlx5_0", "mlx5_2"): Joined(Join.SYS),
        ("mlx5_1", "mlx5_2"): Joined(Join.SYS),
    },
)
"""What MATRIX says."""


def device(known: str, name: str, tier: int) -> dict[str, Any]:
    kind = "switch" if tier > 0 else "discovered_via_lldp"
    return {"id": known, "name": name, "tier": tier, "device_type": kind, "size": 1}


def link(one: str, other: str, count: int) -> dict[str, Any]:
    cables = [
        {
            "id": f"{one}:swp{port}-*-{other}:eth{port}",
            "interfaces": [{"interface": f"swp{port}", "node": one}, {"interface": f"eth{port}", "node": other}],
        }
        for port in range(count)
    ]
    return {"id": f"{one}-*-{other}", "src": one, "target": other, "size": count, "compounded_links": cables}


def graph() -> list[dict[str, Any]]:
    """A link graph as NetQ tells it: two leaves below a spine, two hosts on each; ends in no fixed order."""
    tiers = [
        [device("node0", "leaf-1", 1), device("node9", "leaf-2", 1)],
        [device("node3", "spine-1", 2)],
        [device(f"node{20 + number}", f"dgx-0{number}", -1) for number in range(1, 5)],
    ]
    links = [link("node0", "node21", 4), link("node22", "node0", 4), link("node9", "node23", 4)]
    links += [link("node9", "node24", 4), link("node0", "node3", 28), link("node3", "node9", 19)]
    nodes = [{"node_type": "tier", "compounded_nodes": devices} for devices in tiers]
    return [{"links": links, "nodes": nodes}]


# Written after topology.conf(5).
TOPOLOGY_CONF = """\
# a comment
SwitchName=leaf0 Nodes=n[0-1] LinkSpeed=100
SwitchName=leaf1 Nodes=n2,n3   # another
SwitchName=spine Switches=leaf[0-1]"""

SCONTROL = Path(__file__).parents[2] / "data" / "slurm" / "22.05.8" / "1-busy" / "scontrol-show-topology.txt"

rates = st.sampled_from([None, 0.0, 13.64, 200.0, 400.0])
ends = st.builds(End, st.sampled_from(["", "1", "mlx5_0/1"]), rates, st.booleans())
cables = st.builds(
    Cable,
    lower=ends,
    upper=ends,
    usual_gbps=st.sampled_from([None, 400.0]),
    latency_us=st.sampled_from([None, 1.5]),
    said=st.sampled_from([None, *DeviceHealth]),
    role=st.sampled_from([Role.COMPUTE, Role.STORAGE]),
)


@st.composite
def networks(draw: st.DrawFn, *, rails: int = 2) -> Network:
    """Any graph that readers can make: several levels, several roots, hosts with so many rails or none."""
    counts = [draw(st.integers(1, 4)) for _ in range(draw(st.integers(1, 3)))]
    switches = {
        f"s{level}-{number}": Switch(f"s{level}-{number}", level, draw(st.sampled_from(["", "S-01"])))
        for level, count in enumerate(counts)
        for number in range(count)
    }
    nodes = {
        NodeName(f"n{number}"): Node(
            NodeName(f"n{number}"),
            draw(st.sampled_from(["", "rack-1"])),
            draw(st.sampled_from(list(DeviceHealth))),
            draw(st.sampled_from([None, INSIDE])),
        )
        for number in range(draw(st.integers(0, 8)))
    }
    some = st.lists(cables, min_size=1, max_size=2).map(tuple)
    links = [
        FabricLink(below, above, False, draw(some))
        for below in switches
        for above in switches
        if switches[above].level == switches[below].level + 1 and draw(st.booleans())
    ]
    for node in nodes:
        on = draw(st.lists(st.sampled_from(sorted(switches)), max_size=rails, unique=True))
        links += [FabricLink(node, switch, True, draw(some)) for switch in on]
    others = [Other("oss1 HCA-1", Role.STORAGE, "s0-0", "3", 200.0)] if draw(st.booleans()) else []
    return Network(nodes, switches, tuple(links), tuple(others))
