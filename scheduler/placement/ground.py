"""The leaves of a cluster as placement sees them for one request, and the traits of any choice from them; pure."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from deeplink.scheduler.placement.cost import UNUSED, Traits
from deeplink.scheduler.placement.request import eligible
from deeplink.scheduler.topology.graph import natural

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from deeplink.scheduler.placement.request import Cluster, Request
    from deeplink.scheduler.topology.graph import Path
    from deeplink.types import NodeName


class Part(NamedTuple):
    """Some nodes of one leaf, summed up: their number, bytes held, slow ones, lowest share, idle ones opened."""

    nodes: int
    held: int
    degraded: int
    slowest: float
    opened: int


class Spot(NamedTuple):
    """One node that could be taken: nodes of one leaf that differ in nothing but their name are alike."""

    speed: float
    held: int
    opened: bool
    forced: bool
    node: NodeName

    @property
    def kind(self) -> tuple[float, int, bool, bool]:
        """What it shares with those that are alike."""
        return self[:4]

    def times(self, count: int) -> Part:
        """Return so many that are alike as a part of their leaf."""
        return Part(count, self.held * count, (self.speed < 1.0) * count, self.speed, self.opened * count)


NOTHING = Part(0, 0, 0, 1.0, 0)


def total(parts: Iterable[Part]) -> Part:
    """Return parts of one leaf as one."""
    nodes = held = degraded = opened = 0
    slowest = 1.0
    for part in parts:
        nodes += part.nodes
        held += part.held
        degraded += part.degraded
        slowest = min(slowest, part.slowest)
        opened += part.opened
    return Part(nodes, held, degraded, slowest, opened)


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf switch, or all the nodes of which nobody knows where they hang.

    Attributes:
        number: its place in the order of the tree.
        path: the switches, root first.
        above: the switches above the leaf itself, by path, the nearest first.
        slow_links: those of `path` whose link upwards is slow, with its share of full speed.
        size: all its nodes, busy ones too.
        whole: whether all of them, and more than one, are idle.
        spots: the nodes that could be taken: those that must first, then in order of their names.
        forced: how many must.
    """

    number: int
    path: Path
    above: tuple[Path, ...]
    slow_links: tuple[tuple[Path, float], ...]
    size: int
    whole: bool
    spots: tuple[Spot, ...]
    forced: int


class Ground:
    """All leaves with nodes that could be taken, in the order of the tree.

    Args:
        cluster: the state of things.
        request: what is asked for.

    Raises:
        NoPlacementError: no placement can meet the request.
    """

    def __init__(self, cluster: Cluster, request: Request) -> None:
        self.wanted = request.nodes
        self.data = cluster.residency.total
        able = eligible(cluster, request)
        below: dict[Path, list[NodeName]] = {}
        for node in cluster.rooms:
            below.setdefault(cluster.fabric.leaf(node), []).append(node)
        paths = sorted(below, key=lambda path: tuple(map(natural, path)))
        leaves: list[Leaf] = []
        # A set of switches is a number with a bit for each: they are united for each choice that is weighed.
        bits: dict[Path, int] = {}
        self._own: list[int] = []
        self._above: list[int] = []
        self._speeds: dict[int, float] = {}  # of the slow links, by the bit of the switch below
        self._places: dict[NodeName, int] = {}
        for path in paths:
            mine = sorted((node for node in below[path] if node in able), key=natural)
            if mine:
                self._places.update(zip(mine, count(len(self._places)), strict=False))
                leaf = _leaf(len(leaves), path, below[path], _spots(mine, cluster, request), cluster)
                leaves.append(leaf)
                self._own.append(bits.setdefault(path, 1 << len(bits)) if path else 0)
                self._above.append(sum(bits.setdefault(switch, 1 << len(bits)) for switch in leaf.above))
                self._speeds.update((bits[switch], share) for switch, share in leaf.slow_links)
        self.leaves: tuple[Leaf, ...] = tuple(leaves)
        self._slow = sum(self._speeds)

    def in_order(self, nodes: Iterable[NodeName]) -> tuple[NodeName, ...]:
        """Return nodes that could be taken in the order of the tree, without reading their names once more."""
        return tuple(sorted(nodes, key=self._places.__getitem__))

    def traits(self, chosen: Sequence[tuple[Leaf, Part]]) -> Traits:
        """Return what a choice is like: a part of each leaf that it touches, each leaf once."""
        held = degraded = broken = opened = stranded = own = above = 0
        common, ports = -1, 1.0
        for leaf, part in chosen:
            held += part.held
            degraded += part.degraded
            if part.slowest < ports:  # noqa: PLR1730 - min() takes longer, and this is the search's innermost loop
                ports = part.slowest
            opened += part.opened
            broken += leaf.whole and part.nodes < leaf.size
            stranded += len(leaf.spots) - part.nodes
            mine, over = self._own[leaf.number], self._above[leaf.number]
            own |= mine
            above |= over
            common &= mine | over
        # The ring goes over the link up from a switch if some of its nodes hang below that and some do not.
        used = (own | above) & ~common
        leaf_links = upper_links = UNUSED
        if used:
            leaf_links = 1.0 if used & own else UNUSED
            upper_links = 1.0 if used & ~own else UNUSED
            for switch, share in self._slow_among(used):
                degraded += 1
                if switch & own:
                    leaf_links = min(leaf_links, share)
                else:
                    upper_links = min(upper_links, share)
        counts = tuple(sorted((part.nodes for _, part in chosen), reverse=True))
        local = min(held / self.data, 1.0) if self.data else 1.0
        switches = above.bit_count()
        speeds = (ports, leaf_links, upper_links)
        return Traits(counts, switches, degraded, *speeds, local, broken, opened, stranded)

    def _slow_among(self, switches: int) -> Iterator[tuple[int, float]]:
        left = switches & self._slow
        while left:
            switch = left & -left
            yield switch, self._speeds[switch]
            left ^= switch

    def fewest_leaves(self) -> int:
        """Return how few leaves suffice."""
        forced = [leaf for leaf in self.leaves if leaf.forced]
        left = self.wanted - sum(len(leaf.spots) for leaf in forced)
        others = sorted((len(leaf.spots) for leaf in self.leaves if not leaf.forced), reverse=True)
        used = len(forced)
        for free in others:
            if left <= 0:
                break
            left -= free
            used += 1
        return used

    def most_local(self) -> float:
        """Return how great a share of the data some choice of nodes holds."""
        if not self.data:
            return 1.0
        spots = [spot for leaf in self.leaves for spot in leaf.spots]
        forced = [spot.held for spot in spots if spot.forced]
        others = sorted((spot.held for spot in spots if not spot.forced), reverse=True)
        return min((sum(forced) + sum(others[: self.wanted - len(forced)])) / self.data, 1.0)


