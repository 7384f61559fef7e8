"""The fabric as a tree, for each node the switches above it, and what is wrong with it or worth knowing; pure."""

from __future__ import annotations

import logging
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from deeplink.core.text import counted
from deeplink.core.types import NodeName
from deeplink.scheduler.slurm.nodeset import fold
from deeplink.scheduler.topology.network import DeviceHealth, TopologyCheck, tier

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from deeplink.core.finding import Finding
    from deeplink.scheduler.topology.network import Cable, End, FabricLink, Network

Path = tuple[str, ...]  # switch names from the root of the fabric to a leaf; empty where unknown
_PARTS = re.compile(r"[0-9]{1,18}|[^0-9]+")
log = logging.getLogger(__name__)
LEAST_APART = 8
"""Where less than one part in so many of the nodes' weight hangs elsewhere than on the largest leaf, nothing is
parted. Those few would have to hold a copy of everything: of two copies, four times what their SSDs are for or
more. And a job that has lost nearly all its nodes has no use for what they saved."""
MOST_NAMED = 16_384
"""Bytes of all names, beyond which leaves have numbers: the list goes into an environment variable of 128 KiB."""


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a key that sorts names as people do.

    >>> sorted(["n10", "n9", "n1"], key=natural)
    ['n1', 'n9', 'n10']
    """
    # Numbers in pieces: Python makes no number of more than 4,300 digits, and a port may be called anything.
    parts = _PARTS.findall(name)
    return tuple((0, int(part), part) if part[0] in "0123456789" else (1, 0, part) for part in parts)


@dataclass(frozen=True, slots=True)
class Fabric:
    """Where each node hangs."""

    # the switches above each node. A node without an entry hangs nowhere known; all such nodes count as
    # neighbours of each other, since nothing is known that parts them.
    paths: Mapping[NodeName, Path]

    def path(self, node: NodeName) -> Path:
        """Return the switches above a node, root first; empty where unknown."""
        return self.paths.get(node, ())

    def leaf(self, node: NodeName) -> Path:
        """Return what identifies the node's leaf switch: two nodes share a leaf if and only if these are equal."""
        return self.path(node)

    def sort_key(self, node: NodeName) -> tuple[object, ...]:
        """Return a key that sorts nodes along the tree, and by natural name below one leaf."""
        return (tuple(natural(switch) for switch in self.path(node)), natural(node))


def fabric_from_addresses(addresses: Mapping[NodeName, str]) -> Fabric:
    """Build the fabric from each node's SLURM_TOPOLOGY_ADDR, such as `core.spine0.leaf1.n3`."""
    paths = {}
    for node, address in addresses.items():
        switches = address.removesuffix(node).rstrip(".")
        if switches:
            paths[node] = tuple(switches.split("."))
    return Fabric(paths)


_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Branch:
    """A part of the fabric."""

    name: str  # that of its first switch, or one that no switch has
    level: int  # of its highest switches
    # those of this level, in natural order; none where only cables between those below join them
    switches: tuple[str, ...]
    below: tuple[Branch, ...]  # the parts it joins
    nodes: tuple[NodeName, ...]  # those that hang on `switches` themselves

    def walk(self) -> Iterator[Branch]:
        """Yield this branch and all below it, each before what it joins."""
        waiting = [self]
        while waiting:
            branch = waiting.pop()
            yield branch
            waiting.extend(reversed(branch.below))

    @property
    def populated(self) -> bool:
        """Whether any node hangs here or below."""
        return any(branch.nodes for branch in self.walk())


@dataclass(frozen=True, slots=True)
class FabricTree:
    """The fabric as a tree, or several."""

    roots: tuple[Branch, ...]  # more than one where no cable joins them
    loose: tuple[NodeName, ...]  # nodes that hang nowhere

    def walk(self) -> Iterator[Branch]:
        """Yield every branch, from the roots down."""
        for root in self.roots:
            yield from root.walk()


