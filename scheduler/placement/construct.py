"""Choices of nodes built by rule, for a search to weigh; pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from deeplink.scheduler.placement.candidate_leaves import Lens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from deeplink.scheduler.placement.candidate_leaves import CandidateLeaves
    from deeplink.scheduler.topology.graph import Path

TOPS = 16
"""Choices are built below so many switches that have the room, those with the least of it, and in the whole."""


class LeafAssignment(NamedTuple):
    """Nodes of each leaf, by its number, and which of a leaf's nodes those are."""

    lens: Lens
    counts: dict[int, int]


@dataclass(frozen=True, slots=True)
class _Stock:
    """What may be taken of each leaf, and the tree above."""

    lens: Lens
    caps: Sequence[int]
    below: dict[Path, list[int]]
    sums: dict[Path, int]


class Sketches:
    """Builds choices for one request.

    Args:
        ground: the leaves.
    """

    def __init__(self, ground: CandidateLeaves) -> None:
        self._ground = ground
        self._forced = {number: leaf.forced for number, leaf in enumerate(ground.leaves) if leaf.forced}

    def plans(self) -> Iterator[LeafAssignment]:
        """Yield choices; each meets the request."""
        for stock in self._stocks():
            held = self._held(stock)
            for top in self._tops(stock):
                numbers = stock.below[top]
                for key, tight in self._orders(stock, held):
                    yield LeafAssignment(stock.lens, self._filled(stock, sorted(numbers, key=key), tight=tight))
                if not self._forced:
                    yield LeafAssignment(stock.lens, self._descended(stock, top))

    def _stocks(self) -> Iterator[_Stock]:
        ground = self._ground
        everything = [len(leaf.spots) for leaf in ground.leaves]
        sound = Lens(ground, data_first=False)
        ways: list[tuple[Lens, list[int]]] = [(sound, everything)]
        if any(count < whole for count, whole in zip(sound.sound, everything, strict=True)):
            ways.append((sound, sound.sound))
        if ground.data:
            data = Lens(ground, data_first=True)
            ways += [(data, everything), (data, data.holding)]
        for lens, caps in ways:
            allowed = [max(cap, leaf.forced) for cap, leaf in zip(caps, ground.leaves, strict=True)]
            if sum(allowed) >= ground.wanted:
                yield self._stock(lens, allowed)

    def _stock(self, lens: Lens, caps: list[int]) -> _Stock:
        below: dict[Path, list[int]] = {}
        sums: dict[Path, int] = {}
        for number, leaf in enumerate(self._ground.leaves):
            for switch in dict.fromkeys(((), *leaf.above, leaf.path)):
                below.setdefault(switch, []).append(number)
                sums[switch] = sums.get(switch, 0) + caps[number]
        return _Stock(lens, caps, below, sums)

    def _tops(self, stock: _Stock) -> list[Path]:
        """Return switches that have the room below them, and all nodes that must be taken."""
        must = set(self._forced)
        roomy: dict[tuple[int, ...], Path] = {}  # a switch with but one switch below it is as good as that one
        for top, room in stock.sums.items():
            if room >= self._ground.wanted and must.issubset(stock.below[top]):
                roomy.setdefault(tuple(stock.below[top]), top)
        tops = sorted(roomy.items(), key=lambda item: (stock.sums[item[1]], item[0]))
        # The greatest comes last: it holds all leaves.
        return [top for _, top in [*tops[:-1][:TOPS], tops[-1]]]

    def _held(self, stock: _Stock) -> list[int]:
        wanted = self._ground.wanted
        return [parts[min(cap, wanted)].held for parts, cap in zip(stock.lens.parts, stock.caps, strict=True)]

    def _orders(self, stock: _Stock, held: Sequence[int]) -> list[tuple[Callable[[int], tuple[int, ...]], bool]]:
        """Return orders in which to fill leaves, and whether the last one is to be the tightest that fits."""
        caps, leaves = stock.caps, self._ground.leaves
        orders: list[tuple[Callable[[int], tuple[int, ...]], bool]] = [
            (lambda number: (-caps[number], number), True),
            (lambda number: (leaves[number].whole, -caps[number], number), True),
        ]
        if self._ground.data:
            orders.append((lambda number: (-held[number], -caps[number], number), False))
        return orders

    def _filled(self, stock: _Stock, order: Sequence[int], *, tight: bool) -> dict[int, int]:
        caps, left = stock.caps, self._ground.wanted - sum(self._forced.values())
        counts = dict(self._forced)
        for number, forced in self._forced.items():  # leaves that are touched anyway first
            more = min(caps[number] - forced, left)
            counts[number] = forced + more
            left -= more
        rest = [number for number in order if caps[number] and number not in counts]
        for place, number in enumerate(rest):
            if not left:
                break
            if caps[number] >= left:
                fitting = [one for one in rest[place:] if caps[one] >= left] if tight else [number]
                number = min(fitting, key=lambda one: self._slack(one, caps[one], left))  # noqa: PLW2901
                counts[number] = left
                break
            counts[number] = caps[number]
            left -= caps[number]
        return counts

    def _slack(self, number: int, cap: int, taken: int) -> tuple[bool, int, int]:
        leaf = self._ground.leaves[number]
        return (leaf.whole and taken < leaf.size, cap - taken, number)

    def _descended(self, stock: _Stock, top: Path) -> dict[int, int]:
        """Go down to the tightest switch that has the room; where none has, take the greatest whole, and go on."""
        counts: dict[int, int] = {}
        left = self._ground.wanted
        while left:
            below = [number for number in stock.below[top] if stock.caps[number] and number not in counts]
            children: dict[Path, list[int]] = {}
            for number in below:
                children.setdefault(self._ground.leaves[number].path[: len(top) + 1], []).append(number)
            room = {child: sum(stock.caps[one] for one in numbers) for child, numbers in children.items()}
            fitting = [child for child in children if room[child] >= left]
            if not fitting:
                greatest = max(children, key=lambda child: (room[child], -children[child][0]))
                counts |= {number: stock.caps[number] for number in children[greatest]}
                left -= room[greatest]
                continue
            top = min(fitting, key=lambda child: (room[child], children[child]))
            if len(children[top]) == 1:
                counts[children[top][0]] = left
                break
        return counts
