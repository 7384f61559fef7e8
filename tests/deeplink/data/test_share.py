"""Who gets which sample of a step: everybody's part exactly, and what is near where it can be."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.data import Order, Residency, ResumableSampler
from deeplink.data.order import Blocks, RankShare


@st.composite
def residencies(draw: st.DrawFn) -> tuple[Residency, int]:
    nodes = draw(st.lists(st.sampled_from(["n0", "n1", "n2", "n3"]), min_size=1, max_size=6))
    copy = st.lists(st.sampled_from(["n0", "n1", "n2", "n3", "gone"]), max_size=3, unique=True)
    holders = draw(st.lists(copy, min_size=1, max_size=6))
    length = draw(st.integers(len(nodes) * 2, 300))
    shard = np.arange(length) * len(holders) // length
    return Residency(nodes, holders, shard), length


@given(made=residencies(), seed=st.integers(0, 100), batch_size=st.integers(2, 9))
def test_every_rank_gets_its_part_of_a_step_and_no_sample_twice(
    made: tuple[Residency, int], seed: int, batch_size: int
) -> None:
    residency, length = made
    share = RankShare(batch_size * len(residency.nodes), len(residency.nodes))
    size = share.step_size(length)
    parts = [share.part(size, rank) for rank in range(share.world_size)]
    sizes = np.array([stop - start for start, stop in parts])
    rows = np.random.default_rng(seed).permutation(length)[:size]
    ranks = residency.ranks(rows, sizes)
    assert np.bincount(ranks, minlength=len(sizes)).tolist() == sizes.tolist()
    assert ranks.tolist() == residency.ranks(rows, sizes).tolist()


@given(made=residencies(), batch_size=st.integers(2, 9), other=st.integers(2, 9), cut=st.integers(0, 10))
def test_an_epoch_gives_every_sample_once_though_it_goes_on_with_another_residency(
    made: tuple[Residency, int], batch_size: int, other: int, cut: int
) -> None:
    residency, length = made
    seen: list[int] = []
    world = len(residency.nodes)

    def ranks(batch: int, near: Residency | None) -> list[ResumableSampler]:
        return [
            ResumableSampler(length, batch_size=batch, rank=rank, world_size=world, version="v", residency=near)
            for rank in range(world)
        ]

    first = ranks(batch_size, residency)
    for _, *batches in zip(range(cut), *first, strict=False):
        seen += itertools.chain(*batches)
        for sampler in first:
            sampler.finished()
    state = json.loads(json.dumps(first[0].state_dict()))
    assert all(sampler.state_dict() == state for sampler in first)
    if state["epoch"] == 0 and 0 < length - state["position"] < world:
        return  # too few are left for so many ranks: an error of its own
    second = ranks(other, None)
    for sampler in second:
        sampler.load_state_dict(state)
    if state["epoch"] == 0:
        for left in zip(*second, strict=True):
            seen += itertools.chain(*left)
    assert sorted(seen) == list(range(length))


def test_the_steps_are_the_same_samples_with_and_without_residency() -> None:
    shard = np.arange(1000) // 100
    near = Residency(["a", "b"], [["a"], ["b"]] * 5, shard)

    def steps(residency: Residency | None) -> list[set[int]]:
        samplers = [
            ResumableSampler(1000, batch_size=16, rank=rank, world_size=2, residency=residency)
            for rank in range(2)
        ]
        return [set(a) | set(b) for a, b in zip(*samplers, strict=True)]

    assert steps(near) == steps(None)


@pytest.mark.parametrize("order", [Order.SHUFFLED, Order.BLOCKS])
def test_most_samples_are_read_where_they_lie(order: Order) -> None:
    class Packed:
        version = "v"
        blocks = Blocks(np.arange(0, 65) * 64)

        def __len__(self) -> int:
            return 4096

    shard = np.arange(4096) // 256
    nodes = ["n0", "n0", "n1", "n1", "n2", "n2", "n3", "n3"]
    near = Residency(nodes, [[f"n{number % 4}"] for number in range(16)], shard)
    local = []
    for rank in range(8):
        sampler = ResumableSampler(
            Packed(), batch_size=64, rank=rank, world_size=8, shuffle=order, window=16, residency=near
        )
        local += [near.is_local(np.array(batch), rank).mean() for batch in sampler]
    # A fourth by chance. A step of 512 has 128 of each node give or take ten, and room for 128.
    assert np.mean(local) > 0.85


def test_a_residency_is_made_of_the_lists_of_what_nodes_hold() -> None:
    shard = np.array([0, 0, 1, 2])
    made = Residency.of(
        ["aa", "bb", "cc"], shard, nodes=["x", "y"], held={"y": ["aa", "bb", "zz"], "x": ["bb"], "other": ["cc"]}
    )
    rows = np.arange(4)
    assert made.is_local(rows, 0).tolist() == [False, False, True, False]
    assert made.is_local(rows, 1).tolist() == [True, True, True, False]
    assert made.near(rows) == 0.75
    assert made.ranks(rows, np.array([2, 2])).tolist() == [1, 1, 0, 0]


def test_nodes_that_hold_all_of_the_same_take_turns() -> None:
    shards = [f"{number:02x}" for number in range(8)]
    made = Residency.of(shards, np.arange(8), nodes=["x", "y"], held={"x": shards, "y": shards})
    assert made.ranks(np.arange(8), np.array([4, 4])).tolist() == [0, 1] * 4


def test_a_residency_of_another_number_of_ranks_is_refused_and_states_tell_which_it_was() -> None:
    near = Residency(["a", "b"], [["a"]], np.zeros(10, int))
    with pytest.raises(ValueError, match="2 ranks of 3"):
        ResumableSampler(10, batch_size=2, rank=0, world_size=3, residency=near)
    sampler = ResumableSampler(10, batch_size=2, rank=0, world_size=2, residency=near)
    assert sampler.state_dict()["residency"] == near.digest
    assert near.digest != Residency(["b", "a"], [["a"]], np.zeros(10, int)).digest
    assert near.digest != Residency(["a", "b"], [["b"]], np.zeros(10, int)).digest
