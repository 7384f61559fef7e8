"""Caches the leaves of a cluster between requests; only what changed is computed again.

Where nodes hang, and the order of names, are read once. What a leaf is like for a kind of request is remembered
until one of its nodes changes: who asks again and again, as a simulation does, has each leaf looked at anew only
then. The answers are those of a new terrain.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from deeplink.scheduler.placement.leaf import Leaf, Spot
from deeplink.scheduler.placement.request import PlacementValueError, eligible
from deeplink.scheduler.topology.graph import natural

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deeplink.scheduler.placement.cost import Cost, Traits
    from deeplink.scheduler.placement.request import (
        DataResidency,
        NodeCapacity,
        PlacementCluster,
        PlacementRequest,
        Speeds,
    )
    from deeplink.scheduler.topology.graph import Fabric, Path
    from deeplink.types import NodeName

MOST_VIEWS = 64
"""A leaf is remembered for so many kinds of requests; before another one all of them are forgotten."""


class SingleNode(NamedTuple):
    """One node for a job of one node: what it costs, what it is like, and the first of those that are alike."""

    cost: float
    stranded: int
    traits: Traits
    node: NodeName


class LeafView:
    """A leaf as a kind of request sees it.

    Attributes:
        leaf: it.
        ones: one of each kind of its nodes, weighed by `cost`, for requests of one node; filled in by who weighs.
        cost: by which; None where they were not weighed yet.
    """

    __slots__ = ("cost", "leaf", "ones")

    def __init__(self, leaf: Leaf) -> None:
        self.leaf = leaf
        self.ones: tuple[SingleNode, ...] = ()
        self.cost: Cost | None = None


_Kind = tuple[int, bool, frozenset["NodeName"], frozenset["NodeName"]]
"""What of a request matters to a leaf: GPUs, whether exclusive; of its own nodes the required and the barred."""


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
        self.views: dict[_Kind, LeafView] = {}

    def kind(self, request: PlacementRequest) -> _Kind:
        barred = request.excluded & self.everyone
        if request.candidates is not None:
            barred |= self.everyone - request.candidates
        return (request.gpus_per_node, request.exclusive, request.required & self.everyone, barred)

    def seen(self, cluster: PlacementCluster, request: PlacementRequest) -> Leaf:
        links, able = cluster.speeds.links, eligible(zip(self.names, self.rooms, strict=True), request)
        spots = _spots(able, cluster, request)
        return Leaf(
            path=self.path,
            above=self.above,
            own=self.own,
            over=self.over,
            slow_links=tuple((up, links[up]) for up in (self.path, *self.above) if links.get(up, 1.0) < 1.0),
            size=len(self.names),
            whole=bool(self.path) and len(self.names) > 1 and all(room.idle for room in self.rooms),
            spots=spots,
            forced=sum(spot.forced for spot in spots),
        )


def _spots(nodes: list[NodeName], cluster: PlacementCluster, request: PlacementRequest) -> tuple[Spot, ...]:
    rooms, held, speeds = cluster.rooms, cluster.residency.held, cluster.speeds.nodes
    spots = []
    for node in nodes:
        room = rooms[node]
        opened = not request.exclusive and room.idle and room.gpus > request.gpus_per_node
        spots.append(Spot(speeds.get(node, 1.0), held.get(node, 0), opened, node in request.required, node))
    if request.required:
        spots.sort(key=lambda spot: not spot.forced)  # stable: by name among those
    return tuple(spots)


class Terrain:
    """All leaves of a cluster, in the order of the tree.

    Args:
        fabric: where nodes hang.
        nodes: all that the cluster has rooms of.

    Attributes:
        places: of each node, in the order of the tree.
        bits: of each switch that a choice may hang below.
    """

    def __init__(self, fabric: Fabric, nodes: Iterable[NodeName]) -> None:
        self._fabric = fabric
        below: dict[Path, list[NodeName]] = {}
        for node in nodes:
            below.setdefault(fabric.leaf(node), []).append(node)
        self.bits: dict[Path, int] = {}
        self._stands = [
            _Stand(path, sorted(below[path], key=natural), self.bits)
            for path in sorted(below, key=lambda path: tuple(map(natural, path)))
        ]
        every = chain.from_iterable(stand.names for stand in self._stands)
        self.places: dict[NodeName, int] = {node: place for place, node in enumerate(every)}
        self._known: tuple[Speeds, DataResidency] | None = None

    def views(self, cluster: PlacementCluster, request: PlacementRequest) -> list[LeafView]:
        """Return the leaves with nodes that the job could have now.

        Args:
            cluster: of these nodes; its rooms may have changed, in place too. What else it tells is a value: a
                change is another one.
            request: what is asked for.

        Raises:
            PlacementValueError: the cluster is another one.
        """
        if cluster.fabric != self._fabric or cluster.rooms.keys() != self.places.keys():
            raise PlacementValueError("this terrain is that of other nodes, or of another fabric")
        known = (cluster.speeds, cluster.residency)
        new = known != self._known
        self._known = known
        plain = (request.gpus_per_node, request.exclusive, request.required, request.excluded)
        whole = not request.required and not request.excluded and request.candidates is None
        room_of, found = cluster.rooms.__getitem__, []
        for stand in self._stands:
            rooms = tuple(map(room_of, stand.names))
            if new or rooms != stand.rooms:
                stand.rooms = rooms
                stand.views.clear()
            kind = plain if whole else stand.kind(request)
            view = stand.views.get(kind)
            if view is None:
                if len(stand.views) == MOST_VIEWS:
                    stand.views.clear()
                view = stand.views[kind] = LeafView(stand.seen(cluster, request))
            if view.leaf.spots:
                found.append(view)
        return found
