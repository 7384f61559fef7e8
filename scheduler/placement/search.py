"""Ranked choices of nodes for a job: a pure function of the cluster, the request and the cost.

Where there are few choices, and for a job of one node, each is weighed, and the first one is the best there is,
whatever the cost. Elsewhere choices are built by rules that have proved themselves (fill the emptiest leaves, the
fullest, those with the data; below each switch that has the room, the tightest first; with slow nodes or without),
all are weighed by the same cost, and the best are improved by moving nodes from leaf to leaf as long as that
helps. The work is bounded in numbers, not in seconds: the same input has the same answer everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import nsmallest
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from typing_extensions import override

from deeplink.core.text import counted
from deeplink.scheduler.placement.candidate_leaves import CandidateLeaves, Choices, Lens, single_nodes, total
from deeplink.scheduler.placement.request import DEFAULT_COST

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from deeplink.core.types import NodeName
    from deeplink.scheduler.placement.candidate_leaves import Counts, Terrain
    from deeplink.scheduler.placement.request import Cost, PlacementCluster, PlacementRequest, Traits
    from deeplink.scheduler.topology.graph import Path

TOPS = 16
"""Choices are built below so many switches that have the room, those with the least of it, and in the whole."""
EXACT_CHOICES = 4_000
"""Up to so many choices each is weighed: 14 nodes of which all differ, or many more of which most are alike."""
IMPROVED = 8
"""So many of the best built choices are improved."""
WORK = 60_000
"""Changes are tried until so many leaves have been looked at: it is those that take the time, not the changes."""
OVERHEAD = 10
"""What looking at a change costs besides, in leaves (measured: 3 us, and 0.3 us for each leaf)."""
TARGETS = 12
"""A node is moved to one of so many untouched leaves, or to any touched one."""
_Ranked = list[tuple[float, "Traits", tuple["NodeName", ...]]]
"""Cost, traits and nodes of choices, the best first."""
_Key = tuple[float, int, tuple[tuple[int, int], ...], bool]


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
    """Builds choices for one request."""

    def __init__(self, ground: CandidateLeaves) -> None:
        self._ground = ground

    def plans(self) -> Iterator[LeafAssignment]:
        """Yield choices, each of as many nodes as are wanted."""
        for stock in self._stocks():
            held = self._held(stock)
            for top in self._tops(stock):
                numbers = stock.below[top]
                for key, tight in self._orders(stock, held):
                    yield LeafAssignment(stock.lens, self._filled(stock, sorted(numbers, key=key), tight=tight))
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
            if sum(caps) >= ground.wanted:
                yield self._stock(lens, caps)

    def _stock(self, lens: Lens, caps: list[int]) -> _Stock:
        below: dict[Path, list[int]] = {}
        sums: dict[Path, int] = {}
        for number, leaf in enumerate(self._ground.leaves):
            for switch in dict.fromkeys(((), *leaf.above, leaf.path)):
                below.setdefault(switch, []).append(number)
                sums[switch] = sums.get(switch, 0) + caps[number]
        return _Stock(lens, caps, below, sums)

    def _tops(self, stock: _Stock) -> list[Path]:
        """Return switches that have the room below them."""
        roomy: dict[tuple[int, ...], Path] = {}  # a switch with but one switch below it is as good as that one
        for top, room in stock.sums.items():
            if room >= self._ground.wanted:
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
        caps, left = stock.caps, self._ground.wanted
        counts: dict[int, int] = {}
        rest = [number for number in order if caps[number]]
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


@dataclass(frozen=True, slots=True)
class Candidate:
    """One choice of nodes."""

    nodes: tuple[NodeName, ...]  # along the tree
    cost: float  # what the cost function says; less is better
    traits: Traits  # what it depends on
    given_up: tuple[str, ...]  # what another choice, taken for that alone, would have had better; for people

    @property
    def crossings(self) -> int:
        """Leaf-to-leaf hops of the ring over its nodes, in rank order."""
        return self.traits.crossings

    @property
    def leaves(self) -> int:
        """Leaf spread."""
        return self.traits.leaves

    @property
    def percent_local(self) -> float:
        """Percent of the job's data that its nodes hold."""
        return 100.0 * self.traits.local

    @override
    def __str__(self) -> str:
        return self.said(f"cost {self.cost:.2f}")

    def said(self, price: str) -> str:
        """Return it in words."""
        said = f"{counted(len(self.nodes), 'node')} on {self._leaves}: {price}, "
        said += f"{self.percent_local:.0f} % of the data local"
        return "; ".join([said, *self.given_up])

    @property
    def _leaves(self) -> str:
        if self.leaves == 1:
            return "one leaf"
        return f"{self.leaves} leaves, the ring crosses {self.crossings} times"


