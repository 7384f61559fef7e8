"""One leaf as a request sees it: which of its nodes could be taken, and what each is like; pure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deeplink.scheduler.topology.graph import Path
    from deeplink.types import NodeName


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
    forced: bool
    node: NodeName

    @property
    def kind(self) -> tuple[float, int, bool, bool]:
        """What it shares with those that are alike."""
        return self[:4]

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
    """One leaf switch, or all the nodes of which nobody knows where they hang.

    Attributes:
        path: the switches, root first.
        above: the switches above the leaf itself, by path, the nearest first.
        own: its bit in a set of switches; none for nodes that hang nowhere known.
        over: the bits of those above it.
        slow_links: those of `path` whose link upwards is slow, with its share of full speed.
        size: all its nodes, busy ones too.
        whole: whether all of them, and more than one, are idle.
        spots: the nodes that could be taken: those that must first, then in order of their names.
        forced: how many must.
    """

    path: Path
    above: tuple[Path, ...]
    own: int
    over: int
    slow_links: tuple[tuple[Path, float], ...]
    size: int
    whole: bool
    spots: tuple[Spot, ...]
    forced: int

    def kinds(self) -> list[tuple[Spot, ...]]:
        """Return the nodes that could be taken, those that are alike together; by name among these."""
        alike = sorted(self.spots, key=lambda spot: spot.kind)  # stable
        return [tuple(spots) for _, spots in groupby(alike, key=lambda spot: spot.kind)]
