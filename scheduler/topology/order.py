"""Which nodes of an allocation run ranks, and which rank runs where; pure.

NCCL and gloo connect the ranks in a ring in the order of their numbers. A hop of that ring between two leaf
switches uses the uplinks; a ring over L leaves needs at least L such hops (none for one leaf), and gets exactly L
when the nodes of each leaf stand together. So the order is that of the tree, but for groups of ranks that are to
stay within a leaf (`groups.py`): for their sake leaves change places, and a leaf is cut where it must be. What is
left to choose is who rests.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from typing_extensions import override

from deeplink.errors import DeepLinkError
from deeplink.scheduler.topology.graph import natural
from deeplink.scheduler.topology.groups import Groups, arrange
from deeplink.scheduler.topology.resting import who_rests
from deeplink.text import counted

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


def tree_order(nodes: Collection[NodeName], fabric: Fabric) -> tuple[NodeName, ...]:
    """Return the nodes along the tree: no order crosses less, on any level of it."""
    return tuple(sorted(nodes, key=fabric.sort_key))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A group of ranks that does not stay together.

    Attributes:
        size: its ranks.
        first: the first of them.
        nodes: those they run on, in order.
        leaves: how many leaves these hang on; 1 for a group that would have fitted on a node and lies on two.
        why: the reason, for people.
    """

    size: int
    first: int
    nodes: tuple[NodeName, ...]
    leaves: int
    why: str

    @override
    def __str__(self) -> str:
        where = f"{self.leaves} leaves" if self.leaves > 1 else ", ".join(self.nodes)
        return f"ranks {self.first}-{self.first + self.size - 1} are on {where}: {self.why}"


@dataclass(frozen=True, slots=True)
class RankOrder:
    """The nodes in the order their ranks are numbered, and what that order reaches.

    Attributes:
        nodes: each runs the next `per_node` ranks.
        crossings: leaf-to-leaf hops of the ring over them.
        cut: the groups that do not stay together.
        optimal: whether it is known that no order has fewer cut groups, and none with as few has fewer crossings:
            a bound is reached, or all orders were weighed.
    """

    nodes: tuple[NodeName, ...]
    crossings: int
    cut: tuple[Cut, ...]
    optimal: bool


def rank_order(nodes: Collection[NodeName], fabric: Fabric, groups: Groups | None = None) -> RankOrder:
    """Put nodes in the order that keeps groups of ranks within leaves and has the fewest ring crossings.

    As few groups as possible are cut between leaves, counting the smallest size first. Among such orders it is one
    with the fewest crossings, and among those along the tree as far as that goes. All ranks of a node stand
    together, as launchers and LOCAL_RANK have it. Nodes that the fabric does not know count as being on one leaf.

    Args:
        nodes: those that run ranks, each once, in any order.
        fabric: where they hang.
        groups: what is to stay together; nothing when None.

    Raises:
        GroupSizeError: the ranks do not divide into these groups.
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
    """Choose `count` nodes to run ranks so that they touch the fewest leaves, then the fewest switches above.

    Before all that, so that as many groups of ranks as possible fit on a leaf. Exact (`resting.py`).

    Args:
        nodes: those that can run ranks, each once.
        count: how many shall.
        fabric: where they hang.
        preferred: where choices are as good, nodes to rather run on (they hold the data already).
        groups: ranks that are to stay together; none when None.

    Raises:
        TooFewNodesError: there are fewer nodes than `count`.
    """
    resting = len(nodes) - count
    if resting < 0 or count < 1:
        raise TooFewNodesError(count, len(nodes))
    ordered = tree_order(nodes, fabric)
    spares = who_rests(ordered, resting, fabric, frozenset(preferred), groups or Groups())
    return ActiveNodes(
        tuple(node for node in ordered if node not in spares), tuple(node for node in ordered if node in spares)
    )
