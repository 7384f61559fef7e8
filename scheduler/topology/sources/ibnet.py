"""An InfiniBand fabric as `ibnetdiscover` (infiniband-diags) prints it: every port of every device, at both ends.

One record per device, a line per connected port:

    Switch 65 "S-2c5eab0300b87b40"   # "MF0;leaf-01:MQM9701/U1" enhanced port 0 lid 73 lmc 0
    [1]    "H-e09d7303007a4bd8"[1](e09d7303007a4bd8)   # "node-01 mlx5_5" lid 647 4xNDR

The record of a host's adapter (`Ca`) tells the same cable from its other end. Names are node descriptions, which
each host sets for itself (usually `HOST HCA-1` or `HOST mlx5_0`) or has not set yet.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from deeplink.core.text import counted, listed
from deeplink.core.types import NodeName
from deeplink.scheduler.topology.network import Cable, End, Node, Other, Role, Switch, TopologyCheck
from deeplink.scheduler.topology.sources.gathering import GraphBuilder, Reading, is_name, short, without_domains

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


_ADAPTER = re.compile(r"(?:HCA-|mlx\d+_|ib|hfi\d+_|irdma|bnxt_re)\w*", re.ASCII)
UNSET = re.compile(r"MT\d+\b|.*Mellanox Technologies|Quantum\b|\(none\)|Node GUID", re.ASCII)
"""A description that firmware or a driver gives where no host has set one."""
_ALONE = re.compile(r"(?:HCA-|mlx\d+_|hfi\d+_)\d+", re.ASCII)  # an adapter without its host
# Set by an installer, not by a site.
_ANYBODY = {"localhost", "ubuntu", "debian", "centos", "rocky", "host", "node"}
_STORAGE = {
    "storage", "stor", "oss", "mds", "mgs", "ost", "nsd", "gpfs", "lustre", "beegfs", "bee", "weka", "vast",
    "ceph", "nfs", "daos", "ddn",
}  # fmt: skip
_MANAGEMENT = {"ufm", "cufm", "mgmt", "opensm"}
LANE_GBPS = {
    "SDR": 2.0, "DDR": 4.0, "QDR": 8.0, "FDR10": 10.0, "FDR": 13.64, "EDR": 25.0, "HDR": 50.0, "NDR": 100.0,
    "XDR": 200.0,
}  # fmt: skip
"""Data rate of one lane, Gb/s, after line coding: the InfiniBand Trade Association's roadmap and specification
(8b/10b for SDR to QDR, 64b/66b from FDR10 on, rounded as there)."""
_ID = r'"([SHR])-([0-9a-fA-F]{1,16})"'
_BEHIND = r"(?:\[ext \d+\])?(?:\([0-9a-fA-Fx]*\))?"  # an extended port's number, a GUID
_DEVICE = re.compile(rf'(?:Switch|Ca|Rt)\s+\d+\s+{_ID}\s*(?:#\s*(?:"([^"]*)")?.*)?', re.ASCII)
_PORT = re.compile(rf"\[(\d{{1,4}})\]{_BEHIND}\s+{_ID}\[(\d{{1,4}})\]{_BEHIND}\s*(?:#(.*))?", re.ASCII)
_PASSED_OVER = re.compile(r"#|(?:vendid|devid|sysimgguid|switchguid|caguid|rtguid)=|Chassis\b")
_RATE = re.compile(r"\b(\d{1,2})x([A-Z]+(?:10)?)\b", re.ASCII)
_ENOUGH = 3
"""So many hosts of one kind must have a slower port of one name before it is taken for a network of its own, and
not for a bad cable."""


@dataclass(frozen=True, slots=True)
class AdapterHost:
    """An adapter: whose, which, and what for."""

    name: str
    label: str
    role: Role


def host_of(said: str, storage: tuple[str, ...]) -> AdapterHost:
    """Return whose an adapter is, from its description: `gpu-01 mlx5_5`, `oss3 HCA-1`, `MT4129 ConnectX7 ...`."""
    if "aggregation node" in said.casefold():
        return AdapterHost(said, "", Role.AGGREGATION)
    words = said.split()
    name, label = (words[0], "-".join(words[1:])) if words else ("", "")
    if any(fnmatchcase(said, pattern) for pattern in storage):
        return AdapterHost(name, label, Role.STORAGE)
    known = not label or _ADAPTER.fullmatch(label) or "stor" in label.casefold()
    plain = is_name(name) and not _ALONE.fullmatch(name) and not words[2:] and known  # a host and its adapter
    if not plain or UNSET.match(said) or name.partition(".")[0].casefold() in _ANYBODY:
        return AdapterHost(said or "(no description)", "", Role.UNNAMED)
    tokens = set(re.findall(r"[a-z]+", name.casefold()))
    if tokens & _MANAGEMENT:
        return AdapterHost(name, label, Role.MANAGEMENT)
    if tokens & _STORAGE or "stor" in label.casefold():
        return AdapterHost(name, label, Role.STORAGE)
    return AdapterHost(name, label, Role.COMPUTE)


def family(name: str) -> str:
    """Return what the names of like hosts have in common: `a#-p#-dgx-#` of `a08-p1-dgx-04`."""
    return re.sub(r"[0-9]+", "#", name)


def most_common(rates: Iterable[float]) -> float:
    """Return the most common of some rates; of equally common ones the highest."""
    counts = Counter(rates)
    return max(counts, key=lambda gbps: (counts[gbps], gbps))


Key = tuple[str, int]  # "S" for a switch, "H" for an adapter, "R" for a router; its GUID


@dataclass(slots=True)
class _Device:
    key: Key
    said: str
    line: int


@dataclass(frozen=True, slots=True)
class _Told:
    """What one end says of its cable."""

    peer: Key
    peer_port: str
    gbps: float | None
    line: int


@dataclass(slots=True)
class _Fabric:
    devices: dict[Key, _Device] = field(default_factory=dict)
    ports: dict[tuple[Key, str], _Told] = field(default_factory=dict)
    heard_of: dict[Key, _Device] = field(default_factory=dict)  # named by a neighbour only


def rate(text: str) -> float | None:
    """Return the data rate in Gb/s that a text such as `lid 73 4xNDR` ends in; None where none is known."""
    found = _RATE.findall(text)
    if not found or found[-1][1] not in LANE_GBPS:
        return None
    width, speed = found[-1]
    return int(width) * LANE_GBPS[speed]


def read_ibnetdiscover(text: str, source: str, *, storage: Iterable[str] = ()) -> Reading:
    """Read what `ibnetdiscover` printed.

    Storage is told from compute by name (of the host, or in the adapter's) and by rate: where most hosts of a kind
    have a port of one name that is slower than their others, it is on another network. UFM and subnet managers,
    SHARP's aggregation nodes and adapters without a name of their own are no nodes either.
    """
    gathering = GraphBuilder(source)
    fabric = _parsed(text, gathering)
    hosts = _hosts(fabric, tuple(storage))
    _say_who_is_called_alike(fabric, hosts, gathering)
    hosts = _slow_ones_apart(fabric, hosts)
    names = _switch_names(fabric)
    levels = _levels(fabric, hosts)
    for key, name in names.items():
        gathering.switches[name] = Switch(name, levels[key], id=f"S-{key[1]:016x}")
    _connect(fabric, gathering, names, levels, hosts)
    _say_who_is_apart(gathering)
    return gathering.reading()


def _parsed(text: str, gathering: GraphBuilder) -> _Fabric:
    fabric = _Fabric()
    current: Key | None = None
    for number, raw in enumerate(text.split("\n"), start=1):
        line = raw.strip()
        if not line or _PASSED_OVER.match(line):
            continue
        device, port = _DEVICE.fullmatch(line), _PORT.fullmatch(line)
        if device:
            key = device[1], int(device[2], 16)
            current = None if key in fabric.devices else key
            if current is None:
                earlier = fabric.devices[key].line
                gathering.duplicate(f"device {device[1]}-{device[2]} is also on line {earlier}", number)
            else:
                fabric.devices[key] = _Device(key, device[3] or "", number)
        elif port and current:
            _port(fabric, gathering, current, port, number)
        elif not port:
            gathering.unreadable(f"{short(line)} is no device and no port", number)
            # It may have been the head of a device: no port that follows may go to the device before.
            current = current if line.startswith("[") else None
        elif not fabric.devices:
            gathering.unreadable("a port before any device", number)
    return fabric


def _port(fabric: _Fabric, gathering: GraphBuilder, key: Key, found: re.Match[str], line: int) -> None:
    port, peer, peer_port, comment = found[1], (found[2], int(found[3], 16)), found[4], found[5] or ""
    if (key, port) in fabric.ports:
        earlier = fabric.ports[key, port].line
        gathering.duplicate(f"port {port} is also on line {earlier}", line)
        return
    fabric.ports[key, port] = _Told(peer, peer_port, rate(comment), line)
    if peer not in fabric.heard_of:
        quoted = re.search(r'"([^"]*)"', comment)
        fabric.heard_of[peer] = _Device(peer, quoted[1] if quoted else "", line)
    if "x" in comment and rate(comment) is None and re.search(r"\dx\S", comment):
        gathering.unreadable(f"{short(comment.split()[-1])} is no rate that is known", line)


def _everyone(fabric: _Fabric) -> dict[Key, _Device]:
    return {**fabric.heard_of, **fabric.devices}


def _hosts(fabric: _Fabric, storage: tuple[str, ...]) -> dict[Key, AdapterHost]:
    hosts = {
        key: host_of(one.said, storage)
        if key[0] == "H"
        else AdapterHost(one.said or "router", "", Role.MANAGEMENT)
        for key, one in _everyone(fabric).items()
        if key[0] != "S"
    }
    plain = without_domains(host.name for host in hosts.values() if host.role in {Role.COMPUTE, Role.STORAGE})
    return {key: replace(host, name=plain.get(host.name, host.name)) for key, host in hosts.items()}


def _say_who_is_called_alike(fabric: _Fabric, hosts: Mapping[Key, AdapterHost], gathering: GraphBuilder) -> None:
    """Note adapters of one name: those of a host differ, so two hosts took one name, and are one node here."""
    devices = _everyone(fabric)
    first: dict[tuple[str, str], Key] = {}
    for key, host in hosts.items():
        if host.role is not Role.COMPUTE or not host.label:
            continue
        other = first.setdefault((host.name, host.label), key)
        if other != key:
            text = f"adapter {host.name} {host.label} ({key[1]:x}) is called as that of line {devices[other].line}"
            gathering.duplicate(f"{text}: two hosts with one name count as one", devices[key].line)


def _slow_ones_apart(fabric: _Fabric, hosts: dict[Key, AdapterHost]) -> dict[Key, AdapterHost]:
    """Mark as storage's the ports whose name is that of a slower network on the hosts of a kind."""
    rates: dict[tuple[str, str], list[float]] = {}
    by_adapter: dict[Key, list[float]] = {}
    for (key, _), told in fabric.ports.items():
        for one in (key, told.peer):
            if one in hosts and told.gbps:
                by_adapter.setdefault(one, []).append(told.gbps)
    for key, found in by_adapter.items():
        host = hosts[key]
        if host.role is Role.COMPUTE:
            rates.setdefault((family(host.name), host.label), []).append(max(found))
    usual = {kind: most_common(found) for kind, found in rates.items() if len(found) >= _ENOUGH}
    fastest: dict[str, float] = {}
    for (kin, _), gbps in usual.items():
        fastest[kin] = max(fastest.get(kin, 0.0), gbps)
    return {
        key: replace(host, role=Role.STORAGE)
        if host.role is Role.COMPUTE
        and host.label
        and usual.get((family(host.name), host.label), float("inf")) < fastest.get(family(host.name), 0.0)
        else host
        for key, host in hosts.items()
    }


def _switch_names(fabric: _Fabric) -> dict[Key, str]:
    """Name every switch by its description, shortened; where that is taken or cannot be a name, by more of it."""
    names: dict[Key, str] = {}
    taken: set[str] = set()
    for key, device in _everyone(fabric).items():
        if key[0] != "S":
            continue
        # "MF0;SYSTEM:MODEL/U1" where the switch runs an operating system of its own.
        system, _, board = (
            device.said.partition(";")[2].partition(":") if ";" in device.said else (device.said, "", "")
        )
        guid = f"S-{key[1]:016x}"
        plain = "" if UNSET.match(system) else re.sub(r"[^\w.-]+", "-", system, flags=re.ASCII).strip("-.")
        longer = re.sub(r"[^\w.-]+", "-", f"{plain}-{board.partition('/')[2]}", flags=re.ASCII).strip("-.")
        tries = [name for name in (plain, longer, f"{plain}-{guid}") if plain and is_name(name)]
        names[key] = next((name for name in tries if name not in taken), guid)
        taken.add(names[key])
    return names


def _levels(fabric: _Fabric, hosts: Mapping[Key, AdapterHost]) -> dict[Key, int]:
    """Return each switch's distance from the nearest with compute nodes; storage by itself is a leaf."""
    switches = [key for key in _everyone(fabric) if key[0] == "S"]
    beside: dict[Key, set[Key]] = {key: set() for key in switches}
    roles: dict[Key, set[Role]] = {key: set() for key in switches}
    for (key, _), told in fabric.ports.items():
        for one, other in ((key, told.peer), (told.peer, key)):
            if one in beside and other in beside:
                beside[one].add(other)
            elif one in beside and other in hosts:
                roles[one].add(hosts[other].role)
    leaves = {key for key in switches if Role.COMPUTE in roles[key]}
    starts = set(leaves)
    for role in (Role.STORAGE, Role.MANAGEMENT, Role.UNNAMED):
        starts |= {key for key in switches if role in roles[key] and not beside[key] & starts}
    levels = dict.fromkeys(starts, 0)
    edge = list(starts)
    while edge:
        edge = list({other for key in edge for other in beside[key] if other not in levels})
        levels.update({key: 1 + min(levels[one] for one in beside[key] if one in levels) for key in edge})
    return {key: levels.get(key, 0) for key in switches}


def _connect(
    fabric: _Fabric,
    gathering: GraphBuilder,
    names: Mapping[Key, str],
    levels: Mapping[Key, int],
    hosts: Mapping[Key, AdapterHost],
) -> None:
    sight = _Sight(names, levels, hosts, {host.name for host in hosts.values() if host.role is Role.COMPUTE})
    for (key, port), told in fabric.ports.items():
        back = fabric.ports.get((told.peer, told.peer_port))
        agreed = back is not None and (back.peer, back.peer_port) == (key, port)
        if agreed and (told.peer, told.peer_port) < (key, port):
            continue  # told from there already
        if back is not None and not agreed:
            text = f"port {port} says it is connected to what line {back.line} says is connected elsewhere"
            gathering.unreadable(text, told.line)
            if (told.peer, told.peer_port) < (key, port):
                continue
        here = End(port, told.gbps)
        there = End(told.peer_port, back.gbps if agreed and back else None, told=agreed)
        _cable(gathering, (key, here), (told.peer, there), sight, told.line)


@dataclass(frozen=True, slots=True)
class _Sight:
    names: Mapping[Key, str]
    levels: Mapping[Key, int]
    hosts: Mapping[Key, AdapterHost]
    compute: set[str]


def _cable(
    gathering: GraphBuilder, one: tuple[Key, End], other: tuple[Key, End], sight: _Sight, line: int
) -> None:
    if one[0] in sight.names and other[0] in sight.names:
        if one[0] == other[0]:
            gathering.unreadable("a cable from a switch to itself", line)
            return
        low, high = sorted((one, other), key=lambda end: (sight.levels[end[0]], sight.names[end[0]]))
        cable = Cable(lower=low[1], upper=high[1])
        gathering.connect(sight.names[low[0]], sight.names[high[0]], host=False, cables=[cable])
        return
    low, high = (one, other) if other[0] in sight.names else (other, one)
    if high[0] not in sight.names or low[0] == high[0]:
        gathering.unreadable("a cable between two hosts", line)
        return
    host, switch = sight.hosts[low[0]], sight.names[high[0]]
    if host.role is Role.COMPUTE:
        gathering.nodes.setdefault(NodeName(host.name), Node(NodeName(host.name)))
    if host.role is Role.COMPUTE or (host.role is Role.STORAGE and host.name in sight.compute):
        label = f"{host.label}/{low[1].port}" if host.label else low[1].port
        cable = Cable(lower=replace(low[1], port=label), upper=high[1], role=host.role)
        gathering.connect(host.name, switch, host=True, cables=[cable])
        return
    gbps = min((end.gbps for end in (low[1], high[1]) if end.gbps is not None), default=None)
    gathering.others.append(Other(f"{host.name} {host.label}".strip(), host.role, switch, high[1].port, gbps))


def _say_who_is_apart(gathering: GraphBuilder) -> None:
    for role, kind in (
        (Role.UNNAMED, TopologyCheck.UNNAMED),
        (Role.STORAGE, TopologyCheck.APART),
        (Role.MANAGEMENT, TopologyCheck.APART),
    ):
        found = [other for other in gathering.others if other.role is role]
        if found:
            named = sorted({other.name for other in found})
            adapters = counted(len(found), role.value + " adapter")
            gathering.say(kind, f"{adapters}, on no node's account: {listed(named, 4)}")
    engines = sum(other.role is Role.AGGREGATION for other in gathering.others)
    if engines:
        gathering.say(
            TopologyCheck.APART, f"{counted(engines, 'aggregation node')} (SHARP) inside the switches are no hosts"
        )
    ports = sum(cable.role is Role.STORAGE for cables in gathering.cables.values() for cable in cables)
    if ports:
        gathering.say(TopologyCheck.APART, f"{counted(ports, 'port')} of compute nodes lead to storage")
