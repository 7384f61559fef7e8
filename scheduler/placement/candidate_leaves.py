"""The leaves that one request can use, and the traits of any choice from them; pure."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from deeplink.scheduler.placement.cost import UNUSED, Traits
from deeplink.scheduler.placement.leaf import NOTHING, total
from deeplink.scheduler.placement.leaf_cache import Terrain
from deeplink.scheduler.placement.request import refuse

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from deeplink.scheduler.placement.leaf import Leaf, LeafPart, Spot
    from deeplink.scheduler.placement.request import PlacementCluster, PlacementRequest
    from deeplink.types import NodeName


class CandidateLeaves:
    """All leaves with nodes that could be taken, in the order of the tree.

    Args:
        cluster: the state of things.
        request: what is asked for.
        terrain: of this cluster, for who asks often; a new one when None.

    Attributes:
        views: the leaves, each with what is remembered of it.
        leaves: the same.

    Raises:
        NoPlacementError: no placement can meet the request.
        PlacementValueError: the terrain is another cluster's.
    """

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
        forced = sum(leaf.forced for leaf in self.leaves)
        if able < self.wanted or forced < len(request.required) or len(request.required) > self.wanted:
            refuse(cluster, request)
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


class Lens:
    """One way to prefer nodes of a leaf to others of it; with it a choice is a number of nodes for each leaf.

    Args:
        ground: the leaves.
        data_first: prefer nodes that hold data to nodes that are sound; or the other way round.
    """

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
        return (not spot.forced, *first, spot.opened)

    def chosen(self, counts: dict[int, int]) -> list[tuple[Leaf, LeafPart]]:
        """Return a choice, given as nodes by leaf number, with what its parts come to."""
        leaves = self.ground.leaves
        return [(leaves[number], self.parts[number][count]) for number, count in counts.items()]

    def nodes(self, counts: dict[int, int]) -> tuple[NodeName, ...]:
        """Return a choice's nodes."""
        return tuple(spot.node for number, count in counts.items() for spot in self.spots[number][:count])
