"""Choices of nodes, held against every choice there is."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deeplink.core.text import counted
from deeplink.core.types import NodeName
from deeplink.scheduler.placement import search
from deeplink.scheduler.placement.candidate_leaves import CandidateLeaves
from deeplink.scheduler.placement.request import (
    DEFAULT_COST,
    UNUSED,
    Cost,
    DataResidency,
    NodeCapacity,
    NoPlacementError,
    PlacementCluster,
    PlacementRequest,
    Speeds,
    Traits,
    Weights,
)
from deeplink.scheduler.placement.search import place, weigh
from deeplink.scheduler.topology.graph import Fabric, Path
from deeplink.scheduler.topology.rank_order import rank_order, ring_crossings
from tests.effort import examples


@dataclass(frozen=True)
class Question:
    cluster: PlacementCluster
    request: PlacementRequest


def traits_of(nodes: tuple[NodeName, ...], asked: Question, free: frozenset[NodeName]) -> Traits:
    """Work out what a choice is like node by node, with nothing of the code under test."""
    cluster, request = asked.cluster, asked.request
    fabric, rooms = cluster.fabric, cluster.rooms
    leaves = Counter(map(fabric.path, nodes))
    everywhere = Counter(map(fabric.path, rooms))
    switches = {path[:depth] for path in leaves for depth in range(1, len(path))}
    slow = [cluster.speeds.nodes[node] for node in nodes if cluster.speeds.nodes.get(node, 1.0) < 1.0]
    ports = min(slow, default=1.0)
    links: dict[bool, list[float]] = {True: [], False: []}  # of leaves, and above
    for link in {path[:depth] for path in leaves for depth in range(1, len(path) + 1)}:
        if any(fabric.path(node)[: len(link)] != link for node in nodes):
            share = cluster.speeds.links.get(link, 1.0)
            links[link in leaves].append(share)
            slow += [share] if share < 1.0 else []
    whole = [
        path
        for path, count in everywhere.items()
        if path and count > 1 and all(rooms[node].idle for node in rooms if fabric.path(node) == path)
    ]
    total = cluster.residency.total
    held = sum(cluster.residency.held.get(node, 0) for node in nodes)
    opened = [node for node in nodes if rooms[node].idle and rooms[node].gpus > request.gpus_per_node]
    return Traits(
        per_leaf=tuple(sorted(leaves.values(), reverse=True)),
        switches=len(switches),
        degraded=len(slow),
        ports=ports,
        leaf_links=min(links[True], default=UNUSED),
        upper_links=min(links[False], default=UNUSED),
        local=min(held / total, 1.0) if total else 1.0,
        broken=sum(0 < leaves[path] < everywhere[path] for path in whole),
        opened=0 if request.exclusive else len(opened),
        stranded=sum(fabric.path(node) in leaves for node in free) - len(nodes),
    )


def free_nodes(asked: Question) -> frozenset[NodeName]:
    request = asked.request
    return frozenset(
        node
        for node, room in asked.cluster.rooms.items()
        if node not in request.excluded
        and room.gpus >= request.gpus_per_node
        and (room.idle if request.exclusive else room.free_gpus >= request.gpus_per_node)
    )


def every_choice(asked: Question) -> list[Traits]:
    free = free_nodes(asked)
    return [traits_of(nodes, asked, free) for nodes in combinations(sorted(free), asked.request.nodes)]


@st.composite
def questions(draw: st.DrawFn, most: int = 10) -> Question:
    nodes = [NodeName(f"n{number}") for number in range(draw(st.integers(1, most)))]
    spines = [draw(st.integers(0, 1)) for _ in range(4)]
    paths: dict[NodeName, Path] = {}
    rooms = {}
    for node in nodes:
        leaf = draw(st.integers(-1, 3))
        if leaf >= 0:
            paths[node] = ("core", f"spine{spines[leaf]}", f"leaf{leaf}")
        free = draw(st.sampled_from([4, 4, 4, 2, 0]))
        rooms[node] = NodeCapacity(gpus=4, free_gpus=free, idle=free == 4 and draw(st.booleans()))
    shares = st.sampled_from([0.25, 0.5])
    links = sorted({path[:depth] for path in paths.values() for depth in (2, 3)})
    speeds = Speeds(
        draw(st.dictionaries(st.sampled_from(nodes), shares, max_size=3)),
        draw(st.dictionaries(st.sampled_from(links), shares, max_size=2)) if links else {},
    )
    held = draw(st.dictionaries(st.sampled_from(nodes), st.integers(0, 60), max_size=6))
    cluster = PlacementCluster(
        fabric=Fabric(paths),
        rooms=rooms,
        speeds=speeds,
        residency=DataResidency(held, draw(st.sampled_from([0, 100]))),
    )
    some = st.frozensets(st.sampled_from(nodes), max_size=2)
    request = PlacementRequest(
        nodes=draw(st.integers(1, len(nodes))),
        gpus_per_node=draw(st.sampled_from([0, 2, 4])),
        exclusive=draw(st.booleans()),
        excluded=draw(some),
    )
    return Question(cluster, request)


def spreading(traits: Traits) -> float:
    """Want many leaves: as in measured data, packing is not always the fastest."""
    return -2.0 * traits.leaves - 3.0 * traits.local + traits.degraded + 0.1 * traits.per_leaf[0]


def steps(traits: Traits) -> float:
    """Have no slope to go down."""
    return float(traits.per_leaf != (2, 1)) + float(traits.slowest < 0.5) * 3


@given(questions(), st.sampled_from([DEFAULT_COST, Weights(remote=40.0), spreading, steps]))
@settings(max_examples=examples(200))
def test_no_choice_costs_less(asked: Question, cost: Cost) -> None:
    choices = every_choice(asked)
    if not choices:
        with pytest.raises(NoPlacementError):
            place(asked.cluster, asked.request, cost)
        return
    found = place(asked.cluster, asked.request, cost)
    best = found[0]
    least = min((cost(traits), traits.stranded) for traits in choices)
    assert best.cost == pytest.approx(least[0])
    assert best.traits.stranded == least[1]
    assert [one.cost for one in found] == sorted(one.cost for one in found)
    assert len({frozenset(one.nodes) for one in found}) == len(found)
    for one in found:
        assert one.traits == traits_of(one.nodes, asked, free_nodes(asked))
        assert set(one.nodes) <= free_nodes(asked)
        assert one.crossings == rank_order(one.nodes, asked.cluster.fabric).crossings


@given(questions(), st.data())
@settings(max_examples=examples(150))
def test_a_choice_that_is_named_is_weighed_as_the_others_are(asked: Question, data: st.DataObject) -> None:
    free, wanted = free_nodes(asked), asked.request.nodes
    nodes = data.draw(st.frozensets(st.sampled_from(sorted(asked.cluster.rooms)), max_size=wanted))
    try:
        found = weigh(asked.cluster, asked.request, nodes)
    except NoPlacementError:
        assert len(free) < wanted
        return
    if found is None:
        assert len(nodes) < wanted or nodes - free
        return
    assert (len(nodes), frozenset(found.nodes)) == (wanted, nodes)
    assert found.traits == traits_of(tuple(nodes), asked, free)
    assert found.cost == DEFAULT_COST(found.traits)


@given(questions())
@settings(max_examples=examples(150))
def test_what_was_given_up_is_what_others_have(asked: Question) -> None:
    choices = every_choice(asked)
    if not choices:
        return
    for one in place(asked.cluster, asked.request):
        traits = one.traits
        fewest = min(traits.leaves for traits in choices)
        soundest = min(traits.degraded for traits in choices)
        most = max(traits.local for traits in choices)
        slowest, local, best = (f"{100 * share:.0f} %" for share in (traits.slowest, traits.local, most))
        slow = f"{traits.degraded} slow nodes or links where {soundest} would do"
        whole = "a whole leaf" if traits.broken == 1 else f"{traits.broken} whole leaves"
        worse = {
            f"{traits.leaves} leaves where {fewest} would do": traits.leaves > fewest,
            f"{local} of the data local where {best} could be": traits.local < most,
            f"{slow} (the slowest at {slowest} of its speed)": traits.degraded > soundest,
            f"breaks up {whole}": traits.broken > 0,
            f"takes a part of {counted(traits.opened, 'idle node')}": traits.opened > 0,
        }
        assert one.given_up == tuple(words for words, is_worse in worse.items() if is_worse)


@given(questions(), st.randoms(use_true_random=False), st.booleans())
@settings(max_examples=examples(100))
def test_the_answer_depends_on_nothing_but_the_facts(
    asked: Question, shuffler: random.Random, built: bool
) -> None:
    cluster = asked.cluster
    names = list(cluster.rooms)
    shuffler.shuffle(names)
    rooms = {node: cluster.rooms[node] for node in names}
    fabric = Fabric({node: cluster.fabric.paths[node] for node in names if node in cluster.fabric.paths})
    again = PlacementCluster(fabric=fabric, rooms=rooms, speeds=cluster.speeds, residency=cluster.residency)
    with pytest.MonkeyPatch.context() as patch:
        if built:
            patch.setattr(search, "EXACT_CHOICES", 0)
        try:
            found = place(cluster, asked.request)
        except NoPlacementError:
            return
        assert place(again, asked.request) == found


@given(questions())
@settings(max_examples=examples(150))
def test_built_choices_meet_the_request_too(asked: Question) -> None:
    choices = every_choice(asked)
    if not choices:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "EXACT_CHOICES", 0)
        found = place(asked.cluster, asked.request)
    assert found[0].cost >= min(map(DEFAULT_COST, choices)) - 1e-9
    for one in found:
        assert one.traits == traits_of(one.nodes, asked, free_nodes(asked))
        assert set(one.nodes) <= free_nodes(asked)


def tree(leaves: int, each: int) -> dict[NodeName, Path]:
    """n0, n1, ... dealt to the leaves by turns; eight leaves below a spine."""
    return {
        NodeName(f"n{number}"): ("core", f"spine{number % leaves // 8}", f"leaf{number % leaves}")
        for number in range(leaves * each)
    }


def cluster_of(paths: dict[NodeName, Path], *, busy: Collection[str] = (), **known: Any) -> PlacementCluster:
    rooms = {node: NodeCapacity(gpus=8, free_gpus=8 * (node not in busy), idle=node not in busy) for node in paths}
    return PlacementCluster(fabric=Fabric(paths), rooms=rooms, **known)


def leaves_of(cluster: PlacementCluster, nodes: tuple[NodeName, ...]) -> list[str]:
    return sorted({cluster.fabric.path(node)[-1] for node in nodes}, key=lambda leaf: int(leaf[4:]))


def test_a_small_job_goes_where_a_leaf_is_broken_already() -> None:
    cluster = cluster_of(tree(4, 8), busy={"n2"})
    best, *others = place(cluster, PlacementRequest(nodes=4))
    assert leaves_of(cluster, best.nodes) == ["leaf2"]
    assert not best.given_up
    assert str(best) == "4 nodes on one leaf: cost 0.50, 100 % of the data local"
    assert str(others[-1]).endswith("; breaks up a whole leaf")


def test_the_leaf_that_is_left_fullest_is_taken_among_equals() -> None:
    cluster = cluster_of(tree(3, 8), busy={"n0", "n3", "n6", "n1", "n4", "n2"})  # 5, 6 and 7 left
    best = place(cluster, PlacementRequest(nodes=5))[0]
    assert (leaves_of(cluster, best.nodes), best.traits.stranded) == (["leaf0"], 0)


def test_a_slow_node_and_a_slow_link_are_kept_out() -> None:
    speeds = Speeds({NodeName("n0"): 0.5}, {("core", "spine0", "leaf1"): 0.25})
    cluster = cluster_of(tree(4, 4), speeds=speeds)
    best = place(cluster, PlacementRequest(nodes=8))[0]
    assert leaves_of(cluster, best.nodes) == ["leaf2", "leaf3"]
    inside = weigh(cluster, PlacementRequest(nodes=4), {NodeName(f"n{number}") for number in (1, 5, 9, 13)})
    assert inside is not None
    assert not inside.traits.degraded, "a ring within the leaf does not use its slow link"
    all_of_it = place(cluster, PlacementRequest(nodes=16))[0]
    assert (all_of_it.traits.degraded, all_of_it.traits.slowest) == (2, 0.25)
    assert not all_of_it.given_up, "nothing is given up where there is no other choice"


def test_data_draws_a_job_to_its_leaf() -> None:
    paths = tree(4, 4)
    here = [node for node in paths if paths[node][-1] == "leaf3"]
    cluster = cluster_of(paths, residency=DataResidency(dict.fromkeys(here[:2], 50), 100))
    best = place(cluster, PlacementRequest(nodes=2))[0]
    assert (set(best.nodes), best.percent_local) == (set(here[:2]), 100.0)


def test_shared_jobs_fill_nodes_that_are_in_use() -> None:
    paths = tree(2, 4)
    rooms = {node: NodeCapacity(gpus=8, free_gpus=8) for node in paths} | {
        NodeName("n3"): NodeCapacity(gpus=8, free_gpus=2, idle=False)
    }
    cluster = PlacementCluster(fabric=Fabric(paths), rooms=rooms)
    assert place(cluster, PlacementRequest(nodes=1, gpus_per_node=2, exclusive=False))[0].nodes == ("n3",)
    (best, *_) = place(cluster, PlacementRequest(nodes=1, gpus_per_node=4, exclusive=False))
    assert best.given_up == ("takes a part of 1 idle node",)


def test_a_job_of_512_nodes_on_4096_with_partial_occupancy() -> None:
    paths = tree(256, 16)
    draw = random.Random(4)  # noqa: S311 - a state, no secret
    busy = {node for node in paths if draw.random() < 0.4}
    cluster = cluster_of(paths, busy=busy)
    found = place(cluster, PlacementRequest(nodes=512))
    assert all(len(set(one.nodes)) == 512 and not set(one.nodes) & busy for one in found)
    assert found[0].leaves <= CandidateLeaves(cluster, PlacementRequest(nodes=512)).fewest_leaves() + 2
    assert ring_crossings(found[0].nodes, cluster.fabric.leaf) == found[0].crossings


def middling(seed: int) -> Question:
    """18 nodes on 5 leaves: some busy, some slow, some with data; more choices than are weighed by default."""
    draw = random.Random(seed)  # noqa: S311 - a state, no secret
    nodes = [NodeName(f"n{number}") for number in range(18)]
    leaf = {node: draw.randrange(5) for node in nodes}
    paths = {node: ("core", f"s{leaf[node] % 2}", f"l{leaf[node]}") for node in nodes}
    rooms = {node: NodeCapacity(idle=draw.random() < 0.8) for node in nodes}
    held = {node: draw.choice([0, 0, 5, 10, 20]) for node in nodes} if draw.random() < 0.7 else {}
    links: dict[Path, float] = {}
    if draw.random() < 0.4:
        links["core", "s0", f"l{2 * draw.randrange(2)}"] = 0.5
    speeds = Speeds(dict.fromkeys(draw.sample(nodes, draw.randrange(3)), 0.5), links)
    residency = DataResidency(held, 100 if held else 0)
    cluster = PlacementCluster(fabric=Fabric(paths), rooms=rooms, speeds=speeds, residency=residency)
    return Question(cluster, PlacementRequest(nodes=draw.randint(2, 8)))


@pytest.mark.parametrize("seed", range(20))
def test_built_choices_are_the_best_on_clusters_of_middling_size(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = middling(seed)
    monkeypatch.setattr(search, "EXACT_CHOICES", 10**6)
    exact = place(asked.cluster, asked.request)[0]
    monkeypatch.setattr(search, "EXACT_CHOICES", 0)
    built = place(asked.cluster, asked.request)[0]
    assert built.cost == pytest.approx(exact.cost, rel=0.05)


@pytest.mark.parametrize("most", [1, 3])
def test_as_many_candidates_as_asked_for(most: int) -> None:
    assert len(place(cluster_of(tree(4, 4)), PlacementRequest(nodes=3), most=most)) == most
    assert len(place(cluster_of(tree(64, 16)), PlacementRequest(nodes=100), most=most)) == most