def place(
    cluster: PlacementCluster,
    request: PlacementRequest,
    cost: Cost = DEFAULT_COST,
    *,
    most: int = 5,
    terrain: Terrain | None = None,
) -> tuple[Candidate, ...]:
    """Return choices of nodes for a job, the best first."""
    ground = CandidateLeaves(cluster, request, terrain)
    if request.nodes == 1:
        ranked, soundest = _each_node(ground, cost, most)
    elif (choices := Choices(ground)).at_most(EXACT_CHOICES):
        ranked, soundest = _each_weighed(ground, choices, cost, most)
    else:
        ranked, soundest = _Search(ground, cost).ranked(most)
    leaves, local = ground.fewest_leaves(), ground.most_local()
    return tuple(
        Candidate(
            ground.in_order(nodes), price, traits, _given_up(traits, leaves=leaves, local=local, slow=soundest)
        )
        for price, traits, nodes in ranked
    )


def weigh(
    cluster: PlacementCluster, request: PlacementRequest, nodes: Collection[NodeName], cost: Cost = DEFAULT_COST
) -> Candidate | None:
    """Return one choice of nodes as `place` weighs it; None where the job could not have all of them now."""
    ground = CandidateLeaves(cluster, request)
    wanted = frozenset(nodes)
    chosen = [
        (leaf, total(spots))
        for leaf in ground.leaves
        if (spots := [spot.times(1) for spot in leaf.spots if spot.node in wanted])
    ]
    traits = ground.traits(chosen)
    if not traits.nodes == len(wanted) == request.nodes:
        return None
    given_up = _given_up(traits, leaves=traits.leaves, local=traits.local, slow=traits.degraded)
    return Candidate(ground.in_order(wanted), cost(traits), traits, given_up)


def _each_node(ground: CandidateLeaves, cost: Cost, most: int) -> tuple[_Ranked, int]:
    """As `_each_weighed`, for a request of one node, however great the cluster is."""
    ones = single_nodes(ground, cost)
    best = nsmallest(most, ones, key=itemgetter(0, 1))
    return [(one.cost, one.traits, (one.node,)) for one in best], min(one.traits.degraded for one in ones)


def _each_weighed(ground: CandidateLeaves, choices: Choices, cost: Cost, most: int) -> tuple[_Ranked, int]:
    """Also return the fewest slow nodes and links that any choice has."""
    weighed: list[tuple[float, int, int, Traits, Counts]] = []
    for counts, chosen in choices.every():
        traits = ground.traits(chosen)
        weighed.append((cost(traits), traits.stranded, len(weighed), traits, counts))
    weighed.sort(key=lambda one: one[:3])
    ranked = [(price, traits, choices.nodes(counts)) for price, _, _, traits, counts in weighed[:most]]
    return ranked, min(traits.degraded for _, _, _, traits, _ in weighed)


