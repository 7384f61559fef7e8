"""Batches as one tensor, and how DataLoader workers hand them over: in shared memory, whatever happens to them."""

from __future__ import annotations

import copy
import dataclasses
import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset

import deeplink
from deeplink.core.config import Config
from deeplink.data import DeliveryDigest, Order, Prefetcher, ResumableSampler, receipt, shared_batches
from deeplink.data.errors import BatchError, DatasetError
from deeplink.data.shared_batches import PackedBatch, Ring, loader
from tests.deeplink.data.packed_things import COUNT, body, packed_below
from tests.pickled import copied

TWO: dict[str, Any] = {"multiprocessing_context": "fork", "num_workers": 2}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return packed_below(tmp_path_factory.mktemp("packed"))


@pytest.fixture
def many(config: Config) -> Iterator[deeplink.Dataset]:
    dataset = deeplink.Dataset("many", packed=True, receipts=True, config=config)
    yield dataset
    dataset.close()


def in_use(dataset: deeplink.Dataset) -> int:
    assert dataset._ring is not None
    return dataset._ring.in_use()


def test_a_batch_has_every_samples_bytes_labels_and_receipts(many: deeplink.Dataset) -> None:
    batch = many.__getitems__([0, 239, -1, 80, 57])
    assert len(batch) == 5
    numbers = [0, 239, 239, 80, 57]
    assert [bytes(sample.numpy()) for sample in batch] == [body(number) for number in numbers]
    assert bytes(batch[-1].numpy()) == body(57)
    assert batch.labels.tolist() == [0, 2, 2, 1, 0]
    assert batch.receipts.tolist() == [receipt(number, body(number)) for number in numbers]
    assert batch.offsets.diff().tolist() == [len(body(number)) for number in numbers]
    assert batch.arena.numel() == batch.offsets[-1]
    assert batch.arena.data_ptr() % 64 == batch.whole.data_ptr() % 64


def test_one_item_is_a_batch_of_one_and_none_an_empty_one(many: deeplink.Dataset) -> None:
    assert bytes(many[7][0].numpy()) == body(7)
    assert len(many[7]) == 1
    nothing = many.__getitems__([])
    assert (len(nothing), nothing.labels.tolist(), nothing.stacked().shape) == (0, [], (0, 0))
    assert not list(nothing)
    for index in (COUNT, -COUNT - 1):
        with pytest.raises(IndexError):
            many.__getitems__([0, index])
    with pytest.raises(IndexError):
        many[0][1]


def test_samples_of_one_length_are_a_rectangle_without_a_copy(config: Config) -> None:
    batch = deeplink.Dataset("even", packed=True, config=config).__getitems__([3, 200])
    rows = batch.stacked()
    assert [bytes(row.numpy()) for row in rows] == [b"%100d" % 3, b"%100d" % 200]
    assert rows.data_ptr() == batch.arena.data_ptr()
    assert batch.receipts is None


def test_samples_of_many_lengths_are_no_rectangle_and_said_to_be_none(many: deeplink.Dataset) -> None:
    with pytest.raises(BatchError, match="0 to") as refused:
        many.__getitems__([0, 1]).stacked()
    assert "one by one" in refused.value.remedy


def test_labels_are_left_out_or_an_error_where_there_are_none(config: Config) -> None:
    with pytest.raises(DatasetError, match="'one'"):
        deeplink.Dataset("flat", packed=True, config=config).__getitems__([0])
    plain = deeplink.Dataset("flat", packed=True, labels=False, receipts=True, config=config)
    batch = plain.__getitems__([0, 0])
    assert batch.labels is None
    assert batch.receipts.tolist() == [receipt(0, b"1")] * 2
    with pytest.raises(ValueError, match="collate_fn"):
        deeplink.Dataset("many", bytes, packed=True, config=config)


def test_batches_pickle_copy_and_move_whole(many: deeplink.Dataset) -> None:
    batch = many.__getitems__([5, 6])
    for other in (copied(batch), copy.deepcopy(batch), batch.to("cpu")):
        assert torch.equal(other.whole, batch.whole)
        assert torch.equal(other.labels, batch.labels)
        assert torch.equal(other.receipts, batch.receipts)
    copy.deepcopy(batch).whole.zero_()
    assert bytes(batch[0].numpy()) == body(5)


