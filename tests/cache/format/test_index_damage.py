"""An index is damaged in every way: what was restored is right, and the rest is an error of ours and no crash."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deeplink.cache.errors import IndexFormatError, KeyMissingError
from deeplink.cache.format import index_format
from deeplink.cache.format.index import Index
from deeplink.cache.format.index_format import (
    META,
    OFFSETS_1,
    SCHEMA_1,
    SCHEMA_2,
    IndexContent,
    Seal,
    append_seal,
    file_version,
    write_index,
)
from deeplink.cache.format.index_parts import load
from deeplink.core.errors import DeepLinkError
from deeplink.core.types import Version
from tests.cache.format.test_index import content
from tests.cache.format.test_seal import append_older_seal
from tests.effort import examples

KEYS = sorted(f"{folder}/{i:03d}.x" for folder in ("a", "b/q", "zä") for i in range(20))
SAME_FOLDER = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=examples(60)
)


def everything(index: Index) -> list[Any]:
    """Return all that an index says, in words."""
    rows = np.arange(len(index))
    return [
        index.keys(),
        [index.key(row) for row in range(len(index))],
        [index.row(key) for key in KEYS],
        [(folder, index.rows_below(folder), index.classes(folder)) for folder in ("", "a", "b", "zä")],
        [(found.folders, found.rows.tolist()) for found in map(index.listing, ("", "b", "b/q"))],
        index.file_offsets(rows).tolist(),
        [column.tolist() for column in (index.shard, index.block, index.offset, index.lengths, index.checksums)],
        list(index.shards),
        index.classed().every().tolist(),
        index.source,
    ]


def use_all(index: Index) -> None:
    """Ask for everything; what is damaged may be refused, in our own words."""
    rows = np.arange(len(index))
    asked: list[Callable[[], object]] = [
        index.keys,
        *(lambda key=key: index.row(key) for key in [*KEYS[::7], "nothing"]),
        *(lambda row=row: index.key(row) for row in range(len(index))),
        *(lambda folder=folder: index.listing(folder) for folder in ("", "a", "b", "b/q", "zä", "x")),
        *(lambda folder=folder: index.classed(folder).every() for folder in ("", "b")),
        lambda: index.file_offsets(rows),
        lambda: list(index.shards),
        lambda: [index.block_offsets(int(number)) for number in index.shard],
        index.mend,
    ]
    for ask in asked:
        with contextlib.suppress(DeepLinkError):
            ask()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, Version, list[Any]]:
    path = tmp_path_factory.mktemp("index") / "index"
    version = write_index(path, content(KEYS))
    return path.read_bytes(), version, everything(Index(path, version))


def end_of_part(good: bytes, at: int) -> int:
    """Return where what is restored as one ends: all the columns, a parity, a copy of footer or list."""
    found = Seal.find(memoryview(good))
    assert found is not None
    assert found.parities == 2
    ends = [found.covered]
    for size in (found.chunk, found.chunk, found.footer, found.listed, found.listed, found.footer):
        ends.append(ends[-1] + size)
    assert ends[-1] == len(good)
    return next(end for end in ends if at < end)


@SAME_FOLDER
@given(data=st.data())
def test_a_damaged_part_restores_itself(
    tmp_path: Path, whole: tuple[bytes, Version, list[Any]], data: st.DataObject
) -> None:
    good, version, wanted = whole
    at = data.draw(st.integers(0, len(good) - 1))
    stop = min(at + data.draw(st.sampled_from([1, 8, 300])), end_of_part(good, at))
    bad = bytearray(good)
    for i in range(at, stop):
        bad[i] ^= data.draw(st.integers(1, 255))
    (tmp_path / "index").write_bytes(bad)
    index = Index(tmp_path / "index", version)
    with pytest.raises(IndexFormatError):
        index.verify()
    index.mend()
    assert everything(index) == wanted
    assert not index.mend()


@SAME_FOLDER
@given(flips=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(1, 255)), min_size=2, max_size=40))
def test_damage_all_over_is_an_error_and_no_crash(
    tmp_path: Path, whole: tuple[bytes, Version, list[Any]], flips: list[tuple[int, int]]
) -> None:
    good, version, _ = whole
    bad = bytearray(good)
    for at, bits in flips:
        bad[at % len(bad)] ^= bits
    (tmp_path / "index").write_bytes(bad)
    try:
        index = Index(tmp_path / "index", version)
    except IndexFormatError:
        return
    use_all(index)


@SAME_FOLDER
@given(part=st.integers(0, 1 << 20), more=st.booleans())
def test_a_file_of_another_size_is_refused(
    tmp_path: Path, whole: tuple[bytes, Version, list[Any]], part: int, more: bool
) -> None:
    good, version, _ = whole
    cut = good + good[: part % 500 + 1] if more else good[: part % len(good)]
    (tmp_path / "index").write_bytes(cut)
    with pytest.raises(IndexFormatError):
        Index(tmp_path / "index", version)


def said_of_keys(index: Index) -> list[Any]:
    """Return what follows from the keys and from whole columns, in words."""
    count = len(index)
    text, bounds = index.key_text(range(count))
    return [
        [index.row(key) for key in KEYS],
        [index.key(row) for row in range(count)],
        index.keys(),
        [(folder, index.rows_below(folder), index.classes(folder)) for folder in ("", "a", "b", "zä")],
        [(found.folders, found.rows.tolist()) for found in map(index.listing, ("", "b", "b/q"))],
        bytes(text),
        bounds.tolist(),
        index.classed().every().tolist(),
        [index.column(name, range(count)).tolist() for name in ("shard", "block", "lengths", "checksums")],
    ]


@pytest.mark.parametrize("asked", range(9))
@SAME_FOLDER
@given(at=st.integers(0, 1 << 20), bits=st.integers(1, 255))
def test_nothing_wrong_is_said_of_keys_though_nobody_mended(
    tmp_path: Path, whole: tuple[bytes, Version, list[Any]], asked: int, at: int, bits: int
) -> None:
    good, version, _ = whole
    (tmp_path / "good").write_bytes(good)
    sound = Index(tmp_path / "good", version)
    wanted = said_of_keys(sound)[asked]
    bad = bytearray(good)
    bad[at % len(bad)] ^= bits
    (tmp_path / "index").write_bytes(bad)
    assert said_of_keys(Index(tmp_path / "index", version))[asked] == wanted


def test_a_damaged_key_hides_no_sample_and_makes_no_class(tmp_path: Path) -> None:
    path = tmp_path / "index"
    keys = [f"{animal}/{number:05d}" for animal in ("ant", "bee", "cat") for number in range(20_000)]
    version = write_index(path, content(keys))
    good = path.read_bytes()
    for row in (0, 20_000, 30_000, 59_999):
        damage(path, [good.index(keys[row].encode()) + 1])
        assert Index(path, version).row(keys[row]) == row
        assert Index(path, version).key(row) == keys[row]
        with pytest.raises(KeyMissingError):
            Index(path, version).row(keys[row] + "x")
        assert Index(path, version).classes() == ["ant", "bee", "cat"]
        assert np.bincount(Index(path, version).classed().every()).tolist() == [20_000] * 3
        path.write_bytes(good)


def test_keys_that_cannot_be_restored_are_said_to_be_damaged(tmp_path: Path) -> None:
    path = tmp_path / "index"
    version, index, _ = large(path)
    seal = Seal.find(memoryview(path.read_bytes()))
    assert seal is not None
    at = path.read_bytes().index(b"029999030000030001") + 6
    damage(path, [at, at + seal.parities * seal.chunk])
    for ask in (lambda: index.row("030000"), lambda: index.key(30_000), lambda: index.keys(range(30_000, 30_001))):
        with pytest.raises(IndexFormatError, match="more is damaged"):
            ask()
    assert Index(path, version).row("000001") == 1  # what lies elsewhere is right


def large(path: Path) -> tuple[Version, Index, IndexContent]:
    """Return an index of several chunks."""
    wanted = content([f"{i:06d}" for i in range(60_000)])
    version = write_index(path, wanted)
    return version, Index(path, version), wanted


def damage(path: Path, places: list[int]) -> None:
    """Change a byte at each of the places, in the file: who has it mapped sees it."""
    with path.open("r+b") as file:
        for at in places:
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 0x41]))


def place_of(path: Path, column: np.ndarray, row: int) -> int:
    """Return where in the file a cell is."""
    return path.read_bytes().index(column.tobytes()) + row * column.itemsize


def test_a_row_is_mended_in_the_views_that_others_hold(tmp_path: Path) -> None:
    path = tmp_path / "index"
    version, index, wanted = large(path)
    at = place_of(path, index.checksums, 59_000)
    held = Index(path, version).checksums
    damage(path, [at])
    assert index.checksums[59_000] != wanted.checksum[59_000]
    assert not index.mend(np.array([0, 1]))  # lies elsewhere
    assert index.mend(np.array([59_000]))
    assert index.checksums[59_000] == wanted.checksum[59_000]
    assert not index.mend(np.array([59_000]))
    assert held[59_000] != wanted.checksum[59_000]  # each process, and each index, for itself
    with pytest.raises(ValueError, match="read-only"):
        index.checksums[0] = 1


def test_threads_that_meet_damage_at_once_all_mend_it(tmp_path: Path) -> None:
    path = tmp_path / "index"
    _, index, wanted = large(path)
    good, rows = path.read_bytes(), np.array([59_000])
    at = place_of(path, wanted.checksum, 59_000)
    for byte in range(4):
        damage(path, [at + byte])
        # The pages that were put right are this process's own: damage comes to a new mapping.
        fresh = Index(path, index.version)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _, fresh=fresh: fresh.mend(rows), range(16)))
        assert fresh.checksums[59_000] == wanted.checksum[59_000]
        path.write_bytes(good)


def test_more_damage_than_can_be_restored_is_said(tmp_path: Path) -> None:
    path = tmp_path / "index"
    version, index, _ = large(path)
    found = Seal.find(memoryview(path.read_bytes()))
    assert found is not None
    assert len(found.checksums) >= 4
    damage(path, [found.covered - 5, found.covered - 5 - found.parities * found.chunk])
    with pytest.raises(IndexFormatError, match="more is damaged"):
        index.mend()
    assert len(Index(path, version)) == 60_000  # what is read at open is whole


def slots_of(path: Path, version: Version) -> slice:
    """Return where in the file the slots are."""
    slots = load(path).slots
    assert slots is not None
    start = path.read_bytes().index(slots.tobytes())
    return slice(start, start + slots.nbytes)


def test_damaged_slots_do_not_hide_a_key(tmp_path: Path) -> None:
    path = tmp_path / "index"
    version, _, _ = large(path)
    good = bytearray(path.read_bytes())
    where = slots_of(path, version)
    count = (where.stop - where.start) // 4
    rng = np.random.default_rng(0)
    # As if there were no keys, one key, the same keys in other places, and anything.
    for slots in (
        np.full(count, 0xFFFFFFFF),
        np.zeros(count),
        rng.permutation(np.frombuffer(bytes(good[where]), "<u4")),
        rng.integers(0, 1 << 32, count),
        rng.integers(60_000, 1 << 16, count),
    ):
        good[where] = slots.astype("<u4").tobytes()
        path.write_bytes(good)
        index = Index(path, version)
        assert [index.row(f"{i:06d}") for i in (0, 1, 9_999, 59_999)] == [0, 1, 9_999, 59_999]
        with pytest.raises(KeyMissingError):
            index.row("999999")


def test_damaged_slots_are_mended_with_all_else(tmp_path: Path) -> None:
    path = tmp_path / "index"
    version, _, _ = large(path)
    where = slots_of(path, version)
    good = path.read_bytes()[where]
    damage(path, [where.start, where.start + 1])
    index = Index(path, version)
    assert index._file.view[where] != good
    assert index.mend()
    assert index._file.view[where] == good


def test_a_row_of_a_shard_that_there_is_not(tmp_path: Path) -> None:
    path = tmp_path / "index"
    wanted = content(KEYS)
    wanted.block[3] = 4_000_000
    index = Index(path, write_index(path, wanted))
    with pytest.raises(IndexFormatError, match="a row is damaged"):
        index.file_offsets(np.array([3]))
    for number in (2, -1, 1 << 40):
        with pytest.raises(IndexFormatError, match="in shard"):
            index.block_offsets(number)
    with pytest.raises(IndexFormatError, match="in shard 2 of 2"):
        index.shards[2]


def format_1(path: Path, wanted: IndexContent) -> Version:
    """Write an index as release 0.1 did."""
    meta = {"format": 1, "source": wanted.source, "shards": [asdict(entry) for entry in wanted.shards]}
    offsets = np.concatenate([np.asarray(part, "<u8") for part in wanted.block_offsets])
    schema = SCHEMA_1.with_metadata(
        {META: json.dumps(meta, sort_keys=True).encode(), OFFSETS_1: offsets.tobytes()}
    )
    columns = [pa.array(wanted.keys, pa.large_string())]
    columns += [pa.array(getattr(wanted, field.name), field.type) for field in SCHEMA_1 if field.name != "key"]
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        writer.write_batch(pa.record_batch(columns, schema=schema))
    return Version("0" * 40)


def test_an_index_of_format_1_is_read_as_ever(tmp_path: Path, whole: tuple[bytes, Version, list[Any]]) -> None:
    index = Index(tmp_path / "old", format_1(tmp_path / "old", content(KEYS)))
    assert index.format == 1
    assert everything(index) == whole[2]
    assert not index.mend()


def format_2(path: Path, wanted: IndexContent) -> Version:
    """Write an index as it was before there were slots; what its hashes say does not matter."""
    meta = {"format": 2, "samples": len(wanted.keys), "source": wanted.source}
    schema = SCHEMA_2.with_metadata({META: json.dumps(meta, sort_keys=True).encode()})
    count = len(wanted.keys)
    columns = [
        pa.array(wanted.keys, pa.large_string()),
        pa.DictionaryArray.from_arrays(pa.array(wanted.shard, pa.uint32()), index_format._shard_array(wanted)),
        *(pa.array(getattr(wanted, name), kind) for name, kind in index_format.PLACE),
        pa.array(np.zeros(count, np.uint64)),
        pa.array(np.zeros(count, np.uint32)),
    ]
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        writer.write_batch(pa.record_batch(columns, schema=schema))
    append_seal(path, index_format._columns_start(path))
    made = load(path).seal
    assert made is not None
    append_older_seal(path, made.covered)
    return file_version(path)


@pytest.mark.parametrize("keys", [KEYS, [f"{i:06d}" for i in range(30_000)]], ids=["few", "many"])
def test_an_index_of_format_2_is_read_as_ever(tmp_path: Path, keys: list[str]) -> None:
    version = format_2(tmp_path / "old", content(keys))
    index = Index(tmp_path / "old", version)
    new = Index(tmp_path / "new", write_index(tmp_path / "new", content(keys)))
    assert (index.format, new.format) == (2, 3)
    index.verify()
    assert [index.row(key) for key in keys] == list(range(len(keys)))
    assert index.keys() == new.keys() == keys
    assert index.checksums.tolist() == new.checksums.tolist()
    assert list(index.shards) == list(new.shards)
    with pytest.raises(KeyMissingError):
        index.row("none")
    damage(tmp_path / "old", [place_of(tmp_path / "old", index.checksums, len(keys) - 1)])
    mended = Index(tmp_path / "old", version)
    mended.mend()
    assert mended.checksums.tolist() == new.checksums.tolist()


@pytest.mark.parametrize("slots", [-1, 0, 63, 1 << 40, None, "80", 3.5])
def test_a_number_of_slots_that_cannot_be_is_refused(tmp_path: Path, slots: Any) -> None:
    path = tmp_path / "index"
    write_index(path, content(KEYS))
    with pa.memory_map(str(path)) as file:
        batch = pa.ipc.open_file(file).get_batch(0)
        said = json.loads(batch.schema.metadata[META]) | {"slots": slots}
        schema = batch.schema.with_metadata({META: json.dumps(said).encode()})
        with pa.OSFile(str(tmp_path / "other"), "wb") as other, pa.ipc.new_file(other, schema) as writer:
            writer.write_batch(batch.replace_schema_metadata(schema.metadata))
    append_seal(tmp_path / "other", 1000)
    with pytest.raises(IndexFormatError):
        Index(tmp_path / "other", Version("0" * 40))


def test_an_index_that_cannot_be_opened_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Index(tmp_path / "none", Version("0" * 40))
    (tmp_path / "empty").touch()
    with pytest.raises(IndexFormatError):
        Index(tmp_path / "empty", Version("0" * 40))
    with pytest.raises(OSError, match="Errno"):
        Index(tmp_path, Version("0" * 40))


def test_where_the_blocks_lie_is_mended_with_any_row(tmp_path: Path) -> None:
    """The table of the shards is in no cell of a row, and far from them in a large file."""
    _, index, wanted = large(tmp_path / "index")
    offsets = index.shards.block_offsets
    start = (tmp_path / "index").read_bytes().index(offsets.tobytes())
    damage(tmp_path / "index", [start + 1])
    assert offsets.tolist() != np.concatenate(wanted.block_offsets).tolist()
    assert index.mend(np.array([59_999]))
    assert offsets.tolist() == np.concatenate(wanted.block_offsets).tolist()