def tree_of(network: Network) -> FabricTree:
    """Return the tree of a graph."""
    switches = network.switches
    parts, hangs_on = _leaves(network)
    branches: dict[str, list[Branch]] = {}
    levels = sorted({switch.level for switch in switches.values()})
    for level in levels:
        if level > levels[0]:  # two leaves with a cable between them are still two leaves
            for link in network.trunks():
                if max(switches[link.below].level, switches[link.above].level) <= level:
                    parts.unite(link.below, link.above)
        branches = _grouped((parts.of(one.name), one) for found in branches.values() for one in found)
        here = _grouped((parts.of(name), name) for name, switch in switches.items() if switch.level == level)
        own = _grouped(
            (parts.of(switch), node) for node, switch in hangs_on.items() if switches[switch].level == level
        )
        for part, names in here.items():
            first, *_ = ordered = tuple(sorted(names, key=natural))
            below = tuple(sorted(branches.get(part, ()), key=lambda branch: natural(branch.name)))
            nodes = tuple(sorted(own.get(part, ()), key=natural))
            branches[part] = [Branch(first, level, ordered, below, nodes)]
    for link in network.trunks():
        parts.unite(link.below, link.above)
    branches = _grouped((parts.of(one.name), one) for found in branches.values() for one in found)
    roots = sorted((_joined(found, switches) for found in branches.values()), key=lambda one: natural(one.name))
    loose = sorted((node for node in network.nodes if node not in hangs_on), key=natural)
    return FabricTree(tuple(roots), tuple(loose))


def fabric_of(network: Network) -> Fabric:
    """Return where each node hangs, for rank order and the choice of nodes."""
    paths: dict[NodeName, Path] = {}
    waiting: list[tuple[Branch, Path]] = [(root, ()) for root in tree_of(network).roots]
    while waiting:
        branch, above = waiting.pop()
        path = (*above, branch.name)
        paths.update(dict.fromkeys(branch.nodes, path))
        waiting.extend((below, path) for below in branch.below)
    return Fabric(paths)


def parts_of(network: Network) -> tuple[frozenset[str], ...]:
    """Return the switches that are connected with each other, whatever for, the part with the most first."""
    parts = _Parts(network.switches)
    rails: dict[str, str] = {}
    for link in network.links:
        parts.unite(rails.setdefault(link.below, link.above) if link.host else link.below, link.above)
    grouped = _grouped((parts.of(name), name) for name in network.switches)
    return tuple(sorted(map(frozenset, grouped.values()), key=lambda part: (-len(part), min(map(natural, part)))))


def rails_of(network: Network) -> dict[NodeName, tuple[str, ...]]:
    """Return the switches each node's ranks talk through, by its ports; of several levels those of the lowest."""
    found: dict[NodeName, list[tuple[tuple[object, ...], str]]] = {}
    for link in network.host_links():
        first = min((natural(cable.lower.port) for cable in link.cables), default=())
        if link.below in network.nodes:
            found.setdefault(NodeName(link.below), []).append((first, link.above))
    rails = {}
    for node, ends in found.items():
        lowest = min(network.switches[switch].level for _, switch in ends)
        ends.sort(key=lambda end: (end[0], natural(end[1])))
        rails[node] = tuple(switch for _, switch in ends if network.switches[switch].level == lowest)
    return rails


def _leaves(network: Network) -> tuple[_Parts, dict[NodeName, str]]:
    """Unite the leaf switches that the same hosts' rails end in; also return one switch of each node's leaf."""
    rails = rails_of(network)
    united = _Parts(network.switches)
    for switches in rails.values():
        for switch in switches:
            united.unite(switches[0], switch)
    members = _grouped((united.of(name), name) for name in network.switches)
    most: dict[str, int] = {}
    for switches in rails.values():
        part = united.of(switches[0])
        most[part] = max(most.get(part, 0), len(switches))
    parts = _Parts(network.switches)
    for part, names in members.items():
        # More switches than any host has rails: rails of one host end among unlike neighbours (each plane dealt in
        # its own way, or one cable in the wrong rack). Then only the first rail tells who the neighbours are.
        if len(names) <= most.get(part, 0):
            for name in names:
                parts.unite(names[0], name)
    return parts, {node: switches[0] for node, switches in rails.items()}


