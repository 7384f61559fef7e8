"""The predicted step as a cost: the same as predicting the placement itself, and ranked by it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deeplink.core.types import NodeName
from deeplink.scheduler.placement.model import Constants, Job, LinkSpeed, NodeShare, Placement, ReadSpeeds
from deeplink.scheduler.placement.predicted import TIES, Predicted, predict, reads_of
from deeplink.scheduler.placement.request import (
    DataResidency,
    NodeCapacity,
    PlacementCluster,
    PlacementRequest,
    Speeds,
)
from deeplink.scheduler.placement.search import place
from deeplink.scheduler.topology.graph import Fabric
from tests.effort import examples
from tests.scheduler.placement.models import constants, jobs
from tests.scheduler.placement.test_search import Question, every_choice, questions

TALKATIVE = Job(batch=4, sample_s=1e-3, gradient_bytes=1e9, overlap=0.2)
SILENT = Job(batch=64, sample_s=10e-3, gradient_bytes=1e6)


def cluster_of(leaves: int, each: int, busy: str = "", **more: object) -> PlacementCluster:
    """n0, n1, ... dealt to leaves by turns, two leaves below a spine."""
    names = [NodeName(f"n{number}") for number in range(leaves * each)]
    paths = {node: ("core", f"s{place % leaves // 2}", f"l{place % leaves}") for place, node in enumerate(names)}
    rooms = {
        node: NodeCapacity(gpus=4, free_gpus=4 * (node not in busy.split()), idle=node not in busy.split())
        for node in names
    }
    return PlacementCluster(fabric=Fabric(paths), rooms=rooms, **more)  # type: ignore[arg-type]


@given(questions(most=7), jobs, constants, st.integers(1, 8))
@settings(max_examples=examples(200))
def test_a_choice_costs_what_its_placement_is_predicted_to_take(
    asked: Question, job: Job, known: Constants, each: int
) -> None:
    cluster, cost = asked.cluster, Predicted(job, known, each)
    if not every_choice(asked):
        return
    for one in place(cluster, asked.request, cost, most=20):
        nodes = tuple(
            NodeShare(each, each, cluster.fabric.path(node), cluster.speeds.nodes.get(node, 1.0))
            for node in one.nodes
        )
        where = Placement(nodes, cluster.speeds.links)
        reads = reads_of(known.reads, one.traits.local, len(nodes)) if job.sample_bytes else None
        wanted = predict(job, where, known, reads or ())
        found = cost.step(one.traits)
        assert found.step_s == pytest.approx(wanted.step_s)
        assert found == pytest.approx(wanted) or found.lines() == wanted.lines()
        assert found.step_s <= one.cost < found.step_s * (1 + TIES) * (1 + 1e-12)


@given(questions(), jobs, constants, st.integers(1, 8))
@settings(max_examples=examples(150))
def test_the_first_one_is_the_best_there_is(asked: Question, job: Job, known: Constants, each: int) -> None:
    choices = every_choice(asked)
    if not choices:
        return
    cost = Predicted(job, known, each)
    best = place(asked.cluster, asked.request, cost, most=1)[0]
    assert best.cost == pytest.approx(min(map(cost, choices)))
    assert cost.step(best.traits).step_s <= (1 + TIES) * (1 + 1e-9) * min(cost.step(one).step_s for one in choices)


@given(questions(), jobs, constants)
@settings(max_examples=examples(100))
def test_the_same_traits_cost_the_same_whatever_was_weighed_before(
    asked: Question, job: Job, known: Constants
) -> None:
    cost = Predicted(job, known, 4)
    first = [cost(traits) for traits in every_choice(asked)]
    assert first == [cost(traits) for traits in every_choice(asked)]
    assert first == [Predicted(job, known, 4)(traits) for traits in every_choice(asked)]


def test_two_half_full_nodes_lose_to_four_where_paths_are_narrow() -> None:
    known = Constants(path_bandwidth=0.5e9, nic=LinkSpeed(1e9, 14e-6))
    cluster = cluster_of(2, 4)
    half = PlacementRequest(nodes=2, gpus_per_node=2, exclusive=False)
    spread = PlacementRequest(nodes=4, gpus_per_node=1, exclusive=False)
    found = [
        (place(cluster, asked, cost, most=1)[0].cost, asked.nodes)
        for asked, cost in ((half, Predicted(TALKATIVE, known, 2)), (spread, Predicted(TALKATIVE, known, 1)))
    ]
    assert min(found)[1] == 4
    assert found[1][0] < 0.7 * found[0][0]
    wide = Constants()
    near, far = (Predicted(TALKATIVE, wide, ranks) for ranks in (4, 1))
    four = PlacementRequest(nodes=1, gpus_per_node=4, exclusive=False)
    assert place(cluster, four, near)[0].cost < place(cluster, spread, far)[0].cost


def test_where_steps_are_equal_whole_leaves_are_left_to_others() -> None:
    # On the leaf of which one node is busy there is room; the others are whole.
    cluster = cluster_of(4, 4, busy="n1")
    best = place(cluster, PlacementRequest(nodes=3), Predicted(SILENT, Constants(), 4))[0]
    assert (best.leaves, best.traits.broken) == (1, 0)
    assert {cluster.fabric.leaf(node)[-1] for node in best.nodes} == {"l1"}


def test_a_slow_node_counts_where_the_gradients_are_waited_for() -> None:
    # The leaf that would be left over has a slow node: the weights alone, without speeds, would take it.
    slow = Speeds({NodeName("n5"): 0.5})
    cluster = cluster_of(4, 4, busy="n1", speeds=slow)
    talking = Predicted(TALKATIVE, Constants(), 1)
    best, *others = place(cluster, PlacementRequest(nodes=3), talking, most=50)
    assert "n5" not in best.nodes
    worse = next(one for one in others if "n5" in one.nodes)
    assert talking.step(worse.traits).step_s > 1.5 * talking.step(best.traits).step_s


def test_a_slow_link_counts_on_the_level_it_is_on() -> None:
    known = Constants(leaf=LinkSpeed(6e9, 14e-6), spine=LinkSpeed(24e9, 14e-6))
    job = replace(TALKATIVE, overlap=0.0)

    def step(busy: str, links: dict[tuple[str, ...], float]) -> tuple[float, float]:
        cost = Predicted(job, known, 1)
        found = place(cluster_of(4, 2, busy=busy, speeds=Speeds({}, links)), PlacementRequest(nodes=2), cost)[0]
        return cost.step(found.traits).levels[2].seconds, cost.step(found.traits).levels[3].seconds

    # One node free on each of l0 and l2, below different spines.
    apart = "n1 n3 n4 n5 n6 n7"
    leaf, spine = step(apart, {})
    assert (leaf, spine) == pytest.approx((1 / 6, 1 / 24))
    assert step(apart, {("core", "s0", "l0"): 0.5}) == pytest.approx((2 * leaf, spine))
    assert step(apart, {("core", "s1"): 0.25}) == pytest.approx((leaf, 4 * spine))
    # On one leaf none of them is used.
    assert step("n1 n2 n3 n5 n6 n7", {("core", "s0", "l0"): 0.5, ("core", "s1"): 0.25}) == (0.0, 0.0)


def test_a_fast_link_between_slow_ones_is_chosen() -> None:
    known = Constants(leaf=LinkSpeed(3e9, 14e-6))
    slow = Speeds({}, {("core", "s0", "l0"): 0.25})
    # Two nodes are free on no leaf: l0, l1 and l2 have one each.
    cluster = cluster_of(4, 2, busy="n3 n4 n5 n6 n7", speeds=slow)
    best = place(cluster, PlacementRequest(nodes=2), Predicted(TALKATIVE, known, 1))[0]
    assert set(best.nodes) == {"n1", "n2"}


def test_data_is_worth_what_reading_it_elsewhere_takes() -> None:
    residency = DataResidency({NodeName("n1"): 100, NodeName("n5"): 100}, 100)
    cluster = cluster_of(4, 2, residency=residency)
    known = Constants(reads=ReadSpeeds(local=3e9, peer=1e9, source=0.1e9))
    reading = replace(SILENT, sample_bytes=2e6)
    cost = Predicted(reading, known, 1)
    best, *others = place(cluster, PlacementRequest(nodes=1), cost, most=8)
    assert best.traits.local == 1.0
    assert cost.step(best.traits).step_s == pytest.approx(0.64, rel=0.01)
    cold = next(one for one in others if one.traits.local == 0)
    assert cost.step(cold.traits).step_s == pytest.approx(64 * 2e6 / 0.1e9)
    # Behind a longer step reading costs nothing: then it only decides between equals.
    hidden = Predicted(replace(reading, sample_bytes=1e5), known, 1)
    assert {hidden.step(one.traits).step_s for one in place(cluster, PlacementRequest(nodes=1), hidden)} == {0.64}
    assert place(cluster, PlacementRequest(nodes=1), hidden)[0].traits.local == 1.0
