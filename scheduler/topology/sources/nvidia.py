"""What NVIDIA's tools tell: NetQ's JSON of a fabric, and the inside of a node as `nvidia-smi topo -m` prints it.

NetQ's graph is a list of objects with `links` and `nodes`. The nodes are grouped by tier: 1 for leaf switches, 2
for spines and so on, -1 for what was only heard of by LLDP, which are the hosts. A link names its two devices in
no fixed order, and its cables in `compounded_links`. Compute trays are a list of objects with `Name`,
`DomainUUID` and `DeviceHealth`.

nvidia-smi prints a matrix of GPUs and network cards, then each GPU's CPUs and NUMA node, a legend of the words,
and where the cards are called NIC0, NIC1, ... a legend of their devices. Between drivers the columns at its right
differ, and whether cells are parted by tabs; the words do not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from deeplink.core.types import NodeName
from deeplink.scheduler.topology.network import (
    Cable,
    DeviceHealth,
    End,
    Gpu,
    Inside,
    Join,
    Joined,
    Nic,
    Node,
    Switch,
    TopologyCheck,
)
from deeplink.scheduler.topology.sources.gathering import GraphBuilder, Reading, is_name, short, without_domains
from deeplink.scheduler.topology.sources.marked import Item, MarkedTextError, from_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deeplink.core.finding import Finding

_HEALTH = {
    "HEALTHY": DeviceHealth.OK,
    "DEGRADED": DeviceHealth.DEGRADED,
    "UNHEALTHY": DeviceHealth.DEGRADED,
    "DOWN": DeviceHealth.DOWN,
}
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # nvidia-smi underlines its header, also into a file
_GPU = re.compile(r"GPU\d{1,4}", re.ASCII)
_DEVICE = re.compile(r"[A-Za-z][\w.-]*", re.ASCII)
_CARD = re.compile(r"\s*(NIC\d+)\s*:\s*(\S+)\s*", re.ASCII)
_CPUS = re.compile(r"\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*", re.ASCII)
_FORMER = {"SOC": Join.SYS.value}  # drivers before 2017
_MOST = 1024  # devices; a node has a few dozen


def read_netq(text: str, source: str) -> Reading:
    """Read a NetQ link graph, or a list of compute trays; what cannot be read is noted and passed over."""
    gathering = GraphBuilder(source)
    try:
        root = from_json(text)
    except MarkedTextError as problem:
        gathering.unreadable(f"no JSON: {problem}", problem.line)
        return gathering.reading()
    for part in root.items if isinstance(root.value, list) else [root]:
        if "links" in part.fields or "nodes" in part.fields:
            _graph(part, gathering)
        elif "Name" in part.fields:
            _tray(part, gathering)
        else:
            gathering.unreadable("neither a graph (`links`, `nodes`) nor a tray (`Name`)", part.line)
    return gathering.reading()


def _tray(tray: Item, gathering: GraphBuilder) -> None:
    name = _text(tray, "Name")
    if not is_name(name):
        gathering.unreadable(f"{short(name)} is no name of a node", tray.line)
        return
    if name in gathering.nodes:
        gathering.duplicate(f"tray {name} is there twice", tray.line)
        return
    said = _text(tray, "Health").upper()
    if said and said not in _HEALTH:
        gathering.unreadable(f"{short(said)} is no health that is known", tray.line)
    health = _HEALTH.get(said, DeviceHealth.UNKNOWN)
    gathering.nodes[NodeName(name)] = Node(NodeName(name), domain=_text(tray, "DomainUUID"), health=health)


def _graph(graph: Item, gathering: GraphBuilder) -> None:
    names: dict[str, str] = {}
    devices = [
        device
        for group in _list(graph, "nodes")
        for device in (_list(group, "compounded_nodes") if "compounded_nodes" in group.fields else [group])
    ]
    plain = without_domains(_text(device, "name") for device in devices)
    for device in devices:
        _device(device, names, gathering, plain)
    seen: dict[str, int] = {}
    for link in _list(graph, "links"):
        for cable in _list(link, "compounded_links") if "compounded_links" in link.fields else [link]:
            known = _text(cable, "id")
            if known in seen:
                gathering.duplicate(f"cable {short(known)} is also on line {seen[known]}", cable.line)
                continue
            if known:
                seen[known] = cable.line
            _cable(cable, names, gathering)


def _device(device: Item, names: dict[str, str], gathering: GraphBuilder, plain: Mapping[str, str]) -> None:
    known, name, tier = _text(device, "id"), plain[_text(device, "name")], _text(device, "tier")
    if not known or not is_name(name) or not re.fullmatch(r"-?[0-9]{1,3}", tier):
        text = f"a device must have an id, a name and a tier, not {short(known)}, {short(name)} and {short(tier)}"
        gathering.unreadable(text, device.line)
        return
    is_switch = int(tier) > 0
    if known in names or name in gathering.switches or name in gathering.nodes:
        gathering.duplicate(f"device {name} ({known}) is there twice", device.line)
        return
    names[known] = name
    if is_switch:
        gathering.switches[name] = Switch(name, int(tier) - 1)
    else:
        gathering.nodes[NodeName(name)] = Node(NodeName(name))


def _cable(cable: Item, names: dict[str, str], gathering: GraphBuilder) -> None:
    ends = [(_text(end, "node"), End(_text(end, "interface"))) for end in _list(cable, "interfaces")]
    if len(ends) != 2:  # noqa: PLR2004 - a cable has two ends
        gathering.unreadable(f"a cable with {len(ends)} ends", cable.line)
        return
    unknown = [device for device, _ in ends if device not in names]
    if unknown:
        gathering.say(TopologyCheck.UNKNOWN, f"a cable to {short(unknown[0])}, which is no device", cable.line)
        return
    switches = gathering.switches
    # A device is a switch or a host by its tier, so a name is only one of them here.
    low, high = sorted(
        ((names[device], end) for device, end in ends),
        key=lambda end: (end[0] in switches, switches[end[0]].level if end[0] in switches else 0, end[0]),
    )
    if high[0] not in switches or low[0] == high[0]:
        gathering.unreadable(f"a cable between {low[0]} and {high[0]}, neither above the other", cable.line)
        return
    host = low[0] not in switches
    gathering.connect(low[0], high[0], host=host, cables=[Cable(lower=low[1], upper=high[1])])


def _list(item: Item, name: str) -> list[Item]:
    return item.fields[name].items if name in item.fields else []


def _text(item: Item, name: str) -> str:
    return (item.fields[name].text or "") if name in item.fields else ""


@dataclass(frozen=True, slots=True)
class InsideReading:
    """What was made of a matrix; None where there is none."""

    inside: Inside | None
    findings: tuple[Finding, ...]


def is_header(line: str) -> bool:
    """Tell whether a line is the head of a matrix."""
    return bool(_header(line))


def read_matrix(text: str, source: str) -> InsideReading:
    """Read what `nvidia-smi topo -m` printed. A cell or line that cannot be read is noted and passed over."""
    matrix = _Matrix(source)
    cards: dict[str, str] = {}
    for number, raw in enumerate(text.split("\n"), start=1):
        line = _COLOUR.sub("", raw)
        words = line.split()
        if not matrix.devices:
            matrix.devices, matrix.head = _header(line), number
        elif words and words[0] in matrix.devices:
            matrix.row(words, number)
        elif found := _CARD.fullmatch(line):
            cards[found[1]] = found[2]
    if not matrix.devices:
        return InsideReading(None, (TopologyCheck.NO_TOPOLOGY.finding("no matrix of GPUs is in it", source),))
    gpus = [name for name in matrix.devices if _GPU.fullmatch(name)]
    for name in gpus:
        if name not in matrix.gpus:
            matrix.unreadable(f"{name} is in the head and has no line", matrix.head)
    inside = Inside(
        tuple(matrix.gpus.get(name, Gpu(name)) for name in gpus),
        tuple(Nic(name, cards.get(name, name)) for name in matrix.devices if name not in gpus),
        matrix.pairs(),
    )
    return InsideReading(inside, tuple(matrix.findings))


class _Matrix:
    """The matrix being read."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.devices: tuple[str, ...] = ()
        self.head = 0  # its line
        self.gpus: dict[str, Gpu] = {}
        self.findings: list[Finding] = []
        self._cells: dict[tuple[str, str], tuple[Joined, int]] = {}
        self._lines: dict[str, int] = {}

    def unreadable(self, text: str, line: int) -> None:
        self.findings.append(TopologyCheck.UNREADABLE.finding(text, self.source, line))

    def row(self, words: list[str], line: int) -> None:
        """Take in the line of one device."""
        name, *cells = words
        if self._lines.setdefault(name, line) != line:
            text = f"{name} is also on line {self._lines[name]}"
            self.findings.append(TopologyCheck.DUPLICATE.finding(text, self.source, line))
            return
        if _GPU.fullmatch(name):
            self.gpus[name] = _gpu(name, cells[len(self.devices) :])
        for other, word in zip(self.devices, cells, strict=False):
            joined = _joined(word)
            if joined and other != name:
                self._cells[name, other] = joined, line
            elif word != "X" or other != name:
                self.unreadable(f"{name} to {other}: {short(word)} is no way to be joined", line)
        if len(cells) < len(self.devices):
            self.unreadable(f"{name} has too few cells", line)

    def pairs(self) -> dict[tuple[str, str], Joined]:
        """Make one of the two cells of each pair; where they differ, the farther way counts."""
        pairs: dict[tuple[str, str], Joined] = {}
        place = {name: number for number, name in enumerate(self.devices)}
        for (one, other), (joined, line) in self._cells.items():
            back = self._cells.get((other, one), (joined, line))
            in_order = place[one] < place[other]
            if back[0] != joined and in_order:
                text = f"{one} to {other} is {joined}, and back {back[0]} on line {back[1]}; the farther counts"
                self.unreadable(text, line)
            pair = (one, other) if in_order else (other, one)
            pairs[pair] = max(joined, back[0], key=lambda way: (way.join.distance, -way.nvlinks))
        return dict(sorted(pairs.items(), key=lambda item: (place[item[0][0]], place[item[0][1]])))


def _header(line: str) -> tuple[str, ...]:
    words = _COLOUR.sub("", line).split()
    if not words or not _GPU.fullmatch(words[0]):
        return ()
    devices = list(takewhile(lambda word: word not in {"CPU", "NUMA"}, words[:_MOST]))
    # A line of the matrix begins with a GPU too, but goes on with how that is joined.
    known = all(_DEVICE.fullmatch(word) and not _joined(word) and word != "X" for word in devices)
    return tuple(devices) if known and len(set(devices)) == len(devices) else ()


def _joined(word: str) -> Joined | None:
    return Joined.of(_FORMER.get(word, word))


def _gpu(name: str, behind: list[str]) -> Gpu:
    cpus = behind[0] if behind and _CPUS.fullmatch(behind[0]) else ""
    numa = behind[1] if len(behind) > 1 and re.fullmatch("[0-9]{1,6}", behind[1]) else None
    return Gpu(name, cpus, int(numa) if numa is not None else None)