def _spots(nodes: list[NodeName], cluster: Cluster, request: Request) -> tuple[Spot, ...]:
    rooms, held, speeds = cluster.rooms, cluster.residency.held, cluster.speeds.nodes
    spots = []
    for node in nodes:
        room = rooms[node]
        opened = not request.exclusive and room.idle and room.gpus > request.gpus_per_node
        spots.append(Spot(speeds.get(node, 1.0), held.get(node, 0), opened, node in request.required, node))
    return tuple(sorted(spots, key=lambda spot: not spot.forced))  # stable: by name among those


def _leaf(number: int, path: Path, below: list[NodeName], spots: tuple[Spot, ...], cluster: Cluster) -> Leaf:
    links = cluster.speeds.links
    ups = [path[:depth] for depth in range(len(path), 0, -1)]
    return Leaf(
        number=number,
        path=path,
        above=tuple(ups[1:]),
        slow_links=tuple((up, links[up]) for up in ups if links.get(up, 1.0) < 1.0),
        size=len(below),
        whole=bool(path) and len(below) > 1 and all(cluster.rooms[node].idle for node in below),
        spots=spots,
        forced=sum(spot.forced for spot in spots),
    )


class Lens:
    """One way to prefer nodes of a leaf to others of it; with it a choice is a number of nodes for each leaf.

    Args:
        ground: the leaves.
        data_first: prefer nodes that hold data to nodes that are sound; or the other way round.
    """

    def __init__(self, ground: Ground, *, data_first: bool) -> None:
        self.ground, self.data_first = ground, data_first
        self.spots: list[list[Spot]] = []
        self.parts: list[list[Part]] = []
        self.sound: list[int] = []
        self.holding: list[int] = []
        for leaf in ground.leaves:
            spots = sorted(leaf.spots, key=self._liking)
            self.spots.append(spots)
            parts = [NOTHING]
            for spot in spots:
                parts.append(total((parts[-1], spot.times(1))))
            self.parts.append(parts)
            # How many can be had before the first slow one (none from behind a slow link), or one without data.
            slow = leaf.slow_links and len(ground.leaves) > 1
            self.sound.append(0 if slow else bisect_right(parts, 0, key=lambda part: part.degraded) - 1)
            self.holding.append(sum(spot.held > 0 for spot in spots))

    def _liking(self, spot: Spot) -> tuple[object, ...]:
        first = (-spot.held, -spot.speed) if self.data_first else (-spot.speed, -spot.held)
        return (not spot.forced, *first, spot.opened)

    def chosen(self, counts: dict[int, int]) -> list[tuple[Leaf, Part]]:
        """Return a choice, given as nodes by leaf number, with what its parts come to."""
        leaves = self.ground.leaves
        return [(leaves[number], self.parts[number][count]) for number, count in counts.items()]

    def nodes(self, counts: dict[int, int]) -> tuple[NodeName, ...]:
        """Return a choice's nodes."""
        return tuple(spot.node for number, count in counts.items() for spot in self.spots[number][:count])
