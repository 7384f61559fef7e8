"""Training on an SSD that is too small: what leaves it by the order that training announced.

Real members with a budget, real loaders.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import pytest
from torch.utils.data import DataLoader

import deeplink
from deeplink.cache.catalog import Catalog
from deeplink.cache.packer import pack
from deeplink.cache.replicate.fill import fill
from deeplink.cache.store.pins import Pin, demand, read_pins
from deeplink.core.clock import SystemClock
from deeplink.data import Order, Prefetcher, Residency, ResumableSampler, prefetch
from deeplink.v1 import cache_pb2
from tests.cache.agents import write_tree
from tests.cache.keepers import Keepers

if TYPE_CHECKING:
    from deeplink.core.config import Config
    from tests.cache.keepers import Kept

COUNT, PER_SHARD = 60, 5
FETCHED, NO_ROOM = cache_pb2.FILL_OUTCOME_FETCHED, cache_pb2.FILL_OUTCOME_NO_ROOM


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "EVERY_S", 0.0)


class Node:
    """A member whose SSD is full of the shards of "train", and a version "other" that another job wants there."""

    def __init__(self, keepers: Keepers) -> None:
        self.keepers = keepers
        packing = keepers.config(store=keepers.root / "packed", shard_bytes=PER_SHARD * 10_000)
        for name in ("train", "other"):
            files = {
                f"{'early' if number < COUNT // 2 else 'late'}/{number:03d}": b"%6d %s"
                % (number, name.encode())
                * 833
                for number in range(COUNT)
            }
            pack(str(write_tree(keepers.root / f"{name}-files", files)), name, config=packing)
        self.train, self.other = (Catalog(packing.catalog).open(name) for name in ("train", "other"))
        for path in packing.store.glob("*.mdb"):
            path.unlink()
        assert len(self.train.shards) == len(self.other.shards) == COUNT // PER_SHARD
        each = self.train.shards[0].bytes
        # Room for one more than there are; the low mark is half a shard below.
        self.kept: Kept = keepers.start("n0", store_bytes=len(self.train.shards) * each + each // 2)
        every = range(len(self.train.shards))
        found = fill(self.kept.member, keepers.token, "train", self.train, every, members=())
        assert {reply.outcome for reply in found} == {FETCHED}
        self.config: Config = dataclasses.replace(packing, store=self.kept.store.root)
        self.pin = Pin(self.kept.store.root, self.other, SystemClock())  # the other job reads all of it
        self.coming = iter(range(len(self.other.shards)))

    def dataset(self, root: str = "") -> deeplink.Dataset:
        return deeplink.Dataset("train", root=root, labels=False, packed=True, config=self.config)

    def bring_another(self) -> tuple[bool, set[int]]:
        """Bring a shard of "other"; tell whether it came, and which of "train" had left before or left for it."""
        (reply,) = fill(self.kept.member, self.keepers.token, "other", self.other, [next(self.coming)], members=())
        assert reply.outcome in {FETCHED, NO_ROOM}, reply.problem
        return reply.outcome == FETCHED, self.gone()

    def gone(self) -> set[int]:
        held = set(self.kept.store.ids())
        return {number for number, entry in enumerate(self.train.shards) if entry.id not in held}

    def account(self) -> str:
        """Tell what is known of each shard, and who needs which."""
        number = {entry.id: place for place, entry in enumerate(self.train.shards)}
        now, root = SystemClock().unix(), self.kept.store.root
        said = [
            f"{pin.holder}, {pin.needed} needed, {pin.expires_unix - now:.0f} s left, "
            f"{[number.get(shard, 'other') for shard in pin.shards]}"
            for pin in read_pins(root, now)
        ]
        used = {place: round(now - self.kept.store.used_unix(shard), 2) for shard, place in number.items()}
        return "\n".join(
            [
                *said,
                f"used before so many seconds: {used}",
                *sorted(str(path) for there in (".pins/*", "quarantine/*") for path in root.glob(there)),
            ]
        )

    def needed(self) -> set[int]:
        """Return the shards of "train" that somebody is known to need."""
        found = demand(read_pins(self.kept.store.root, SystemClock().unix())).needed
        return {number for number, entry in enumerate(self.train.shards) if entry.id in found}


@pytest.fixture
def node(keepers: Keepers) -> Node:
    return Node(keepers)


def shards_of(dataset: deeplink.Dataset, rows: list[int]) -> list[int]:
    found: list[int] = dataset.shard[rows].tolist()
    return found


@pytest.mark.parametrize(("order", "window"), [(Order.SEQUENTIAL, 1), (Order.BLOCKS, 2)])
def test_what_the_epoch_needs_no_more_leaves_first_and_nothing_that_it_needs(
    node: Node, order: Order, window: int
) -> None:
    dataset = node.dataset()
    sampler = ResumableSampler(dataset, batch_size=PER_SHARD, shuffle=order, window=window)
    turns = [shards_of(dataset, sampler._stretch(epoch, 0)[0]) for epoch in (0, 1)]
    came = 0
    gone: set[int] = set()
    for rows in sampler:
        dataset.__getitems__(rows)
        sampler.finished()
        if sampler.epoch:
            break
        used_up = set(turns[0]) - set(turns[0][sampler.position :])
        for _ in range((sampler.position >= COUNT // 2) + 2 * (sampler.position == COUNT // 2)):
            is_here, now_gone = node.bring_another()
            left, gone = now_gone - gone, now_gone
            came += is_here
            assert gone <= used_up, node.account()
            # Whatever of the used-up ones is here still is used before what left, in the next epoch.
            for stays in used_up - gone:
                assert all(turns[1].index(stays) < turns[1].index(goes) + window * PER_SHARD for goes in left)
    assert came == 8
    assert dataset.stats().source_samples == 0  # the epoch read each shard once, from here
    # The next epoch needs all again.
    assert sampler.epoch == 1
    assert node.bring_another()[1] == gone
    dataset.close()


def test_in_an_exact_shuffle_all_is_needed_to_the_end(node: Node) -> None:
    dataset = node.dataset()
    sampler = ResumableSampler(dataset, batch_size=PER_SHARD)
    for rows in sampler:
        dataset.__getitems__(rows)
        assert len(node.needed()) == len(dataset.shards)
        sampler.finished()
    assert node.bring_another() == (False, set())
    dataset.close()
    came, gone = node.bring_another()
    assert came
    assert gone


def test_a_folder_needs_its_own_shards_and_an_epoch_resumed_what_is_left(node: Node) -> None:
    folder = node.dataset("late")
    iter(ResumableSampler(folder, batch_size=4))
    assert node.needed() == set(range(len(folder.shards) // 2, len(folder.shards)))
    folder.close()
    dataset = node.dataset()
    sampler = ResumableSampler(dataset, batch_size=4, shuffle=Order.SEQUENTIAL)
    sampler.load_state_dict({**sampler.state_dict(), "position": COUNT - 2 * PER_SHARD})
    iter(sampler)
    assert node.needed() == {10, 11}
    dataset.close()


def test_ranks_of_one_node_need_what_any_of_them_needs(node: Node) -> None:
    names = ["n0", "n1"]
    residency = Residency(names, [[names[n % 2]] for n in range(COUNT // PER_SHARD)], node.dataset().shard)
    ranks = []
    for rank in (0, 1):
        dataset = node.dataset()
        sampler = ResumableSampler(
            dataset, batch_size=4, rank=rank, world_size=2, shuffle=Order.SEQUENTIAL, residency=residency
        )
        iter(sampler)
        ranks.append((dataset, sampler))
        # Both ranks are in this process, and so on this node: the second one's shards are needed besides.
        assert node.needed() == {number for number in range(12) if number % 2 == 0 or rank}
    for (dataset, sampler), expected in zip(ranks, ({1, 3, 5, 7, 9, 11}, set()), strict=True):
        dataset.close()
        assert node.needed() == expected
        del sampler


def test_what_other_nodes_take_leaves_before_what_this_node_takes(node: Node) -> None:
    dataset = node.dataset()
    names = ["n0", "n1"]
    residency = Residency(names, [[names[n % 2]] for n in range(len(dataset.shards))], dataset.shard)
    sampler = ResumableSampler(
        dataset, batch_size=PER_SHARD, rank=0, world_size=2, shuffle=Order.BLOCKS, window=4, residency=residency
    )
    iter(sampler)
    came, gone = node.bring_another()
    while came:
        came, gone = node.bring_another()
        assert all(number % 2 for number in gone)
    assert len(gone) >= len(dataset.shards) // 2 - 1
    dataset.close()


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_stream", [False, True])
def test_workers_need_what_the_trainer_announced(node: Node, context: str, *, is_stream: bool) -> None:
    dataset = node.dataset()
    sampler = ResumableSampler(dataset, batch_size=PER_SHARD, shuffle=Order.SEQUENTIAL)
    options = {"num_workers": 2, "multiprocessing_context": context}
    loader: DataLoader[object]
    if is_stream:
        stream = deeplink.IterableDataset(dataset, sampler)
        loader, done = DataLoader(stream, batch_size=None, **options), stream.finished  # type: ignore[arg-type]
    else:
        loader, done = deeplink.data.shared_batches.loader(dataset, sampler, **options), sampler.finished  # type: ignore[arg-type]
    gone: set[int] = set()
    for step, _ in enumerate(loader, 1):
        done()
        if step == COUNT // PER_SHARD:
            break
        pins = read_pins(node.kept.store.root, SystemClock().unix())
        assert len(pins) == 2  # the other job's, and the trainer's for all
        assert node.needed() == set(range(step, len(dataset.shards)))
        _, gone = node.bring_another()
        assert gone <= set(range(step)), node.account()
    assert gone
    dataset.close()
    assert not node.needed()


def test_a_prefetcher_reads_ahead_what_is_still_needed(node: Node) -> None:
    dataset = node.dataset()
    sampler = ResumableSampler(dataset, batch_size=PER_SHARD, shuffle=Order.SEQUENTIAL)
    for delivered, batch in enumerate(Prefetcher(dataset, sampler, threads=2)):
        assert node.needed() == set(range(delivered, len(dataset.shards)))
        assert len(batch) == PER_SHARD
        sampler.finished()
        node.bring_another()
    assert dataset.stats().source_samples == 0
    dataset.close()


def test_without_a_sampler_of_ours_all_of_the_version_is_needed(node: Node) -> None:
    dataset = node.dataset()
    for rows in np.arange(COUNT).reshape(-1, PER_SHARD).tolist():
        dataset.__getitems__(rows)
        assert len(node.needed()) == len(dataset.shards)
    assert node.bring_another() == (False, set())
    dataset.close()
