from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deeplink.cache.errors import IndexFormatError, KeyMissingError
from deeplink.cache.format import index_format
from deeplink.cache.format.block import SPAN
from deeplink.cache.format.index import Index
from deeplink.cache.format.index_format import IndexContent, ShardEntry, write_index
from deeplink.core.types import SampleKey, ShardId
from tests.effort import examples

if TYPE_CHECKING:
    from pathlib import Path

PART = st.sampled_from(["a", "b", "a-b", "a0", "ä", "z.png", "0", "字", "A"])
KEYS = st.sets(st.lists(PART, min_size=1, max_size=4).map("/".join), min_size=1, max_size=40).map(
    lambda keys: sorted(key for key in keys if not any(other.startswith(f"{key}/") for other in keys))
)
SAME_FOLDER = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=examples(60)
)


def content(keys: list[str]) -> IndexContent:
    count = len(keys)
    cut = count // 2
    numbers = np.arange(count)
    return IndexContent(
        source="/data",
        shards=[
            ShardEntry(id=ShardId("00" * 20), bytes=9000, samples=cut, blocks=2),
            ShardEntry(id=ShardId("11" * 20), bytes=9001, samples=count - cut, blocks=1),
        ],
        block_offsets=[np.array([4096, 8192], np.uint64), np.array([12288], np.uint64)],
        keys=[SampleKey(key) for key in keys],
        shard=(numbers >= cut).astype(np.uint32),
        block=np.where(numbers < cut, numbers % 2, 0).astype(np.uint32),
        offset=(numbers * 10).astype(np.uint32),
        length=(numbers + 1).astype(np.uint64),
        checksum=(numbers.astype(np.uint64) << np.uint64(40)) + np.uint64(7),
    )


def made(path: Path, keys: list[str]) -> Index:
    return Index(path, write_index(path, content(keys)))


@SAME_FOLDER
@given(keys=KEYS)
def test_rows_keys_and_folders_are_found(tmp_path: Path, keys: list[str]) -> None:
    index = made(tmp_path / "index", keys)
    assert index.keys() == keys
    assert len(index) == len(keys)
    for row, key in enumerate(keys):
        assert index.key(row) == key
        assert index.row(key) == row
    folders = {"", *("/".join(key.split("/")[:depth]) for key in keys for depth in range(1, key.count("/") + 1))}
    for folder in folders:
        below = [row for row, key in enumerate(keys) if not folder or key.startswith(f"{folder}/")]
        assert list(index.rows_below(folder)) == below
        assert list(index.rows_below(f"{folder}/")) == below
        assert index.keys(index.rows_below(folder)) == [keys[row] for row in below]


@SAME_FOLDER
@given(keys=KEYS)
def test_labels_follow_the_folders_as_imagefolder_does(tmp_path: Path, keys: list[str]) -> None:
    index = made(tmp_path / "index", keys)
    for root in ("", "a", "a/b", "ä"):
        below = [key.removeprefix(f"{root}/") for key in keys if not root or key.startswith(f"{root}/")]
        if not below:
            with pytest.raises(KeyMissingError):
                index.classed(root).every()
            continue
        classes = sorted({key.split("/")[0] for key in below if "/" in key})
        assert index.classes(root) == classes
        labels = index.classed(root).every()
        assert labels.dtype == np.int64
        assert labels.tolist() == [classes.index(key.split("/")[0]) if "/" in key else -1 for key in below]


@SAME_FOLDER
@given(keys=KEYS)
def test_a_listing_is_what_a_folder_of_files_would_hold(tmp_path: Path, keys: list[str]) -> None:
    index = made(tmp_path / "index", keys)
    for folder in ("", "a", "a/b", "ä", "A"):
        prefix = f"{folder}/" if folder else ""
        inside = {row: key.removeprefix(prefix) for row, key in enumerate(keys) if key.startswith(prefix)}
        if not inside:
            with pytest.raises(KeyMissingError):
                index.listing(folder)
            continue
        for said in (folder, f"{folder}/"):
            found = index.listing(said)
            assert found.folders == sorted({rest.split("/")[0] for rest in inside.values() if "/" in rest})
            assert found.rows.tolist() == [row for row, rest in inside.items() if "/" not in rest]
            assert found.rows.dtype == np.int64


def test_a_listing_goes_over_long_runs_of_files_and_deep_folders(tmp_path: Path) -> None:
    keys = sorted([f"f{i:05d}" for i in range(3000)] + [f"f0{i}/x/{j}" for i in range(40) for j in range(50)])
    index = made(tmp_path / "index", keys)
    found = index.listing()
    assert found.folders == sorted(f"f0{i}" for i in range(40))
    assert [keys[row] for row in found.rows] == [key for key in keys if "/" not in key]
    assert index.listing("f07").folders == ["x"]
    assert len(index.listing("f07/x").rows) == 50
    nothing = made(tmp_path / "none", []).listing()
    assert (nothing.folders, len(nothing.rows)) == ([], 0)


@SAME_FOLDER
@given(keys=KEYS)
def test_labels_of_some_rows_are_those_of_all(tmp_path: Path, keys: list[str]) -> None:
    index = made(tmp_path / "index", keys)
    labels = index.classed()
    every = index.classed().every().tolist()
    assert [labels[position] for position in range(len(keys))] == every
    assert labels.of(np.arange(len(keys))[::-1]).tolist() == every[::-1]
    for outside in (-1, len(keys)):
        with pytest.raises(IndexError):
            labels[outside]


