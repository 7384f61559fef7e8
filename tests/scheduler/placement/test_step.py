"""The formulas: closed forms worked out by hand, and what must hold for any job, placement and constants."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deeplink.core.errors import DeepLinkError
from deeplink.scheduler.placement.model import (
    Algorithm,
    Constants,
    Job,
    LinkSpeed,
    NodeShare,
    Placement,
    Read,
    Scaling,
    Schedule,
)
from deeplink.scheduler.placement.predicted import demands, estimate, predict
from tests.scheduler.placement.models import PLAIN, constants, jobs, placement, placements

ROUNDING = 1 + 1e-12
GIGABYTE = Job(batch=10, sample_s=0.01, gradient_bytes=1e9, overlap=0.0)


def transfers(job: Job, where: Placement, known: Constants) -> dict[str, float]:
    return {level.level: level.seconds for level in predict(job, where, known).levels}


def test_two_ranks_on_two_nodes_send_the_gradients_once() -> None:
    step = predict(GIGABYTE, placement("11"), PLAIN)  # 2(2-1)/2 * 1 GB at 1 GB/s, and ten samples of 10 ms
    assert (step.compute_s, step.communication_s, step.step_s) == pytest.approx((0.1, 1.0, 1.1))


def test_a_flat_ring_goes_as_fast_as_its_slowest_level() -> None:
    # Eight ranks: 2 * 7/8 GB through each, at 10 GB/s inside and 1 GB/s between.
    assert transfers(GIGABYTE, placement("44"), PLAIN) == pytest.approx(
        {"gpu": 0.175, "nic": 1.75, "leaf": 0, "spine": 0}
    )
    step = predict(GIGABYTE, placement("44"), PLAIN)
    assert step.communication_s == pytest.approx(1.75)
    assert [level.level for level in step.levels if level.slowest] == ["nic"]


def test_levels_one_after_another_add_up() -> None:
    # Inside 2 * 3/4 GB at 10 GB/s, then between two nodes 2 * 1/2 GB at 1 GB/s.
    job = replace(GIGABYTE, schedule=Schedule.HIERARCHICAL)
    step = predict(job, placement("44"), PLAIN)
    assert step.communication_s == pytest.approx(0.15 + 1.0)
    assert [level.level for level in step.levels if level.slowest] == ["gpu", "nic"]


def test_two_nodes_have_one_path_and_three_have_two() -> None:
    narrow = replace(PLAIN, nic=LinkSpeed(10e9, 0.0), path_bandwidth=0.5e9)
    assert predict(GIGABYTE, placement("22"), narrow).communication_s == pytest.approx(1.5 / 0.5)
    assert predict(GIGABYTE, placement("112"), narrow).communication_s == pytest.approx(1.5 / 1.0)
    assert predict(GIGABYTE, placement("1111"), narrow).communication_s == pytest.approx(1.5 / 1.0)


def test_two_half_full_nodes_lose_to_four_where_paths_are_narrow() -> None:
    narrow = replace(PLAIN, nic=LinkSpeed(1e9, 0.0), path_bandwidth=0.6e9)
    packed, half, spread = (predict(GIGABYTE, placement(shape), narrow).step_s for shape in ("4", "22", "1111"))
    assert packed < spread < half


def test_ports_add_up_and_what_is_left_of_the_weakest_counts() -> None:
    assert transfers(GIGABYTE, placement("11"), replace(PLAIN, nics=2))["nic"] == pytest.approx(0.5)
    weak = Placement((NodeShare(1, 4), NodeShare(1, 4, health=0.25)))
    assert transfers(GIGABYTE, weak, PLAIN)["nic"] == pytest.approx(4.0)


def test_ranks_of_one_node_share_its_ports_and_all_wait_for_the_slowest() -> None:
    sharing = replace(PLAIN, nic_sharing=0.1, straggling=0.2)
    # Busiest node: 3 ranks, two more than one; four nodes: two doublings.
    assert transfers(GIGABYTE, placement("1113"), sharing)["nic"] == pytest.approx(2 * 5 / 6 * 1.2 * 1.4)


def test_ranks_of_one_node_slow_its_computing() -> None:
    shared = replace(PLAIN, host_contention=0.2)
    assert [predict(GIGABYTE, placement(s), shared).compute_s for s in ("1", "2", "4")] == pytest.approx(
        [0.1, 0.11, 0.115]
    )


def test_flows_share_a_leafs_uplinks() -> None:
    a, b = ("core", "a"), ("core", "b")
    known = replace(PLAIN, leaf=LinkSpeed(2e9, 0.0))
    ordered = Placement(tuple(NodeShare(1, 4, path) for path in (a, a, b, b)))
    mixed = Placement(tuple(NodeShare(1, 4, path) for path in (a, b, a, b)))
    assert transfers(GIGABYTE, ordered, known)["leaf"] == pytest.approx(0.75)
    assert transfers(GIGABYTE, mixed, known)["leaf"] == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("algorithm", "shape", "steps"),
    [
        (Algorithm.RING, "4", (0, 6)),  # 2(p-1) inside
        (Algorithm.RING, "44", (2, 12)),  # 2(n-1) between, 2(p-n) inside
        (Algorithm.TREE, "44", (2, 6)),  # 2 log2(n) between, 2(g-1) inside
        (Algorithm.TREE, "1111", (4, 0)),
        (Algorithm.TREE, "11111", (6, 0)),  # five nodes make a tree of depth three
    ],
)
def test_latency_counts_the_steps(algorithm: Algorithm, shape: str, steps: tuple[int, int]) -> None:
    slow = replace(PLAIN, gpu=LinkSpeed(inf, 1e-6), nic=LinkSpeed(inf, 1e-3))
    step = predict(replace(GIGABYTE, algorithm=algorithm), placement(shape), slow)
    assert step.latency_s == pytest.approx(steps[0] * 1e-3 + steps[1] * 1e-6)
    assert step.communication_s == pytest.approx(step.latency_s)


def test_latency_is_that_of_the_farthest_level_used() -> None:
    slow = replace(PLAIN, nic=LinkSpeed(1e9, 1e-3), leaf=LinkSpeed(1e9, 2e-3), spine=LinkSpeed(1e9, 3e-3))
    near, far, farther = ("core", "s0", "a"), ("core", "s0", "b"), ("core", "s1", "c")
    for other, wanted in ((near, 1e-3), (far, 2e-3), (farther, 3e-3)):
        where = Placement((NodeShare(1, 1, near), NodeShare(1, 1, other)))
        assert predict(GIGABYTE, where, slow).latency_s == pytest.approx(2 * wanted)


def test_what_overlaps_is_hidden_up_to_the_last_bucket() -> None:
    job = replace(GIGABYTE, overlap=0.5)  # 50 ms of the 100 can hide something
    assert predict(job, placement("11"), PLAIN).hidden_s == pytest.approx(0.05)
    quick = replace(PLAIN, nic=LinkSpeed(100e9, 0.0))  # 10 ms, of which 1 ms always shows
    step = predict(job, placement("11"), quick)
    assert (step.communication_s, step.hidden_s, step.step_s) == pytest.approx((0.01, 0.009, 0.101))


def test_strong_scaling_divides_the_batch() -> None:
    strong = replace(GIGABYTE, scaling=Scaling.STRONG, gradient_bytes=0)
    assert predict(strong, placement("32"), PLAIN).step_s == pytest.approx(0.02)


def test_a_step_waits_for_its_samples() -> None:
    job = replace(GIGABYTE, sample_bytes=1e6)
    reads = [
        Read(name="local", share=0.5, bandwidth=1e9),
        Read(name="source", share=0.5, bandwidth=1e7, shared=True),
    ]
    step = predict(job, placement("12"), PLAIN, reads)
    # Two ranks of ten samples each on the busiest node: 10 MB from the SSD; 15 MB of all ranks from the source.
    assert [read.seconds for read in step.reads] == pytest.approx([0.01, 1.5])
    rest = step.compute_s + step.communication_s - step.hidden_s
    assert rest < step.read_s
    assert step.step_s == pytest.approx(1.51)
    assert step.read_hidden_s == pytest.approx(rest)
    assert predict(job, placement("12"), PLAIN, reads[:0]).read_s == 0


def test_the_explanation_names_what_takes_the_time() -> None:
    reads = [Read(name="peer", share=1.0, bandwidth=1e9)]
    text = "\n".join(predict(replace(GIGABYTE, sample_bytes=1e5), placement("22"), PLAIN, reads).lines())
    assert "step             1600.000 ms" in text
    assert "nic          1500.000 ms  sets the pace" in text
    assert "peer            2.000 ms" in text
    assert "leaf" not in text
    alone = "\n".join(predict(GIGABYTE, placement("1"), PLAIN).lines())
    assert "latency" not in alone
    assert "reading" not in alone


@given(jobs, placements, constants)
@example(  # nothing but rounding is left of what is not hidden
    Job(
        batch=22,
        sample_s=0.38086395886319846,
        gradient_bytes=40929731758.0,
        fixed_s=0.8165022528757093,
        overlap=1.0,
        algorithm=Algorithm.RING,
        schedule=Schedule.FLAT,
    ),
    Placement((NodeShare(1, 8), NodeShare(2, 8))),
    replace(
        PLAIN,
        gpu=LinkSpeed(5284888626.0, 0.0),
        nic=LinkSpeed(5283797385.0, 0.0),
        path_bandwidth=5284139340.0,
        host_contention=0.25,
        unhidden=0.0,
    ),
)
def test_the_parts_are_the_step(job: Job, where: Placement, known: Constants) -> None:
    reads = [Read(name="local", share=1.0, bandwidth=1e9)]
    step = predict(job, where, known, reads)
    waited = step.read_s - step.read_hidden_s
    assert step.step_s == pytest.approx(step.compute_s + step.communication_s - step.hidden_s + waited)
    assert step.step_s >= step.compute_s > 0
    assert 0 <= step.hidden_s <= step.communication_s
    assert 0 <= step.latency_s <= step.communication_s
    assert waited >= 0


@given(jobs, constants)
def test_one_rank_sums_nothing(job: Job, known: Constants) -> None:
    step = predict(job, Placement((NodeShare(1, 8, health=0.5),)), known)
    assert (step.communication_s, step.hidden_s, step.latency_s) == (0, 0, 0)


@given(jobs, placements, constants, st.floats(1, 100), st.sampled_from(["gpu", "nic", "leaf", "spine"]))
def test_more_bandwidth_is_never_slower(
    job: Job, where: Placement, known: Constants, times: float, level: str
) -> None:
    link: LinkSpeed = getattr(known, level)
    better = replace(known, **{level: LinkSpeed(link.bandwidth * times, link.latency_s)})  # type: ignore[arg-type]
    assert predict(job, where, better).step_s <= predict(job, where, known).step_s * ROUNDING
    wider = replace(known, path_bandwidth=known.path_bandwidth * times)
    assert predict(job, where, wider).step_s <= predict(job, where, known).step_s * ROUNDING


@given(jobs, placements, constants, st.floats(1, 100))
def test_more_bytes_or_samples_are_never_faster(
    job: Job, where: Placement, known: Constants, times: float
) -> None:
    here = predict(job, where, known).step_s
    heavier, larger = replace(job, gradient_bytes=job.gradient_bytes * times), replace(job, batch=job.batch + 1)
    assert predict(heavier, where, known).step_s * ROUNDING >= here
    assert predict(larger, where, known).step_s * ROUNDING >= here


@given(jobs, placements, constants, st.floats(0.1, 1))
def test_a_weaker_node_is_never_faster(job: Job, where: Placement, known: Constants, health: float) -> None:
    first = where.nodes[0]
    weaker = replace(where, nodes=(replace(first, health=first.health * health), *where.nodes[1:]))
    assert predict(job, weaker, known).step_s * ROUNDING >= predict(job, where, known).step_s


@given(jobs, placements, constants, st.floats(1e-3, 1e3))
def test_units_cancel(job: Job, where: Placement, known: Constants, unit: float) -> None:
    """Bytes counted in another unit, everywhere, change nothing."""

    def link(one: LinkSpeed) -> LinkSpeed:
        return LinkSpeed(one.bandwidth * unit, one.latency_s)

    other = replace(
        known,
        gpu=link(known.gpu),
        nic=link(known.nic),
        leaf=link(known.leaf),
        spine=link(known.spine),
        path_bandwidth=known.path_bandwidth * unit,
    )
    counted = replace(job, gradient_bytes=job.gradient_bytes * unit)
    assert predict(counted, where, other).step_s == pytest.approx(predict(job, where, known).step_s)


@given(jobs, st.lists(placements, min_size=1, max_size=4), constants)
def test_many_at_once_are_as_one_by_one(job: Job, where: list[Placement], known: Constants) -> None:
    asked = demands(where, [job.local_batch(one.ranks) for one in where])
    together = estimate(job, known, asked).step
    np.testing.assert_allclose(together, [predict(job, one, known).step_s for one in where])


@pytest.mark.parametrize("shares", [(0.5,), (0.7, 0.7)])
def test_shares_that_are_not_all_are_refused(shares: tuple[float, ...]) -> None:
    reads = [Read(name=f"place {number}", share=share, bandwidth=1) for number, share in enumerate(shares)]
    with pytest.raises(DeepLinkError, match="sum of the shares"):
        predict(GIGABYTE, placement("1"), PLAIN, reads)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: LinkSpeed(0, 0),
        lambda: LinkSpeed(1, -1),
        lambda: LinkSpeed(float("nan"), 0),
        lambda: Constants(nics=0),
        lambda: Constants(unhidden=1.5),
        lambda: Constants(straggling=-0.1),
        lambda: Job(batch=0, sample_s=1, gradient_bytes=1),
        lambda: Job(batch=1, sample_s=inf, gradient_bytes=1),
        lambda: Job(batch=1, sample_s=1, gradient_bytes=1, overlap=2),
        lambda: Read(name="peer", share=-1, bandwidth=1),
        lambda: Read(name="peer", share=1, bandwidth=0),
    ],
)
def test_what_cannot_be_is_refused_with_a_remedy(wrong: object) -> None:
    assert callable(wrong)
    with pytest.raises(DeepLinkError, match=", but must be ") as refused:
        wrong()
    assert refused.value.remedy
    assert refused.value.exit_code == 2
