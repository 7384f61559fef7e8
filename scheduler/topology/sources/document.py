"""Our own description of a fabric, in YAML or JSON: written by people, and by `deeplink topology discover`.

    switches:
      core:   {switches: [spine0, spine1]}
      spine0: {switches: "leaf[0-1]", gbps: 400}       # of each cable from here down
      leaf0:  {nodes: "n[0-3]", gbps: 400, latency_us: 1.5}
    blocks:                                            # the same for leaves, as NVIDIA's topograph writes it
      - {switch: leaf1, nodes: ["n[4-6]", n7], domain: rack-1}
    links:                                             # cable by cable, where they are not all alike
      - {below: leaf0, above: spine0, ports: ["33", "1"], gbps: [100, 400]}
    inside:                                            # of some nodes, or of all
      - {nodes: "n[0-7]", gpus: [{name: GPU0}], nics: [{name: mlx5_0}], joins: [[GPU0, mlx5_0, PIX]]}

docs/topology.md has every key.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from deeplink.core.types import NodeName
from deeplink.scheduler.topology.network import (
    Cable,
    DeviceHealth,
    End,
    Gpu,
    Inside,
    Joined,
    Nic,
    Node,
    Other,
    Role,
    Switch,
    TopologyCheck,
)
from deeplink.scheduler.topology.sources.gathering import GraphBuilder, Reading, is_name, short
from deeplink.scheduler.topology.sources.marked import Item, MarkedTextError, from_json, from_yaml

if TYPE_CHECKING:
    from enum import Enum

    from deeplink.scheduler.topology.network import FabricLink, Network


_KEYS = {
    "": {"switches", "blocks", "nodes", "links", "inside", "others"},
    "switch": {
        "switches", "nodes", "level", "id", "link_speed", "gbps", "latency_us", "health", "labels", "annotations",
    },
    "block": {"switch", "nodes", "domain", "gbps", "latency_us", "health", "labels", "annotations"},
    "node": {"domain", "health", "labels", "annotations"},
    "link": {
        "below", "above", "host", "ports", "gbps", "usual_gbps", "latency_us", "health", "role", "cables", "told",
    },
    "inside": {"nodes", "gpus", "nics", "joins"},
    "gpu": {"name", "cpus", "numa"},
    "nic": {"name", "device"},
    "other": {"name", "role", "switch", "port", "gbps"},
}  # fmt: skip
_FLAGS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_E = TypeVar("_E", bound="Enum")
_MOST_CABLES = 1024  # between two devices, and no switch has more ports
_MOST_LEVEL = 65_533
_MOST_SPEED = 2**32 - 1  # Slurm keeps it in 32 bits


def read_document(text: str, source: str) -> Reading:
    """Read a description; what cannot be read is noted with its line and passed over."""
    gathering = GraphBuilder(source)
    try:
        root = from_json(text) if text.lstrip()[:1] in {"{", "["} else from_yaml(text)
    except MarkedTextError as problem:
        gathering.unreadable(f"neither YAML nor JSON: {problem}", problem.line)
        return gathering.reading()
    if not isinstance(root.value, dict):
        gathering.unreadable("not a mapping with `switches`, `nodes` or `links`", root.line)
        return gathering.reading()
    _Document(gathering).read(root)
    return gathering.reading()


class _Document:
    """One document being read into a graph in the making."""

    def __init__(self, gathering: GraphBuilder) -> None:
        self.to = gathering
        self.below: dict[str, dict[str, Cable]] = {}  # the cable from each switch down to each of its switches
        self.levels: dict[str, int] = {}
        self.nodes_of: dict[str, dict[NodeName, Cable]] = {}
        self.lines: dict[str, int] = {}

    def _once(self, item: Item) -> None:
        for key, line in item.twice:
            self.to.duplicate(f"{short(key)} is there twice; the first counts", line)

    def _known(self, item: Item, what: str) -> None:
        self._once(item)
        if not isinstance(item.value, dict):
            if item.value != "":
                self.to.unreadable(f"a {what or 'document'} is a mapping", item.line)
            return
        for key, value in item.fields.items():
            if key not in _KEYS[what]:
                where = f"of a {what}" if what else "of a description"
                self.to.unreadable(f"{short(key)} is no key {where}", value.line)

    def _mapping(self, item: Item, key: str) -> list[tuple[str, Item]]:
        found = _given(item, key)
        if found is None:
            return []
        if not isinstance(found.value, dict):
            self.to.unreadable(f"`{key}` is a mapping of names", found.line)
        self._once(found)
        return list(found.fields.items())

    def _list(self, item: Item, key: str) -> list[Item]:
        found = _given(item, key)
        if found is None:
            return []
        if not isinstance(found.value, list):
            self.to.unreadable(f"`{key}` is a list", found.line)
            return []
        return found.items

    def _names(self, item: Item, key: str) -> tuple[NodeName, ...]:
        found = item.fields.get(key)
        if found is None:
            return ()
        names: list[NodeName] = []
        for one in found.items:
            if one.text is None:
                self.to.unreadable(f"`{key}` is a list of names", one.line)
            else:
                names.extend(self.to.names(one.text, one.line))
        return tuple(names)

    def _text(self, item: Item, key: str) -> str:
        found = item.fields.get(key)
        if found is not None and found.text is None:
            self.to.unreadable(f"`{key}` is one text", found.line)
        return (found.text or "") if found else ""

    def _number(self, item: Item | None, key: str) -> float | None:
        if item is None or item.value == "":
            return None
        try:
            number = float(item.text if item.text is not None else "")
        except ValueError:
            number = math.nan
        if not (math.isfinite(number) and number >= 0):
            self.to.unreadable(f"`{key}` is a number of 0 or more", item.line)
            return None
        return number

    def _whole(self, item: Item, key: str, most: int) -> int | None:
        found = _given(item, key)
        if found is None:
            return None
        if found.text is None or not re.fullmatch("[0-9]{1,10}", found.text) or int(found.text) > most:
            self.to.unreadable(f"`{key}` is a whole number from 0 to {most}", found.line)
            return None
        return int(found.text)

    def _word(self, item: Item, key: str, words: type[_E]) -> _E | None:
        said = self._text(item, key)
        for word in words:
            if word.value == said:
                return word
        if said:
            known = ", ".join(str(word.value) for word in words)
            self.to.unreadable(f"`{key}` is one of {known}, not {short(said)}", item.fields[key].line)
        return None

    def _flag(self, item: Item | None, key: str, *, otherwise: bool = True) -> bool:
        if item is None or item.value == "":
            return otherwise
        if item.text is None or item.text.casefold() not in _FLAGS:
            self.to.unreadable(f"`{key}` is true or false", item.line)
            return otherwise
        return _FLAGS[item.text.casefold()]

    def _cable(self, item: Item, role: Role = Role.COMPUTE) -> Cable:
        """One cable as the keys `gbps`, `usual_gbps`, `latency_us`, `health`, `ports` and `told` describe it."""
        ends = [End(), End()]
        rates, ports, told = item.fields.get("gbps"), item.fields.get("ports"), item.fields.get("told")
        if ports is not None and not isinstance(ports.value, list):
            self.to.unreadable("`ports` is a list of the lower and the upper end's", ports.line)
            ports = None
        for place in range(2):
            gbps = self._number(_end(rates, place), "gbps")
            port = _end(ports, place)
            # One rate stands for both ends.
            ends[place] = End((port.text or "") if port else "", gbps, told=self._flag(_end(told, place), "told"))
        return Cable(
            lower=ends[0],
            upper=ends[1],
            usual_gbps=self._number(item.fields.get("usual_gbps"), "usual_gbps"),
            latency_us=self._number(item.fields.get("latency_us"), "latency_us"),
            said=self._word(item, "health", DeviceHealth),
            role=role,
        )

    def read(self, root: Item) -> None:
        self._known(root, "")
        for name, switch in self._mapping(root, "switches"):
            self._switch(name, switch)
        for block in self._list(root, "blocks"):
            self._block(block)
        self._nodes(root)
        self._finish_switches()
        # Given cable by cable, a pair is not also what the short form said.
        given: set[tuple[str, str, bool]] = set()
        for link in self._list(root, "links"):
            self._link(link, given)
        for part in self._list(root, "inside"):
            self._inside(part)
        for other in self._list(root, "others"):
            self._other(other)

    def _add_switch(self, name: str, line: int) -> bool:
        if not is_name(name):
            self.to.unreadable(f"{short(name)} is no name of a switch", line)
            return False
        self.below.setdefault(name, {})
        self.nodes_of.setdefault(name, {})
        self.lines.setdefault(name, line)
        return True

    def _switch(self, name: str, item: Item) -> None:
        if not self._add_switch(name, item.line):
            return
        self._known(item, "switch")
        cable = self._cable(item)
        for child in self._names(item, "switches"):
            if self._add_switch(child, item.line):
                self.below[name][child] = cable
        self.nodes_of[name].update(dict.fromkeys(self._names(item, "nodes"), cable))
        level = self._whole(item, "level", _MOST_LEVEL)
        if level is not None:
            self.levels[name] = level
        speed = self._whole(item, "link_speed", _MOST_SPEED)
        self.to.switches[name] = Switch(name, 0, self._text(item, "id"), speed)

    def _block(self, item: Item) -> None:
        self._known(item, "block")
        name = self._text(item, "switch")
        if not self._add_switch(name, item.line):
            return
        cable = self._cable(item)
        domain = self._text(item, "domain") or _annotated(item)
        for node in self._names(item, "nodes"):
            if node in self.nodes_of[name]:
                self.to.duplicate(f"{node} is on {name} twice", item.line)
            self.nodes_of[name][node] = cable
            self.to.nodes.setdefault(node, Node(node, domain))

    def _nodes(self, root: Item) -> None:
        given = root.fields.get("nodes")
        if given is None:
            return
        self._once(given)
        described = list(given.fields.items())
        for one in given.items:
            if one.text is None:
                self.to.unreadable("`nodes` is a list of names, or a mapping", one.line)
            described.append((one.text or "", Item({}, one.line)))
        for folded, item in described:
            self._known(item, "node")
            health, domain = self._word(item, "health", DeviceHealth), self._text(item, "domain")
            for node in self.to.names(folded, item.line):
                before = self.to.nodes.get(node, Node(node))
                if domain and before.domain not in {"", domain}:
                    self.to.duplicate(f"{node} is in domain {short(before.domain)} already", item.line)
                self.to.nodes[node] = replace(
                    before, domain=before.domain or domain, health=health or before.health
                )

    def _finish_switches(self) -> None:
        levels, looped = self.to.levels_of({name: tuple(below) for name, below in self.below.items()}, self.lines)
        for name in looped:
            self.below[name] = {child: cable for child, cable in self.below[name].items() if child not in looped}
        hangs: dict[NodeName, str] = {}
        given: dict[str, int] = {}
        for name in sorted(self.below, key=levels.__getitem__):  # what is below comes first
            least = 1 + max((given[child] for child in self.below[name]), default=-1)
            given[name] = max(least, self.levels.get(name, least))
            if self.levels.get(name, least) < least:
                text = f"switch {name} is on level {least}, above what is below it"
                self.to.unreadable(text, self.lines[name])
        for name in self.below:
            self.to.switches[name] = replace(self.to.switches.get(name, Switch(name, 0)), level=given[name])
        for name, children in self.below.items():
            for child, cable in children.items():
                self.to.connect(child, name, host=False, cables=[cable])
            for node, cable in self.nodes_of[name].items():
                self.to.nodes.setdefault(node, Node(node))
                if hangs.setdefault(node, name) != name:
                    text = f"{node} is on {hangs[node]} and {name}; `links` is for hosts with several rails"
                    self.to.duplicate(text, self.lines[name])
                    continue
                self.to.connect(node, name, host=True, cables=[cable])

    def _link(self, item: Item, given: set[tuple[str, str, bool]]) -> None:
        self._known(item, "link")
        below, above = self._text(item, "below"), self._text(item, "above")
        if above not in self.to.switches:
            text = f"a link to {short(above)}, which is no switch of `switches`"
            self.to.say(TopologyCheck.UNKNOWN, text, item.line)
            return
        host = self._flag(item.fields.get("host"), "host", otherwise=below not in self.to.switches)
        if (host and not is_name(below)) or (not host and (below not in self.to.switches or below == above)):
            text = f"a link from {short(below)}, which is nothing below {above}"
            self.to.say(TopologyCheck.UNKNOWN, text, item.line)
            return
        if host:
            self.to.nodes.setdefault(NodeName(below), Node(NodeName(below)))
        elif self.to.switches[below].level > self.to.switches[above].level:
            self.to.unreadable(f"{below} is above {above}, not below it", item.line)
            return
        key = (below, above, host)
        if key not in given:
            given.add(key)
            self.to.cables.pop(key, None)
        count = self._whole(item, "cables", _MOST_CABLES)
        if count is not None and not self.to.afford(count, item.line):
            return
        cable = self._cable(item, self._word(item, "role", Role) or Role.COMPUTE)
        self.to.connect(below, above, host=host, cables=[cable] * (1 if count is None else count))

    def _inside(self, item: Item) -> None:
        self._known(item, "inside")
        gpus: list[Gpu] = []
        nics: list[Nic] = []
        for one in self._list(item, "gpus"):
            self._known(one, "gpu")
            gpus.append(Gpu(self._text(one, "name"), self._text(one, "cpus"), self._whole(one, "numa", 10**6)))
        for one in self._list(item, "nics"):
            self._known(one, "nic")
            nics.append(Nic(self._text(one, "name"), self._text(one, "device") or self._text(one, "name")))
        devices = [gpu.name for gpu in gpus] + [nic.name for nic in nics]
        place = {name: number for number, name in enumerate(devices)}
        if len(place) < len(devices):
            self.to.duplicate("two devices of a node have one name", item.line)
            return
        pairs: dict[tuple[str, str], Joined] = {}
        for join in self._list(item, "joins"):
            words = [word.text or "" for word in join.items]
            joined = Joined.of(words[2]) if len(words) == 3 else None  # noqa: PLR2004 - two devices and how
            if joined is None or words[0] not in place or words[1] not in place or words[0] == words[1]:
                self.to.unreadable("a join is [DEVICE, DEVICE, NV4|PIX|PXB|PHB|NODE|SYS]", join.line)
                continue
            first, second = sorted(words[:2], key=place.__getitem__)
            pairs[first, second] = joined
        inside = Inside(tuple(gpus), tuple(nics), pairs)
        if "nodes" in item.fields:
            names = self._names(item, "nodes")
        else:
            names = tuple(self.to.nodes) if self.to.afford(len(self.to.nodes), item.line) else ()
        for node in names:
            self.to.nodes[node] = replace(self.to.nodes.get(node, Node(node)), inside=inside)

    def _other(self, item: Item) -> None:
        self._known(item, "other")
        role, switch = self._word(item, "role", Role), self._text(item, "switch")
        if role is None or switch not in self.to.switches:
            self.to.unreadable("one of `others` has a `role`, and a `switch` of `switches`", item.line)
            return
        gbps = self._number(item.fields.get("gbps"), "gbps")
        self.to.others.append(Other(self._text(item, "name"), role, switch, self._text(item, "port"), gbps))


def _end(item: Item | None, place: int) -> Item | None:
    """Return what a key says of one end: its part of a list of two, or the one value for both."""
    if item is None or not isinstance(item.value, list):
        return item
    return item.value[place] if place < len(item.value) else None


def _given(item: Item, key: str) -> Item | None:
    found = item.fields.get(key)
    return None if found is None or found.value == "" else found


def _annotated(item: Item) -> str:
    """Return the NVLink domain as topograph's models give it, in an annotation whose name ends in `/domain`."""
    fields = item.fields["annotations"].fields if "annotations" in item.fields else {}
    return next((value.text or "" for key, value in fields.items() if key.endswith("/domain")), "")


