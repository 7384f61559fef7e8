"""Which nodes hold the copies of a shard, so that no leaf and no rack takes all of them along; pure.

The cache ranks members for each shard by itself, so that nobody need be asked and little moves when a member
comes or goes. That ranking comes in as a value; here the first of it are taken that fail apart from each other.
Where the first two do so already, as they mostly do, nothing changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from deeplink.scheduler.placement.request import PlacementValueError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Mapping, Sequence

    from deeplink.scheduler.topology.graph import Fabric
    from deeplink.types import NodeName

_Shard = TypeVar("_Shard")
_Marks = tuple["Hashable", ...]


@dataclass(frozen=True, slots=True)
class Replicas:
    """The nodes that are to hold a shard.

    Attributes:
        nodes: the most preferred first.
        survive_leaf: whether a copy is left whichever leaf fails.
        survive_rack: whether a copy is left whichever rack fails.
    """

    nodes: tuple[NodeName, ...]
    survive_leaf: bool
    survive_rack: bool


def spread_replicas(
    ranked: Sequence[NodeName], copies: int, fabric: Fabric, racks: Mapping[NodeName, str] | None = None
) -> Replicas:
    """Choose nodes for the copies of one shard.

    No leaf and no rack holds all of them, if any choice of so many nodes has that; if none has both, no leaf does.
    Beyond that, copies go to leaves and racks that have none yet, and to the most preferred node of those.

    Args:
        ranked: the nodes that could hold it, each once, the most preferred first.
        copies: how many to choose; all nodes when there are fewer.
        fabric: where nodes hang. Nodes that it does not know are taken to fail together.
        racks: the rack of each node, likewise; when None, nobody knows racks and leaves stand for them.

    Raises:
        PlacementValueError: not even one copy is wanted.
    """
    if copies < 1:
        raise PlacementValueError("a shard has at least one copy")
    marks: dict[NodeName, _Marks] = {
        node: (fabric.leaf(node), fabric.leaf(node) if racks is None else racks.get(node, "")) for node in ranked
    }
    chosen = _begun(ranked, marks, copies)
    taken = set(chosen)
    while len(chosen) < min(copies, len(ranked)):
        chosen.append(_next(ranked, marks, chosen, taken))
        taken.add(chosen[-1])
    chosen.sort(key=list(ranked).index)
    leaf, rack = (len({marks[node][which] for node in chosen}) > 1 for which in (0, 1))
    return Replicas(tuple(chosen), leaf, rack)


def _apart(one: _Marks, other: _Marks) -> tuple[bool, bool, bool]:
    leaf, rack = one[0] != other[0], one[1] != other[1]
    return leaf and rack, leaf, rack


def _begun(ranked: Sequence[NodeName], marks: Mapping[NodeName, _Marks], copies: int) -> list[NodeName]:
    """Return the first node; or, where there are to be two and the first has no good partner, both."""
    if len(ranked) < 2 or copies != 2:  # noqa: PLR2004 - with a third, one can part from the first by leaf, one by rack
        return list(ranked[:1])
    firsts: dict[
        _Marks, NodeName
    ] = {}  # nodes on one leaf and in one rack are alike: the most preferred stands for them
    for node in ranked:
        firsts.setdefault(marks[node], node)
    best, found = (False, False, False), [ranked[0], ranked[1]]
    for one, node in firsts.items():
        for other, partner in firsts.items():
            apart = _apart(one, other)
            if apart > best:
                best, found = apart, [node, partner]
                if best[0]:
                    return found
    return found


def _next(
    ranked: Sequence[NodeName], marks: Mapping[NodeName, _Marks], chosen: Sequence[NodeName], taken: set[NodeName]
) -> NodeName:
    used = [{marks[node][which] for node in chosen} for which in (0, 1)]

    def badness(node: NodeName) -> tuple[int, int]:
        held = [mark in known for mark, known in zip(marks[node], used, strict=True)]
        together = sum(len(known) == 1 and mark in known for mark, known in zip(marks[node], used, strict=True))
        return together, sum(held)

    # The first of the best: min keeps the order of preference among equals.
    return min((node for node in ranked if node not in taken), key=badness)


def lost_with(
    holders: Mapping[_Shard, Collection[NodeName]], domain_of: Callable[[NodeName], Hashable]
) -> dict[Hashable, int]:
    """Return how many shards would be lost with each leaf (or rack) that fails; those without loss are left out.

    Args:
        holders: the nodes that hold each shard.
        domain_of: the leaf, or rack, of a node.
    """
    lost: dict[Hashable, int] = {}
    for nodes in holders.values():
        domains = {domain_of(node) for node in nodes}
        if len(domains) == 1:
            (domain,) = domains
            lost[domain] = lost.get(domain, 0) + 1
    return lost
