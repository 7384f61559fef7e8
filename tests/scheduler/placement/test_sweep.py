"""Constants found again in sweeps that the model itself made, and in what ranks read."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from time import process_time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.scheduler.placement.model import (
    Algorithm,
    Constants,
    Job,
    LinkSpeed,
    NodeShare,
    Placement,
    ReadSpeeds,
)
from deeplink.scheduler.placement.predicted import predict
from deeplink.scheduler.placement.sweep import (
    AllReduceTiming,
    MeasuredRead,
    RankLocation,
    Reach,
    ReadPlace,
    ReadSweep,
    Sweep,
    SweepError,
    calibrated,
    line,
    reads_from,
    to_time,
    usable,
)

A, B, C = ("core", "s0", "a"), ("core", "s0", "b"), ("core", "s1", "c")
SIZES = [4**power for power in range(5, 14)]


def swept(reach: Reach, where: Placement, known: Constants) -> Sweep:
    """What the model itself takes for all-reduces there."""
    job = Job(batch=1, sample_s=0, gradient_bytes=0, overlap=0, algorithm=Algorithm.RING)
    timings = [
        AllReduceTiming(size, predict(replace(job, gradient_bytes=size), where, known).communication_s)
        for size in SIZES
    ]
    return Sweep(reach, where.ranks, tuple(timings))


def on(*paths: tuple[str, ...]) -> Placement:
    return Placement(tuple(NodeShare(1, 2, path) for path in paths))


def test_a_pair_of_each_distance_is_timed_and_one_rank_of_each_node() -> None:
    paths = [A, A, B, C]
    seats = [RankLocation(rank, rank // 2, paths[rank // 2]) for rank in range(8)]
    assert to_time(reversed(seats)) == {
        Reach.GPU: (0, 1),
        Reach.NIC: (0, 2),
        Reach.LEAF: (0, 4),
        Reach.SPINE: (0, 6),
        Reach.NODES: (0, 2, 4, 6),
    }


def test_only_what_there_is_is_timed() -> None:
    assert to_time([RankLocation(0, 0), RankLocation(1, 0)]) == {Reach.GPU: (0, 1)}
    assert to_time([RankLocation(0, 0), RankLocation(1, 1)]) == {Reach.NIC: (0, 1)}
    assert to_time([RankLocation(0, 0, A), RankLocation(1, 1, B)]) == {Reach.LEAF: (0, 1)}
    # The second node is the first with two ranks.
    assert to_time([RankLocation(0, 0), RankLocation(1, 1), RankLocation(2, 1)]) == {
        Reach.GPU: (1, 2),
        Reach.NIC: (0, 1),
    }


def test_one_rank_is_no_pair() -> None:
    with pytest.raises(SweepError, match=r"one rank alone"):
        to_time([RankLocation(0, 0)])


@given(st.floats(1e6, 1e12), st.floats(0, 1e-2), st.integers(2, 64))
def test_a_line_is_found_again(bandwidth: float, latency: float, ranks: int) -> None:
    timings = [
        AllReduceTiming(size, 2 * (ranks - 1) * latency + 2 * (ranks - 1) / ranks * size / bandwidth)
        for size in SIZES
    ]
    found = line(Sweep(Reach.NIC, ranks, tuple(timings)))
    slowest = timings[-1].seconds
    assert 2 * (ranks - 1) / ranks * SIZES[-1] / found.bandwidth == pytest.approx(
        2 * (ranks - 1) / ranks * SIZES[-1] / bandwidth, rel=1e-3, abs=1e-3 * slowest
    )
    assert found.latency_s == pytest.approx(latency, rel=1e-3, abs=1e-3 * timings[0].seconds)


def test_a_line_through_noise_is_near() -> None:
    dice = np.random.default_rng(0)
    timings = [AllReduceTiming(size, (1e-4 + size / 1e9) * float(np.exp(dice.normal(0, 0.05)))) for size in SIZES]
    found = line(Sweep(Reach.NIC, 2, tuple(timings)))
    assert found.bandwidth == pytest.approx(1e9, rel=0.1)
    assert found.latency_s == pytest.approx(5e-5, rel=0.1)


def test_latency_is_never_negative() -> None:
    timings = [AllReduceTiming(size, (size / 1e9) ** 1.1) for size in SIZES]
    assert line(Sweep(Reach.NIC, 2, tuple(timings))).latency_s == 0


@pytest.mark.parametrize(
    ("timings", "problem"),
    [
        ([(4, 1.0), (16, 1.1)], "fewer than 3 sizes"),
        ([(4, 1.0), (4, 1.0), (4, 1.0)], "fewer than 3 sizes"),
        ([(4, 1.0), (16, 0.0), (64, 2.0)], "took no time"),
        ([(4, 3.0), (16, 2.0), (64, 1.0)], "no longer than small"),
    ],
)
def test_times_that_make_no_line_are_an_error(timings: list[tuple[int, float]], problem: str) -> None:
    with pytest.raises(SweepError, match=problem) as refused:
        line(Sweep(Reach.LEAF, 2, tuple(AllReduceTiming(*one) for one in timings)))
    assert "two nodes below two leaves" in str(refused.value)
    assert refused.value.remedy


def test_a_sweep_without_a_line_leaves_the_others() -> None:
    flat = Sweep(Reach.NODES, 3, tuple(AllReduceTiming(size, 1.0 - size * 1e-12) for size in SIZES))
    good, wrong = usable([swept(Reach.NIC, on(A, A), Constants()), flat])
    assert [sweep.reach for sweep in good] == [Reach.NIC]
    assert [Reach.NODES.value in str(problem) for problem in wrong] == [True]
    with pytest.raises(SweepError):
        usable([flat])


def test_the_pairs_of_four_thousand_nodes_are_found_at_once() -> None:
    paths = [("core", f"s{number // 256}", f"leaf{number // 16}") for number in range(4096)]
    seats = [RankLocation(rank, rank, path) for rank, path in enumerate(paths)]
    began = process_time()
    found = to_time(seats)
    assert process_time() - began < 2.0
    pairs = {reach: ranks for reach, ranks in found.items() if reach is not Reach.NODES}
    assert pairs == {Reach.NIC: (0, 1), Reach.LEAF: (0, 16), Reach.SPINE: (0, 256)}


TRUTH = Constants(
    gpu=LinkSpeed(20e9, 4e-6),
    nic=LinkSpeed(1.6e9, 20e-6),
    leaf=LinkSpeed(0.9e9, 25e-6),
    spine=LinkSpeed(0.5e9, 40e-6),
    path_bandwidth=1e9,
)
PLACES = {
    Reach.GPU: Placement((NodeShare(2, 2, A),)),
    Reach.NIC: on(A, A),
    Reach.LEAF: on(A, B),
    Reach.SPINE: on(A, C),
    Reach.NODES: on(A, A, A, A),
}


def test_constants_that_made_the_sweeps_are_found_again() -> None:
    found = calibrated([swept(reach, where, TRUTH) for reach, where in PLACES.items()], Constants())
    for name in ("gpu", "nic", "leaf", "spine"):
        link, true = getattr(found, name), getattr(TRUTH, name)
        assert (link.bandwidth, link.latency_s) == pytest.approx((true.bandwidth, true.latency_s), rel=1e-6), name
    assert found.path_bandwidth == pytest.approx(TRUTH.path_bandwidth)


FAST = Constants(
    gpu=LinkSpeed(200e9, 2e-6),
    nic=LinkSpeed(96e9, 3e-6),
    leaf=LinkSpeed(55e9, 4e-6),
    spine=LinkSpeed(50e9, 5e-6),
    path_bandwidth=60e9,
)
"""Beyond all defaults."""


@given(st.sets(st.sampled_from(list(PLACES)), min_size=1), st.sampled_from([TRUTH, FAST]))
def test_the_model_takes_as_long_as_the_sweeps_did(there: set[Reach], truth: Constants) -> None:
    sweeps = [swept(reach, PLACES[reach], truth) for reach in Reach if reach in there]
    found = calibrated(sweeps, Constants())
    for sweep in sweeps:
        if sweep.reach is Reach.NODES and len(there & {Reach.NIC, Reach.LEAF, Reach.SPINE}) == 0:
            continue  # without a pair nobody can tell the path from the ports: the defaults stay
        if sweep.reach is Reach.NODES and Reach.NIC not in there:
            continue  # the only pair was across slower leaves than the nodes are
        again = swept(sweep.reach, PLACES[sweep.reach], found)
        wanted = [timing.seconds for timing in sweep.timings]
        assert [timing.seconds for timing in again.timings] == pytest.approx(wanted, rel=1e-6)


def test_two_nodes_do_not_tell_ports_from_path() -> None:
    found = calibrated([swept(Reach.NIC, on(A, A), TRUTH)], Constants())
    assert found.nic.bandwidth == pytest.approx(1e9)
    assert found.path_bandwidth == float("inf")


def test_what_was_not_timed_keeps_its_default() -> None:
    found = calibrated([swept(Reach.GPU, PLACES[Reach.GPU], TRUTH)], Constants(straggling=0.2))
    assert found == replace(Constants(straggling=0.2), gpu=found.gpu)


def sweep(place: ReadPlace, *told: tuple[int, int, float]) -> ReadSweep:
    return ReadSweep(place, tuple(MeasuredRead(*one) for one in told))


def test_ranks_of_a_node_count_together_and_the_slowest_node_is_waited_for() -> None:
    local = sweep(ReadPlace.LOCAL, (0, 100, 1.0), (0, 300, 2.0), (1, 200, 1.0), (1, 0, 0.0))
    assert local.per_node() == {0: 250.0, 1: 200.0}
    assert local.bandwidth == 200.0


def test_nothing_read_is_not_timed_and_says_why() -> None:
    lost = ReadSweep(ReadPlace.PEER, (MeasuredRead(0, problem="no other node gave any of it"), MeasuredRead(1)))
    assert (lost.bandwidth, lost.problem) == (None, "no other node gave any of it")
    assert ReadSweep(ReadPlace.PEER, ()).problem == "there was nothing to read"
    assert reads_from([lost]) == ReadSpeeds()
    half = ReadSweep(ReadPlace.LOCAL, (MeasuredRead(0, problem="nothing"), MeasuredRead(1, 10, 1.0)))
    assert (half.bandwidth, half.problem) == (10.0, "")


@pytest.mark.parametrize(("seconds", "limit"), [(1.0, inf), (1.2, inf), (1.3, 200 / 1.3), (2.0, 100.0)])
def test_a_limit_of_the_source_shows_when_all_read_at_once(seconds: float, limit: float) -> None:
    alone = sweep(ReadPlace.SOURCE, (0, 100, 1.0))
    together = sweep(ReadPlace.TOGETHER, (0, 100, seconds), (1, 100, seconds))
    found = reads_from([alone, together])
    assert found.source == 100.0
    assert found.source_of_all == pytest.approx(limit)
    assert reads_from([together]) == ReadSpeeds()
