"""The stream of a rank's batches: the sampler's order at any number of workers, and exact resumption."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import deeplink
from deeplink.core.config import Config
from deeplink.data import DeliveryDigest, Order, ResumableSampler, SamplerError
from deeplink.data.shared_batches import loader
from tests.deeplink.data.packed_things import COUNT, packed_below

# torchdata 0.11 makes a call that torch 2.13 deprecates.
pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return packed_below(tmp_path_factory.mktemp("stream"))


@pytest.fixture
def many(config: Config) -> Iterator[deeplink.Dataset]:
    dataset = deeplink.Dataset("many", packed=True, receipts=True, config=config)
    yield dataset
    dataset.close()


def stream(dataset: deeplink.Dataset, batch_size: int = 10, **more: Any) -> deeplink.IterableDataset:
    options: dict[str, Any] = {"shuffle": Order.BLOCKS, "window": 2, **more}
    return deeplink.IterableDataset(dataset, ResumableSampler(dataset, batch_size=batch_size, **options))


def loaded(found: deeplink.IterableDataset, workers: int, **more: Any) -> DataLoader[Any]:
    return DataLoader(found, batch_size=None, num_workers=workers, **more)


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_batches_come_in_the_samplers_order_at_any_number_of_workers(many: deeplink.Dataset, workers: int) -> None:
    expected = [many.__getitems__(rows).receipts.tolist() for rows in stream(many).sampler]
    assert [batch.receipts.tolist() for batch in loaded(stream(many), workers)] == expected


def test_items_of_a_plain_dataset_are_collated_as_a_loader_would(config: Config) -> None:
    plain = deeplink.Dataset("even", lambda data: torch.tensor(list(data)), config=config)
    samples, labels = next(iter(stream(plain)))
    assert (samples.shape, labels.shape) == ((10, 100), (10,))
    own = deeplink.IterableDataset(plain, ResumableSampler(plain, batch_size=10), len)
    assert list(own) == [10] * 24


def test_an_epoch_interrupted_at_other_numbers_of_workers_and_ranks_gives_every_sample_once(
    many: deeplink.Dataset,
) -> None:
    digest = DeliveryDigest()
    state: dict[str, Any] = {}
    for world, workers, batch_size, steps in [(1, 2, 9, 5), (3, 1, 5, 4), (2, 0, 7, 3), (1, 3, 11, COUNT)]:
        ranks = [stream(many, batch_size, rank=rank, world_size=world) for rank in range(world)]
        for found in ranks:
            if state:
                found.load_state_dict(json.loads(json.dumps(state)))
        for number, batches in enumerate(zip(*(loaded(found, workers) for found in ranks), strict=True)):
            for batch, found in zip(batches, ranks, strict=True):
                digest.add(0, batch.receipts)
                found.finished()
            if number + 1 == steps:
                break
        state = ranks[0].state_dict()
        assert all(found.state_dict() == state for found in ranks)
        assert len(json.dumps(state)) < 1024
    assert (state["epoch"], state["position"]) == (1, 0)
    assert digest == DeliveryDigest.expected(many, 1)


def test_epochs_follow_one_another_with_workers_that_stay(many: deeplink.Dataset) -> None:
    found = stream(many)
    kept = loaded(found, 2, persistent_workers=True)
    digest = DeliveryDigest()
    while found.epoch < 3:
        epoch = found.epoch
        for batch in kept:
            digest.add(epoch, batch.receipts)
            found.finished()
    assert digest == DeliveryDigest.expected(many, 3)


def test_a_pass_left_in_the_middle_is_refused_by_workers_that_stay(many: deeplink.Dataset) -> None:
    found = stream(many)
    kept = loaded(found, 2, persistent_workers=True)
    for _ in kept:
        found.finished()
        break
    # torch makes a worker's error again from its text alone.
    with pytest.raises(SamplerError, match="left before"):
        next(iter(kept))


def trained(found: deeplink.IterableDataset, kept: DataLoader[Any], steps: int = COUNT) -> list[list[int]]:
    given = []
    for batch in kept:
        given.append(batch.receipts.tolist())
        found.finished()
        if len(given) == steps:
            break
    return given


@pytest.mark.parametrize("is_left", [False, True])
def test_a_state_loaded_takes_workers_that_stay_to_its_position(many: deeplink.Dataset, is_left: bool) -> None:
    found, alone = stream(many), stream(many)
    kept = loaded(found, 2, persistent_workers=True)
    trained(found, kept, 12 if is_left else COUNT)
    alone.finished(9)
    found.load_state_dict(alone.state_dict())
    assert trained(found, kept) == [batch.receipts.tolist() for batch in alone]
    assert (found.epoch, found.state_dict()["position"]) == (1, 0)
    alone.set_epoch(1)
    assert trained(found, kept) == [batch.receipts.tolist() for batch in alone]


def test_setting_the_epoch_under_way_says_that_the_pass_was_left_on_purpose(many: deeplink.Dataset) -> None:
    found = stream(many)
    kept = loaded(found, 2, persistent_workers=True)
    whole = trained(found, kept, 7)
    found.set_epoch(0)
    whole += trained(found, kept)
    assert whole == [batch.receipts.tolist() for batch in stream(many)]


def test_a_state_with_fewer_batches_left_than_workers_that_stay_is_refused(many: deeplink.Dataset) -> None:
    found, alone = stream(many), stream(many)
    kept = loaded(found, 2, persistent_workers=True)
    trained(found, kept)
    alone.finished(23)
    found.load_state_dict(alone.state_dict())
    with pytest.raises(SamplerError, match="1 batches left"):
        next(iter(kept))
    assert trained(found, loaded(found, 2)) == [batch.receipts.tolist() for batch in alone]


def test_finishing_more_than_there_is_is_refused(many: deeplink.Dataset) -> None:
    found = stream(many)
    assert len(found) == 24
    found.finished(24)
    assert (found.epoch, found.sampler.steps_left) == (1, 24)
    with pytest.raises(SamplerError, match="25 steps"):
        found.finished(25)
    found.set_epoch(5)
    found.finished(4)
    assert (found.epoch, len(found), found.sampler.steps_left) == (5, 24, 20)


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_a_state_that_would_repeat_what_was_handed_out_is_refused(
    many: deeplink.Dataset, options: dict[str, Any]
) -> None:
    found = stream(many)
    kept = DataLoader(found, batch_size=None, **options)
    for epoch in range(2):
        assert found.state_dict()["epoch"] == epoch
        for number, _ in enumerate(kept):
            if not number:
                with pytest.raises(SamplerError, match=r"without a finished\(\)"):
                    found.state_dict()
            found.finished()
            assert found.state_dict()["position"] == (number + 1) * 10 % COUNT
    whole = stream(many)
    passing = iter(DataLoader(whole, batch_size=None))
    next(passing)
    whole.set_epoch(0)  # it was only looked at
    assert whole.state_dict()["position"] == 0


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["map", "stream"])
@pytest.mark.parametrize("taken", [0, 9, 24])
def test_a_stateful_data_loader_goes_on_where_it_was(
    many: deeplink.Dataset, workers: int, kind: str, taken: int
) -> None:
    def made() -> Any:
        if kind == "stream":
            return StatefulDataLoader(stream(many), batch_size=None, num_workers=workers)
        sampler = ResumableSampler(many, batch_size=10, shuffle=Order.BLOCKS, window=2)
        return loader(many, sampler, num_workers=workers, kind=StatefulDataLoader)

    whole = [batch.receipts.tolist() for batch in made()]
    first = made()
    batches = iter(first)
    found = [next(batches).receipts.tolist() for _ in range(taken)]
    state = json.loads(json.dumps(first.state_dict()))
    assert len(json.dumps(state)) < 1024 * max(1, workers)
    del batches, first
    second = made()
    second.load_state_dict(state)
    found += [batch.receipts.tolist() for batch in second]
    assert found == whole


def test_a_worker_takes_no_other_workers_state(many: deeplink.Dataset) -> None:
    passing: Any = iter(stream(many))
    next(passing)
    state = passing.state_dict()
    other: Any = iter(stream(many))
    with pytest.raises(SamplerError, match="worker"):
        other.load_state_dict({**state, "worker": [1, 2]})
    other.load_state_dict(state)
    assert next(other).receipts.tolist() == next(passing).receipts.tolist()
