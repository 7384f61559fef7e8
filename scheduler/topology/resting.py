"""Which nodes of a job should rest, so that the others touch as little of the fabric as possible; pure and exact.

A knapsack over the tree of who rests: below each switch, the least cost of the others for every number of resting
nodes. A cost has many parts, the first of which weighs most: groups of ranks that fit on no leaf, leaves in use,
switches above them level by level, nodes at work that others were preferred to. It is one number here, in which
each part has digits enough that none runs over, and parts of the tree that are alike are joined once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deeplink.scheduler.topology.graph import Fabric, Path
    from deeplink.scheduler.topology.groups import Groups
    from deeplink.types import NodeName

Costs = tuple[int, ...]
"""The least cost of the nodes at work, by how many rest."""


def who_rests(
    nodes: Sequence[NodeName], resting: int, fabric: Fabric, liked: frozenset[NodeName], groups: Groups
) -> frozenset[NodeName]:
    """Return the nodes that should rest.

    Args:
        nodes: all, along the tree.
        resting: how many shall; of equals those furthest along the tree.
        fabric: where they hang.
        liked: where choices are as good, nodes to rather run on.
        groups: ranks that are to stay together.
    """
    deepest = max((len(fabric.path(node)) for node in nodes), default=0)
    question = _Question(
        fabric, liked, groups, most=resting, deepest=deepest, base=len(nodes) * groups.per_node + 1
    )
    found: list[NodeName] = []
    question.below((), nodes).choose(resting, found)
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class _Leaf:
    """The nodes that hang on one switch itself, in the order in which they go to rest."""

    costs: Costs
    goes_first: Sequence[NodeName]

    def choose(self, rest: int, found: list[NodeName]) -> None:
        found.extend(self.goes_first[:rest])


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two parts of the tree."""

    costs: Costs
    left: _Leaf | _Pair | _Switch
    right: _Leaf | _Pair | _Switch

    def choose(self, rest: int, found: list[NodeName]) -> None:
        left, right = self.left.costs, self.right.costs
        least = max(0, rest - len(right) + 1)
        a = next(a for a in range(least, len(left)) if left[a] + right[rest - a] == self.costs[rest])
        self.left.choose(a, found)
        self.right.choose(rest - a, found)


@dataclass(frozen=True, slots=True)
class _Switch:
    """All below one switch, and the switch: it counts if anything below it works."""

    costs: Costs
    below: _Leaf | _Pair | _Switch

    def choose(self, rest: int, found: list[NodeName]) -> None:
        self.below.choose(rest, found)


@dataclass(frozen=True, slots=True)
class _Question:
    fabric: Fabric
    liked: frozenset[NodeName]
    groups: Groups
    most: int  # nobody needs to know what is cheapest when more than these rest
    deepest: int
    base: int  # more than any part of a cost amounts to
    joined: dict[tuple[Costs, Costs], Costs] = field(default_factory=dict)

    def below(self, switch: Path, nodes: Sequence[NodeName]) -> _Switch:
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
        parts: list[_Leaf | _Pair | _Switch] = [self.leaf(here)] if here else []
        parts += [self.below((*switch, name), below) for name, below in children.items()]
        parts.sort(key=lambda part: part.costs)  # alike beside alike: such pairs are joined once
        while len(parts) > 1:
            pairs: list[_Leaf | _Pair | _Switch] = [
                _Pair(self.join(one.costs, other.costs), one, other)
                for one, other in zip(parts[::2], parts[1::2], strict=False)
            ]
            parts = pairs + parts[len(parts) // 2 * 2 :]
        # The leaves weigh most, the root least; the last part is the nodes at work.
        used = self.base ** (1 + depth)
        costs = tuple(cost + used if rest < len(nodes) else cost for rest, cost in enumerate(parts[0].costs))
        return _Switch(costs, parts[0])

    def leaf(self, here: list[NodeName]) -> _Leaf:
        """Return what is known of the nodes on one switch: the last rest first, preferred ones after others."""
        unliked = [node for node in reversed(here) if node not in self.liked]
        goes_first = [*unliked, *(node for node in reversed(here) if node in self.liked)]
        # Nobody is preferred: then whoever works costs the same.
        regretted = len(unliked) if self.liked else 0
        costs = []
        for rest in range(min(len(here), self.most) + 1):
            cost = 0
            for size in self.groups.moving:
                cost = cost * self.base - self.groups.most(size, len(here) - rest)
            costs.append(cost * self.base ** (self.deepest + 2) + max(regretted - rest, 0))
        return _Leaf(tuple(costs), goes_first)

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