def _joined(branches: Sequence[Branch], switches: Collection[str]) -> Branch:
    """Return the one branch, or what joins several: leaves with cables between them, and no switch above."""
    if len(branches) == 1:
        return branches[0]
    below = tuple(sorted(branches, key=lambda branch: natural(branch.name)))
    name = f"{below[0].name}-joined"
    while name in switches:
        name += "-"
    return Branch(name, 1 + max(branch.level for branch in below), (), below, ())


def _grouped(pairs: Iterable[tuple[str, _T]]) -> dict[str, list[_T]]:
    grouped: dict[str, list[_T]] = {}
    for key, one in pairs:
        grouped.setdefault(key, []).append(one)
    return grouped


class _Parts:
    """Which things belong together: a union-find with path halving."""

    def __init__(self, names: Iterable[str]) -> None:
        self._above = {name: name for name in names}

    def of(self, name: str) -> str:
        """Return the name that stands for all that `name` belongs together with."""
        above = self._above
        while above[name] != name:
            above[name] = above[above[name]]
            name = above[name]
        return name

    def unite(self, one: str, other: str) -> None:
        self._above[self.of(one)] = self.of(other)


def failure_domains(fabric: Fabric, weight: Mapping[NodeName, int]) -> dict[NodeName, str]:
    """Return the leaf switch of each node, "" where unknown; empty where all fail together, or too few apart."""
    held: Counter[tuple[str, ...]] = Counter()
    for node, much in weight.items():
        held[fabric.leaf(node)] += much
    apart = held.total() - max(held.values(), default=0)
    if apart * LEAST_APART < held.total() or not apart:
        if apart:
            log.info("copies of shards are not spread over leaves: nearly all nodes hang on one of %d", len(held))
        return {}
    names = {path: path[-1] if path else "" for path in held}
    if len(set(names.values())) < len(names):
        names = {path: ".".join(path) for path in held}
    if sum(len(names[fabric.leaf(node)].encode(errors="surrogatepass")) for node in weight) > MOST_NAMED:
        names = {path: str(number) if path else "" for number, path in enumerate(sorted(held))}
    return {node: names[fabric.leaf(node)] for node in weight}


def checked(network: Network, cluster: Collection[NodeName] | None = None, whose: str = "Slurm") -> list[Finding]:
    """Return what the graph itself shows, problems first."""
    findings = [
        *_compared(network, cluster, whose),
        *_connected(network),
        *_cables(network),
        *_nodes(network),
        *_uneven(network),
        *_empty(network),
    ]
    return sorted(findings, key=lambda finding: -finding.severity)


def _compared(network: Network, cluster: Collection[NodeName] | None, whose: str) -> Iterator[Finding]:
    if cluster is None:
        return
    missing, unknown = set(cluster) - set(network.nodes), set(network.nodes) - set(cluster)
    if missing:
        yield TopologyCheck.MISSING.finding(f"{_listed(missing)} of {whose} not in the topology")
    if unknown:
        yield TopologyCheck.UNKNOWN.finding(f"{_listed(unknown)} in the topology, and no node of {whose}")


def _listed(nodes: Collection[NodeName]) -> str:
    return f"{counted(len(nodes), 'node')} ({fold(nodes)})"


def _connected(network: Network) -> Iterator[Finding]:
    if not network.switches:
        return  # readers say where they found nothing
    loose = tree_of(network).loose
    if loose:
        yield TopologyCheck.LOOSE.finding(f"{_listed(loose)} on no switch")
    nodes_at: dict[str, set[str]] = {}
    for link in network.host_links():
        nodes_at.setdefault(link.above, set()).add(link.below)
    with_nodes = [
        (min(part, key=lambda name: (-network.switches[name].level, natural(name))), nodes)
        for part in parts_of(network)
        if (nodes := {node for switch in part for node in nodes_at.get(switch, ())})
    ]
    if len(with_nodes) > 1:
        told = "; ".join(f"{counted(len(nodes), 'node')} below {top}" for top, nodes in with_nodes)
        yield TopologyCheck.DISCONNECTED.finding(f"{len(with_nodes)} parts that no cable joins: {told}")


