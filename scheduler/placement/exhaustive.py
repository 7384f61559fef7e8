"""Every choice of nodes there is, for clusters small enough to look at each, and for jobs of one node; pure.

Nodes of one leaf that differ in nothing but their name are alike: no cost can tell them apart, so choices are
numbers of nodes of each kind. That leaves few enough even where there are many nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from deeplink.scheduler.placement.leaf import total
from deeplink.scheduler.placement.leaf_cache import SingleNode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deeplink.scheduler.placement.candidate_leaves import CandidateLeaves
    from deeplink.scheduler.placement.cost import Cost
    from deeplink.scheduler.placement.leaf import Leaf, LeafPart, Spot
    from deeplink.scheduler.placement.leaf_cache import LeafView
    from deeplink.types import NodeName

MOST_KINDS = 64
"""The search goes one level down for each kind."""


class _Kind(NamedTuple):
    leaf: int  # its place among the ground's
    spots: tuple[Spot, ...]
    least: int  # all of those that must be taken


Counts = tuple[int, ...]
"""How many nodes of each kind."""


class Choices:
    """All choices on some ground.

    Args:
        ground: the leaves.
    """

    def __init__(self, ground: CandidateLeaves) -> None:
        self._ground = ground
        self._kinds: list[_Kind] = []
        for number, leaf in enumerate(ground.leaves):
            for spots in leaf.kinds():
                self._kinds.append(_Kind(number, spots, len(spots) if spots[0].forced else 0))
        room = [0]
        for one in reversed(self._kinds):
            room.append(room[-1] + len(one.spots))
        self._room = room[::-1]  # nodes of each kind and all behind it

    def at_most(self, limit: int) -> bool:
        """Tell whether there are no more than `limit` choices; stops counting as soon as there are."""
        if len(self._kinds) > MOST_KINDS:
            return False
        wanted = self._ground.wanted - sum(kind.least for kind in self._kinds)
        sizes = [len(kind.spots) - kind.least for kind in self._kinds]
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
        least = max(kind.least, left - self._room[at + 1])
        for count in range(min(len(kind.spots), left), least - 1, -1):
            for rest in self._counts(at + 1, left - count):
                yield (count, *rest)


def single_nodes(ground: CandidateLeaves, cost: Cost) -> list[SingleNode]:
    """Return every choice for a request of one node, in the order of `Choices.every`.

    A node's traits depend on its own leaf alone: what was weighed by this very cost is not weighed again, unless
    something changed on its leaf.
    """
    views = [view for view in ground.views if view.leaf.forced] or ground.views
    for view in views:
        if view.cost is not cost:
            view.ones, view.cost = tuple(_ones(ground, view, cost)), cost
    return [one for view in views for one in view.ones]


def _ones(ground: CandidateLeaves, view: LeafView, cost: Cost) -> Iterator[SingleNode]:
    for first, *_ in view.leaf.kinds():
        if first.forced or not view.leaf.forced:
            traits = ground.traits([(view.leaf, first.times(1))])
            yield SingleNode(cost(traits), traits.stranded, traits, first.node)