def _given_up(traits: Traits, *, leaves: int, local: float, slow: int) -> tuple[str, ...]:
    """Return what a choice has worse than the best of each thing, were that all that mattered."""
    found = []
    if traits.leaves > leaves:
        found.append(f"{traits.leaves} leaves where {leaves} would do")
    if traits.local < local:
        found.append(f"{100 * traits.local:.0f} % of the data local where {100 * local:.0f} % could be")
    if traits.degraded > slow:
        words = f"{traits.degraded} slow nodes or links where {slow} would do"
        found.append(f"{words} (the slowest at {100 * traits.slowest:.0f} % of its speed)")
    if traits.broken:
        found.append("breaks up " + ("a whole leaf" if traits.broken == 1 else f"{traits.broken} whole leaves"))
    if traits.opened:
        found.append(f"takes a part of {counted(traits.opened, 'idle node')}")
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Weighed:
    key: _Key
    traits: Traits
    plan: LeafAssignment

    def better_than(self, other: _Weighed) -> bool:
        return self.key[:2] < other.key[:2]


class _Search:
    """Builds choices, weighs them and improves the best."""

    def __init__(self, ground: CandidateLeaves, cost: Cost) -> None:
        self._ground, self._cost = ground, cost
        self._seen: dict[tuple[bool, tuple[tuple[int, int], ...]], _Weighed] = {}
        self._work = WORK

    def ranked(self, most: int) -> tuple[_Ranked, int]:
        """Return the best choices, and the fewest slow nodes and links that any weighed one has."""
        for plan in Sketches(self._ground).plans():
            self._weigh(plan)
        for start in sorted(self._seen.values(), key=lambda one: one.key)[:IMPROVED]:
            self._improve(start)
        found: dict[frozenset[NodeName], tuple[float, Traits, tuple[NodeName, ...]]] = {}
        for one in sorted(self._seen.values(), key=lambda one: one.key):
            nodes = one.plan.lens.nodes(one.plan.counts)
            found.setdefault(frozenset(nodes), (one.key[0], one.traits, nodes))
            if len(found) == most:
                break
        return list(found.values()), min(one.traits.degraded for one in self._seen.values())

    def _weigh(self, plan: LeafAssignment) -> _Weighed:
        items = tuple(sorted(plan.counts.items()))
        name = (plan.lens.data_first, items)
        if name not in self._seen:
            traits = self._ground.traits(plan.lens.chosen(plan.counts))
            key = (self._cost(traits), traits.stranded, items, plan.lens.data_first)
            self._seen[name] = _Weighed(key, traits, plan)
        return self._seen[name]

    def _improve(self, best: _Weighed) -> None:
        while True:
            for counts in _neighbours(best.plan.lens, best.plan.counts):
                if self._work <= 0:
                    return
                self._work -= len(counts) + OVERHEAD
                tried = self._weigh(LeafAssignment(best.plan.lens, counts))
                if tried.better_than(best):
                    best = tried
                    break
            else:
                return


def _neighbours(lens: Lens, counts: dict[int, int]) -> Iterator[dict[int, int]]:
    """Yield what comes of moving nodes from one leaf to another: as many as can be, then one."""
    leaves = lens.ground.leaves
    touched = sorted(counts, key=lambda number: (counts[number], number))
    targets = [*touched, *_untouched(lens, counts)]
    for source in touched:
        for target in targets:
            room = len(leaves[target].spots) - counts.get(target, 0)
            most = min(counts[source], room)
            for moved in (most, 1) if most > 1 else (most,):
                if moved < 1 or target == source:
                    continue
                changed = counts | {source: counts[source] - moved, target: counts.get(target, 0) + moved}
                yield {number: count for number, count in changed.items() if count}


def _untouched(lens: Lens, counts: dict[int, int]) -> list[int]:
    """Return leaves to try: of those that look alike the first, the ones with the least room before the others."""
    alike: dict[tuple[object, ...], int] = {}
    near = {above for number in counts for above in lens.ground.leaves[number].above[:1]}
    for number, leaf in enumerate(lens.ground.leaves):
        if number not in counts:
            beside = bool(leaf.above) and leaf.above[0] in near
            first = lens.parts[number][1]
            alike.setdefault((len(leaf.spots), leaf.whole, first, leaf.slow_links, beside), number)

    def promise(number: int) -> tuple[int, int, int]:
        return -lens.parts[number][1].held, len(lens.ground.leaves[number].spots), number

    return sorted(alike.values(), key=promise)[:TARGETS]