def _cables(network: Network) -> Iterator[Finding]:
    for link in network.links:
        one_sided = 0
        for cable in link.cables:
            if cable.health in {DeviceHealth.DEGRADED, DeviceHealth.DOWN}:
                yield TopologyCheck.DEGRADED.finding(cable_text(link, cable))
            one_sided += not (cable.lower.told and cable.upper.told)
        if one_sided:
            silent = next(cable for cable in link.cables if not (cable.lower.told and cable.upper.told))
            device, end = (link.above, silent.upper) if silent.lower.told else (link.below, silent.lower)
            text = (
                f"{_place(device, end)} was not heard; {link.below} - {link.above}, {counted(one_sided, 'cable')}"
            )
            yield TopologyCheck.ONE_SIDED.finding(text)


def _place(device: str, end: End) -> str:
    return f"{device} port {end.port}" if end.port else device


def cable_text(link: FabricLink, cable: Cable) -> str:
    """Tell between what a cable is, and the rates its ends report."""
    lower, upper = cable.lower.gbps, cable.upper.gbps
    where = f"{_place(link.below, cable.lower)} - {_place(link.above, cable.upper)}"
    if lower is not None and upper is not None and lower != upper:
        rates = f"{lower:g} Gb/s at its lower end, {upper:g} at its upper"
    elif cable.gbps is not None:
        rates = f"{cable.gbps:g} Gb/s" + (", told by both ends" if None not in {lower, upper} else "")
    else:
        rates = cable.health.value
    usual = f"; usual here {cable.usual_gbps:g}" if cable.usual_gbps is not None else ""
    return f"{where}: {rates}{usual}"


def _nodes(network: Network) -> Iterator[Finding]:
    for node in network.nodes.values():
        if node.health in {DeviceHealth.DEGRADED, DeviceHealth.DOWN}:
            yield TopologyCheck.DEGRADED.finding(f"node {node.name} is {node.health.value}")
        if node.inside is None:
            continue
        links = {gpu.name: node.inside.nvlinks(gpu.name) for gpu in node.inside.gpus}
        most = max(links.values(), default=0)
        for gpu, count in links.items():
            # In every NVLink machine each GPU has as many as the others, however they are dealt to its peers.
            if count < most:
                yield TopologyCheck.DEGRADED.finding(
                    f"{node.name} {gpu} has {counted(count, 'NVLink')}, others {most}"
                )


def _uneven(network: Network) -> Iterator[Finding]:
    """Tell switches with fewer cables up than most of their level; leaves without compute nodes aside."""
    with_nodes = {link.above for link in network.host_links()}
    up: Counter[str] = Counter()
    for link in network.trunks():
        if network.switches[link.below].level or link.below in with_nodes:
            up[link.below] += len(link.cables)
    for level in sorted({network.switches[name].level for name in up}):
        counts = {name: count for name, count in up.items() if network.switches[name].level == level}
        often = Counter(counts.values())
        usual = max(often, key=lambda count: (often[count], count))
        for name, count in sorted(counts.items(), key=lambda item: natural(item[0])):
            if count < usual:
                text = f"{tier(level)} {name} has {counted(count, 'cable')} up, most have {usual}"
                yield TopologyCheck.UNEVEN.finding(text)


def _empty(network: Network) -> Iterator[Finding]:
    used = {link.above for link in network.links} | {other.switch for other in network.others}
    for name, switch in network.switches.items():
        if name not in used:
            yield TopologyCheck.EMPTY.finding(f"{tier(switch.level)} {name} has nothing below it")
