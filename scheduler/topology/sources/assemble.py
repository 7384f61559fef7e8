"""Several readings to one graph: planes of a fabric, the insides of nodes, what a cable usually carries; pure."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from deeplink.core.types import NodeName
from deeplink.scheduler.topology.network import (
    DeviceHealth,
    FabricLink,
    Network,
    Node,
    Role,
    Switch,
    TopologyCheck,
)
from deeplink.scheduler.topology.sources.document import read_document
from deeplink.scheduler.topology.sources.gathering import Reading, read_names
from deeplink.scheduler.topology.sources.ibnet import family, most_common, read_ibnetdiscover
from deeplink.scheduler.topology.sources.nvidia import is_header, read_netq
from deeplink.scheduler.topology.sources.slurm_topology import read_slurm

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deeplink.core.finding import Finding
    from deeplink.scheduler.topology.network import Cable, Inside

THIS_NODE = NodeName("node")  # what a node is called of which only the inside is known
# Blanks of one line: over those of all that follow, empty lines would take time by their number's square.
_SLURM = re.compile(r"^[ \t]*(?:SwitchName|BlockName)[ \t]*=", re.MULTILINE | re.IGNORECASE)
_IBNETDISCOVER = re.compile(
    r"^[ \t]*(?:vendid=|(?:Switch|Ca|Rt)\s+\d+\s+\"|# Topology file: generated)", re.MULTILINE
)
_YAML = re.compile(r"^(?:switches|blocks|nodes|links|inside)\s*:", re.MULTILINE)
_JSON = re.compile(r"\s*(?:\{\s*[\"}]|\[\s*[\[{\"\]])")
_OUR_KEYS = re.compile(r"\s*\{\s*\"(?:switches|blocks|inside|others)\"")
# What is no list may begin with the keys that both have, `nodes` and `links`.
_NETQ_KEYS = re.compile(r"\"(?:compounded_nodes|compounded_links|interfaces|tier|Name|DomainUUID)\"\s*:")


@dataclass(frozen=True, slots=True)
class NodeInternals:
    """The inside of some nodes; of all where none is named."""

    inside: Inside
    nodes: tuple[NodeName, ...] = ()


def assembled(readings: Sequence[Reading], insides: Sequence[NodeInternals] = ()) -> Reading:
    """Return one graph of all that was read; of two sources the first counts where it says something."""
    switches, twins = _switches(readings)
    nodes: dict[NodeName, Node] = {}
    links: dict[tuple[str, str, bool], FabricLink] = {}
    for reading in readings:
        for node in reading.network.nodes.values():
            nodes[node.name] = _fuller(nodes[node.name], node) if node.name in nodes else node
        for link in (_upright(link, switches) for link in reading.network.links):
            key = (link.below, link.above, link.host)
            if key not in links or (links[key].gbps is None and link.gbps is not None):
                links[key] = link
    if insides and not nodes:
        nodes[THIS_NODE] = Node(THIS_NODE)
    for fitted in insides:
        for name in fitted.nodes or tuple(nodes):
            nodes[name] = replace(nodes.get(name, Node(name)), inside=fitted.inside)
    others = tuple(dict.fromkeys(other for reading in readings for other in reading.network.others))
    network = with_usual_rates(_with_far_ports_apart(Network(nodes, switches, tuple(links.values()), others)))
    findings = [*(finding for reading in readings for finding in reading.findings), *twins]
    # A list of names beside a fabric is no flat cluster.
    return Reading(network, tuple(one for one in findings if one.check != TopologyCheck.FLAT or not switches))


def _switches(readings: Sequence[Reading]) -> tuple[dict[str, Switch], list[Finding]]:
    switches: dict[str, Switch] = {}
    twins = []
    for switch in (switch for reading in readings for switch in reading.network.switches.values()):
        first = switches.setdefault(switch.name, switch)
        if first.id and switch.id and first.id != switch.id:
            text = f"{switch.id} and {first.id} of another source are both called {switch.name}, and taken for one"
            twins.append(TopologyCheck.DUPLICATE.finding(text))
    return switches, twins


def _upright(link: FabricLink, switches: Mapping[str, Switch]) -> FabricLink:
    """Turn a link over where the source that counts has its switches the other way up."""
    if link.host or switches[link.below].level <= switches[link.above].level:
        return link
    turned = tuple(replace(cable, lower=cable.upper, upper=cable.lower) for cable in link.cables)
    return FabricLink(link.above, link.below, link.host, turned)


def _fuller(one: Node, other: Node) -> Node:
    return Node(
        one.name,
        one.domain or other.domain,
        other.health if one.health is DeviceHealth.UNKNOWN else one.health,
        one.inside or other.inside,
    )


def _with_far_ports_apart(network: Network) -> Network:
    """Mark as storage's the ports of cards that no GPU is near to, where the inside of the node is known."""
    links = []
    known: dict[int, set[str]] = {}  # by identity: thousands of nodes share one inside
    for link in network.links:
        inside = network.nodes[NodeName(link.below)].inside if link.host else None
        if inside is not None and id(inside) not in known:
            known[id(inside)] = {name for nic in inside.far_nics() for name in (nic.name, nic.device)}
        far = known[id(inside)] if inside is not None else set()
        cables = tuple(
            replace(cable, role=Role.STORAGE) if cable.lower.port.partition("/")[0] in far else cable
            for cable in link.cables
        )
        links.append(replace(link, cables=cables))
    return replace(network, links=tuple(links))


