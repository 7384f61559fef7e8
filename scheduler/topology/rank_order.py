"""Which nodes of an allocation run ranks, and which rank runs where; pure.

NCCL and gloo connect the ranks in a ring in the order of their numbers. A hop of that ring between two leaf
switches uses the uplinks; a ring over L leaves needs at least L such hops (none for one leaf), and gets exactly L
when the nodes of each leaf stand together. So the order is that of the tree, but for groups of ranks that are to
stay within a leaf (`groups.py`): for their sake leaves change places, and a leaf is cut where it must be. What is
left to choose is who rests.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import TYPE_CHECKING

from typing_extensions import override

from deeplink.core.errors import DeepLinkError
from deeplink.core.text import counted
from deeplink.scheduler.topology.graph import natural
from deeplink.scheduler.topology.groups import Groups, arrange

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Sequence

    from deeplink.core.types import NodeName
    from deeplink.scheduler.topology.graph import Fabric, Path


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
    # whether it is known that no order has fewer cut groups, and none with as few has fewer crossings: a bound
    # is reached, or all orders were weighed
    optimal: bool


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
    runs, optimal = arrange(counts, groups)
    left = [iter(below) for below in leaves.values()]
    order = tuple(node for leaf, length in runs for node in islice(left[leaf], length))
    return RankOrder(order, ring_crossings(order, fabric.leaf), _cuts(order, fabric, groups), optimal)


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
