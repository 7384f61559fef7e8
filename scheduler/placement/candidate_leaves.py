"""The leaves that one request can use, and the traits of any choice from them; pure.

Where nodes hang, and the order of names, are read once. What a leaf is like for a kind of request is remembered
until one of its nodes changes: a caller that asks again and again, as a simulation does, has each leaf looked at
again only then. The answers are those of a new terrain.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate, chain, groupby
from typing import TYPE_CHECKING, NamedTuple

from deeplink.core.text import counted
from deeplink.scheduler.placement.request import UNUSED, NoPlacementError, Traits, eligible, impossible
from deeplink.scheduler.topology.graph import natural

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from deeplink.core.types import NodeName
    from deeplink.scheduler.placement.request import (
        Cost,
        DataResidency,
        NodeCapacity,
        PlacementCluster,
        PlacementRequest,
        Speeds,
    )
    from deeplink.scheduler.topology.graph import Fabric, Path

MOST_VIEWS = 64
"""A leaf is remembered for so many kinds of requests; before another one all of them are forgotten."""
_RequestKind = tuple[int, bool, frozenset["NodeName"]]
"""What of a request matters to a leaf: GPUs, whether exclusive; the barred of its own nodes."""
MOST_KINDS = 64
"""The search goes one level down for each kind."""
Counts = tuple[int, ...]
"""How many nodes of each kind."""


class LeafPart(NamedTuple):
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
    node: NodeName

    @property
    def kind(self) -> tuple[float, int, bool]:
        """What it shares with those that are alike."""
        return self[:3]

    def times(self, count: int) -> LeafPart:
        """Return so many that are alike as a part of their leaf."""
        return LeafPart(count, self.held * count, (self.speed < 1.0) * count, self.speed, self.opened * count)


NOTHING = LeafPart(0, 0, 0, 1.0, 0)


def total(parts: Iterable[LeafPart]) -> LeafPart:
    """Return parts of one leaf as one."""
    nodes = held = degraded = opened = 0
    slowest = 1.0
    for part in parts:
        nodes += part.nodes
        held += part.held
        degraded += part.degraded
        slowest = min(slowest, part.slowest)
        opened += part.opened
    return LeafPart(nodes, held, degraded, slowest, opened)


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf switch, or all the nodes of which no one knows where they hang."""

    path: Path  # the switches, root first
    above: tuple[Path, ...]  # the switches above the leaf itself, by path, the nearest first
    own: int  # its bit in a set of switches; none for nodes that hang nowhere known
    over: int  # the bits of those above it
    # those of `path` whose link upwards is slow, with its share of full speed
    slow_links: tuple[tuple[Path, float], ...]
    size: int  # all its nodes, busy ones too
    whole: bool  # whether all of them, and more than one, are idle
    spots: tuple[Spot, ...]  # the nodes that could be taken, in order of their names

    def kinds(self) -> list[tuple[Spot, ...]]:
        """Return the nodes that could be taken, those that are alike together; by name among these."""
        alike = sorted(self.spots, key=lambda spot: spot.kind)  # stable
        return [tuple(spots) for _, spots in groupby(alike, key=lambda spot: spot.kind)]


class SingleNode(NamedTuple):
    """One node for a job of one node: what it costs, what it is like, and the first of those that are alike."""

    cost: float
    stranded: int
    traits: Traits
    node: NodeName


class LeafView:
    """A leaf as a kind of request sees it, with one of each kind of its nodes as `single_nodes` weighed it."""

    __slots__ = ("cost", "leaf", "ones")

    def __init__(self, leaf: Leaf) -> None:
        self.leaf = leaf
        self.ones: tuple[SingleNode, ...] = ()
        self.cost: Cost | None = None


class _Stand:
    """A leaf whatever the request: its nodes by name, and what is remembered of it."""

    __slots__ = ("above", "everyone", "names", "over", "own", "path", "rooms", "views")

    def __init__(self, path: Path, names: list[NodeName], bits: dict[Path, int]) -> None:
        self.path, self.names, self.everyone = path, names, frozenset(names)
        # A set of switches is a number with a bit for each: they are united for each choice that is weighed.
        self.own = bits.setdefault(path, 1 << len(bits)) if path else 0
        self.above = tuple(path[:depth] for depth in range(len(path) - 1, 0, -1))
        self.over = sum(bits.setdefault(switch, 1 << len(bits)) for switch in self.above)
        self.rooms: tuple[NodeCapacity, ...] = ()
        self.views: dict[_RequestKind, LeafView] = {}

    def kind(self, request: PlacementRequest) -> _RequestKind:
        return (request.gpus_per_node, request.exclusive, request.excluded & self.everyone)

    def seen(self, cluster: PlacementCluster, request: PlacementRequest) -> Leaf:
        links, able = cluster.speeds.links, eligible(zip(self.names, self.rooms, strict=True), request)
        return Leaf(
            path=self.path,
            above=self.above,
            own=self.own,
            over=self.over,
            slow_links=tuple((up, links[up]) for up in (self.path, *self.above) if links.get(up, 1.0) < 1.0),
            size=len(self.names),
            whole=bool(self.path) and len(self.names) > 1 and all(room.idle for room in self.rooms),
            spots=_spots(able, cluster, request),
        )