def test_many_keys_are_found_and_take_little_room(tmp_path: Path) -> None:
    keys = [f"{i:06d}" for i in range(30_000)]
    index = made(tmp_path / "index", keys)
    assert index.path.stat().st_size < (41.5 + 6) * len(keys)
    assert [index.row(key) for key in keys] == list(range(len(keys)))
    with pytest.raises(KeyMissingError):
        index.row("x")


def test_keys_may_come_as_an_arrow_array_and_as_a_part_of_one(tmp_path: Path) -> None:
    keys = [f"ä/{i:03d}" for i in range(50)]
    wanted = write_index(tmp_path / "list", content(keys))
    for name, array in (
        ("array", pa.array(keys, pa.large_string())),
        ("part", pa.array(["a", *keys, "ö"], pa.large_string()).slice(1, 50)),
    ):
        assert write_index(tmp_path / name, replace(content(keys), keys=array)) == wanted


@pytest.mark.parametrize("keys", [["b", "a"], ["a", "a"], ["ä", "z"]])
def test_keys_out_of_order_are_refused(tmp_path: Path, keys: list[str]) -> None:
    with pytest.raises(ValueError, match="not sorted"):
        write_index(tmp_path / "index", content(keys))


def test_an_arrow_reader_of_any_kind_reads_it(tmp_path: Path) -> None:
    wanted = content(["a/b", "c"])
    write_index(tmp_path / "index", wanted)
    with pa.memory_map(str(tmp_path / "index")) as file:
        table = pa.ipc.open_file(file).read_all()
        assert table["key"].to_pylist() == ["a/b", "c"]
        assert [shard["id"].hex() for shard in table["shard"].to_pylist()] == [e.id for e in wanted.shards]
        assert table["shard"].to_pylist()[0]["block_offsets"] == [4096, 8192]


def test_columns_are_what_was_written_and_views_of_the_file(tmp_path: Path) -> None:
    wanted = content([f"{i:04d}" for i in range(100)])
    index = made(tmp_path / "index", list(wanted.keys))
    columns = {"shard": index.shard, "block": index.block, "offset": index.offset}
    columns |= {"length": index.lengths, "checksum": index.checksums}
    for name, column in columns.items():
        assert column.tolist() == getattr(wanted, name).tolist()
        assert not column.flags.owndata
        assert not column.flags.writeable
    assert list(index.shards) == list(wanted.shards)
    assert index.shards[-1] == index.shards[1:][0] == wanted.shards[1]
    assert index.file_offsets(np.array([0, 1, 99])).tolist() == [4096, 8192 + 10, 12288 + 990]


def test_a_sample_longer_than_a_span_has_several_pieces(tmp_path: Path) -> None:
    wanted = content(["a", "b"])
    wanted.length[1] = 2 * SPAN + 3
    index = Index(tmp_path / "index", write_index(tmp_path / "index", wanted))
    assert index.pieces(0) == [(0, 0, 1)]
    assert [length for _, _, length in index.pieces(1)] == [SPAN, SPAN, 3]


def test_what_is_not_there_is_said_so(tmp_path: Path) -> None:
    index = made(tmp_path / "index", ["a/b", "c"])
    for key in ("", "a", "a/", "a/bb", "d", "\udce9"):
        with pytest.raises(KeyMissingError):
            index.row(key)
    for row in (-1, 2, 2**63):
        with pytest.raises(KeyMissingError, match="row"):
            index.key(row)
    assert not index.rows_below("nowhere")


def test_the_same_content_is_the_same_version_and_any_other_is_not(tmp_path: Path) -> None:
    one, two = write_index(tmp_path / "1", content(["a", "b"])), write_index(tmp_path / "2", content(["a", "b"]))
    other = content(["a", "b"])
    other.checksum[1] += 1
    assert one == two != write_index(tmp_path / "3", other)


def test_a_flipped_bit_in_the_index_is_noticed_by_verify(tmp_path: Path) -> None:
    index = made(tmp_path / "index", ["a", "b"])
    index.verify()
    data = bytearray((tmp_path / "index").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "index").write_bytes(data)
    with pytest.raises(IndexFormatError):
        index.verify()


@pytest.mark.parametrize("keep", [0, 8, 100, 1000])
def test_an_index_cut_short_is_refused(tmp_path: Path, keep: int) -> None:
    version = write_index(tmp_path / "index", content(["a", "b"]))
    os.truncate(tmp_path / "index", keep)
    with pytest.raises(IndexFormatError):
        Index(tmp_path / "index", version)


def test_an_index_of_another_format_or_kind_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_format, "FORMAT", 99)
    version = write_index(tmp_path / "newer", content(["a", "b"]))
    monkeypatch.undo()
    with pytest.raises(IndexFormatError, match="format 99 was written by a newer release"):
        Index(tmp_path / "newer", version)
    table = pa.table({"x": [1]})
    with pa.OSFile(str(tmp_path / "other"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(IndexFormatError):
        Index(tmp_path / "other", version)