def document_of(network: Network) -> dict[str, Any]:
    """Return the whole graph as plain values, which `read_document` makes the same graph of."""
    unknown = DeviceHealth.UNKNOWN
    document: dict[str, Any] = {
        "switches": {
            switch.name: _filled(level=switch.level, id=switch.id, link_speed=switch.link_speed)
            for switch in network.switches.values()
        },
        "nodes": {
            node.name: _filled(
                domain=node.domain, health=node.health.value if node.health is not unknown else None
            )
            for node in network.nodes.values()
        },
        "links": [_cable_document(link, cable) for link in network.links for cable in link.cables],
    }
    if insides := network.insides():
        document["inside"] = [{"nodes": names, **_inside_document(inside)} for inside, names in insides]
    if network.others:
        document["others"] = [
            _filled(name=one.name, role=one.role.value, switch=one.switch, port=one.port, gbps=one.gbps)
            for one in network.others
        ]
    return document


def _cable_document(link: FabricLink, cable: Cable) -> dict[str, Any]:
    told = [cable.lower.told, cable.upper.told]
    return _filled(
        below=link.below,
        above=link.above,
        host=link.host,
        ports=[cable.lower.port, cable.upper.port],
        gbps=[cable.lower.gbps, cable.upper.gbps],
        usual_gbps=cable.usual_gbps,
        latency_us=cable.latency_us,
        health=cable.said.value if cable.said else None,
        role=cable.role.value if cable.role is not Role.COMPUTE else None,
        told=None if all(told) else told,
    )


def _inside_document(inside: Inside) -> dict[str, Any]:
    return {
        "gpus": [_filled(name=gpu.name, cpus=gpu.cpus, numa=gpu.numa) for gpu in inside.gpus],
        "nics": [{"name": nic.name, "device": nic.device} for nic in inside.nics],
        "joins": [[one, other, str(joined)] for (one, other), joined in inside.pairs.items()],
    }


def _filled(**fields: Any) -> dict[str, Any]:
    """Leave out what says nothing; a rate of 0 says something."""
    return {key: value for key, value in fields.items() if value not in (None, "", [None, None], ["", ""])}