def run(
    dataset: deeplink.Dataset, epochs: int = 1, digest: DeliveryDigest | None = None, **more: Any
) -> DeliveryDigest:
    """Train some epochs; return what was delivered."""
    sampler = ResumableSampler(dataset, batch_size=16, shuffle=Order.BLOCKS, window=3)
    digest = digest or DeliveryDigest()
    found = loader(dataset, sampler, **more)
    while sampler.epoch < epochs:
        epoch = sampler.epoch
        for batch in found:
            digest.add(epoch, batch.receipts)
            assert batch.labels.tolist() == many_labels(batch)
            sampler.finished()
    return digest


def many_labels(batch: PackedBatch) -> list[int]:
    texts = [bytes(sample.numpy()).split() for sample in batch]
    labels = batch.labels
    assert labels is not None
    return [
        int(text[0]) * 3 // COUNT if text else label for text, label in zip(texts, labels.tolist(), strict=True)
    ]


@pytest.mark.parametrize("more", [{"num_workers": 0}, TWO, {**TWO, "persistent_workers": True}])
def test_every_sample_is_delivered_once_and_every_slot_free_at_the_end(
    many: deeplink.Dataset, more: dict[str, Any]
) -> None:
    assert run(many, 2, **more) == DeliveryDigest.expected(many, 2)
    if more["num_workers"]:
        assert in_use(many) == 0


@pytest.mark.slow
def test_workers_that_are_spawned_use_the_ring_too(many: deeplink.Dataset) -> None:
    many.share(workers=1, batch_size=16)
    sampler = ResumableSampler(many, batch_size=16)
    batches = iter(loader(many, sampler, num_workers=1, multiprocessing_context="spawn"))
    first = next(batches)
    assert in_use(many) > 0
    digest = DeliveryDigest()
    digest.add(0, first.receipts)
    for batch in batches:
        digest.add(0, batch.receipts)
    assert digest == DeliveryDigest.expected(many, 1)


def test_batches_that_training_keeps_stay_what_they_are(many: deeplink.Dataset) -> None:
    sampler = ResumableSampler(many, batch_size=16, shuffle=False)
    kept = list(loader(many, sampler, **TWO))  # more than there are slots: the rest came torch's way
    assert 0 < in_use(many) <= 8
    assert [bytes(s.numpy()) for batch in kept for s in batch] == [body(number) for number in range(COUNT)]
    kept[0].whole.zero_()
    assert bytes(kept[1][3].numpy()) == body(19)
    tail = kept[5].labels
    del kept
    assert in_use(many) <= 1
    assert tail is not None
    assert tail.tolist() == [1] * 16


def test_a_batch_bigger_than_a_slot_comes_all_the_same(many: deeplink.Dataset) -> None:
    many._ring = Ring(2, 4, 4096)  # batches are of about 6 KiB
    sampler = ResumableSampler(many, batch_size=16)
    digest = DeliveryDigest()
    found: Any = DataLoader(many, batch_sampler=sampler, collate_fn=shared_batches.collate, **TWO)
    for batch in found:
        digest.add(0, batch.receipts)
    assert digest == DeliveryDigest.expected(many, 1)


def test_after_a_worker_was_killed_training_goes_on_with_a_new_pass(many: deeplink.Dataset) -> None:
    sampler = ResumableSampler(many, batch_size=4)
    digest = DeliveryDigest()

    def until_killed() -> None:
        batches: Any = iter(loader(many, sampler, **TWO))
        for number, batch in enumerate(batches):
            digest.add(0, batch.receipts)
            sampler.finished()
            if number == 3:
                os.kill(batches._workers[0].pid, signal.SIGKILL)

    with pytest.raises(RuntimeError, match=r"killed by signal|exited unexpectedly"):
        until_killed()
    assert 0 < sampler.position < COUNT
    for batch in loader(many, sampler, **TWO):
        digest.add(0, batch.receipts)
        sampler.finished()
    assert digest == DeliveryDigest.expected(many, 1)
    del batch
    # What was on its way from the dead worker was set free by the one that took its stripe.
    assert in_use(many) <= 4


