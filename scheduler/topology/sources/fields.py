"""The values of a description's fields: names, numbers, words, cables. What is none is noted, with its line."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, TypeVar

from deeplink.scheduler.topology.finding import TopologyFindingKind
from deeplink.scheduler.topology.network import Cable, DeviceHealth, End, Role
from deeplink.scheduler.topology.sources.gathering import short

if TYPE_CHECKING:
    from enum import Enum

    from deeplink.scheduler.topology.sources.gathering import GraphBuilder
    from deeplink.scheduler.topology.sources.marked import Item
    from deeplink.types import NodeName

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


class Fields:
    """Reads fields into a graph in the making."""

    def __init__(self, gathering: GraphBuilder) -> None:
        self.to = gathering

    def _once(self, item: Item) -> None:
        for key, line in item.twice:
            self.to.say(TopologyFindingKind.DUPLICATE, f"{short(key)} is there twice; the first counts", line)

    def _known(self, item: Item, what: str) -> None:
        self._once(item)
        if not isinstance(item.value, dict):
            if item.value != "":
                self.to.say(TopologyFindingKind.UNREADABLE, f"a {what or 'document'} is a mapping", item.line)
            return
        for key, value in item.fields.items():
            if key not in _KEYS[what]:
                where = f"of a {what}" if what else "of a description"
                self.to.say(TopologyFindingKind.UNREADABLE, f"{short(key)} is no key {where}", value.line)

    def _mapping(self, item: Item, key: str) -> list[tuple[str, Item]]:
        found = item.fields.get(key)
        if found is None or found.value == "":
            return []
        if not isinstance(found.value, dict):
            self.to.say(TopologyFindingKind.UNREADABLE, f"`{key}` is a mapping of names", found.line)
        self._once(found)
        return list(found.fields.items())

    def _list(self, item: Item, key: str) -> list[Item]:
        found = item.fields.get(key)
        if found is None or found.value == "":
            return []
        if not isinstance(found.value, list):
            self.to.say(TopologyFindingKind.UNREADABLE, f"`{key}` is a list", found.line)
            return []
        return found.items

    def _names(self, item: Item, key: str) -> tuple[NodeName, ...]:
        found = item.fields.get(key)
        if found is None:
            return ()
        names: list[NodeName] = []
        for one in found.items:
            if one.text is None:
                self.to.say(TopologyFindingKind.UNREADABLE, f"`{key}` is a list of names", one.line)
            else:
                names.extend(self.to.names(one.text, one.line))
        return tuple(names)

    def _text(self, item: Item, key: str) -> str:
        found = item.fields.get(key)
        if found is not None and found.text is None:
            self.to.say(TopologyFindingKind.UNREADABLE, f"`{key}` is one text", found.line)
        return (found.text or "") if found else ""

    def _number(self, item: Item | None, key: str) -> float | None:
        if item is None or item.value == "":
            return None
        try:
            number = float(item.text if item.text is not None else "")
        except ValueError:
            number = math.nan
        if not (math.isfinite(number) and number >= 0):
            self.to.say(TopologyFindingKind.UNREADABLE, f"`{key}` is a number of 0 or more", item.line)
            return None
        return number

    def _whole(self, item: Item, key: str, most: int) -> int | None:
        found = item.fields.get(key)
        if found is None or found.value == "":
            return None
        if found.text is None or not re.fullmatch("[0-9]{1,10}", found.text) or int(found.text) > most:
            self.to.say(TopologyFindingKind.UNREADABLE, f"`{key}` is a whole number from 0 to {most}", found.line)
            return None
        return int(found.text)

    def _word(self, item: Item, key: str, words: type[_E]) -> _E | None:
        said = self._text(item, key)
        for word in words:
            if word.value == said:
                return word
        if said:
            known = ", ".join(str(word.value) for word in words)
            self.to.say(
                TopologyFindingKind.UNREADABLE,
                f"`{key}` is one of {known}, not {short(said)}",
                item.fields[key].line,
            )
        return None

    def _flag(self, item: Item | None, key: str, *, otherwise: bool = True) -> bool:
        if item is None or item.value == "":
            return otherwise
        if item.text is None or item.text.casefold() not in _FLAGS:
            self.to.say(TopologyFindingKind.UNREADABLE, f"`{key}` is true or false", item.line)
            return otherwise
        return _FLAGS[item.text.casefold()]

    def _cable(self, item: Item, role: Role = Role.COMPUTE) -> Cable:
        """One cable as the keys `gbps`, `usual_gbps`, `latency_us`, `health`, `ports` and `told` describe it."""
        ends = [End(), End()]
        rates, ports, told = item.fields.get("gbps"), item.fields.get("ports"), item.fields.get("told")
        if ports is not None and not isinstance(ports.value, list):
            self.to.say(
                TopologyFindingKind.UNREADABLE, "`ports` is a list of the lower and the upper end's", ports.line
            )
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


def _end(item: Item | None, place: int) -> Item | None:
    """Return what a key says of one end: its part of a list of two, or the one value for both."""
    if item is None or not isinstance(item.value, list):
        return item
    return item.value[place] if place < len(item.value) else None
