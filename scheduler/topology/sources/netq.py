"""NVIDIA NetQ's answers in JSON: the graph of links, and the compute trays of NVLink domains.

A graph is a list of objects with `links` and `nodes`. The nodes are grouped by tier: 1 for leaf switches, 2 for
spines and so on, -1 for what was only heard of by LLDP, which are the hosts. A link names its two devices in no
fixed order, and its cables in `compounded_links`. Compute trays are a list of objects with `Name`, `DomainUUID`
and `DeviceHealth`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from deeplink.scheduler.topology.finding import TopologyFindingKind
from deeplink.scheduler.topology.network import Cable, DeviceHealth, End, Node, Switch
from deeplink.scheduler.topology.sources.gathering import GraphBuilder, Reading, is_name, short, without_domains
from deeplink.scheduler.topology.sources.marked import Item, MarkedTextError, from_json
from deeplink.types import NodeName

if TYPE_CHECKING:
    from collections.abc import Mapping

_HEALTH = {
    "HEALTHY": DeviceHealth.OK,
    "DEGRADED": DeviceHealth.DEGRADED,
    "UNHEALTHY": DeviceHealth.DEGRADED,
    "DOWN": DeviceHealth.DOWN,
}


def read_netq(text: str, source: str) -> Reading:
    """Read a NetQ link graph, or a list of compute trays; what cannot be read is noted and passed over."""
    gathering = GraphBuilder(source)
    try:
        root = from_json(text)
    except MarkedTextError as problem:
        gathering.say(TopologyFindingKind.UNREADABLE, f"no JSON: {problem}", problem.line)
        return gathering.reading()
    for part in root.items if isinstance(root.value, list) else [root]:
        if "links" in part.fields or "nodes" in part.fields:
            _graph(part, gathering)
        elif "Name" in part.fields:
            _tray(part, gathering)
        else:
            gathering.say(
                TopologyFindingKind.UNREADABLE, "neither a graph (`links`, `nodes`) nor a tray (`Name`)", part.line
            )
    return gathering.reading()


def _tray(tray: Item, gathering: GraphBuilder) -> None:
    name = _text(tray, "Name")
    if not is_name(name):
        gathering.say(TopologyFindingKind.UNREADABLE, f"{short(name)} is no name of a node", tray.line)
        return
    if name in gathering.nodes:
        gathering.say(TopologyFindingKind.DUPLICATE, f"tray {name} is there twice", tray.line)
        return
    said = _text(tray, "Health").upper()
    if said and said not in _HEALTH:
        gathering.say(TopologyFindingKind.UNREADABLE, f"{short(said)} is no health that is known", tray.line)
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
                gathering.say(
                    TopologyFindingKind.DUPLICATE,
                    f"cable {short(known)} is also on line {seen[known]}",
                    cable.line,
                )
                continue
            if known:
                seen[known] = cable.line
            _cable(cable, names, gathering)


def _device(device: Item, names: dict[str, str], gathering: GraphBuilder, plain: Mapping[str, str]) -> None:
    known, name, tier = _text(device, "id"), plain[_text(device, "name")], _text(device, "tier")
    if not known or not is_name(name) or not re.fullmatch(r"-?[0-9]{1,3}", tier):
        text = f"a device must have an id, a name and a tier, not {short(known)}, {short(name)} and {short(tier)}"
        gathering.say(TopologyFindingKind.UNREADABLE, text, device.line)
        return
    is_switch = int(tier) > 0
    if known in names or name in gathering.switches or name in gathering.nodes:
        gathering.say(TopologyFindingKind.DUPLICATE, f"device {name} ({known}) is there twice", device.line)
        return
    names[known] = name
    if is_switch:
        gathering.switches[name] = Switch(name, int(tier) - 1)
    else:
        gathering.nodes[NodeName(name)] = Node(NodeName(name))


def _cable(cable: Item, names: dict[str, str], gathering: GraphBuilder) -> None:
    ends = [(_text(end, "node"), End(_text(end, "interface"))) for end in _list(cable, "interfaces")]
    if len(ends) != 2:  # noqa: PLR2004 - a cable has two ends
        gathering.say(TopologyFindingKind.UNREADABLE, f"a cable with {len(ends)} ends", cable.line)
        return
    unknown = [device for device, _ in ends if device not in names]
    if unknown:
        gathering.say(
            TopologyFindingKind.UNKNOWN, f"a cable to {short(unknown[0])}, which is no device", cable.line
        )
        return
    switches = gathering.switches
    # A device is a switch or a host by its tier, so a name is only one of them here.
    low, high = sorted(
        ((names[device], end) for device, end in ends),
        key=lambda end: (end[0] in switches, switches[end[0]].level if end[0] in switches else 0, end[0]),
    )
    if high[0] not in switches or low[0] == high[0]:
        gathering.say(
            TopologyFindingKind.UNREADABLE,
            f"a cable between {low[0]} and {high[0]}, neither above the other",
            cable.line,
        )
        return
    host = low[0] not in switches
    gathering.connect(low[0], high[0], host=host, cables=[Cable(lower=low[1], upper=high[1])])


def _list(item: Item, name: str) -> list[Item]:
    return item.fields[name].items if name in item.fields else []


def _text(item: Item, name: str) -> str:
    return (item.fields[name].text or "") if name in item.fields else ""
