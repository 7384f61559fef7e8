"""Subsets and random splits: what they hold, and that a sampler knows them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import data as torch_data

import deeplink
from deeplink.cache.errors import KeyMissingError
from deeplink.core.config import Config
from deeplink.data import (
    DatasetError,
    DeliveryDigest,
    Order,
    Prefetcher,
    ResumableSampler,
    SamplerError,
)
from deeplink.data.shared_batches import loader as packed_loader
from deeplink.data.subsets import resolved
from tests.deeplink.data.packed_things import COUNT, body, packed_below
from tests.pickled import copied

PICKED = [7, 200, 3, 90, 91, 92, 200, -1]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return packed_below(tmp_path_factory.mktemp("subset"))


@pytest.fixture(scope="module")
def many(config: Config) -> deeplink.Dataset:
    return deeplink.Dataset("many", config=config, receipts=True)


def test_a_subset_is_the_items_that_were_picked_in_their_order(many: deeplink.Dataset) -> None:
    part = many.subset(PICKED)
    assert len(part) == len(PICKED)
    assert [part[i] for i in range(len(part))] == [many[i] for i in PICKED]
    assert part.targets.tolist() == many.targets[PICKED].tolist()
    assert part.rows.tolist() == many.rows[PICKED].tolist()
    assert part.lengths.tolist() == [len(body(i % COUNT)) for i in PICKED]
    assert part.key(0) == many.key(7)
    assert DeliveryDigest.expected(part, 1).count(0) == len(PICKED)
    assert copied(part).__getitems__(range(len(PICKED))) == [many[i] for i in PICKED]
    inner = part.subset([1, 0])
    assert inner.rows.tolist() == [200, 7]
    with pytest.raises(IndexError, match="item 8 of 8"):
        part[8]


def test_the_number_of_a_key_is_found_in_the_whole_and_in_a_subset(many: deeplink.Dataset, config: Config) -> None:
    part = many.subset(PICKED)
    assert [many.index(many.key(i)) for i in range(COUNT)] == list(range(COUNT))
    assert part.index(many.key(200)) == 1
    with pytest.raises(DatasetError, match=f"has '{many.key(8)}', but not as an item below '/' in this subset"):
        part.index(many.key(8))
    bees = deeplink.Dataset("many", root="bee", config=config)
    assert bees.key(bees.index("bee/081")) == "bee/081"
    with pytest.raises(DatasetError, match="not as an item below 'bee'"):
        bees.index("cat/200")
    with pytest.raises(KeyMissingError, match="'bee/no'"):
        bees.index("bee/no")


@pytest.mark.parametrize(
    ("indices", "error"),
    [
        ([], ValueError),
        ([True, False], ValueError),
        ([[1]], ValueError),
        ([0.5], ValueError),
        ([COUNT], IndexError),
    ],
)
def test_what_is_no_choice_of_items_is_refused(
    many: deeplink.Dataset, indices: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        many.subset(indices)


def test_a_split_has_every_item_once_and_is_the_same_everywhere(many: deeplink.Dataset) -> None:
    parts = many.random_split([0.8, 0.1, 0.1], seed=3)
    assert [len(part) for part in parts] == [192, 24, 24]
    assert Counter(int(row) for part in parts for row in part.rows) == Counter(range(COUNT))
    again = many.random_split([192, 24, 24], seed=3)
    assert [part.subset_digest for part in parts] == [part.subset_digest for part in again]
    assert parts[0].subset_digest != many.random_split([0.8, 0.2], seed=4)[0].subset_digest
    for lengths in ([0.5, 0.6], [100, 100], [0.999, 0.001], [1.5, -0.5], []):
        with pytest.raises(ValueError, match="lengths"):
            many.random_split(lengths)


def _batches(dataset: Any, sampler: ResumableSampler, steps: int, **options: Any) -> list[Any]:
    found = []
    for batch in torch_data.DataLoader(dataset, batch_sampler=sampler, **options):
        found.append(batch)
        sampler.finished()
        if len(found) == steps:
            break
    return found


def _kinds(many: deeplink.Dataset) -> dict[str, Any]:
    positions = many.random_split([0.5, 0.5])[0].rows.tolist()
    return {"ours": many.subset(positions), "torch's": torch_data.Subset(many, positions)}


def _samplers(dataset: Any, batch_size: int, world: int) -> list[ResumableSampler]:
    return [ResumableSampler(dataset, batch_size=batch_size, rank=r, world_size=world) for r in range(world)]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("ours", {}),
        ("torch's", {}),
        ("ours", {"num_workers": 2}),
        ("torch's", {"num_workers": 2}),
        pytest.param("torch's", {"num_workers": 2, "multiprocessing_context": "spawn"}, marks=pytest.mark.slow),
    ],
)
def test_an_epoch_of_a_split_left_in_the_middle_goes_on_at_other_ranks(
    many: deeplink.Dataset, kind: str, options: dict[str, Any]
) -> None:
    part = _kinds(many)[kind]
    (one,) = _samplers(part, 8, 1)
    digest = DeliveryDigest()
    for _, _, receipts in _batches(part, one, 5, **options):
        digest.add(0, receipts)
    for sampler in _samplers(part, 4, 3):
        sampler.load_state_dict(one.state_dict())
        for _, _, receipts in _batches(part, sampler, COUNT, **options):
            digest.add(0, receipts)
    assert digest.differences(DeliveryDigest.expected(_kinds(many)["ours"], 1)) == []


def test_the_state_of_another_split_is_refused(many: deeplink.Dataset) -> None:
    mine, other = many.random_split([0.5, 0.5])
    state = ResumableSampler(mine, batch_size=4).state_dict()
    torchs = ResumableSampler(torch_data.Subset(many, mine.rows.tolist()), batch_size=4)
    torchs.load_state_dict(state)
    for foreign in (ResumableSampler(other, batch_size=4), ResumableSampler(many, batch_size=4)):
        with pytest.raises(SamplerError, match=r"of another run: (subset|length)"):
            foreign.load_state_dict(state)
    ordered = ResumableSampler(many.subset(np.sort(mine.rows)[::-1]), batch_size=4)
    with pytest.raises(SamplerError, match=f"subset is '{mine.subset_digest}', here it is"):
        ordered.load_state_dict(state)


@pytest.mark.parametrize("kind", ["ours", "torch's"])
def test_blocks_residency_and_reading_ahead_know_a_subset(many: deeplink.Dataset, kind: str) -> None:
    part = _kinds(many)[kind]
    ours = _kinds(many)["ours"]
    sampler = ResumableSampler(part, batch_size=7, shuffle=Order.BLOCKS, residency=ours.residency(["n0"]))
    seen: Counter[int] = Counter()
    for items in Prefetcher(part, sampler):
        seen.update(receipt for _, _, receipt in items)
        sampler.finished()
    assert seen == Counter(ours[i][2] for i in range(len(ours)))
    with pytest.raises(ValueError, match="residency is of 240 samples, the dataset has 120"):
        ResumableSampler(part, batch_size=7, residency=many.residency(["n0"]))


@pytest.mark.parametrize("workers", [0, 2])
def test_packed_batches_of_a_subset(config: Config, workers: int) -> None:
    even = deeplink.Dataset("even", config=config, packed=True)
    part = even.subset(np.arange(COUNT)[::-3])
    sampler = ResumableSampler(part, batch_size=16, shuffle=False)
    batches = list(packed_loader(part, sampler, num_workers=workers))
    texts = [int(bytes(row.tolist())) for batch in batches for row in batch.stacked()]
    assert texts == list(range(COUNT))[::-3]
    assert torch.cat([batch.labels for batch in batches]).tolist() == even.targets[::-3].tolist()


def test_a_grouped_dataset_has_subsets_too(tmp_path: Path) -> None:
    from deeplink.cache.packer import pack

    config = Config(catalog=tmp_path / "catalog", store=tmp_path / "store", state=tmp_path / "state", node="n0")
    for number in range(9):
        (tmp_path / "tree").mkdir(exist_ok=True)
        for extension in ("jpg", "json"):
            (tmp_path / "tree" / f"{number}.{extension}").write_bytes(b"%d" % number)
    pack(str(tmp_path / "tree"), "pairs", config=config)
    whole = deeplink.GroupedDataset("pairs", ("jpg", "json"), config=config)
    part = whole.subset([4, 2])
    assert [part.key(0), part[1]["jpg"], len(part)] == ["4", b"2", 2]
    assert ResumableSampler(torch_data.Subset(whole, [4, 2]), batch_size=1).subset == part.subset_digest

    class Changed(torch_data.Subset[Any]):
        """What it does to items would be lost."""

    changed = Changed(whole, [4, 2])
    assert resolved(changed) is changed
    assert [whole.index(str(i)) for i in range(9)] == list(range(9))
    assert part.index("2") == 1
    for key in ("3", "2.jpg", "no"):
        with pytest.raises(DatasetError, match=f"has no sample '{key}'"):
            part.index(key)
