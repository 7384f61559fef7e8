"""What a terrain remembers changes no answer, and jobs of one node have the best of all nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deeplink.core.errors import DeepLinkError
from deeplink.core.types import NodeName
from deeplink.scheduler.placement import candidate_leaves as leaf_cache
from deeplink.scheduler.placement import search
from deeplink.scheduler.placement.candidate_leaves import CandidateLeaves, Choices, Terrain, single_nodes
from deeplink.scheduler.placement.request import (
    DEFAULT_COST,
    Cost,
    DataResidency,
    NodeCapacity,
    NoPlacementError,
    PlacementCluster,
    PlacementRequest,
    Speeds,
    Weights,
)
from deeplink.scheduler.placement.search import Candidate, place
from deeplink.scheduler.topology.graph import Fabric, natural
from tests.effort import examples
from tests.scheduler.placement.test_search import (
    Question,
    cluster_of,
    free_nodes,
    questions,
    spreading,
    steps,
    traits_of,
    tree,
)

ROOMS = [
    NodeCapacity(gpus=4, free_gpus=4),
    NodeCapacity(gpus=4, free_gpus=2, idle=False),
    NodeCapacity(gpus=4, free_gpus=0, idle=False),
    NodeCapacity(gpus=2, free_gpus=2),
]
COSTS: st.SearchStrategy[Cost] = st.sampled_from([DEFAULT_COST, Weights(remote=40.0), spreading, steps])


@given(questions(most=24), COSTS)
@settings(max_examples=examples(150))
def test_a_job_of_one_node_gets_the_best_of_all_nodes(asked: Question, cost: Cost) -> None:
    asked = replace(asked, request=replace(asked.request, nodes=1))
    fabric, free = asked.cluster.fabric, free_nodes(asked)
    able = sorted(free, key=fabric.sort_key)
    if not able:
        with pytest.raises(NoPlacementError):
            place(asked.cluster, asked.request, cost)
        return
    traits = {node: traits_of((node,), asked, free) for node in able}
    least = min((cost(traits[node]), traits[node].stranded) for node in able)
    equals = [node for node in able if (cost(traits[node]), traits[node].stranded) == least]
    best = place(asked.cluster, asked.request, cost)[0]
    assert best.nodes[0] in equals
    assert (best.cost, best.traits) == (least[0], traits[best.nodes[0]])
    first_leaf = [node for node in equals if fabric.leaf(node) == fabric.leaf(equals[0])]
    alike = [node for node in first_leaf if _kind(node, asked) == _kind(best.nodes[0], asked)]
    assert best.nodes[0] == min(alike, key=natural), "the first leaf along the tree, and there the first by name"


def _kind(node: NodeName, asked: Question) -> tuple[object, ...]:
    cluster = asked.cluster
    return (cluster.speeds.nodes.get(node, 1.0), cluster.residency.held.get(node, 0), cluster.rooms[node].idle)


@given(questions(most=24), COSTS, st.sampled_from([1, 5, 100]))
@settings(max_examples=examples(100))
def test_one_node_is_ranked_as_any_number_is(asked: Question, cost: Cost, most: int) -> None:
    request = replace(asked.request, nodes=1)
    try:
        ground = CandidateLeaves(asked.cluster, request)
    except NoPlacementError:
        return
    weighed = search._each_weighed(ground, Choices(ground), cost, most)
    assert search._each_node(ground, cost, most) == weighed


def answer(
    cluster: PlacementCluster, request: PlacementRequest, cost: Cost, known: Terrain | None
) -> tuple[Candidate, ...] | str:
    try:
        return place(cluster, request, cost, terrain=known)
    except NoPlacementError as limit:
        return str(limit)


@given(questions(), st.data(), st.sampled_from([1, leaf_cache.MOST_VIEWS]))
@settings(max_examples=examples(75))
def test_what_is_remembered_changes_no_answer(asked: Question, data: st.DataObject, most_views: int) -> None:
    cluster, rooms = asked.cluster, dict(asked.cluster.rooms)
    nodes = sorted(rooms)
    known = Terrain(cluster.fabric, nodes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leaf_cache, "MOST_VIEWS", most_views)
        for _ in range(data.draw(st.integers(2, 6))):
            rooms[data.draw(st.sampled_from(nodes))] = data.draw(st.sampled_from(ROOMS))  # in place, as State does
            if data.draw(st.integers(0, 4)) == 0:
                slow = {data.draw(st.sampled_from(nodes)): 0.5}
                residency = DataResidency({data.draw(st.sampled_from(nodes)): 60}, 100)
                cluster = replace(cluster, speeds=Speeds(slow), residency=residency)
            some = st.frozensets(st.sampled_from(nodes), max_size=2)
            request = replace(
                asked.request,
                nodes=data.draw(st.integers(1, min(3, len(nodes)))),
                gpus_per_node=data.draw(st.sampled_from([0, 2, 4])),
                exclusive=data.draw(st.booleans()),
                excluded=data.draw(some),
            )
            cost = data.draw(COSTS)
            now = replace(cluster, rooms=rooms)
            assert answer(now, request, cost, known) == answer(now, request, cost, None)


def test_leaves_that_did_not_change_are_not_looked_at_again() -> None:
    cluster = cluster_of(tree(256, 16))
    known, request = (
        Terrain(cluster.fabric, cluster.rooms),
        PlacementRequest(nodes=1, gpus_per_node=1, exclusive=False),
    )
    before = CandidateLeaves(cluster, request, known)
    counted = single_nodes(before, DEFAULT_COST)
    rooms = dict(cluster.rooms) | {NodeName("n5"): NodeCapacity(gpus=8, free_gpus=1, idle=False)}
    now = replace(cluster, rooms=rooms)
    ground = CandidateLeaves(now, request, known)
    assert [place_ for place_, leaf in enumerate(ground.leaves) if leaf is not before.leaves[place_]] == [5]
    again = single_nodes(ground, DEFAULT_COST)
    assert sum(one not in counted for one in again) == 2, "n5, and the idle ones beside it"
    best = place(now, request, terrain=known)
    assert best == place(now, request)
    assert best[0].nodes == ("n5",)


@pytest.mark.parametrize("nodes", [7, 9])
def test_the_terrain_of_another_cluster_is_refused(nodes: int) -> None:
    cluster = cluster_of(tree(2, 4))
    for other in (Terrain(Fabric({}), cluster.rooms), Terrain(cluster.fabric, cluster_of(tree(nodes, 1)).rooms)):
        with pytest.raises(DeepLinkError, match="other nodes, or of another fabric"):
            place(cluster, PlacementRequest(nodes=1), terrain=other)