def test_two_loaders_at_once_share_the_ring_without_harm(many: deeplink.Dataset) -> None:
    samplers = [ResumableSampler(many, batch_size=16, seed=seed) for seed in (0, 1)]
    digests = [DeliveryDigest(), DeliveryDigest()]
    for pair in zip(*(loader(many, sampler, **TWO) for sampler in samplers), strict=True):
        for digest, batch in zip(digests, pair, strict=True):
            digest.add(0, batch.receipts)
    assert all(digest == DeliveryDigest.expected(many, 1) for digest in digests)


def test_a_bigger_ring_leaves_loaders_of_the_smaller_at_work(many: deeplink.Dataset) -> None:
    small, big = (ResumableSampler(many, batch_size=size) for size in (8, 64))
    digest = DeliveryDigest()
    batches = iter(loader(many, small, **TWO))
    digest.add(0, next(batches).receipts)
    before = many._ring
    digest_of_big = DeliveryDigest()
    for batch in loader(many, big, **TWO):
        digest_of_big.add(0, batch.receipts)
    assert many._ring is not before
    for batch in batches:
        digest.add(0, batch.receipts)
    assert digest == digest_of_big == DeliveryDigest.expected(many, 1)


def test_a_collate_function_works_on_batches_in_the_worker(many: deeplink.Dataset) -> None:
    sampler = ResumableSampler(many, batch_size=16)
    lengths = list(loader(many, sampler, collate_fn=sizes, **TWO))
    assert sum(int(part.sum()) for part in lengths) == sum(len(body(number)) for number in range(COUNT))


def sizes(batch: PackedBatch) -> torch.Tensor:
    return batch.offsets.diff()


def test_a_loader_takes_torchs_subset(many: deeplink.Dataset) -> None:
    part: Any = Subset(many, [5, 3, 9])
    sampler = ResumableSampler(part, batch_size=2, shuffle=False)
    got = [bytes(sample) for batch in loader(part, sampler, num_workers=1) for sample in batch]
    assert got == [bytes(sample) for sample in many.__getitems__([5, 3, 9])]


def test_the_blocks_shards_and_lengths_of_a_dataset_are_those_of_its_items(config: Config) -> None:
    part = deeplink.Dataset("many", root="bee", packed=True, config=config)
    assert part.lengths.tolist() == [len(body(number)) for number in range(80, 160)]
    assert part.blocks.samples == len(part) == 80
    assert {part.shards[number] for number in part.shard.tolist()} <= set(part.shards)
    part.will_need(np.arange(80))
    assert len(part.shard) == 80


@pytest.mark.parametrize("threads", [1, 3])
def test_a_prefetcher_delivers_every_sample_once_by_blocks(many: deeplink.Dataset, threads: int) -> None:
    sampler = ResumableSampler(many, batch_size=7, shuffle=Order.BLOCKS, window=2)
    digest = DeliveryDigest()
    for batch in Prefetcher(many, sampler, threads=threads, ahead_bytes=64 << 10):
        digest.add(0, batch.receipts)
        sampler.finished()
    assert digest == DeliveryDigest.expected(many, 1)
    assert many.stats().local_samples == COUNT


def test_a_dataset_knows_which_of_its_samples_belong_where(config: Config) -> None:
    alone = deeplink.Dataset("many", config=config).residency(["n0", "n0"])
    assert alone.near(np.arange(COUNT)) == 0.0  # no members are configured: nothing is nearer than something else
    members = dataclasses.replace(config, members="n0=127.0.0.1:1,n1=127.0.0.1:2", replicas=1, token_file=None)
    dataset = deeplink.Dataset("many", config=members)
    near = dataset.residency(["n0", "n1"])
    rows = np.arange(COUNT)
    assert near.near(rows) == 1.0
    assert (near.is_local(rows, 0) ^ near.is_local(rows, 1)).all()
    assert near.digest == dataset.residency(["n0", "n1"]).digest != dataset.residency(["n1", "n0"]).digest
