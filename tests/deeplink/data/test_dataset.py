"""`deeplink.Dataset` under real DataLoaders, on real packed files."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import deeplink
from deeplink.cache.errors import DatasetMissingError, KeyMissingError
from deeplink.cache.packer import pack
from deeplink.core.config import Config
from deeplink.data import DeliveryDigest, Order, ResumableSampler, receipt
from deeplink.data.errors import DatasetError, SamplerError
from tests.pickled import copied

if TYPE_CHECKING:
    from collections.abc import Iterator

CLASSES = ("ant", "bee", "cat")
PER_CLASS = 20


def body(split: str, name: str, number: int) -> bytes:
    return f"{split} {name} {number} ".encode() * (1 + number * 7)


class Length:
    """A transform that pickles: bytes to a tensor of their length and their first byte."""

    def __call__(self, data: bytes) -> torch.Tensor:
        return torch.tensor([len(data), data[0]])


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    base = tmp_path_factory.mktemp("dataset")
    config = Config(
        catalog=base / "catalog",
        store=base / "store",
        state=base / "state",
        node="n0",
        replicas=1,
        shard_bytes=1 << 20,
    )
    for split in ("train", "test"):
        for name in CLASSES:
            folder = base / "tree" / split / name
            folder.mkdir(parents=True)
            for number in range(PER_CLASS):
                (folder / f"{number:03d}.txt").write_bytes(body(split, name, number))
    pack(str(base / "tree"), "things", config=config)
    flat = base / "flat"
    flat.mkdir()
    for number in range(5):
        (flat / f"{number}.txt").write_bytes(b"flat %d" % number)
    pack(str(flat), "flat", config=config)
    return config


@pytest.fixture
def train(config: Config) -> Iterator[deeplink.Dataset]:
    dataset = deeplink.Dataset("things", root="train", config=config)
    yield dataset
    dataset.close()


def test_classes_and_labels_follow_the_folders(train: deeplink.Dataset) -> None:
    assert train.classes == list(CLASSES)
    assert train.class_to_idx == {"ant": 0, "bee": 1, "cat": 2}
    assert len(train) == 60
    assert train.targets.tolist() == [0] * 20 + [1] * 20 + [2] * 20
    assert train.key(21) == "train/bee/001.txt"


def test_items_are_the_files_bytes_and_their_label(train: deeplink.Dataset) -> None:
    assert train[0] == (body("train", "ant", 0), 0)
    assert train[-1] == (body("train", "cat", 19), 2)
    assert train[np.int64(25)] == (body("train", "bee", 5), 1)
    assert train.__getitems__([41, 0, 41]) == [train[41], train[0], train[41]]
    assert train.__getitems__([]) == []
    assert train.stats().local_samples > 0


def test_batches_that_are_taken_for_items_say_so(train: deeplink.Dataset) -> None:
    loader = DataLoader(train, sampler=ResumableSampler(train, batch_size=2))
    with pytest.raises(SamplerError, match="took its batches for items"):
        next(iter(loader))


def test_an_item_is_had_by_its_key_too(train: deeplink.Dataset, config: Config) -> None:
    assert train["train/bee/005.txt"] == train[25]
    assert "train/bee/005.txt" in train
    assert "train/bee/999.txt" not in train
    assert 25 not in train
    assert "test/bee/000.txt" not in train, "of another root"
    with pytest.raises(KeyMissingError, match=r"train/bee/999\.txt"):
        train["train/bee/999.txt"]
    packed = deeplink.Dataset("things", root="train", packed=True, config=config)
    assert [bytes(sample.numpy()) for sample in packed["train/bee/005.txt"]] == [body("train", "bee", 5)]
    packed.close()
    assert repr(train).endswith(": 60 items")


def test_a_plain_loop_ends_where_the_items_end(train: Any) -> None:
    labels = [label for _, label in train]
    assert labels == train.targets.tolist()


@pytest.mark.parametrize("index", [60, -61])
def test_an_item_that_is_not_there_is_an_index_error(train: deeplink.Dataset, index: int) -> None:
    with pytest.raises(IndexError, match=f"item {index} of 60"):
        train[index]


def test_transforms_are_applied(config: Config) -> None:
    dataset = deeplink.Dataset(
        "things", Length(), root="/test/", target_transform=lambda label: label * 10, config=config
    )
    sample, label = dataset[20]
    assert sample.tolist() == [len(body("test", "bee", 0)), ord("t")]
    assert label == 10


class Refusing:
    """A transform that pickles, and cannot stand one file."""

    def __call__(self, data: bytes) -> bytes:
        if data.startswith(b"train bee 7 "):
            raise ValueError("no picture")
        return data[:4]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_a_transform_names_the_sample(config: Config, workers: int) -> None:
    dataset = deeplink.Dataset("things", Refusing(), root="train", config=config)
    with pytest.raises(ValueError, match="no picture") as caught:
        list(DataLoader(dataset, batch_size=4, num_workers=workers))
    said = "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "item 27, 'train/bee/007.txt', of dataset 'things'" in said


def test_an_error_of_a_target_transform_names_the_sample(config: Config) -> None:
    dataset = deeplink.Dataset("things", root="train", target_transform={0: 5}.__getitem__, config=config)
    with pytest.raises(KeyError) as caught:
        dataset[20]
    assert "'train/bee/000.txt'" in caught.value.__notes__[0]


def test_what_a_transform_gets_can_be_opened_like_a_file_and_decoded(config: Config) -> None:
    dataset = deeplink.Dataset("things", lambda data: (io.BytesIO(data).read(4), data.decode()), config=config)
    assert dataset[0][0] == (b"test", body("test", "ant", 0).decode())


def test_receipts_are_of_the_very_bytes_and_make_the_digest(train: deeplink.Dataset, config: Config) -> None:
    audited = deeplink.Dataset("things", Length(), root="train", receipts=True, config=config)
    items = audited.__getitems__(list(range(60)))
    start = int(train.rows[0])
    assert [item[2] for item in items] == [receipt(start + i, train[i][0]) for i in range(60)]
    digest = DeliveryDigest()
    digest.add(0, [item[2] for item in reversed(items)])
    assert digest == DeliveryDigest.expected(train, 1)
    assert digest != DeliveryDigest.expected(deeplink.Dataset("things", root="test", config=config), 1)


def test_a_flat_dataset_has_samples_but_no_labels(config: Config) -> None:
    with pytest.raises(DatasetError, match=r"'0\.txt' lies in no class folder") as refused:
        deeplink.Dataset("flat", config=config)[0]
    assert "labels=False" in refused.value.remedy
    plain = deeplink.Dataset("flat", labels=False, config=config)
    assert plain[3] == b"flat 3"
    assert (plain.classes, len(plain.targets)) == ([], 0)
    audited = deeplink.Dataset("flat", labels=False, receipts=True, config=config)
    assert audited[3] == (b"flat 3", receipt(3, b"flat 3"))


def test_a_root_without_samples_is_refused_and_the_folders_named(config: Config) -> None:
    with pytest.raises(DatasetError, match="'val'") as refused:
        deeplink.Dataset("things", root="val", config=config)
    assert "'train'" in refused.value.remedy


@pytest.mark.parametrize(
    ("root", "remedy"),
    [
        ("trian", "Is 'train' meant?"),
        ("train/bees", "Is 'train/bee' meant?"),
        ("xyzzy/bee", "at its top: 'test', "),
    ],
)
def test_the_root_that_is_probably_meant_is_named(config: Config, root: str, remedy: str) -> None:
    with pytest.raises(DatasetError, match=f"no samples below '{root}'") as caught:
        deeplink.Dataset("things", root=root, config=config)
    assert remedy in caught.value.remedy
    with pytest.raises(DatasetError, match=f"no samples below '{root}'"):
        deeplink.GroupedDataset("things", ["txt"], root=root, config=config)


def test_the_first_digits_of_a_version_are_enough(config: Config) -> None:
    whole = deeplink.Dataset("things", config=config)
    short = deeplink.Dataset("things", version=whole.version[:4], config=config)
    grouped = deeplink.GroupedDataset("things", ["txt"], version=whole.version[:4], config=config)
    assert short.version == grouped.version == whole.version
    assert ResumableSampler(short, batch_size=2).state_dict() == ResumableSampler(whole, batch_size=2).state_dict()
    other = next(digit for digit in "0123456789abcdef" if digit != whole.version[0])
    with pytest.raises(DatasetMissingError, match=f"no version {other} of 'things'"):
        deeplink.Dataset("things", version=other, config=config)


def test_the_name_that_is_probably_meant_is_named(config: Config) -> None:
    with pytest.raises(DatasetMissingError) as caught:
        deeplink.Dataset("Thing", config=config)
    assert "Is 'things' meant?" in caught.value.remedy


def test_a_dataset_that_is_not_there_is_refused_by_name(config: Config) -> None:
    with pytest.raises(DatasetMissingError, match="nothing-such"):
        deeplink.Dataset("nothing-such", config=config)


def test_the_version_stays_the_same_whatever_is_packed_meanwhile(config: Config, tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_bytes(b"old")
    pack(str(tmp_path), "moving", config=config)
    before = deeplink.Dataset("moving", labels=False, config=config)
    (tmp_path / "0.txt").write_bytes(b"new")
    (tmp_path / "9.txt").write_bytes(b"new")
    pack(str(tmp_path), "moving", config=config)
    after = deeplink.Dataset("moving", labels=False, config=config)
    travelled = copied(before)
    for old in (before, travelled):
        assert (len(old), old[0]) == (3, b"old")
    assert (len(after), after[0]) == (4, b"new")
    assert after.version != before.version == travelled.version
    assert deeplink.Dataset("moving", labels=False, version=before.version, config=config)[0] == b"old"


def fed(loader: DataLoader[Any]) -> DeliveryDigest:
    digest = DeliveryDigest()
    for samples, labels, receipts in loader:
        assert samples.shape == (len(labels), 2)
        assert receipts.dtype == torch.int64
        digest.add(0, receipts)
    return digest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "context", "persistent"),
    [(0, None, False), (2, "fork", False), (2, "fork", True), (2, "forkserver", False), (2, "spawn", True)],
)
def test_every_sample_reaches_the_loop_exactly_once(
    config: Config, workers: int, context: str | None, persistent: bool
) -> None:
    dataset = deeplink.Dataset("things", Length(), root="train", receipts=True, config=config)
    dataset[0]  # the parent has files open before it forks
    sampler = ResumableSampler(dataset, batch_size=8, rank=0, world_size=1)
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=workers,
        multiprocessing_context=context,
        persistent_workers=persistent,
    )
    expected = DeliveryDigest.expected(dataset, 1)
    for epoch in range(2):
        assert sampler.epoch == epoch
        assert fed(loader) == expected
        sampler.finished(sampler.steps_left)


@pytest.mark.slow
def test_leaving_an_epoch_in_the_middle_and_resuming_elsewhere_feeds_every_sample_once(config: Config) -> None:
    dataset = deeplink.Dataset("things", Length(), root="train", receipts=True, config=config)
    digest = DeliveryDigest()
    state: dict[str, Any] = {}
    for world, steps in ((1, 2), (3, 2), (2, 100)):
        samplers = [ResumableSampler(dataset, batch_size=5, rank=rank, world_size=world) for rank in range(world)]
        for sampler in samplers:
            if state:
                sampler.load_state_dict(state)
        loaders = [iter(DataLoader(dataset, batch_sampler=sampler, num_workers=1)) for sampler in samplers]
        for _ in range(min(steps, samplers[0].steps_left)):
            for loader, sampler in zip(loaders, samplers, strict=True):
                digest.add(0, next(loader)[2])
                sampler.finished()
        state = samplers[0].state_dict()
        del loaders
    assert (state["epoch"], state["position"]) == (1, 0)
    assert digest == DeliveryDigest.expected(dataset, 1)


@pytest.mark.parametrize("order", [Order.SHUFFLED, Order.SEQUENTIAL, Order.BLOCKS])
def test_a_wrong_bit_in_a_column_of_the_index_changes_no_order_and_ends_no_training(
    tmp_path: Path, order: Order
) -> None:
    config = Config(catalog=tmp_path / "catalog", store=tmp_path / "store", state=tmp_path / "state", node="n0")
    folder = tmp_path / "tree" / "a"
    folder.mkdir(parents=True)
    for number in range(2000):
        (folder / f"{number:05d}").write_bytes(b"%d" % number)
    pack(str(tmp_path / "tree"), "many", config=config)
    sound = deeplink.Dataset("many", config=config)
    expected = list(ResumableSampler(sound, batch_size=100, shuffle=order))
    index = sound._reader.index
    with index.path.open("r+b") as file:
        for column in (index.shard, index.block, index.lengths):
            file.seek(column.ctypes.data - index._file.address + 1500 * column.itemsize + 2)
            file.write(b"\x7f")
            damaged = deeplink.Dataset("many", config=config)
            assert list(ResumableSampler(damaged, batch_size=100, shuffle=order)) == expected
            assert damaged.lengths.max() == 4
            assert not damaged.shard.any()
            damaged.close()
            file.seek(-1, 1)
            file.write(b"\0")
    sound.close()
