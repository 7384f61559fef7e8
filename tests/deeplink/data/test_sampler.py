"""The resumable batch sampler: exactly once, whatever happens to the ranks."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from deeplink.data import (
    Blocks,
    Order,
    ResumableSampler,
    SamplerError,
)

orders = st.sampled_from([(Order.SHUFFLED, 1), (Order.SEQUENTIAL, 1), (Order.BLOCKS, 1), (Order.BLOCKS, 3)])


class Packed:
    """A dataset of which a block has seven samples."""

    def __init__(self, length: int) -> None:
        self.length, self.version = length, "v"
        self.blocks = Blocks(np.append(np.arange(0, length, 7), length))

    def __len__(self) -> int:
        return self.length


def ranks(length: int, world: int, batch_size: int, **more: Any) -> list[ResumableSampler]:
    packed = Packed(length)
    return [
        ResumableSampler(packed, batch_size=batch_size, rank=r, world_size=world, **more) for r in range(world)
    ]


def train(samplers: list[ResumableSampler], steps: int, ahead: int = 0) -> list[list[list[int]]]:
    """Do at most `steps` steps of one epoch on all ranks together, fetching `ahead` batches more; return them."""
    epoch = samplers[0].epoch
    passes = [iter(sampler) for sampler in samplers]
    fetched: list[list[list[int]]] = [[] for _ in samplers]
    done: list[list[list[int]]] = []
    while len(done) < steps and samplers[0].epoch == epoch:
        for own, batches in zip(passes, fetched, strict=True):
            while len(batches) <= len(done) + ahead:
                batch = next(own, None)
                if batch is None:
                    break
                batches.append(batch)
        done.append([batches[len(done)] for batches in fetched])
        for sampler in samplers:
            sampler.finished()
    return done


def seen(steps: list[list[list[int]]]) -> Counter[int]:
    return Counter(row for step in steps for batch in step for row in batch)


@given(length=st.integers(2, 400), world=st.integers(1, 7), batch_size=st.integers(2, 9), order=orders)
def test_an_epoch_gives_every_sample_exactly_once(
    length: int, world: int, batch_size: int, order: tuple[Order, int]
) -> None:
    assume(length >= world)
    samplers = ranks(length, world, batch_size, shuffle=order[0], window=order[1])
    planned = len(samplers[0])
    steps = train(samplers, length)
    assert seen(steps) == Counter(range(length))
    assert len(steps) == planned == -(-length // (world * batch_size))
    sizes = [sum(map(len, step)) for step in steps]
    assert max(sizes) - min(sizes) <= 1
    assert all(1 <= len(batch) <= batch_size for step in steps for batch in step)
    assert (samplers[0].epoch, samplers[0].position) == (1, 0)


@given(
    length=st.integers(8, 500),
    attempts=st.lists(
        st.tuples(st.integers(1, 8), st.integers(2, 9), st.integers(1, 12), st.integers(0, 4)), max_size=6
    ),
    order=orders,
)
def test_interrupted_attempts_together_give_every_sample_exactly_once(
    length: int, attempts: list[tuple[int, int, int, int]], order: tuple[Order, int]
) -> None:
    state: dict[str, Any] | None = None
    total: Counter[int] = Counter()
    for world, batch_size, steps, ahead in [*attempts, (1, 16, length, 3)]:
        samplers = ranks(length, world, batch_size, seed=5, shuffle=order[0], window=order[1])
        for sampler in samplers:
            if state:
                sampler.load_state_dict(json.loads(json.dumps(state)))
        if samplers[0].epoch or length - samplers[0].position < world:
            continue
        total += seen(train(samplers, steps, ahead))
        state = samplers[0].state_dict()
        assert all(sampler.state_dict() == state for sampler in samplers)
    assert total == Counter(range(length))
    assert state is not None
    assert (state["epoch"], state["position"]) == (1, 0)


@given(
    length=st.integers(4, 300),
    world=st.integers(1, 4),
    batch_size=st.integers(2, 6),
    cut=st.integers(1, 40),
    order=orders,
)
def test_resumed_at_the_same_size_the_batches_are_those_of_an_uninterrupted_run(
    length: int, world: int, batch_size: int, cut: int, order: tuple[Order, int]
) -> None:
    more: dict[str, Any] = {"shuffle": order[0], "window": order[1]}
    whole = train(ranks(length, world, batch_size, **more), length)
    before = ranks(length, world, batch_size, **more)
    first = train(before, min(cut, len(whole) - 1))
    after = ranks(length, world, batch_size, **more)
    for sampler in after:
        sampler.load_state_dict(before[0].state_dict())
    assert first + train(after, length) == whole or len(whole) == 1


@pytest.mark.parametrize("kind", list(Order))
def test_the_order_does_not_depend_on_world_size_or_batch_size(kind: Order) -> None:
    def order(world: int, batch_size: int) -> list[int]:
        samplers = ranks(100, world, batch_size, shuffle=kind, window=4)
        return [row for step in train(samplers, 100) for batch in step for row in batch]

    assert order(1, 100) == order(4, 5) == order(3, 2)


def test_what_workers_fetched_ahead_does_not_move_the_state() -> None:
    sampler = ResumableSampler(100, batch_size=10)
    batches = list(sampler)
    assert sampler.position == 0
    sampler.finished(3)
    assert sampler.position == 30
    assert (len(sampler), sampler.steps_left) == (10, 7)
    again = ResumableSampler(100, batch_size=10)
    again.load_state_dict(sampler.state_dict())
    assert list(again) == batches[3:]


def test_rank_and_world_size_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert list(ResumableSampler(30, batch_size=5)) == list(
        ResumableSampler(30, batch_size=5, rank=2, world_size=3)
    )


def test_forgetting_finished_is_noticed_when_the_next_pass_begins() -> None:
    sampler = ResumableSampler(20, batch_size=5)
    list(sampler)
    with pytest.raises(SamplerError, match=r"gave 4 batches.*called for 0"):
        iter(sampler)
    with pytest.raises(SamplerError, match="never called"):
        sampler.set_epoch(1)


def test_calling_finished_once_per_two_batches_is_noticed() -> None:
    sampler = ResumableSampler(20, batch_size=5)
    for number, _ in enumerate(sampler):
        if number % 2:
            sampler.finished()
    with pytest.raises(SamplerError, match="called for 2"):
        iter(sampler)


def test_finished_without_a_batch_is_refused() -> None:
    sampler = ResumableSampler(20, batch_size=5)
    with pytest.raises(SamplerError, match="gave 0"):
        sampler.finished()
    next(iter(sampler))
    sampler.finished()
    with pytest.raises(SamplerError, match="2 steps"):
        sampler.finished()


def test_a_pass_left_on_purpose_goes_on_at_the_position_reached() -> None:
    sampler = ResumableSampler(20, batch_size=5, shuffle=False)
    first, *_ = list(sampler)  # all of it is fetched ahead
    assert first == [0, 1, 2, 3, 4]
    sampler.finished()
    sampler.set_epoch(0)
    assert next(iter(sampler)) == [5, 6, 7, 8, 9]


def test_set_epoch_of_the_epoch_under_way_keeps_the_position_and_another_starts_afresh() -> None:
    sampler = ResumableSampler(20, batch_size=5)
    next(iter(sampler))
    sampler.finished()
    sampler.set_epoch(0)
    assert sampler.position == 5
    sampler.set_epoch(3)
    assert (sampler.epoch, sampler.position) == (3, 0)


def test_an_earlier_pass_cannot_go_on_beside_a_newer_one() -> None:
    sampler = ResumableSampler(20, batch_size=5)
    old = iter(sampler)
    next(old)
    next(iter(sampler))
    with pytest.raises(SamplerError, match="earlier pass"):
        next(old)


@pytest.mark.parametrize(("length", "world", "batch_size"), [(3, 4, 2), (10, 4, 1)])
def test_samples_that_cannot_be_shared_out_are_an_error_and_no_empty_batch(
    length: int, world: int, batch_size: int
) -> None:
    with pytest.raises(SamplerError, match=f"^{length} samples left.*by {world} ranks"):
        list(ResumableSampler(length, batch_size=batch_size, rank=0, world_size=world))


def test_batches_of_one_work_where_the_samples_divide_evenly() -> None:
    assert seen(train(ranks(12, 4, 1), 12)) == Counter(range(12))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"version": "other"}, "version"),
        ({"length": 99}, "length"),
        ({"seed": 1}, "seed"),
        ({"order": "sequential"}, "order"),
        ({"format": "deeplink-sampler-2"}, "format"),
        ({"position": 100}, "position"),
        ({"position": -1}, "position"),
        ({"position": "7"}, "position"),
        ({"epoch": -1}, "epoch"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_state_of_another_run_is_refused_by_name(change: dict[str, object], key: str) -> None:
    sampler = ResumableSampler(100, batch_size=10, version="v")
    with pytest.raises(SamplerError, match=f"of another run: {key} is "):
        sampler.load_state_dict({**sampler.state_dict(), **change})
    assert sampler.position == 0


def test_a_state_that_lacks_a_key_is_refused_by_name() -> None:
    sampler = ResumableSampler(100, batch_size=10)
    state = sampler.state_dict()
    del state["epoch"]
    with pytest.raises(SamplerError, match="epoch is None"):
        sampler.load_state_dict(state)


def test_the_state_is_small() -> None:
    assert len(json.dumps(ResumableSampler(10**9, batch_size=256, version="a" * 64).state_dict())) < 300


@pytest.mark.parametrize(
    "arguments",
    [{"batch_size": 0}, {"batch_size": 1, "rank": 2, "world_size": 2}, {"batch_size": 1, "rank": -1}],
)
def test_impossible_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="batch_size"):
        ResumableSampler(10, **arguments)
    with pytest.raises(ValueError, match="nothing to sample"):
        ResumableSampler(0, batch_size=1)


@given(length=st.integers(10, 300), batch_size=st.integers(2, 9), taken=st.integers(0, 60), order=orders)
def test_a_pass_goes_on_after_what_it_handed_out_whatever_was_finished(
    length: int, batch_size: int, taken: int, order: tuple[Order, int]
) -> None:
    def sampler() -> ResumableSampler:
        return ResumableSampler(Packed(length), batch_size=batch_size, shuffle=order[0], window=order[1])

    whole = list(sampler())
    taken = min(taken, len(whole))
    begun = iter(sampler())
    assert [next(begun) for _ in range(taken)] == whole[:taken]
    state = json.loads(json.dumps(begun.state_dict()))
    fresh = sampler()
    resumed = iter(fresh)
    resumed.load_state_dict(state)
    assert (fresh.epoch, fresh.position) == ((1, 0) if taken == len(whole) else (0, state["position"]))
    assert list(resumed) == whole[taken:]
    if taken < len(whole):
        fresh.finished(len(whole) - taken)
    assert (fresh.epoch, fresh.position) == (1, 0)


def test_a_state_by_blocks_is_small_and_tells_its_window() -> None:
    sampler = ResumableSampler(Packed(100), batch_size=10, shuffle=Order.BLOCKS, window=4)
    state = sampler.state_dict()
    assert (state["order"], state["window"]) == ("blocks-1", 4)
    assert len(json.dumps(state)) < 300
    for other in (
        ResumableSampler(Packed(100), batch_size=10, shuffle=Order.BLOCKS, window=5),
        ResumableSampler(Packed(100), batch_size=10),
    ):
        with pytest.raises(SamplerError, match=r"window|order"):
            other.load_state_dict(state)
        with pytest.raises(SamplerError, match=r"window|order"):
            sampler.load_state_dict(other.state_dict())


def test_blocks_are_asked_of_the_dataset_and_the_quality_is_told() -> None:
    with pytest.raises(SamplerError, match="without blocks") as refused:
        ResumableSampler(100, batch_size=10, shuffle=Order.BLOCKS)
    assert "Dataset" in refused.value.remedy
    qualities = [
        ResumableSampler(Packed(700), batch_size=10, world_size=2, rank=0, shuffle=kind, window=10).shuffle_quality
        for kind in (Order.SHUFFLED, Order.BLOCKS, Order.SEQUENTIAL)
    ]
    assert qualities[0] == 1.0
    assert 0.3 < qualities[1] < 0.6
    assert qualities[2] == 0.0


@pytest.mark.parametrize("order", list(Order))
def test_with_a_global_batch_size_the_steps_are_the_same_at_any_world_size(order: Order) -> None:
    def steps(*worlds: int) -> list[set[int]]:
        found: list[set[int]] = []
        state = None
        for number, world in enumerate(worlds):
            samplers = [
                ResumableSampler(
                    Packed(207), global_batch_size=24, rank=rank, world_size=world, shuffle=order, window=4
                )
                for rank in range(world)
            ]
            for sampler in samplers:
                assert len(sampler) == 9
                if state is not None:
                    sampler.load_state_dict(state)
            done = train(samplers, 3 if number + 1 < len(worlds) else 207)
            sizes = [[len(batch) for batch in step] for step in done]
            assert all(max(step) - min(step) <= 1 and sum(step) == 23 for step in sizes)
            found += [{row for batch in step for row in batch} for step in done]
            state = samplers[0].state_dict()
        return found

    assert steps(1) == steps(2) == steps(3) == steps(7) == steps(4, 1, 5)
    assert len(steps(1)) == 9


@pytest.mark.parametrize(
    "sizes", [{}, {"batch_size": 2, "global_batch_size": 4}, {"global_batch_size": 1}, {"global_batch_size": 0}]
)
def test_just_one_batch_size_is_given_and_it_reaches_every_rank(sizes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="global_batch_size"):
        ResumableSampler(10, rank=0, world_size=2, **sizes)


def test_an_order_may_be_named_by_its_value_and_numbers_be_numpys() -> None:
    nine, three, four = (np.int64(number) for number in (9, 3, 4))
    numbers: Any = {"batch_size": three, "seed": four}
    length: Any = nine
    sampler = ResumableSampler(length, shuffle="sequential", **numbers)
    assert (sampler.order, list(next(iter(sampler)))) == (Order.SEQUENTIAL, [0, 1, 2])
    assert json.loads(json.dumps(sampler._state()))["seed"] == 4
    with pytest.raises(
        ValueError, match=r"'shuffled' is not a valid Order: .*'feistel-1', 'blocks-1', 'sequential'"
    ):
        ResumableSampler(10, batch_size=3, shuffle="shuffled")
    wrong: Any = 2.5
    with pytest.raises(TypeError, match="'float' object"):
        ResumableSampler(10, batch_size=wrong)


def test_a_state_that_would_repeat_what_was_handed_out_is_refused() -> None:
    sampler = ResumableSampler(100, batch_size=10)
    assert sampler.state_dict()["position"] == 0
    begun = iter(sampler)
    assert sampler.state_dict()["position"] == 0
    next(begun)
    with pytest.raises(SamplerError, match=r"gave 1 batches, without a finished\(\)"):
        sampler.state_dict()
    sampler.finished()
    next(begun)
    state = sampler.state_dict()  # of two batches one is finished: the other may be fetched ahead
    assert state["position"] == 10
    sampler.load_state_dict(state)
    next(iter(sampler))
    with pytest.raises(SamplerError):
        sampler.state_dict()
    sampler.set_epoch(0)  # it was only looked at
    assert sampler.state_dict() == state
    for _ in sampler:
        sampler.finished()
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["position"]) == (1, 0)


def test_no_more_steps_are_finished_than_an_epoch_has() -> None:
    sampler = ResumableSampler(100, batch_size=10)
    with pytest.raises(SamplerError, match="11 steps"):
        sampler._move(11)
