"""Groups of ranks kept together, held against brute force."""

from __future__ import annotations

import math
import re
from collections import Counter
from itertools import combinations, permutations

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from deeplink.core.errors import DeepLinkError
from deeplink.core.types import NodeName
from deeplink.scheduler.topology.graph import Fabric
from deeplink.scheduler.topology.rank_order import (
    EXACT_STATES,
    Cut,
    Groups,
    Runs,
    _aligned,
    _chained,
    _next,
    _states,
    arrange,
    bound,
    choose_active,
    rank_order,
    ring_crossings,
    score,
)
from tests.effort import examples


def names(count: int) -> list[NodeName]:
    return [NodeName(f"n{number}") for number in range(count)]


def parted(counts: list[int], spines: int = 2) -> tuple[list[NodeName], Fabric]:
    """So many nodes on each leaf, dealt to them by turns as names go."""
    nodes = names(sum(counts))
    left, paths, leaf = list(counts), {}, 0
    for node in nodes:
        while not left[leaf % len(left)]:
            leaf += 1
        left[leaf % len(left)] -= 1
        paths[node] = ("core", f"spine{leaf % len(left) % spines}", f"leaf{leaf % len(left)}")
        leaf += 1
    return nodes, Fabric(paths)


def worth(order: tuple[NodeName, ...], fabric: Fabric, groups: Groups) -> tuple[int, ...]:
    """Count, group by group, those cut between leaves; then the crossings."""
    ranks = [fabric.leaf(node) for node in order for _ in range(groups.per_node)]
    cut = [
        sum(len(set(ranks[first : first + size])) > 1 for first in range(0, len(ranks), size))
        for size in groups.sizes
    ]
    return (*cut, ring_crossings(order, fabric.leaf))


def distinct(leaves: tuple[int, ...]) -> set[tuple[int, ...]]:
    """Every order of leaves' nodes; those of one leaf are alike."""
    if not leaves:
        return {()}
    return {
        (leaf, *rest)
        for place, leaf in enumerate(leaves)
        if leaf not in leaves[:place]
        for rest in distinct((*leaves[:place], *leaves[place + 1 :]))
    }


@st.composite
def tasks(draw: st.DrawFn, most: int = 10) -> tuple[list[int], Groups]:
    """Nodes on leaves, and groups that their ranks divide into."""
    counts = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5).filter(lambda found: sum(found) <= most))
    assume(math.factorial(sum(counts)) <= 6_000 * math.prod(map(math.factorial, counts)))  # orders to be tried
    per_node = draw(st.integers(1, 6))
    ranks = sum(counts) * per_node
    sizes: list[int] = []
    for _ in range(draw(st.integers(0, 2))):
        fit = [
            size
            for size in range(2, ranks + 1)
            if ranks % size == 0 and size not in sizes and size % (sizes or [1])[-1] == 0
        ]
        if fit:
            sizes.append(draw(st.sampled_from(fit)))
    return counts, Groups(tuple(sizes), per_node)


@given(tasks())
@settings(max_examples=examples(150))
@example(([3, 3, 2], Groups((2,))))
@example(([1, 3, 1, 3], Groups((2, 4))))
@example(([5, 3, 2], Groups((2, 10))))
@example(([4, 3, 3], Groups((10, 20), per_node=4)))
def test_no_permutation_cuts_fewer_groups_or_crosses_less(task: tuple[list[int], Groups]) -> None:
    counts, groups = task
    nodes, fabric = parted(counts)
    found = rank_order(nodes, fabric, groups)
    assert sorted(found.nodes) == sorted(nodes)
    leaves = [leaf for leaf, count in enumerate(counts) for _ in range(count)]
    fewest = min(
        worth(tuple(nodes), Fabric(dict(zip(nodes, [(str(leaf),) for leaf in order], strict=True))), groups)
        for order in distinct(tuple(leaves))
    )
    assert worth(found.nodes, fabric, groups) == fewest
    assert found.crossings == fewest[-1]
    between = [cut for cut in found.cut if cut.leaves > 1]
    assert tuple(sum(cut.size == size for cut in between) for size in groups.sizes) == fewest[:-1]


@given(tasks(most=12))
@settings(max_examples=examples(100))
def test_what_is_told_is_what_was_reached(task: tuple[list[int], Groups]) -> None:
    counts, groups = task
    runs = arrange(counts, groups)
    assert score(runs, groups) >= bound(counts, groups)
    assert [sum(length for leaf, length in runs if leaf == which) for which in range(len(counts))] == counts


def all_parts(total: int, most: int) -> list[list[int]]:
    if total == 0:
        return [[]]
    return [[part, *rest] for part in range(min(total, most), 0, -1) for rest in all_parts(total - part, part)]


def test_any_ten_nodes_are_weighed_in_full() -> None:
    assert max(_states(counts) for total in range(1, 11) for counts in all_parts(total, total)) <= EXACT_STATES


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6))
@example([2] * 8)
@example([3] * 5)
@settings(max_examples=examples(60))
def test_the_states_of_the_search_are_not_underrated(counts: list[int]) -> None:
    seen: set[tuple[tuple[int, ...], int]] = set()
    waiting = [(tuple(counts), -1)]
    while waiting:
        left, last = waiting.pop()
        for leaf in _next(left, last, counts):
            for length in range(1, left[leaf] + 1):
                behind = ((*left[:leaf], left[leaf] - length, *left[leaf + 1 :]), leaf)
                if behind not in seen:
                    seen.add(behind)
                    waiting.append(behind)
    assert len(seen) <= _states(counts)


