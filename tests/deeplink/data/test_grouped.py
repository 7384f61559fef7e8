"""Files grouped into samples: against a plain model, and under real DataLoaders."""

from __future__ import annotations

import json
import multiprocessing
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import deeplink
from deeplink.cache.format.index import Index
from deeplink.cache.format.index_format import IndexContent, ShardEntry, write_index
from deeplink.cache.packer import pack
from deeplink.core.types import SampleKey, ShardId
from deeplink.data import Prefetcher, ResumableSampler
from deeplink.data import grouped as grouping
from deeplink.data.errors import DatasetError
from deeplink.data.grouped import (
    GroupedDataset,
    column,
    grouped,
    key_of,
)
from tests.cache.agents import config_below, write_tree
from tests.effort import examples
from tests.pickled import copied

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from deeplink.core.config import Config

WHOLE = 40
FILES = {
    **{f"train/{i % 3}/{i:04d}.jpg": b"picture %d" % i for i in range(WHOLE)},
    **{f"train/{i % 3}/{i:04d}.json": json.dumps({"i": i}).encode() for i in range(WHOLE)},
    **{f"train/{i % 3}/{i:04d}.seg.png": b"mask %d" % i for i in range(0, WHOLE, 2)},
    "train/0/extra.png": b"only",
    "train/notes.txt": b"no sample",
    "train/README": b"no extension",
    "train/.hidden": b"no key",
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    base = tmp_path_factory.mktemp("grouped")
    config = config_below(base)
    pack(str(write_tree(base / "tree", FILES)), "pairs", config=config)
    return config


def test_an_error_of_a_transform_names_the_key(config: Config) -> None:
    dataset = GroupedDataset("pairs", ["jpg", "json"], transform=lambda item: item["png"], config=config)
    with pytest.raises(KeyError) as caught:
        dataset[3]
    assert repr(dataset.key(3)) in caught.value.__notes__[0]


def test_a_stream_and_a_prefetcher_read_it_like_a_loader(config: Config) -> None:
    columns = ["jpg", "seg.png"]
    dataset = GroupedDataset("pairs", columns, lambda item: item["__key__"], missing="none", config=config)
    assert dataset.lengths.tolist() == [
        len(FILES[f"{dataset.key(i)}.jpg"]) + len(FILES.get(f"{dataset.key(i)}.seg.png", b""))
        for i in range(len(dataset))
    ]
    expected = [[dataset.key(row) for row in rows] for rows in ResumableSampler(dataset, batch_size=7)]
    assert list(Prefetcher(dataset, ResumableSampler(dataset, batch_size=7))) == expected
    stream = deeplink.IterableDataset(dataset, ResumableSampler(dataset, batch_size=7))
    assert list(DataLoader(stream, batch_size=None, num_workers=1)) == expected
    dataset.will_need(np.arange(3))


def test_lengths_are_summed_once_for_each_choice_of_items(config: Config) -> None:
    dataset = GroupedDataset("pairs", ["jpg", "json"], config=config)
    whole = dataset.lengths
    assert dataset.lengths is whole
    assert not whole.flags.writeable
    part = dataset.subset([5, 2])
    assert part.lengths.tolist() == [whole[5], whole[2]]
    assert part.subset([1]).lengths.tolist() == [whole[2]]
    assert dataset.lengths is whole
    assert dataset.__getstate__()["_lengths"] is None  # workers do not get it sent
    assert copied(dataset).lengths.tolist() == whole.tolist()


def test_an_item_is_the_files_of_one_key(config: Config) -> None:
    dataset = GroupedDataset("pairs", ["jpg", "json"], config=config)
    assert len(dataset) == WHOLE
    keys = sorted(path.removesuffix(".jpg") for path in FILES if path.endswith(".jpg"))
    assert [dataset.key(i) for i in range(WHOLE)] == keys
    for i, key in enumerate(keys):
        assert dataset[i] == {"__key__": key, "jpg": FILES[f"{key}.jpg"], "json": FILES[f"{key}.json"]}
    assert dataset[-1] == dataset[WHOLE - 1]
    assert [item["__key__"] for item in dataset.__getitems__([7, 0, 7])] == [keys[7], keys[0], keys[7]]
    assert dataset.__getitems__([]) == []
    with pytest.raises(IndexError):
        dataset[WHOLE]
    assert deeplink.GroupedDataset is GroupedDataset


def test_a_batch_is_one_read(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = GroupedDataset("pairs", ["jpg", "json", "seg.png"], missing="none", root="train/1", config=config)
    reads = []
    read = dataset._reader.read

    def counted(rows: np.ndarray) -> list[memoryview]:
        reads.append(len(rows))
        return read(rows)

    monkeypatch.setattr(dataset._reader, "read", counted)
    items = dataset.__getitems__(range(4))
    assert reads == [4 * 2 + sum(item["seg.png"] is not None for item in items)]
    assert dataset.rows.shape == (len(dataset), 3)


def test_columns_may_be_named_and_have_alternatives(config: Config) -> None:
    dataset = GroupedDataset("pairs", {"image": "JPG;png", "about": "json"}, missing="none", config=config)
    assert dataset.columns == ("image", "about")
    items = {item["__key__"]: item for item in dataset.__getitems__(range(len(dataset)))}
    assert len(items) == WHOLE + 1
    assert items["train/0/extra"] == {"__key__": "train/0/extra", "image": b"only", "about": None}
    assert items["train/1/0001"]["image"] == b"picture 1"


@pytest.mark.parametrize("root", ["", "train", "/train/2/"])
def test_missing_columns_are_an_error_or_left_out_or_none(config: Config, root: str) -> None:
    columns = ["jpg", "seg.png"]
    inside = [path for path in FILES if path.startswith(root.strip("/")) and path.endswith(".jpg")]
    masked = [path for path in inside if f"{path.removesuffix('.jpg')}.seg.png" in FILES]
    lacking = len(inside) - len(masked)
    with pytest.raises(DatasetError, match=rf"{lacking} samples have no file for column 'seg.png': ") as refused:
        GroupedDataset("pairs", columns, root=root, config=config)
    keys = str(refused.value).rpartition("'seg.png': ")[2].removesuffix(" ...").split(", ")
    assert keys
    assert all(f"{key[1:-1]}.jpg" in inside for key in keys)
    assert len(GroupedDataset("pairs", columns, root=root, missing="skip", config=config)) == len(masked)
    dataset = GroupedDataset("pairs", columns, root=root, missing="none", config=config)
    assert len(dataset) == len(inside)
    assert sum(item["seg.png"] is None for item in dataset.__getitems__(range(len(dataset)))) == lacking


@pytest.mark.parametrize("columns", [[], {}, ["jpg", ""], {"__key__": "jpg"}, ["jpg;"]])
def test_columns_that_make_no_sense_are_refused(config: Config, columns: Any) -> None:
    with pytest.raises(ValueError, match="columns"):
        GroupedDataset("pairs", columns, config=config)


def test_other_wrong_arguments_are_refused(config: Config) -> None:
    with pytest.raises(TypeError, match="list of extensions"):
        GroupedDataset("pairs", "jpg", config=config)
    with pytest.raises(ValueError, match="perhaps"):
        GroupedDataset("pairs", ["jpg"], missing="perhaps", config=config)
    with pytest.raises(DatasetError, match="'tif'"):
        GroupedDataset("pairs", ["tif"], missing="none", config=config)
    with pytest.raises(DatasetError, match="nowhere"):
        GroupedDataset("pairs", ["jpg"], root="nowhere", config=config)


class Decoded:
    """A transform that pickles."""

    def __call__(self, item: dict[str, Any]) -> tuple[str, int]:
        return item["jpg"].decode(), json.loads(item["json"])["i"]


@pytest.mark.parametrize("how", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_loader_with_workers_delivers_every_sample_once(config: Config, how: str) -> None:
    dataset = GroupedDataset("pairs", ["jpg", "json"], Decoded(), config=config)
    sampler = ResumableSampler(dataset, batch_size=7)
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=1 + (how == "fork"),
        multiprocessing_context=multiprocessing.get_context(how),
    )
    found = []
    for texts, numbers in loader:
        found += list(zip(texts, numbers.tolist(), strict=True))
        sampler.finished()
    assert sorted(number for _, number in found) == list(range(WHOLE))
    assert all(text == f"picture {number}" for text, number in found)
    assert sampler.state_dict()["version"] == dataset.version
    assert sampler.epoch == 1


def test_a_copy_reads_the_same(config: Config) -> None:
    dataset = GroupedDataset("pairs", ["jpg", "json"], config=config)
    copy = copied(dataset)
    dataset.close()
    assert copy[3] == dataset[3]
    assert copy.stats().local_samples == 2


# Against a plain model: WebDataset's own expression, file by file.

WEBDATASET = re.compile(r"^((?:.*/|)[^./][^./]*)[.]([^/]*)$", re.DOTALL)


def model(keys: list[str]) -> dict[str, dict[str, list[str]]]:
    groups: dict[str, dict[str, list[str]]] = {}
    for key in keys:
        if found := WEBDATASET.match(key):
            groups.setdefault(found[1], {}).setdefault(found[2].lower(), []).append(key)
    return groups


def index_of(path: Path, keys: list[str]) -> Index:
    """Return an index of samples of no bytes: only the names count here."""
    zeros = np.zeros(len(keys), np.uint64)
    content = IndexContent(
        source="/nowhere",
        shards=(ShardEntry(id=ShardId("0" * 40), bytes=1, samples=len(keys), blocks=1),),
        block_offsets=[np.zeros(1, np.uint64)],
        keys=[SampleKey(key) for key in keys],
        shard=zeros.astype(np.uint32),
        block=zeros.astype(np.uint32),
        offset=zeros.astype(np.uint32),
        length=zeros,
        checksum=zeros,
    )
    return Index(path, write_index(path, content))


def rows_by_key(index: Index, extensions: list[str]) -> Mapping[str, list[str | None]]:
    found = grouped(index, range(len(index)))
    table = np.stack([column(index, found, [extension]) for extension in extensions], axis=1)
    keys: dict[int, str] = {}
    for row, stem, group in zip(found.rows.tolist(), found.stems.tolist(), found.groups.tolist(), strict=True):
        key = key_of(index, row, stem)
        assert keys.setdefault(group, key) == key
    assert len(set(keys.values())) == len(keys) == found.count
    return {
        keys[group]: [index.key(row) if row >= 0 else None for row in rows]
        for group, rows in enumerate(table.tolist())
    }


NAMES = st.text("ab.é", min_size=1, max_size=5).filter(lambda name: name not in {".", ".."})
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)


@pytest.mark.parametrize("at_once", [1, 3, 1 << 16])
def test_groups_are_webdatasets(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(grouping, "_AT_ONCE", at_once)
    base = tmp_path_factory.mktemp("model")

    @settings(max_examples=examples(40), suppress_health_check=list(HealthCheck))
    @given(st.sets(PATHS, min_size=1, max_size=25))
    def check(paths: set[str]) -> None:
        keys = sorted(path for path in paths if not any(other.startswith(f"{path}/") for other in paths))
        index = index_of(base / "index.arrow", keys)
        extensions = sorted({name for group in model(keys).values() for name in group if name}) or ["a"]
        expected = {
            key: [group[name][0] if name in group else None for name in extensions]
            for key, group in model(keys).items()
        }
        assert rows_by_key(index, extensions) == expected

    check()


def test_a_folder_between_the_files_of_a_sample_parts_nothing(tmp_path: Path) -> None:
    keys = ["a/1.c", "a/1.d/2.c", "a/1.e", "a/10.c", "b.c"]
    found = rows_by_key(index_of(tmp_path / "index", keys), ["c", "e"])
    assert found == {
        "a/1": ["a/1.c", "a/1.e"], "a/1.d/2": ["a/1.d/2.c", None], "a/10": ["a/10.c", None], "b": ["b.c", None],
    }  # fmt: skip


def test_two_files_for_one_column_are_refused(tmp_path: Path) -> None:
    index = index_of(tmp_path / "index", ["a/1.JPG", "a/1.jpg", "a/2.jpg"])
    with pytest.raises(DatasetError, match=r"'a/1\.(JPG|jpg)' and 'a/1\.(jpg|JPG)' are both column 'jpg'"):
        column(index, grouped(index, range(3)), ["jpg"])
