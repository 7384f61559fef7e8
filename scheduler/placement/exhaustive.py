"""Every choice of nodes there is, for clusters small enough to look at each; pure.

Nodes of one leaf that differ in nothing but their name are alike: no cost can tell them apart, so choices are
numbers of nodes of each kind. That leaves few enough even where there are many nodes.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from deeplink.scheduler.placement.ground import Part, total

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deeplink.scheduler.placement.ground import Ground, Leaf, Spot
    from deeplink.types import NodeName

MOST_KINDS = 64
"""The search goes one level down for each kind."""


class _Kind(NamedTuple):
    leaf: Leaf
    spots: tuple[Spot, ...]
    least: int  # all of those that must be taken


def _kinds(ground: Ground) -> list[_Kind]:
    found = []
    for leaf in ground.leaves:
        alike = sorted(leaf.spots, key=lambda spot: spot.kind)  # stable: by name among those alike
        for kind, spots in groupby(alike, key=lambda spot: spot.kind):
            mine = tuple(spots)
            found.append(_Kind(leaf, mine, len(mine) if kind[3] else 0))
    return found


def few(ground: Ground, limit: int) -> bool:
    """Tell whether there are at most `limit` choices; stops counting as soon as there are more."""
    kinds = _kinds(ground)
    if len(kinds) > MOST_KINDS:
        return False
    wanted = ground.wanted - sum(kind.least for kind in kinds)
    sizes = [len(kind.spots) - kind.least for kind in kinds]
    left = sum(sizes)
    ways = [1] + [0] * wanted  # by the number of nodes taken so far
    for size in sizes:
        left -= size
        ways = [sum(ways[max(taken - size, 0) : taken + 1]) for taken in range(wanted + 1)]
        # Each of these goes on to at least one whole choice.
        if any(count > limit and wanted - taken <= left for taken, count in enumerate(ways)):
            return False
    return ways[wanted] <= limit


Choice = tuple[list[tuple["Leaf", Part]], tuple["NodeName", ...]]
"""What of each leaf, and the nodes."""


def every(ground: Ground) -> Iterator[Choice]:
    """Yield every choice, of nodes that are alike the first ones by name."""
    kinds = _kinds(ground)
    room = [0]
    for kind in reversed(kinds):
        room.append(room[-1] + len(kind.spots))
    room.reverse()
    for counts in _vectors(kinds, room, 0, ground.wanted):
        parts: dict[int, list[Part]] = {}
        nodes: list[NodeName] = []
        for kind, count in zip(kinds, counts, strict=True):
            if count:
                parts.setdefault(kind.leaf.number, []).extend(spot.part() for spot in kind.spots[:count])
                nodes.extend(spot.node for spot in kind.spots[:count])
        yield [(ground.leaves[number], total(found)) for number, found in parts.items()], tuple(nodes)


def _vectors(kinds: list[_Kind], room: list[int], at: int, left: int) -> Iterator[tuple[int, ...]]:
    if at == len(kinds):
        yield ()
        return
    least = max(kinds[at].least, left - room[at + 1])
    for count in range(min(len(kinds[at].spots), left), least - 1, -1):
        for rest in _vectors(kinds, room, at + 1, left - count):
            yield (count, *rest)
