"""Seeds of samples, and keys: a resumed run draws what the run that was never interrupted would have drawn."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils import data as torch_data

import deeplink
from deeplink.core.config import Config
from deeplink.data import DatasetError, Prefetcher, ResumableSampler
from deeplink.data.sampler import SampledBatch, sample_seed
from tests.deeplink.data.packed_things import COUNT, packed_below
from tests.pickled import copied

Drawn = dict[tuple[int, str], float]


class Augmented:
    """A random transform that pickles."""

    def __call__(self, data: bytes, seed: int) -> float:
        return float(np.random.default_rng(seed).random()) + len(data)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return packed_below(tmp_path_factory.mktemp("seeds"))


@pytest.fixture(scope="module")
def seeded(config: Config) -> deeplink.Dataset:
    return deeplink.Dataset("many", Augmented(), keys=True, seeded=True, config=config)


def trained(loader: Any, progress: Any, most: int = COUNT) -> Drawn:
    """Train for at most so many steps of an epoch; return what the transform made of each sample."""
    found, epoch = {}, progress.epoch
    for values, _, keys in itertools.islice(loader, most):
        found.update({(epoch, key): float(value) for key, value in zip(keys, values, strict=True)})
        progress.finished()
    return found


def plain(dataset: Any, **options: Any) -> tuple[Any, Any]:
    world = options.pop("world", (0, 1))
    sampler = ResumableSampler(dataset, batch_size=8, seed=5, rank=world[0], world_size=world[1])
    return torch_data.DataLoader(dataset, batch_sampler=sampler, **options), sampler


@pytest.fixture(scope="module")
def whole(seeded: deeplink.Dataset) -> Drawn:
    """Two epochs, never interrupted."""
    loader, sampler = plain(seeded)
    return trained(loader, sampler) | trained(loader, sampler)


def test_a_sample_is_drawn_anew_in_each_epoch_and_as_itself(whole: Drawn, seeded: deeplink.Dataset) -> None:
    assert len(whole) == 2 * COUNT
    fractions = {value % 1 for value in whole.values()}
    assert len(fractions) > 2 * COUNT - 5
    expected = Augmented()(bytes(int(seeded.lengths[7])), sample_seed(5, 1, seeded.key(7)))
    assert whole[1, seeded.key(7)] == expected


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_workers": 2},
        {"num_workers": 2, "persistent_workers": True},
        pytest.param({"num_workers": 2, "multiprocessing_context": "spawn"}, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_draws_the_same_at_any_number_of_workers_and_ranks(
    seeded: deeplink.Dataset, whole: Drawn, options: dict[str, Any]
) -> None:
    loader, sampler = plain(seeded)
    found = trained(loader, sampler, 11)
    state = sampler.state_dict()
    for rank in range(3):
        loader, sampler = plain(seeded, world=(rank, 3), **options)
        sampler.load_state_dict(state)
        found |= trained(loader, sampler) | trained(loader, sampler)
    assert found == whole


def test_streams_threads_subsets_and_copies_draw_the_same(seeded: deeplink.Dataset, whole: Drawn) -> None:
    stream = deeplink.IterableDataset(copied(seeded), ResumableSampler(seeded, batch_size=8, seed=5))
    for workers in (0, 2):
        stream.set_epoch(0)
        found = trained(torch_data.DataLoader(stream, batch_size=None, num_workers=workers), stream)
        assert found == {place: value for place, value in whole.items() if place[0] == 0}
    part = seeded.random_split([0.3, 0.7])[0]
    loader, sampler = plain(part)
    assert (found := trained(loader, sampler)) == {place: whole[place] for place in found}
    sampler = ResumableSampler(seeded, batch_size=8, seed=5)
    ahead = Prefetcher(seeded, sampler, collate=torch_data.default_collate)
    assert len(ahead) == len(sampler)
    assert trained(ahead, sampler).items() <= whole.items()


def test_what_has_no_epoch_is_refused(seeded: deeplink.Dataset, config: Config) -> None:
    torchs = torch_data.Subset(seeded, [1, 2, 3])
    for read in (
        lambda: seeded[0],
        lambda: list(torch_data.DataLoader(seeded, batch_size=4)),
        lambda: list(torch_data.DataLoader(torchs, batch_sampler=ResumableSampler(torchs, batch_size=2))),
    ):
        with pytest.raises(DatasetError, match="not asked for a ResumableSampler's batch"):
            read()
    with pytest.raises(ValueError, match="seeded=True"):
        deeplink.Dataset("many", seeded=True, config=config)
    with pytest.raises(ValueError, match="keys"):
        deeplink.Dataset("many", keys=True, packed=True, config=config)


def test_a_batch_crosses_to_workers_with_its_seed_and_epoch() -> None:
    batch = copied(SampledBatch([3, 1], 5, 2))
    assert (batch, batch.seed, batch.epoch) == ([3, 1], 5, 2)
    assert sample_seed(0, 0, "train/bee/7.jpg") == 55_760_446  # part of what a run is: it stays


def test_keys_come_with_the_items(config: Config) -> None:
    flat = deeplink.Dataset("flat", labels=False, keys=True, config=config)
    assert flat[0] == (b"1", "one")
    many = deeplink.Dataset("many", keys=True, receipts=True, config=config)
    assert many[3][-1] == many.key(3)
    assert many.index(many[3][-1]) == 3
    (batch,) = torch_data.DataLoader(many.subset([5, 6]), batch_size=2, collate_fn=list)
    assert [key for *_, key in batch] == [many.key(5), many.key(6)]


def test_a_grouped_dataset_is_seeded_too(tmp_path: Path) -> None:
    from deeplink.cache.packer import pack

    config = Config(catalog=tmp_path / "catalog", store=tmp_path / "store", state=tmp_path / "state", node="n0")
    (tmp_path / "tree").mkdir()
    for number in range(4):
        (tmp_path / "tree" / f"{number}.txt").write_bytes(b"%d" % number)
    pack(str(tmp_path / "tree"), "texts", config=config)
    dataset = deeplink.GroupedDataset(
        "texts", ["txt"], lambda item, seed: (item["__key__"], seed), seeded=True, config=config
    )
    sampler = ResumableSampler(dataset, batch_size=4, seed=2)
    (batch,) = torch_data.DataLoader(dataset, batch_sampler=sampler, collate_fn=list)
    assert sorted(batch) == [(str(n), sample_seed(2, 0, str(n))) for n in range(4)]
    with pytest.raises(DatasetError):
        dataset[0]
