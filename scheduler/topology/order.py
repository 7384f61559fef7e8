"""Which nodes of an allocation run ranks, and which rank runs where; pure.

NCCL and gloo connect the ranks in a ring in the order of their numbers. A hop of that ring between two leaf
switches uses the uplinks; a ring over L leaves needs at least L such hops (none for one leaf), and gets exactly L
when the nodes of each leaf stand together. So the order is that of the tree; what is left to choose is who rests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.errors import DeepLinkError
from deeplink.scheduler.topology.graph import natural
from deeplink.wording import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Sequence

    from deeplink.scheduler.topology.graph import Fabric, Path
    from deeplink.types import NodeName


class TooFewNodesError(DeepLinkError):
    """More nodes are wanted than there are."""

    exit_code = 2

    def __init__(self, wanted: int, there: int) -> None:
        super().__init__(
            f"{counted(wanted, 'node')} wanted for ranks and spares; the job has {there}",
            remedy="Ask Slurm for more nodes (-N; --local without Slurm), or want fewer (--nnodes, --spares).",
        )
        self.wanted, self.there = wanted, there


def ring_crossings(order: Sequence[NodeName], leaf_of: Callable[[NodeName], Hashable]) -> int:
    """Count the hops of the ring over `order` (and back to its start) that leave a leaf switch."""
    return (
        sum(leaf_of(node) != leaf_of(order[place - 1]) for place, node in enumerate(order))
        if len(order) > 1
        else 0
    )


def rank_order(nodes: Collection[NodeName], fabric: Fabric) -> tuple[NodeName, ...]:
    """Return the nodes in the order their ranks are numbered: along the tree, with the fewest ring crossings."""
    return tuple(sorted(nodes, key=fabric.sort_key))


def stock_order(nodes: Collection[NodeName]) -> tuple[NodeName, ...]:
    """Return the order plain srun numbers ranks in, whatever the fabric is: by node name."""
    return tuple(sorted(nodes, key=natural))


@dataclass(frozen=True, slots=True)
class Choice:
    """The nodes that run ranks, in rank order, and those that rest."""

    active: tuple[NodeName, ...]
    spares: tuple[NodeName, ...]


Cost = tuple[int, ...]
# Resting nodes by how many rest: the cheapest cost of the others, and who rests.
_Table = list[tuple[Cost, tuple["NodeName", ...]]]


def choose_active(
    nodes: Collection[NodeName], count: int, fabric: Fabric, preferred: Collection[NodeName] = ()
) -> Choice:
    """Choose `count` nodes to run ranks so that they touch the fewest leaves, then the fewest switches above.

    Exact (a knapsack over the tree of who rests), in time proportional to nodes times resting nodes.

    Args:
        nodes: those that can run ranks, each once.
        count: how many shall.
        fabric: where they hang.
        preferred: where choices are as good, nodes to rather run on (they hold the data already).

    Raises:
        TooFewNodesError: there are fewer nodes than `count`.
    """
    resting = len(nodes) - count
    if resting < 0 or count < 1:
        raise TooFewNodesError(count, len(nodes))
    liked = frozenset(preferred)
    deepest = max(len(fabric.path(node)) for node in nodes)
    table = _rest_below((), list(rank_order(nodes, fabric)), _Question(fabric, liked, resting, deepest))
    spares = frozenset(table[resting][1])
    active = rank_order([node for node in nodes if node not in spares], fabric)
    return Choice(active, rank_order(spares, fabric))


@dataclass(frozen=True, slots=True)
class _Question:
    fabric: Fabric
    liked: frozenset[NodeName]
    most: int  # nobody needs to know what is cheapest when more than these rest
    deepest: int


def _rest_below(switch: Path, nodes: list[NodeName], ask: _Question) -> _Table:
    """Who should rest among the nodes below one switch, for each number of resting nodes up to the most."""
    depth = len(switch)
    here = [node for node in nodes if len(ask.fabric.path(node)) == depth]
    table = _rest_on_leaf(here, ask)
    children: dict[str, list[NodeName]] = {}
    for node in nodes:
        if len(ask.fabric.path(node)) > depth:
            children.setdefault(ask.fabric.path(node)[depth], []).append(node)
    for name, below in children.items():
        table = _combined(table, _rest_below((*switch, name), below, ask), ask.most)
    # A switch counts once if anything below it works; the leaves weigh most, the root least.
    used = (*(int(level == ask.deepest - depth) for level in range(ask.deepest + 1)), 0)
    idle = len(nodes)
    return [(_sum(cost, used) if rest < idle else cost, who) for rest, (cost, who) in enumerate(table)]


def _rest_on_leaf(here: list[NodeName], ask: _Question) -> _Table:
    # The last in order rest first, those we would rather not run on before the others.
    goes_first = [
        *(node for node in here[::-1] if node not in ask.liked),
        *(node for node in here[::-1] if node in ask.liked),
    ]
    nothing = (0,) * (ask.deepest + 1)
    unliked = sum(node not in ask.liked for node in here)
    return [
        ((*nothing, max(unliked - rest, 0)), tuple(goes_first[:rest]))
        for rest in range(min(len(here), ask.most) + 1)
    ]


def _combined(left: _Table, right: _Table, most: int) -> _Table:
    best: dict[int, tuple[Cost, tuple[NodeName, ...]]] = {}
    for a, (cost_a, who_a) in enumerate(left):
        for b, (cost_b, who_b) in enumerate(right[: most - a + 1]):
            cost = _sum(cost_a, cost_b)
            if a + b not in best or cost < best[a + b][0]:
                best[a + b] = (cost, who_a + who_b)
    return [best[rest] for rest in range(len(best))]


def _sum(one: Cost, other: Cost) -> Cost:
    return tuple(a + b for a, b in zip(one, other, strict=True))