def _spots(nodes: list[NodeName], cluster: PlacementCluster, request: PlacementRequest) -> tuple[Spot, ...]:
    rooms, held, speeds = cluster.rooms, cluster.residency.held, cluster.speeds.nodes
    spots = []
    for node in nodes:
        room = rooms[node]
        opened = not request.exclusive and room.idle and room.gpus > request.gpus_per_node
        spots.append(Spot(speeds.get(node, 1.0), held.get(node, 0), opened, node))
    return tuple(spots)


class Terrain:
    """All leaves of a cluster, in the order of the tree."""

    def __init__(self, fabric: Fabric, nodes: Iterable[NodeName]) -> None:
        self._fabric = fabric
        below: dict[Path, list[NodeName]] = {}
        for node in nodes:
            below.setdefault(fabric.leaf(node), []).append(node)
        self.bits: dict[Path, int] = {}  # of each switch that a choice may hang below
        self._stands = [
            _Stand(path, sorted(below[path], key=natural), self.bits)
            for path in sorted(below, key=lambda path: tuple(map(natural, path)))
        ]
        every = chain.from_iterable(stand.names for stand in self._stands)
        self.places: dict[NodeName, int] = {node: place for place, node in enumerate(every)}
        self._known: tuple[Speeds, DataResidency] | None = None

    def views(self, cluster: PlacementCluster, request: PlacementRequest) -> list[LeafView]:
        """Return the leaves with nodes that the job could have now."""
        if cluster.fabric != self._fabric or cluster.rooms.keys() != self.places.keys():
            raise impossible("this terrain is that of other nodes, or of another fabric")
        known = (cluster.speeds, cluster.residency)
        new = known != self._known
        self._known = known
        plain = (request.gpus_per_node, request.exclusive, request.excluded)
        room_of, found = cluster.rooms.__getitem__, []
        for stand in self._stands:
            rooms = tuple(map(room_of, stand.names))
            if new or rooms != stand.rooms:
                stand.rooms = rooms
                stand.views.clear()
            kind = stand.kind(request) if request.excluded else plain
            view = stand.views.get(kind)
            if view is None:
                if len(stand.views) == MOST_VIEWS:
                    stand.views.clear()
                view = stand.views[kind] = LeafView(stand.seen(cluster, request))
            if view.leaf.spots:
                found.append(view)
        return found


class CandidateLeaves:
    """All leaves with nodes that could be taken, in the order of the tree."""

    def __init__(
        self, cluster: PlacementCluster, request: PlacementRequest, terrain: Terrain | None = None
    ) -> None:
        self.wanted = request.nodes
        self.data = cluster.residency.total
        if terrain is None:
            terrain = Terrain(cluster.fabric, cluster.rooms)
        self.views = terrain.views(cluster, request)
        self.leaves = tuple(view.leaf for view in self.views)
        able = sum(len(leaf.spots) for leaf in self.leaves)
        if able < self.wanted:
            raise NoPlacementError(f"{counted(self.wanted, 'node')} wanted; {able:,} could be had now")
        self._places = terrain.places
        # Of the slow links, by the bit of the switch below.
        self._speeds = {
            terrain.bits[path]: share
            for path, share in cluster.speeds.links.items()
            if share < 1.0 and path in terrain.bits
        }
        self._slow = sum(self._speeds)

    def in_order(self, nodes: Iterable[NodeName]) -> tuple[NodeName, ...]:
        """Return nodes that could be taken in the order of the tree, without reading their names once more."""
        return tuple(sorted(nodes, key=self._places.__getitem__))

    def traits(self, chosen: Sequence[tuple[Leaf, LeafPart]]) -> Traits:
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
            own |= leaf.own
            above |= leaf.over
            common &= leaf.own | leaf.over
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
        sizes = sorted((len(leaf.spots) for leaf in self.leaves), reverse=True)
        return 1 + sum(room < self.wanted for room in accumulate(sizes))

    def most_local(self) -> float:
        """Return how great a share of the data some choice of nodes holds."""
        if not self.data:
            return 1.0
        held = sorted((spot.held for leaf in self.leaves for spot in leaf.spots), reverse=True)
        return min(sum(held[: self.wanted]) / self.data, 1.0)


