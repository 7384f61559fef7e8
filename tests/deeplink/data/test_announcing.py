"""What is announced beside what an epoch really uses, sample by sample; and how often it is said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.core.clock import ManualClock
from deeplink.data import Blocks, Order, Residency, ResumableSampler, prefetch
from deeplink.data.order import BlockOrder
from deeplink.data.prefetch import EVERY_S, Announcer, announcer_of, upcoming, uses_in
from tests.pickled import copied

ORDERS = st.sampled_from([Order.SEQUENTIAL, Order.SHUFFLED, Order.BLOCKS])


@dataclass
class Packed:
    """A dataset whose samples lie in these blocks of these shards; keeps what is announced to it."""

    shard: np.ndarray
    block: np.ndarray
    version: str = "v"
    told: list[tuple[list[int], int]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.shard)

    @property
    def shards(self) -> list[str]:
        return [f"{number:040x}" for number in range(int(self.shard.max()) + 1)]

    @property
    def blocks(self) -> Blocks:
        return Blocks.of(self.shard.astype(np.uint32), self.block.astype(np.uint32))

    def announce(self, shards: Sequence[int], needed: int) -> None:
        self.told.append((list(shards), needed))


@st.composite
def packs(draw: st.DrawFn) -> Packed:
    """Shards of a few blocks of a few samples; now and then one after another, now and then appended to."""
    sizes = draw(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=7))
    homes = [
        (shard, block)
        for shard, blocks in enumerate(sizes)
        for block, size in enumerate(blocks)
        for _ in range(size)
    ]
    if draw(st.booleans()):
        homes = draw(st.permutations(homes))
    if draw(st.booleans()):  # below a root: some shards have no sample in it
        homes = homes[len(homes) // 3 :]
    places = np.array(homes, np.int64)
    return Packed(places[:, 0], places[:, 1])


def used(packed: Packed, order: Order, window: int, epoch: int) -> list[int]:
    """Return the shard of each sample of an epoch, in its order."""
    sampler = ResumableSampler(packed, batch_size=len(packed), shuffle=order, window=window)
    rows, _ = sampler._stretch(epoch, 0)
    found: list[int] = packed.shard[rows].tolist()
    return found


@given(packed=packs(), order=ORDERS, window=st.integers(1, 4), epoch=st.integers(0, 2), data=st.data())
def test_what_an_epoch_still_uses_is_needed_and_the_rest_follows_as_the_next_one_uses_it(
    packed: Packed, order: Order, window: int, epoch: int, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(packed) - 1))
    count = len(packed.shards)
    is_near = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    by_blocks = BlockOrder(packed.blocks, window, version="v", seed=0) if order is Order.BLOCKS else None
    now, later = (uses_in(order, packed.shard, by_blocks, number) for number in (epoch, epoch + 1))
    found = upcoming(now, later, place, np.array(is_near))

    def turn(place: int, epoch: int) -> int:
        """Return where in its epoch a place lies, as nearly as it is told."""
        if by_blocks is not None:
            return by_blocks.window_at(place, epoch)[0]
        return place if order is Order.SEQUENTIAL else 0

    in_turn, next_time = used(packed, order, window, epoch), used(packed, order, window, epoch + 1)
    # The turns of each shard from the place on, and in the next epoch.
    since = turn(place, epoch)
    left = {s: t for p, s in reversed(list(enumerate(in_turn))) if (t := turn(p, epoch)) >= since}
    then = {s: turn(p, epoch + 1) for p, s in reversed(list(enumerate(next_time)))}
    assert set(in_turn[place:]) <= set(left)
    needed = sorted((shard for shard in left if is_near[shard]), key=lambda shard: (left[shard], shard))
    others = sorted((shard for shard in left if not is_near[shard]), key=lambda shard: (left[shard], shard))
    rest = sorted(then.keys() - left, key=lambda shard: (then[shard], shard))
    assert found.shards.tolist() == [*needed, *others, *rest]
    assert found.needed == len(needed)


@given(packed=packs(), order=ORDERS, window=st.integers(1, 4), data=st.data())
def test_the_same_is_needed_until_the_place_that_is_said(
    packed: Packed, order: Order, window: int, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(packed) - 1))
    by_blocks = BlockOrder(packed.blocks, window, version="v", seed=0) if order is Order.BLOCKS else None
    now, later = (uses_in(order, packed.shard, by_blocks, number) for number in (0, 1))
    is_near = np.ones(len(packed.shards), bool)

    def needed(at: int) -> set[int]:
        found = upcoming(now, later, at, is_near)
        return set(found.shards[: found.needed].tolist())

    until = upcoming(now, later, place, is_near).until
    assert place < until <= len(packed)
    assert needed(until - 1) == needed(place)
    assert needed(until) < needed(place)
    assert needed(len(packed)) == set()


def test_a_shard_is_said_to_be_used_up_soon_but_not_at_every_step() -> None:
    packed, clock = Packed(np.arange(100) // 10, np.zeros(100, np.int64)), ManualClock()
    announcer = Announcer(packed, Order.SEQUENTIAL, None, clock=clock)
    announcer.tell(0, 0)
    assert packed.told == [(list(range(10)), 10)]
    for place in range(1, 40):
        announcer.tell(0, place)
    assert len(packed.told) == 1
    clock.sleep(EVERY_S)
    for place in range(40, 45):
        announcer.tell(0, place)
    assert packed.told[1:] == [([4, 5, 6, 7, 8, 9, 0, 1, 2, 3], 6)]
    clock.sleep(100 * EVERY_S)
    announcer.tell(0, 49)
    assert len(packed.told) == 2  # nothing was used up since


def test_another_epoch_a_place_before_and_a_new_pass_are_said_at_once() -> None:
    packed = Packed(np.arange(100) // 10, np.zeros(100, np.int64))
    announcer = Announcer(packed, Order.SEQUENTIAL, None, clock=ManualClock())
    places = [(0, 95), (1, 50), (1, 60), (1, 10), (1, 10)]
    for epoch, place in places:
        announcer.tell(epoch, place)
    assert [needed for _, needed in packed.told] == [1, 5, 9]
    announcer.tell(1, 10, again=True)
    assert [needed for _, needed in packed.told] == [1, 5, 9, 9]


def test_a_sampler_says_it_as_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "EVERY_S", 0.0)
    packed = Packed(np.arange(40) // 10, np.zeros(40, np.int64))
    sampler = ResumableSampler(packed, batch_size=5, shuffle=Order.SEQUENTIAL)
    assert packed.told == []
    handed_out = [len(packed.told) for _ in sampler]
    assert handed_out == [1] * 8  # what is handed out is not used yet
    for _ in range(8):
        sampler.finished()
    assert [needed for _, needed in packed.told] == [4, 3, 2, 1, 4]
    sampler.load_state_dict({**sampler.state_dict(), "epoch": 3, "position": 25})
    next(iter(sampler))
    assert packed.told[-1] == ([2, 3, 0, 1], 2)


def test_a_node_keeps_what_its_own_ranks_are_to_take() -> None:
    packed = Packed(np.arange(40) // 10, np.zeros(40, np.int64))
    residency = Residency(["a", "b"], [["a"], ["b"], ["b", "a"], ["gone"]], packed.shard)
    for rank, expected in enumerate([[0, 2, 3], [1, 2, 3]]):
        sampler = ResumableSampler(
            packed, batch_size=5, rank=rank, world_size=2, shuffle=Order.SEQUENTIAL, residency=residency
        )
        iter(sampler)
        shards, needed = packed.told[-1]
        assert shards[:needed] == expected
        assert set(shards) == {0, 1, 2, 3}


def test_a_shard_that_there_is_not_ends_nothing_and_is_announced_to_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    packed = Packed(np.arange(40) // 10, np.zeros(40, np.int64))
    for order in (Order.SEQUENTIAL, Order.SHUFFLED):
        announcer = Announcer(packed, order, None, np.ones(3, bool))
        for place in range(3):
            announcer.tell(0, place)
    assert packed.told == []
    assert len(caplog.records) == 2  # once each


def test_a_workers_copy_has_what_it_needs_to_say_the_same() -> None:
    packed = Packed(np.arange(100) // 10, np.zeros(100, np.int64))
    announcer = Announcer(packed, Order.SEQUENTIAL, None)
    announcer.tell(0, 5)
    copy: Any = copied(announcer)
    copy.tell(0, 5, again=True)
    assert copy._dataset.told == packed.told * 2


def test_whether_a_dataset_is_told_is_found_out_without_asking_it() -> None:
    class Unread:
        announce = shards = None
        shard = property(lambda _self: pytest.fail("it was asked"))

    for dataset in (Unread(), 7, [1, 2]):
        assert announcer_of(dataset, Order.SHUFFLED, None, None, 0) is None