@given(st.lists(st.integers(1, 7), min_size=2, max_size=9), st.sampled_from([2, 3, 4, 6, 8]))
@settings(max_examples=examples(200))
def test_the_constructions_for_many_nodes_cut_no_group_that_need_not_be(counts: list[int], span: int) -> None:
    counts = [*counts, span - sum(counts) % span]
    groups = Groups((span * 4,), per_node=4)
    least = bound(counts, groups)
    built: list[Runs] = [_aligned(counts, groups)]
    built += [_chained(counts, groups, roomy=roomy) for roomy in (False, True)]
    for runs in built:
        assert [sum(length for leaf, length in runs if leaf == which) for which in range(len(counts))] == counts
        assert score(runs, groups)[0] == least[0]


def test_four_thousand_ranks_with_two_sizes_of_groups() -> None:
    counts = [(7 * leaf) % 13 + 3 for leaf in range(57)]
    counts.append(512 - sum(counts) if sum(counts) < 512 else 512 * 2 - sum(counts))
    nodes, fabric = parted(counts)
    groups = Groups((16, 32), per_node=8)
    found = rank_order(nodes, fabric, groups)
    whole = sum(count // 2 for count in counts)
    assert sum(cut.size == 16 for cut in found.cut) == len(nodes) // 2 - whole
    assert found.crossings <= 2 * len(counts)


@given(tasks(), st.randoms(use_true_random=False))
@settings(max_examples=examples(60))
def test_the_order_depends_on_nothing_but_the_set(task: tuple[list[int], Groups], random: object) -> None:
    counts, groups = task
    nodes, fabric = parted(counts)
    shuffled = list(nodes)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert rank_order(shuffled, fabric, groups) == rank_order(nodes, fabric, groups)


def test_without_groups_the_order_is_the_trees() -> None:
    nodes, fabric = parted([3, 2, 4])
    found = rank_order(nodes, fabric)
    assert list(found.nodes) == sorted(nodes, key=fabric.sort_key)
    assert (found.crossings, found.cut) == (3, ())


def test_leaves_change_places_so_that_no_group_is_cut() -> None:
    nodes, fabric = parted([3, 2, 3], spines=1)
    found = rank_order(nodes, fabric, Groups((2,)))
    assert [fabric.leaf(node)[-1] for node in found.nodes] == [f"leaf{leaf}" for leaf in (0, 0, 0, 2, 2, 2, 1, 1)]
    assert len(found.cut) == 1


def test_a_cut_group_says_why() -> None:
    nodes, fabric = parted([1, 1])
    (cut,) = rank_order(nodes, fabric, Groups((8,), per_node=4)).cut
    assert cut == Cut(
        size=8, first=0, nodes=tuple(nodes), leaves=2, why="no leaf has more than 1 of the job's nodes"
    )
    assert str(cut) == "ranks 0-7 are on 2 leaves: no leaf has more than 1 of the job's nodes"
    nodes, fabric = parted([3, 3])
    (cut,) = rank_order(nodes, fabric, Groups((2,))).cut
    assert cut.why == "the job's nodes on a leaf do not divide into groups of 2 everywhere"
    (cut,) = rank_order(names(2), Fabric({}), Groups((4,), per_node=6)).cut
    assert (cut.nodes, cut.leaves) == (("n0", "n1"), 1)
    assert cut.why == "a node's 6 ranks do not divide into groups of 4"


@pytest.mark.parametrize(
    ("nodes", "sizes", "said"),
    [
        (3, (2,), "3 ranks (3 nodes with 1 each) do not divide into groups of 2"),
        (6, (2, 3), "groups of 3 ranks do not consist of smaller ones of 2"),
        (2, (0,), "at least one rank"),
    ],
)
def test_groups_that_cannot_be_are_refused(nodes: int, sizes: tuple[int, ...], said: str) -> None:
    with pytest.raises(DeepLinkError, match=re.escape(said)) as caught:
        rank_order(names(nodes), Fabric({}), Groups(sizes))
    assert caught.value.exit_code == 2


def test_who_rests_leaves_whole_groups_to_the_others() -> None:
    nodes, fabric = parted([3, 4], spines=1)
    groups = Groups((2,))
    active = choose_active(nodes, 6, fabric, groups=groups).active
    assert not rank_order(active, fabric, groups).cut


@given(tasks(), st.integers(1, 4))
@settings(max_examples=examples(100))
def test_no_other_choice_of_nodes_has_room_for_more_groups(task: tuple[list[int], Groups], resting: int) -> None:
    counts, groups = task
    nodes, fabric = parted(counts)
    count = max(len(nodes) - resting, 1)

    def room(active: tuple[NodeName, ...]) -> tuple[int, ...]:
        below = Counter(map(fabric.leaf, active)).values()
        return tuple(sum(groups.most(size, one) for one in below) for size in groups.moving)

    best = max(room(some) for some in combinations(nodes, count))
    assert room(choose_active(nodes, count, fabric, groups=groups).active) == best


@pytest.mark.parametrize("known", [0, 3])
def test_nodes_that_the_fabric_does_not_know_count_as_one_leaf(known: int) -> None:
    nodes = names(6)
    fabric = Fabric(dict.fromkeys(nodes[:known], ("core", "leaf")))
    found = rank_order(nodes, fabric, Groups((3,)))
    assert (found.crossings, found.cut) == (2 if known else 0, ())


def test_the_brute_force_knows_every_order() -> None:
    assert distinct((0, 0, 1, 2)) == set(permutations((0, 0, 1, 2)))