class Lens:
    """One way to prefer nodes of a leaf to others of it; with it a choice is a number of nodes for each leaf."""

    def __init__(self, ground: CandidateLeaves, *, data_first: bool) -> None:
        self.ground, self.data_first = ground, data_first
        self.spots: list[list[Spot]] = []
        self.parts: list[list[LeafPart]] = []
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
        return (*first, spot.opened)

    def chosen(self, counts: dict[int, int]) -> list[tuple[Leaf, LeafPart]]:
        """Return a choice, given as nodes by leaf number, with what its parts come to."""
        leaves = self.ground.leaves
        return [(leaves[number], self.parts[number][count]) for number, count in counts.items()]

    def nodes(self, counts: dict[int, int]) -> tuple[NodeName, ...]:
        """Return a choice's nodes."""
        return tuple(spot.node for number, count in counts.items() for spot in self.spots[number][:count])


class _Kind(NamedTuple):
    leaf: int  # its place among the ground's
    spots: tuple[Spot, ...]


class Choices:
    """All choices on some ground."""

    def __init__(self, ground: CandidateLeaves) -> None:
        self._ground = ground
        self._kinds = [_Kind(number, spots) for number, leaf in enumerate(ground.leaves) for spots in leaf.kinds()]
        room = [0]
        for one in reversed(self._kinds):
            room.append(room[-1] + len(one.spots))
        self._room = room[::-1]  # nodes of each kind and all behind it

    def at_most(self, limit: int) -> bool:
        """Tell whether there are no more than `limit` choices; stops counting as soon as there are."""
        if len(self._kinds) > MOST_KINDS:
            return False
        wanted, sizes = self._ground.wanted, [len(kind.spots) for kind in self._kinds]
        left = sum(sizes)
        ways = [1] + [0] * wanted  # by the number of nodes taken so far
        for size in sizes:
            left -= size
            # Who has taken too few to make up for it goes on to no choice, each other one to at least one.
            ways = [
                sum(ways[max(taken - size, 0) : taken + 1]) if wanted - taken <= left else 0
                for taken in range(wanted + 1)
            ]
            if max(ways) > limit:
                return False
        return ways[wanted] <= limit

    def every(self) -> Iterator[tuple[Counts, list[tuple[Leaf, LeafPart]]]]:
        """Yield every choice, with what it takes of each leaf."""
        for counts in self._counts(0, self._ground.wanted):
            parts: dict[int, list[LeafPart]] = {}
            for kind, count in zip(self._kinds, counts, strict=True):
                if count:
                    parts.setdefault(kind.leaf, []).append(kind.spots[0].times(count))
            yield counts, [(self._ground.leaves[number], total(found)) for number, found in parts.items()]

    def nodes(self, counts: Counts) -> tuple[NodeName, ...]:
        """Return a choice's nodes: of those that are alike the first ones by name."""
        taken = zip(self._kinds, counts, strict=True)
        return tuple(spot.node for kind, count in taken for spot in kind.spots[:count])

    def _counts(self, at: int, left: int) -> Iterator[Counts]:
        if at == len(self._kinds):
            yield ()
            return
        kind = self._kinds[at]
        least = max(0, left - self._room[at + 1])
        for count in range(min(len(kind.spots), left), least - 1, -1):
            for rest in self._counts(at + 1, left - count):
                yield (count, *rest)


def single_nodes(ground: CandidateLeaves, cost: Cost) -> list[SingleNode]:
    """Return every choice of one node; what this cost weighed before stays until its leaf changes."""
    for view in ground.views:
        if view.cost is not cost:
            view.ones, view.cost = tuple(_ones(ground, view, cost)), cost
    return [one for view in ground.views for one in view.ones]


def _ones(ground: CandidateLeaves, view: LeafView, cost: Cost) -> Iterator[SingleNode]:
    for first, *_ in view.leaf.kinds():
        traits = ground.traits([(view.leaf, first.times(1))])
        yield SingleNode(cost(traits), traits.stranded, traits, first.node)