def with_usual_rates(network: Network) -> Network:
    """Give each cable that has none the rate that cables like it have.

    Like a cable between switches are the others from its lower switch up, or, where it is alone, those between
    switches of the same levels. Like a host's are those of hosts named alike, for the same purpose, on its switch,
    or, where it is alone, anywhere. Their most common rate counts, of equally common ones the highest: a leaf with
    one of its two uplinks slow is degraded, a leaf of an older generation is not.
    """
    told = [(link, cable) for link in network.links for cable in link.cables if cable.gbps is not None]
    near = Counter(_near(link, cable) for link, cable in told)
    rates: dict[tuple[object, ...], list[float]] = {}
    for link, cable in told:
        if cable.gbps:
            for kind in (_near(link, cable), _far(network, link, cable)):
                rates.setdefault(kind, []).append(cable.gbps)
    usual = {kind: most_common(found) for kind, found in rates.items()}

    def given(link: FabricLink, cable: Cable) -> Cable:
        if cable.usual_gbps is not None or cable.gbps is None:
            return cable
        kind = _near(link, cable)
        kind = kind if near[kind] > 1 else _far(network, link, cable)
        return replace(cable, usual_gbps=usual.get(kind))

    links = (replace(link, cables=tuple(given(link, cable) for cable in link.cables)) for link in network.links)
    return replace(network, links=tuple(links))


def _near(link: FabricLink, cable: Cable) -> tuple[object, ...]:
    return ("host", link.above, family(link.below), cable.role) if link.host else ("up", link.below)


def _far(network: Network, link: FabricLink, cable: Cable) -> tuple[object, ...]:
    if link.host:
        return ("hosts", family(link.below), cable.role)
    return ("levels", network.switches[link.below].level, network.switches[link.above].level)


class Format(Enum):
    """What a topology can be told in."""

    SLURM = "slurm"
    IBNETDISCOVER = "ibnetdiscover"
    NETQ = "netq"
    YAML = "yaml"
    NAMES = "names"
    MATRIX = "nvidia-smi"


def format_of(text: str) -> Format:
    """Tell which format a text is most likely in; NAMES where it is like none of the others."""
    if any(is_header(line) for line in text.split("\n", 20)[:20]):
        return Format.MATRIX
    if _IBNETDISCOVER.search(text):
        return Format.IBNETDISCOVER
    if _JSON.match(text):
        ours = _OUR_KEYS.match(text) or (text.lstrip()[0] == "{" and not _NETQ_KEYS.search(text))
        return Format.YAML if ours else Format.NETQ
    if _SLURM.search(text):
        return Format.SLURM
    return Format.YAML if _YAML.search(text) else Format.NAMES


def read(text: str, source: str, told: Format, *, storage: tuple[str, ...] = ()) -> Reading:
    """Read a text in any format but the matrix of a node's inside; one in which nothing was found says so."""
    readers = {
        Format.SLURM: read_slurm,
        Format.NETQ: read_netq,
        Format.YAML: read_document,
        Format.NAMES: read_names,
    }
    if told is Format.IBNETDISCOVER:
        reading = read_ibnetdiscover(text, source, storage=storage)
    else:
        reading = readers[told](text, source)
    if reading.network == Network():
        nothing = TopologyCheck.NO_TOPOLOGY.finding(
            f"no switch and no node was found (read as {told.value})", source
        )
        return Reading(reading.network, (*reading.findings, nothing))
    return reading
