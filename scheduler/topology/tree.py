"""From the graph to the tree that rank order, placement and Slurm think in; pure.

Two nodes are as near as the lowest level at which they reach each other without going higher. So a branch of the
tree is a connected part of the fabric below a level, not one switch: nine spines that all leaves share are one
branch. A host with several rails makes one leaf of the leaf switches its rails end in. Leaves that only cables
between them join, and no switch above, are below a branch without a switch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from deeplink.scheduler.topology.graph import Fabric, Path, natural
from deeplink.types import NodeName

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from deeplink.scheduler.topology.network import Network

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Branch:
    """A part of the fabric.

    Attributes:
        name: that of its first switch, or one that no switch has.
        level: of its highest switches.
        switches: those of this level, in natural order; none where only cables between those below join them.
        below: the parts it joins.
        nodes: those that hang on `switches` themselves.
    """

    name: str
    level: int
    switches: tuple[str, ...]
    below: tuple[Branch, ...]
    nodes: tuple[NodeName, ...]

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
    """The fabric as a tree, or several.

    Attributes:
        roots: more than one where no cable joins them.
        loose: nodes that hang nowhere.
    """

    roots: tuple[Branch, ...]
    loose: tuple[NodeName, ...]

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
    """Return the switches each node's ranks talk through, by the names of its ports, each once.

    Of a node on switches of several levels those of the lowest; nodes that hang nowhere are not there.
    """
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
