"""Which nodes of an allocation run ranks, and which rank runs where; pure.

NCCL and gloo connect the ranks in a ring in the order of their numbers. A hop of that ring between two leaf
switches uses the uplinks; a ring over L leaves needs at least L such hops (none for one leaf), and gets exactly L
when the nodes of each leaf stand together. So the order is that of the tree, but for groups of ranks that are to
stay within a leaf: for their sake leaves change places, and a leaf is cut where it must be. What is left to choose
is who rests.

An order is looked at as runs: stretches of nodes of one leaf, one behind the other. A group of consecutive ranks
stays within a leaf if and only if it lies within one run, so what an order is worth is a sum over its runs, and
the best one can be searched run by run. A leaf that has `c` nodes in the job holds at most as many groups as fit
into `c` nodes on end, wherever they begin; and a ring over L leaves crosses between them at least L times. An
order that reaches both bounds is optimal.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import islice, pairwise
from typing import TYPE_CHECKING

from typing_extensions import override

from deeplink.core.errors import DeepLinkError
from deeplink.core.text import counted
from deeplink.scheduler.topology.graph import natural

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterator, Sequence

    from deeplink.core.types import NodeName
    from deeplink.scheduler.topology.graph import Fabric, Path

EXACT_STATES = 4_000
"""Up to so many states of the search every order is weighed (a tenth of a second); any 10 nodes stay below."""


def _no_groups(problem: str) -> DeepLinkError:
    return DeepLinkError(
        problem,
        remedy="A group size is the product of the parallel sizes that stay together (tensor 8; tensor 8 "
        "times expert 4 is 32): each divides the number of all ranks, and the next greater one.",
        exit_code=2,
    )


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of consecutive ranks that talk to each other more than to others."""

    sizes: tuple[int, ...] = ()  # ranks of a group, the smallest first; each divides the next, which is greater
    per_node: int = 1  # ranks on each node

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.sizes) or self.per_node < 1:
            raise _no_groups("a group and a node have at least one rank each")
        for smaller, greater in zip(self.sizes, self.sizes[1:], strict=False):
            if greater % smaller or greater == smaller:
                raise _no_groups(f"groups of {greater} ranks do not consist of smaller ones of {smaller}")

    def check(self, nodes: int) -> None:
        """Check that the groups divide the ranks of so many nodes."""
        ranks = nodes * self.per_node
        for size in self.sizes:
            if ranks % size:
                of = f"{counted(nodes, 'node')} with {self.per_node} each"
                raise _no_groups(f"{counted(ranks, 'rank')} ({of}) do not divide into groups of {size}")

    def span(self, size: int) -> int:
        """Return after how many nodes groups of this size begin with a node's first rank again.

        >>> Groups((8,), per_node=4).span(8), Groups((4,), per_node=8).span(4), Groups((4,), per_node=6).span(4)
        (2, 1, 2)
        """
        return size // math.gcd(size, self.per_node)

    def whole(self, size: int, start: int, length: int) -> int:
        """Count the groups of this size that lie on the `length` nodes from place `start` of the order on."""
        first = -(-start * self.per_node // size)
        return max((start + length) * self.per_node // size - first, 0)

    def most(self, size: int, length: int) -> int:
        """Return how many groups of this size `length` nodes on end hold at most, wherever they begin."""
        return _most(self, size, length)

    @property
    def moving(self) -> tuple[int, ...]:
        """The sizes whose fate the order of nodes decides: the others lie within a node in any order."""
        return tuple(size for size in self.sizes if self.span(size) > 1)


@lru_cache(maxsize=4_096)
def _most(groups: Groups, size: int, length: int) -> int:
    return max(groups.whole(size, start, length) for start in range(groups.span(size)))


Runs = tuple[tuple[int, int], ...]  # (leaf, nodes of it) after one another; a leaf is named by its number
Score = tuple[int, ...]
"""Less is better: whole groups of each size, negative, the smallest size first; then the ring's crossings."""


def score(runs: Runs, groups: Groups) -> Score:
    """Return what an order is worth."""
    whole, place = [0] * len(groups.sizes), 0
    for _, length in runs:
        for which, size in enumerate(groups.sizes):
            whole[which] -= groups.whole(size, place, length)
        place += length
    return (*whole, sum(leaf != runs[place - 1][0] for place, (leaf, _) in enumerate(runs)))


def bound(counts: Sequence[int], groups: Groups) -> Score:
    """Return a score that no order of leaves with so many nodes each can beat."""
    each = [-sum(groups.most(size, count) for count in counts) for size in groups.sizes]
    return (*each, len(counts) if len(counts) > 1 else 0)


def arrange(counts: Sequence[int], groups: Groups) -> Runs:
    """Return the best order of leaves that is found.

    Exact up to `EXACT_STATES`; beyond, the best of four constructions. Where leaves can stand in the given order
    without harm, they do: it follows the tree, which keeps the levels above the leaves in order too.
    """
    plain: Runs = tuple(enumerate(counts))
    if score(plain, groups) == bound(counts, groups):
        return plain
    if _states(counts) <= EXACT_STATES:
        return _exact(counts, groups)
    found = [plain, _aligned(counts, groups)]
    found += [_chained(counts, groups, roomy=roomy) for roomy in (False, True)]
    return min(found, key=lambda runs: score(runs, groups))


def _states(counts: Sequence[int]) -> int:
    """Return an upper bound on the states of `_exact`: what is left of leaves of one size, in their order."""
    kinds = set(counts)
    left = math.prod(sum(int(kind**begun) for begun in range(counts.count(kind) + 1)) for kind in kinds)
    return left * len(counts) * len(kinds)


def _exact(counts: Sequence[int], groups: Groups) -> Runs:
    # Leaves of one size are alike as long as they are untouched: only the first of them is tried.
    firsts = [leaf for leaf, count in enumerate(counts) if count not in counts[:leaf]]
    found = [_exact_from(leaf, counts, groups) for leaf in firsts]
    return min(found, key=lambda runs: score(runs, groups))


def _exact_from(first: int, counts: Sequence[int], groups: Groups) -> Runs:
    total = sum(counts)

    @cache
    def best(left: tuple[int, ...], last: int) -> tuple[Score, Runs]:
        place = total - sum(left)
        if place == total:
            return (*(0 for _ in groups.sizes), int(last != first)), ()
        found = None
        for leaf in _next(left, last, counts):
            for length in range(left[leaf], 0, -1):
                behind, runs = best((*left[:leaf], left[leaf] - length, *left[leaf + 1 :]), leaf)
                gain = (*(-groups.whole(size, place, length) for size in groups.sizes), int(place > 0))
                cost = tuple(a + b for a, b in zip(gain, behind, strict=True))
                if found is None or cost < found[0]:
                    found = (cost, ((leaf, length), *runs))
        # Only nodes of the last run's own leaf are left: no order, since that run would simply be longer.
        return found or ((*(0 for _ in groups.sizes), total), ((last, total - place),))

    start = tuple(counts)
    tried = []
    for length in range(counts[first], 0, -1):
        left = (*start[:first], start[first] - length, *start[first + 1 :])
        tried.append(((first, length), *best(left, first)[1]))
    return min(tried, key=lambda runs: score(_joined(runs), groups))


def _next(left: tuple[int, ...], last: int, counts: Sequence[int]) -> Iterator[int]:
    untouched: set[int] = set()
    for leaf, rest in enumerate(left):
        if leaf == last or not rest:
            continue
        if rest == counts[leaf]:
            if rest in untouched:
                continue
            untouched.add(rest)
        yield leaf


def _joined(runs: Runs) -> Runs:
    found: list[tuple[int, int]] = []
    for leaf, length in runs:
        if found and found[-1][0] == leaf:
            found[-1] = (leaf, found[-1][1] + length)
        else:
            found.append((leaf, length))
    return tuple(found)


def _aligned(counts: Sequence[int], groups: Groups) -> Runs:
    """Give each leaf as many whole groups of the greatest size as it holds, then of the next, and so on."""
    left = list(counts)
    runs: list[tuple[int, int]] = []
    for turn, span in enumerate([*(groups.span(size) for size in reversed(groups.moving)), 1]):
        # Back and forth, so that the leaf that ends one sweep goes on in the next.
        for leaf in range(len(left)) if turn % 2 == 0 else reversed(range(len(left))):
            taken = left[leaf] - left[leaf] % span
            if taken:
                runs.append((leaf, taken))
                left[leaf] -= taken
    return _joined(tuple(runs))


def _chained(counts: Sequence[int], groups: Groups, *, roomy: bool) -> Runs:
    """Put leaf behind leaf so that no group is lost where one ends amid a group; where none fits, a part of one.

    A group begun is filled up by a leaf that has the nodes to spare, the one with the fewest (or, `roomy`, the
    most). Where none has, the spare nodes of one are taken by themselves, for one more crossing.
    """
    span = groups.span(groups.moving[0])
    kinds: dict[int, list[int]] = {}  # nodes of a leaf: which leaves, the first of the tree last
    for leaf in reversed(range(len(counts))):
        kinds.setdefault(counts[leaf], []).append(leaf)
    runs: list[tuple[int, int]] = []
    place = 0
    while kinds:
        wanted = -place % span  # so many nodes until a group begins with a node
        count = min(kinds, key=lambda kind: _loss(kind, place, wanted, groups, roomy=roomy))
        leaf = kinds[count].pop()
        if not kinds[count]:
            del kinds[count]
        spare = count % span
        taken = spare if 0 < spare < wanted and count > span else count
        runs.append((leaf, taken))
        if taken < count:
            kinds.setdefault(count - taken, []).append(leaf)
        place += taken
    return _joined(tuple(runs))


def _loss(count: int, place: int, wanted: int, groups: Groups, *, roomy: bool) -> tuple[int, ...]:
    span = groups.span(groups.moving[0])
    spare = count % span
    lost = [groups.most(size, count) - groups.whole(size, place, count) for size in groups.moving]
    # Without a group begun, those that begin none go first and the small ones, good for filling up, last.
    order = (spare != 0, -count) if not wanted else (spare != wanted, -spare if roomy else spare)
    splits = 0 < spare < wanted and count > span
    # One that has fewer to spare than wanted loses a group if taken whole; taken in part it costs a crossing.
    return (0 if splits else lost[0], int(splits), *lost[1:], *order, -spare, count)


Costs = tuple[int, ...]  # the least cost of the nodes at work, by how many rest


def who_rests(
    nodes: Sequence[NodeName], resting: int, fabric: Fabric, liked: frozenset[NodeName], groups: Groups
) -> frozenset[NodeName]:
    """Return the nodes that should rest."""
    deepest = max((len(fabric.path(node)) for node in nodes), default=0)
    question = _Question(
        fabric, liked, groups, most=resting, deepest=deepest, base=len(nodes) * groups.per_node + 1
    )
    found: list[NodeName] = []
    question.below((), nodes).choose(resting, found)
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of the tree: nodes on one switch, two parts, or all below a switch."""

    costs: Costs
    choose: Callable[[int, list[NodeName]], None]  # adds so many of its nodes that should rest


def _pair(costs: Costs, left: _Part, right: _Part) -> _Part:
    def choose(rest: int, found: list[NodeName]) -> None:
        least = max(0, rest - len(right.costs) + 1)
        a = next(a for a in range(least, len(left.costs)) if left.costs[a] + right.costs[rest - a] == costs[rest])
        left.choose(a, found)
        right.choose(rest - a, found)

    return _Part(costs, choose)


@dataclass(frozen=True, slots=True)
class _Question:
    fabric: Fabric
    liked: frozenset[NodeName]
    groups: Groups
    most: int  # more than these never rest
    deepest: int
    base: int  # more than any part of a cost amounts to
    joined: dict[tuple[Costs, Costs], Costs] = field(default_factory=dict)

    def below(self, switch: Path, nodes: Sequence[NodeName]) -> _Part:
        """Return what is known of all that hangs below one switch."""
        depth = len(switch)
        here: list[NodeName] = []
        children: dict[str, list[NodeName]] = {}
        for node in nodes:
            path = self.fabric.path(node)
            if len(path) == depth:
                here.append(node)
            else:
                children.setdefault(path[depth], []).append(node)
        parts = [self.leaf(here)] if here else []
        parts += [self.below((*switch, name), below) for name, below in children.items()]
        parts.sort(key=lambda part: part.costs)  # alike beside alike: such pairs are joined once
        while len(parts) > 1:
            pairs = [
                _pair(self.join(one.costs, other.costs), one, other)
                for one, other in zip(parts[::2], parts[1::2], strict=False)
            ]
            parts = pairs + parts[len(parts) // 2 * 2 :]
        # A switch counts if anything below it works: the leaves weigh most, the root least.
        used = self.base ** (1 + depth)
        costs = tuple(cost + used if rest < len(nodes) else cost for rest, cost in enumerate(parts[0].costs))
        return _Part(costs, parts[0].choose)

    def leaf(self, here: list[NodeName]) -> _Part:
        """Return what is known of the nodes on one switch: the last rest first, preferred ones after others."""
        unliked = [node for node in reversed(here) if node not in self.liked]
        goes_first = [*unliked, *(node for node in reversed(here) if node in self.liked)]
        # Without preferred nodes all cost the same.
        regretted = len(unliked) if self.liked else 0
        costs = []
        for rest in range(min(len(here), self.most) + 1):
            cost = 0
            for size in self.groups.moving:
                cost = cost * self.base - self.groups.most(size, len(here) - rest)
            costs.append(cost * self.base ** (self.deepest + 2) + max(regretted - rest, 0))
        return _Part(tuple(costs), lambda rest, found: found.extend(goes_first[:rest]))

    def join(self, left: Costs, right: Costs) -> Costs:
        """Return the costs of two parts together, the cheapest for each number of resting nodes."""
        known = self.joined.get((left, right))
        if known is None:
            short, long = sorted((left, right), key=len)
            known = self.joined[left, right] = _cheapest(short, long, self.most)
        return known


def _cheapest(short: Costs, long: Costs, most: int) -> Costs:
    best = [short[0] + cost for cost in long[: most + 1]]
    # Where more rest is never dearer, one more of `short` that saves nothing is no better than one more of `long`.
    falling = all(one >= other for one, other in pairwise(long))
    for a, cost in enumerate(short[1 : most + 1], start=1):
        end = min(a + len(long), most + 1)
        if len(best) < end:
            best.append(cost + long[end - 1 - a])
        if falling and cost == short[a - 1]:
            continue
        best[a:end] = [
            new if (new := cost + other) < old else old for other, old in zip(long, best[a:end], strict=False)
        ]
    return tuple(best)


def too_few_nodes(wanted: int, there: int) -> DeepLinkError:
    """Return the error for more nodes wanted than there are."""
    return DeepLinkError(
        f"{counted(wanted, 'node')} wanted for ranks and spares; the job has {there}",
        remedy="Ask Slurm for more nodes (-N; --local without Slurm), or want fewer (--nnodes, --spares).",
        exit_code=2,
    )


def ring_crossings(order: Sequence[NodeName], leaf_of: Callable[[NodeName], Hashable]) -> int:
    """Count the hops of the ring over `order` (and back to its start) that leave a leaf switch."""
    return (
        sum(leaf_of(node) != leaf_of(order[place - 1]) for place, node in enumerate(order))
        if len(order) > 1
        else 0
    )


def tree_order(nodes: Collection[NodeName], fabric: Fabric) -> tuple[NodeName, ...]:
    """Return the nodes along the tree: no order crosses less, on any level of it."""
    return tuple(sorted(nodes, key=fabric.sort_key))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A group of ranks that does not stay together."""

    size: int  # its ranks
    first: int  # the first of them
    nodes: tuple[NodeName, ...]  # those they run on, in order
    leaves: int  # how many leaves these hang on; 1 for a group that would have fitted on a node and lies on two
    why: str  # the reason, for people

    @override
    def __str__(self) -> str:
        where = f"{self.leaves} leaves" if self.leaves > 1 else ", ".join(self.nodes)
        return f"ranks {self.first}-{self.first + self.size - 1} are on {where}: {self.why}"


@dataclass(frozen=True, slots=True)
class RankOrder:
    """The nodes in the order their ranks are numbered, and what that order reaches."""

    nodes: tuple[NodeName, ...]  # each runs the next `per_node` ranks
    crossings: int  # leaf-to-leaf hops of the ring over them
    cut: tuple[Cut, ...]  # the groups that do not stay together


def rank_order(nodes: Collection[NodeName], fabric: Fabric, groups: Groups | None = None) -> RankOrder:
    """Put nodes in the order that keeps groups of ranks within leaves and has the fewest ring crossings.

    As few groups as possible are cut between leaves, counting the smallest size first. Among such orders it is one
    with the fewest crossings, and among those along the tree as far as that goes. All ranks of a node stand
    together, as launchers and LOCAL_RANK have it. Nodes that the fabric does not know count as being on one leaf.
    """
    groups = groups or Groups()
    groups.check(len(nodes))
    leaves: dict[Path, list[NodeName]] = {}
    for node in tree_order(nodes, fabric):
        leaves.setdefault(fabric.leaf(node), []).append(node)
    counts = [len(below) for below in leaves.values()]
    left = [iter(below) for below in leaves.values()]
    order = tuple(node for leaf, length in arrange(counts, groups) for node in islice(left[leaf], length))
    return RankOrder(order, ring_crossings(order, fabric.leaf), _cuts(order, fabric, groups))


def _cuts(order: tuple[NodeName, ...], fabric: Fabric, groups: Groups) -> tuple[Cut, ...]:
    each = groups.per_node
    most = max(Counter(map(fabric.leaf, order)).values(), default=0)
    found = []
    for size in groups.sizes:
        for first in range(0, len(order) * each, size):
            nodes = order[first // each : (first + size - 1) // each + 1]
            leaves = len({fabric.leaf(node) for node in nodes})
            if leaves == 1 and (size > each or len(nodes) == 1):
                continue
            if size <= each:
                why = f"a node's {counted(each, 'rank')} do not divide into groups of {size}"
            elif len(nodes) > most:
                why = f"no leaf has more than {most} of the job's nodes"
            else:
                why = f"the job's nodes on a leaf do not divide into groups of {groups.span(size)} everywhere"
            found.append(Cut(size=size, first=first, nodes=nodes, leaves=leaves, why=why))
    return tuple(found)


def stock_order(nodes: Collection[NodeName]) -> tuple[NodeName, ...]:
    """Return the order plain srun numbers ranks in, whatever the fabric is: by node name."""
    return tuple(sorted(nodes, key=natural))


@dataclass(frozen=True, slots=True)
class ActiveNodes:
    """The nodes that run ranks and those that rest, along the tree."""

    active: tuple[NodeName, ...]
    spares: tuple[NodeName, ...]


def choose_active(
    nodes: Collection[NodeName],
    count: int,
    fabric: Fabric,
    preferred: Collection[NodeName] = (),
    groups: Groups | None = None,
) -> ActiveNodes:
    """Choose `count` nodes for ranks: most whole groups on a leaf, fewest leaves, fewest switches above; exact."""
    resting = len(nodes) - count
    if resting < 0 or count < 1:
        raise too_few_nodes(count, len(nodes))
    ordered = tree_order(nodes, fabric)
    spares = who_rests(ordered, resting, fabric, frozenset(preferred), groups or Groups())
    return ActiveNodes(
        tuple(node for node in ordered if node not in spares), tuple(node for node in ordered if node in spares)
    )
