"""Ranks that belong together, and runs of nodes on one leaf that keep them so; pure.

A rank order is looked at as runs: stretches of nodes of one leaf, one behind the other. A group of consecutive
ranks stays within a leaf if and only if it lies within one run, so what an order is worth is a sum over its runs,
and the best one can be searched run by run. A leaf that has `c` nodes in the job holds at most as many groups as
fit into `c` nodes on end, wherever they begin; and a ring over L leaves crosses between them at least L times. An
order that reaches both bounds is optimal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from deeplink.core.errors import DeepLinkError
from deeplink.core.text import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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


def arrange(counts: Sequence[int], groups: Groups) -> tuple[Runs, bool]:
    """Return the best order of leaves that is found, and whether it is known that there is no better one.

    Exact up to `EXACT_STATES`; beyond, the best of four constructions. Where leaves can stand in the given order
    without harm, they do: it follows the tree, which keeps the levels above the leaves in order too.
    """
    plain: Runs = tuple(enumerate(counts))
    least = bound(counts, groups)
    if score(plain, groups) == least:
        return plain, True
    if _states(counts) <= EXACT_STATES:
        return _exact(counts, groups), True
    found = [plain, _aligned(counts, groups)]
    found += [_chained(counts, groups, roomy=roomy) for roomy in (False, True)]
    best = min(found, key=lambda runs: score(runs, groups))
    return best, score(best, groups) == least


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
    """Give every leaf as many whole groups of the greatest size as it holds, with the rest of the next, and so on.

    What is left over of the leaves stands together at the end.
    """
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
