"""`deeplink://` as a file system: what it says, what it reads, what it refuses, and who reads through it."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import fsspec.generic
import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset
import pyarrow.fs
import pyarrow.parquet as pq
import pytest

from deeplink.cache.format import block
from deeplink.cache.format.block import SPAN
from deeplink.cache.packer import pack
from deeplink.cache.store.store import Store
from deeplink.core.errors import DeepLinkError
from deeplink.fs import library as readahead
from deeplink.fs.filesystem import DeepLinkFileSystem
from deeplink.fs.library import (
    DatasetNotFoundError,
    IsFolderError,
    NotReadError,
    ReadOnlyDatasetError,
    forget_open_datasets,
)
from tests.cache.agents import Agents, config_below, write_tree
from tests.pickled import copied
from tests.waiting import LIMIT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.context import ForkContext, SpawnContext

    from deeplink.core.config import Config

FILES = {
    "a.txt": b"first\nsecond\n",
    "a/deep/er/one": b"1",
    "a/deep/two.bin": bytes(range(256)) * 20,
    "a.d/x": b"",
    "b/ä ö/ü%20#?.txt": "Grüße".encode(),
    "b/[1]*.txt": b"literal",
    "b/1.txt": b"one",
    "b/at@sign": b"@",
    "empty": b"",
}
FOLDERS = ["a", "a.d", "a/deep", "a/deep/er", "b", "b/ä ö"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("filesystem")


@pytest.fixture(scope="module")
def config(base: Path) -> Config:
    config = config_below(base)
    pack(str(write_tree(base / "tree", FILES)), "odd", config=config)
    pack(str(write_tree(base / "other", {"x/1": b"x1", "x/2": b"x2"})), "other", config=config)
    return config


@pytest.fixture
def fs(config: Config) -> DeepLinkFileSystem:
    return DeepLinkFileSystem(config=config)


@pytest.fixture
def local() -> Any:
    return fsspec.filesystem("file")


def below(name: str, paths: list[str]) -> list[str]:
    return sorted(f"{name}/{path}" for path in paths)


# What there is.


def test_the_root_lists_the_datasets(fs: DeepLinkFileSystem) -> None:
    assert fs.ls("deeplink://", detail=False) == ["odd", "other"]
    assert fs.ls("", detail=True)[0] == {"name": "odd", "size": 0, "type": "directory"}
    assert fs.isdir("deeplink://")
    assert fs.find("", maxdepth=1, withdirs=True) == ["odd", "other"]
    assert fs.find("") == [*below("odd", list(FILES)), "other/x/1", "other/x/2"]
    assert fs.glob("*/x/*") == ["other/x/1", "other/x/2"]


def test_a_folder_lists_what_is_directly_in_it_sorted(fs: DeepLinkFileSystem) -> None:
    assert fs.ls("odd", detail=False) == ["odd/a", "odd/a.d", "odd/a.txt", "odd/b", "odd/empty"]
    assert fs.ls("deeplink://odd/a/deep/", detail=False) == ["odd/a/deep/er", "odd/a/deep/two.bin"]
    file = fs.ls("odd/a/deep")[1]
    assert (file["type"], file["size"]) == ("file", 5120)
    assert fs.ls("odd/a/deep/two.bin") == [file] == [fs.info("odd/a/deep/two.bin")]


@pytest.mark.parametrize("path", ["odd", "odd/a", "odd/b/ä ö", "odd/a.d"])
def test_a_folder_is_a_folder(fs: DeepLinkFileSystem, path: str) -> None:
    assert fs.info(path)["type"] == "directory"
    assert (fs.exists(path), fs.isdir(path), fs.isfile(path)) == (True, True, False)


@pytest.mark.parametrize(
    "path",
    ["odd/none", "odd/a/deep/er/one/x", "odd/empty/", "none", "none/x", "odd@0000", "o dd", "@", "odd@", "odd//a",
     "odd/./a", "odd/../odd/empty", "odd/a.tx", "odd/a/dee"],
)  # fmt: skip
def test_what_is_not_there_is_an_error_that_says_so(fs: DeepLinkFileSystem, path: str) -> None:
    if path == "odd/empty/":  # fsspec takes the slash for nothing
        assert fs.isfile(path)
        return
    assert (fs.exists(path), fs.isdir(path), fs.isfile(path)) == (False, False, False)
    for call in (fs.info, fs.ls, fs.cat, fs.open, fs.checksum, fs.size, fs.modified):
        with pytest.raises(FileNotFoundError) as refused:
            call(path)
        assert isinstance(refused.value, DatasetNotFoundError)
        assert refused.value.errno == 2
    assert fs.find(path) == []
    assert fs.glob(path) == []


def test_a_catalog_that_cannot_be_read_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    config = config_below(tmp_path)
    (config.catalog / "broken" / "latest").mkdir(parents=True)
    with pytest.raises(DeepLinkError, match="Is a directory"):
        DeepLinkFileSystem(config=config).exists("broken/x")


def test_find_walks_as_deep_as_told(fs: DeepLinkFileSystem, local: Any, base: Path) -> None:
    assert fs.find("odd") == below("odd", list(FILES))
    assert fs.find("odd", withdirs=True) == sorted(["odd", *below("odd", [*FILES, *FOLDERS])])
    assert fs.find("odd/a") == ["odd/a/deep/er/one", "odd/a/deep/two.bin"]
    assert fs.find("odd/a.txt") == ["odd/a.txt"]
    assert fs.find("odd/a", prefix="de") == ["odd/a/deep/er/one", "odd/a/deep/two.bin"]
    assert fs.find("odd", prefix="a.") == ["odd/a.d/x", "odd/a.txt"]
    assert fs.find("odd", prefix="z") == []
    for depth in (1, 2, 3, None):
        for withdirs in (False, True):
            expected = [
                path.removeprefix(f"{base}/tree").lstrip("/")
                for path in local.find(f"{base}/tree", maxdepth=depth, withdirs=withdirs)
            ]
            found = [path.removeprefix("odd").lstrip("/") for path in fs.find("odd", depth, withdirs)]
            assert found == sorted(expected)
    with pytest.raises(ValueError, match="maxdepth"):
        fs.find("odd", maxdepth=0)


@pytest.mark.parametrize(
    "pattern",
    ["*", "**", "*/*", "a*", "a*/**", "**/*.txt", "b/?.txt", "b/[12].txt", "*/", "a/**/one", "none*", "e*/"],
)
@pytest.mark.parametrize("depth", [None, 1, 2])
def test_patterns_match_as_they_do_on_a_local_folder(
    fs: DeepLinkFileSystem, local: Any, base: Path, pattern: str, depth: int | None
) -> None:
    expected = [
        path.removeprefix(f"{base}/tree/") for path in local.glob(f"{base}/tree/{pattern}", maxdepth=depth)
    ]
    found = [path.removeprefix("odd/") for path in fs.glob(f"odd/{pattern}", maxdepth=depth)]
    assert [path.rstrip("/") for path in found] == [
        path.rstrip("/") for path in expected if path.rstrip("/") != f"{base}/tree"
    ] or (pattern == "**" and found[0] == "odd" and found[1:] == expected[1:])


def test_walking_sees_every_folder_and_file(fs: DeepLinkFileSystem, base: Path) -> None:
    expected = {
        f"odd{root.removeprefix(f'{base}/tree')}": (sorted(folders), sorted(files))
        for root, folders, files in os.walk(base / "tree")
    }
    assert {root: (sorted(folders), sorted(files)) for root, folders, files in fs.walk("odd")} == expected
    assert list(fs.walk("odd/none")) == []


def test_sizes_are_the_bytes_of_the_files(fs: DeepLinkFileSystem) -> None:
    assert fs.du("odd") == sum(map(len, FILES.values()))
    assert fs.du("odd/a", total=False) == {"odd/a/deep/er/one": 1, "odd/a/deep/two.bin": 5120}
    assert fs.size("odd/empty") == 0
    assert fs.sizes(["odd/b/1.txt", "odd/a.txt"]) == [3, 13]


def test_checksums_are_of_the_content(fs: DeepLinkFileSystem) -> None:
    assert fs.checksum("odd/b/1.txt") == block.checksum(b"one")
    assert fs.info("odd/b/1.txt")["ETag"] == f"{block.checksum(b'one'):016x}"
    assert fs.checksum("odd/empty") == fs.checksum("odd/a.d/x")
    assert fs.ukey("odd/empty") != fs.ukey("odd/a.txt")
    assert fs.checksum("odd") == fs.checksum("odd/a") == int(fs.info("odd")["version"], 16)
    assert fs.modified("odd/a.txt") == fs.created("odd") > fs.modified("odd/a.txt").replace(year=2020)
    with pytest.raises(NotImplementedError):
        fs.sign("odd/a.txt")


# Bytes.


@pytest.mark.parametrize("path", FILES)
def test_every_file_is_read_whole_whatever_its_name(fs: DeepLinkFileSystem, path: str) -> None:
    assert fs.cat_file(f"odd/{path}") == fs.cat(f"deeplink://odd/{path}") == FILES[path]
    with fs.open(f"odd/{path}") as file:
        assert file.read() == FILES[path]
    assert fs.head(f"odd/{path}", 3) == FILES[path][:3]
    assert fs.tail(f"odd/{path}", 3) == FILES[path][-3:]


@pytest.mark.parametrize(
    ("start", "end"), [(0, 10), (250, 300), (None, 5), (5000, None), (-10, None), (-10, -5), (9000, 9010), (10, 5)]
)
def test_ranges_are_slices(fs: DeepLinkFileSystem, start: int | None, end: int | None) -> None:
    path = "odd/a/deep/two.bin"
    expected = FILES["a/deep/two.bin"][start:end]
    assert fs.cat_file(path, start, end) == expected
    assert fs.cat_file(path, start=start, end=end) == expected
    assert fs.cat_ranges([path, path, "odd/empty"], [start, 1, 0], [end, 3, 9]) == [expected, b"\1\2", b""]
    assert fs.cat_ranges([path], start, end, max_gap=100) == [expected]
    assert fs.cat([path, "odd/empty"], start=start, end=end) == {path: expected, "odd/empty": b""}


@pytest.fixture
def batches(fs: DeepLinkFileSystem, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many samples each read asked for."""
    kind = type(fs._library.at("odd").reader)
    sizes: list[int] = []
    read = kind.read

    def counted(self: Any, rows: Any) -> Any:
        sizes.append(len(rows))
        return read(self, rows)

    monkeypatch.setattr(kind, "read", counted)
    return sizes


def test_several_files_are_read_at_once(fs: DeepLinkFileSystem, batches: list[int], tmp_path: Path) -> None:
    paths = [f"odd/{path}" for path in FILES] + ["other/x/1"]
    assert fs.cat(paths) == {f"odd/{path}": data for path, data in FILES.items()} | {"other/x/1": b"x1"}
    assert batches == [len(FILES), 1]
    assert fs.cat("odd/a", recursive=True) == {
        "odd/a/deep/er/one": b"1",
        "odd/a/deep/two.bin": FILES["a/deep/two.bin"],
    }
    assert fs.cat("odd/b/*.txt") == {"odd/b/1.txt": b"one", "odd/b/[1]*.txt": b"literal"}
    assert batches[2:] == [2, 2]
    fs.get("odd", str(tmp_path / "all"), recursive=True)
    assert batches[4:] == [len(FILES)]
    targets = [str(tmp_path / "b"), str(tmp_path / "a")]
    fs.get(["odd/b/1.txt", "deeplink://odd/a.txt"], targets)
    assert batches[5:] == [2]
    assert [Path(target).read_bytes() for target in targets] == [b"one", FILES["a.txt"]]


def test_reading_ahead_is_bounded(
    fs: DeepLinkFileSystem, batches: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readahead, "_BATCH_SAMPLES", 2)
    fs.get("odd", str(tmp_path / "two"), recursive=True)
    assert sum(batches) == len(FILES)
    assert max(batches) == 2
    batches.clear()
    monkeypatch.setattr(readahead, "_BATCH_BYTES", 10)
    fs.get("odd/b", str(tmp_path / "few"), recursive=True)
    assert sum(batches) == 4
    with pytest.raises(DatasetNotFoundError):
        fs.get(["odd/a.txt", "odd/none"], [str(tmp_path / "there"), str(tmp_path / "not")])
    assert (tmp_path / "there").read_bytes() == FILES["a.txt"]


def test_what_cannot_be_read_is_raised_left_out_or_returned(fs: DeepLinkFileSystem) -> None:
    paths = ["odd/none", "odd/a", "odd/b/1.txt"]
    with pytest.raises(DatasetNotFoundError):
        fs.cat(["odd/b/1.txt", "odd/none"])
    assert fs.cat(paths, on_error="omit") == {"odd/b/1.txt": b"one"}
    returned = fs.cat(paths, on_error="return")
    assert list(returned) == sorted(paths)
    assert isinstance(returned["odd/none"], FileNotFoundError)
    assert isinstance(returned["odd/a"], IsADirectoryError)
    ranges = fs.cat_ranges(paths, 0, 2)
    assert [type(part) for part in ranges] == [DatasetNotFoundError, IsFolderError, bytes]
    with pytest.raises(DatasetNotFoundError):
        fs.cat_ranges(paths, 0, 2, on_error="raise")
    with pytest.raises(IsFolderError):
        fs.cat("odd/a")
    for call in (fs.cat, lambda paths, **options: fs.cat_ranges(paths, 0, 1, **options)):
        with pytest.raises(ValueError, match="on_error"):
            call(paths, on_error="ignore")


def test_a_sample_that_cannot_be_had_is_an_os_error_with_its_cause(tmp_path: Path) -> None:
    config = config_below(tmp_path, shard_bytes=4096)
    source = write_tree(tmp_path / "tree", {f"{i}": bytes([i]) * 4000 for i in range(4)})
    pack(str(source), "lost", config=config)
    fs = DeepLinkFileSystem(config=config)
    index = fs._library.at("lost").reader.index
    Store(config.store).remove(index.shards[int(index.shard[2])].id)
    source.rename(tmp_path / "moved")
    with pytest.raises(OSError, match=r"'2'.*cannot be read") as refused:
        fs.cat(["lost/0", "lost/2"])
    assert isinstance(refused.value, NotReadError)
    returned = fs.cat(["lost/0", "lost/2", "lost/3"], on_error="return")
    assert [type(part) for part in returned.values()] == [bytes, NotReadError, bytes]


def test_samples_come_from_members_in_one_round(tmp_path: Path) -> None:
    agents = Agents(tmp_path)
    try:
        for name in ("n0", "n1"):
            agents.start(name)
        config = agents.config()
        pack(
            str(write_tree(tmp_path / "t", FILES)),
            "odd",
            config=config,
            members=agents.members,
            token=agents.token,
        )
        fs = DeepLinkFileSystem(config=config)
        assert fs.cat([f"odd/{path}" for path in FILES]) == {f"odd/{path}": data for path, data in FILES.items()}
        with fs.open("odd/a.txt", "r") as file:
            assert file.readline() == "first\n"
        stats = fs._library.at("odd").reader.stats()
        assert (stats.peer_samples, stats.local_samples, stats.source_samples) == (len(FILES) + 1, 0, 0)
        fs._library.at("odd").reader.close()
    finally:
        agents.stop_all()


def test_an_open_file_seeks_and_reads_as_a_local_one_does(fs: DeepLinkFileSystem) -> None:
    data = FILES["a/deep/two.bin"]
    with fs.open("odd/a/deep/two.bin") as file:
        assert (file.readable(), file.seekable(), file.writable(), file.size) == (True, True, False, len(data))
        assert file.seek(-5, os.SEEK_END) == len(data) - 5
        assert file.read() == data[-5:]
        file.seek(10)
        room = bytearray(7)
        assert file.readinto(room) == 7
        assert room == data[10:17]
        copy = copied(file)
        assert copy.tell() == 17
        assert copy.read(3) == file.read(3) == data[17:20]
    assert file.closed
    with fs.open("odd/a.txt", "r", encoding="utf-8") as text:
        assert list(text) == ["first\n", "second\n"]
    with fs.open("odd/b/ä ö/ü%20#?.txt", "rt") as text:
        assert text.read() == "Grüße"
    with pytest.raises(IsFolderError):
        fs.open("odd/a")
    with pytest.raises(ValueError, match="mode"):
        fs.open("odd/a.txt", "b")


def test_of_a_long_sample_only_the_pieces_are_read_that_are_wanted(tmp_path: Path) -> None:
    data = os.urandom(1 << 20) * 65  # two pieces and a bit
    config = config_below(tmp_path, shard_bytes=1 << 27)
    pack(str(write_tree(tmp_path / "long", {"long": data})), "long", config=config)
    fs = DeepLinkFileSystem(config=config)
    reader = fs._library.at("long").reader
    with fs.open("long/long") as file:
        assert file.size == len(data)
        file.seek(-100, os.SEEK_END)
        assert file.read() == data[-100:]
        file.seek(SPAN - 5)
        assert file.read(10) == data[SPAN - 5 :][:10]
        copy = copied(file)
        assert copy.read(10) == file.read(10) == data[SPAN + 5 :][:10]
    for start, end in ((0, 10), (-5, None), (SPAN - 1, SPAN + 1), (None, 3), (9, 3), (2 * SPAN, None)):
        assert fs.cat_file("long/long", start, end) == data[start:end]
    assert reader.stats().local_samples == 0  # it was never read whole
    with fs.open("long/long") as file:
        assert file.read() == data
    assert fs.cat_file("long/long", None, None) == data

    # A damaged piece: the sample comes whole, from where it is right.
    forget_open_datasets()
    fs = DeepLinkFileSystem(config=config)
    with Store(config.store).path(reader.index.shards[0].id).open("r+b") as shard:
        shard.seek(int(reader.index.block_offsets(0)[1]) + 1000)
        shard.write(b"damage")
    with fs.open("long/long") as file:
        assert file.read(10) == data[:10]
        file.seek(SPAN + 990)
        assert file.read(100) == data[SPAN + 990 :][:100]
    assert fs._library.at("long").reader.stats().source_samples == 1


def test_getting_writes_whole_files(fs: DeepLinkFileSystem, tmp_path: Path) -> None:
    fs.get("odd", str(tmp_path / "all"), recursive=True)
    assert {
        str(p.relative_to(tmp_path / "all")): p.read_bytes() for p in (tmp_path / "all").rglob("*") if p.is_file()
    } == FILES
    fs.get(["odd/a.txt", "odd/b/1.txt"], str(tmp_path / "list") + "/")
    assert sorted(path.name for path in (tmp_path / "list").iterdir()) == ["1.txt", "a.txt"]
    with (tmp_path / "stream").open("wb") as stream:
        fs.get_file("odd/a.txt", stream)
    assert (tmp_path / "stream").read_bytes() == FILES["a.txt"]
    seen = fsspec.callbacks.Callback()
    fs.get_file("odd/a/deep/two.bin", str(tmp_path / "new" / "two"), callback=seen)
    assert (seen.size, seen.value) == (5120, 5120)
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        fs.get_file("odd/a.txt", str(tmp_path / "taken"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all", "list", "new", "stream", "taken"]


def test_a_mapper_reads_as_a_dict_does(fs: DeepLinkFileSystem) -> None:
    mapper = fs.get_mapper("odd/a")
    assert dict(mapper) == {"deep/er/one": b"1", "deep/two.bin": FILES["a/deep/two.bin"]}
    with pytest.raises(KeyError):
        mapper["deep"]
    with pytest.raises(ReadOnlyDatasetError):
        mapper["new"] = b""
    with pytest.raises(KeyError):  # fsspec's own answer to any refusal
        del mapper["deep/er/one"]
    assert len(mapper) == 2


# Nothing is written.

WRITES: list[Callable[[DeepLinkFileSystem], Any]] = [
    lambda fs: fs.mkdir("odd/new"),
    lambda fs: fs.makedirs("odd/new", exist_ok=True),
    lambda fs: fs.makedir("odd/new"),
    lambda fs: fs.mkdirs("odd/new"),
    lambda fs: fs.rmdir("odd/a"),
    lambda fs: fs.rm("odd/a.txt"),
    lambda fs: fs.rm(["odd/a"], recursive=True),
    lambda fs: fs.rm_file("odd/a.txt"),
    lambda fs: fs._rm("odd/a.txt"),
    lambda fs: fs.delete("odd/a.txt"),
    lambda fs: fs.touch("odd/a.txt"),
    lambda fs: fs.touch("odd/new", truncate=False),
    lambda fs: fs.pipe("odd/new", b"x"),
    lambda fs: fs.pipe({"odd/new": b"x"}),
    lambda fs: fs.pipe_file("odd/new", b"x"),
    lambda fs: fs.write_bytes("odd/new", b"x"),
    lambda fs: fs.write_text("odd/new", "x"),
    lambda fs: fs.put("/etc/hostname", "odd/new"),
    lambda fs: fs.put_file("/etc/hostname", "odd/new"),
    lambda fs: fs.upload("/etc/hostname", "odd/new"),
    lambda fs: fs.cp("odd/a.txt", "odd/new"),
    lambda fs: fs.copy("odd/a.txt", "odd/new"),
    lambda fs: fs.cp_file("odd/a.txt", "odd/new"),
    lambda fs: fs.mv("odd/a.txt", "odd/new"),
    lambda fs: fs.move("odd/a.txt", "odd/new"),
    lambda fs: fs.rename("odd/a.txt", "odd/new"),
    lambda fs: fs.start_transaction(),
    lambda fs: fs.get_mapper("odd/new", create=True),
    *(lambda fs, mode=mode: fs.open("odd/a.txt", mode) for mode in ("w", "wb", "a", "ab", "x", "xb", "r+", "r+b")),
    lambda fs: fs.open("odd/a.txt").write(b"x"),
    lambda fs: fs.open("odd/a.txt").writelines([b"x"]),
    lambda fs: fs.open("odd/a.txt").truncate(0),
]


@pytest.mark.parametrize("write", WRITES)
def test_every_call_that_writes_is_refused(
    fs: DeepLinkFileSystem, write: Callable[[DeepLinkFileSystem], Any]
) -> None:
    with pytest.raises(PermissionError, match="read only") as refused:
        write(fs)
    assert isinstance(refused.value, ReadOnlyDatasetError)
    assert refused.value.errno == 30
    assert "deeplink pack" in refused.value.remedy


def test_no_call_of_fsspec_that_writes_was_forgotten() -> None:
    """What fsspec itself does not implement is either implemented here or refused."""
    ours = {
        name
        for kind in DeepLinkFileSystem.__mro__[:-2]
        if kind.__module__.startswith("deeplink")
        for name in vars(kind)
    }
    writing = {
        "mkdir", "makedirs", "rmdir", "write_text", "pipe_file", "pipe", "put_file", "put", "cp_file", "copy",
        "mv", "rm_file", "_rm", "rm", "touch", "write_bytes", "makedir", "mkdirs", "cp", "move", "rename",
        "delete", "upload", "start_transaction",
    }  # fmt: skip
    assert writing <= ours
    reading = {
        "current", "transaction", "end_transaction", "invalidate_cache", "ls", "walk", "find", "du", "glob",
        "exists", "lexists", "info", "checksum", "size", "sizes", "isdir", "isfile", "read_text", "cat_file",
        "cat_ranges", "cat", "get_file", "get", "head", "tail", "expand_path", "open", "ukey", "read_block",
        "to_json", "from_json", "to_dict", "from_dict", "get_mapper", "clear_instance_cache", "created",
        "modified", "tree",
        "read_bytes", "listdir", "stat", "disk_usage", "download", "sign", "fsid", "unstrip_protocol",
    }  # fmt: skip
    public = {name for name in vars(fsspec.AbstractFileSystem) if not name.startswith("_") and name.islower()}
    attributes = {
        "cachable", "blocksize", "sep", "protocol", "async_impl", "mirror_sync_methods", "root_marker",
        "transaction_type",
    }  # fmt: skip
    assert public - attributes - reading <= writing, "a call of a newer fsspec: does it write?"


# Versions and instances.


def test_an_instance_stays_at_its_version_and_a_new_one_sees_the_newest(tmp_path: Path) -> None:
    config = config_below(tmp_path)
    tree = write_tree(tmp_path / "tree", {"x": b"old"})
    first = pack(str(tree), "moving", config=config).version
    old = fsspec.filesystem("deeplink", config=config)
    assert old.cat("moving/x") == b"old"
    write_tree(tree, {"x": b"new!", "y": b""})
    second = pack(str(tree), "moving", config=config).version
    assert old.cat("moving/x") == b"old"
    assert old.ls("moving", detail=False) == ["moving/x"]
    new = fsspec.filesystem("deeplink", config=config)
    assert new is not old
    assert new.cat("moving/x") == b"new!"
    assert new != old
    for fs in (old, new):
        assert fs.cat(f"moving@{first}/x") == fs.cat(f"moving@{first[:8]}/x") == b"old"
        assert fs.cat(f"moving@{second}/x") == b"new!"
        assert fs.ls(f"moving@{first[:8]}", detail=False) == [f"moving@{first[:8]}/x"]
    assert fsspec.filesystem("deeplink", config=config, versions={"moving": first}).cat("moving/x") == b"old"
    copy = copied(old)
    assert copy == old
    assert hash(copy) == hash(old)
    assert copy.cat("moving/x") == b"old"
    assert (first != second, old.versions, new.versions) == (True, {"moving": first}, {"moving": second})


def test_json_keeps_the_versions(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPLINK_CATALOG", str(config.catalog))
    monkeypatch.setenv("DEEPLINK_STORE", str(config.store))
    fs = fsspec.filesystem("deeplink")
    version = fs.info("odd")["version"]
    assert json.loads(fs.to_json())["versions"] == {"odd": version}
    again = fsspec.AbstractFileSystem.from_json(fs.to_json())
    assert (type(again), again.versions) == (DeepLinkFileSystem, {"odd": version})


def test_unknown_options_are_refused(config: Config) -> None:
    with pytest.raises(TypeError, match="versoins"):
        fsspec.filesystem("deeplink", config=config, versoins={})
    assert fsspec.filesystem("deeplink", config=config, use_listings_cache=False).exists("odd")


def test_urls_open_without_a_file_system_object(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPLINK_CATALOG", str(config.catalog))
    monkeypatch.setenv("DEEPLINK_STORE", str(config.store))
    with fsspec.open("deeplink://odd/b/1.txt") as file:
        assert file.read() == b"one"
    fs, path = fsspec.url_to_fs("deeplink://odd/a.txt")
    assert (fs.cat(path), fs.unstrip_protocol(path)) == (FILES["a.txt"], "deeplink://odd/a.txt")
    assert [file.path for file in fsspec.open_files("deeplink://odd/a/deep/*.bin")] == ["odd/a/deep/two.bin"]


@pytest.mark.parametrize("line", ["import fsspec", "import fsspec, deeplink.fs.filesystem"])
def test_fsspec_finds_it_by_its_entry_point_or_once_it_is_imported(line: str) -> None:
    found = subprocess.run(
        [sys.executable, "-c", f"{line}; print(fsspec.get_filesystem_class('deeplink').__module__)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=LIMIT_S,
    )
    assert found.stdout.strip() == "deeplink.fs.filesystem"


def _first_line(fs: DeepLinkFileSystem, results: Any) -> None:
    with fs.open("odd/a.txt", "r") as file:
        results.put(file.readline())


@pytest.mark.parametrize("how", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_it_goes_with_a_process_however_that_is_started(fs: DeepLinkFileSystem, how: Any) -> None:
    assert fs.cat("odd/empty") == b""
    context: ForkContext | SpawnContext = multiprocessing.get_context(how)
    results = context.Queue()
    process = context.Process(target=_first_line, args=(fs, results))
    process.start()
    assert results.get(timeout=LIMIT_S) == "first\n"
    process.join(LIMIT_S)
    assert process.exitcode == 0


def test_threads_share_an_instance(fs: DeepLinkFileSystem) -> None:
    with ThreadPoolExecutor(8) as pool:
        read = list(pool.map(fs.cat_file, [f"odd/{path}" for path in FILES] * 20))
    assert read == list(FILES.values()) * 20


# Who reads through it.


@pytest.fixture(scope="module")
def tables(base: Path) -> Iterator[DeepLinkFileSystem]:
    tree = base / "tables"
    for split, rows in (("train", 50), ("test", 10)):
        (tree / "parquet" / f"split={split}").mkdir(parents=True)
        (tree / "csv").mkdir(exist_ok=True)
        table = pa.table({"n": list(range(rows)), "text": [f"row {i}" for i in range(rows)]})
        pq.write_table(table, tree / "parquet" / f"split={split}" / "0.parquet", row_group_size=20)
        pa.csv.write_csv(table, tree / "csv" / f"{split}.csv")
    config = config_below(base, catalog=base / "tables-catalog")
    pack(str(tree), "tables", config=config)
    return DeepLinkFileSystem(config=config)


def test_pyarrow_reads_a_packed_tree(tables: DeepLinkFileSystem) -> None:
    arrow = pa.fs.PyFileSystem(pa.fs.FSSpecHandler(tables))
    dataset = pa.dataset.dataset("tables/parquet", filesystem=arrow, partitioning="hive")
    assert dataset.count_rows() == 60
    assert dataset.to_table(filter=pa.dataset.field("split") == "test")["n"].to_pylist() == list(range(10))
    assert pq.read_table("tables/parquet/split=train/0.parquet", filesystem=arrow).num_rows == 50
    with arrow.open_input_stream("tables/csv/train.csv") as stream:
        assert pa.csv.read_csv(stream)["text"][49].as_py() == "row 49"
    infos = arrow.get_file_info(pa.fs.FileSelector("tables", recursive=True))
    assert sum(info.type == pa.fs.FileType.File for info in infos) == 4
    assert arrow.get_file_info("tables/none").type == pa.fs.FileType.NotFound
    with pytest.raises(PermissionError):
        arrow.delete_file("tables/csv/train.csv")
    # pyarrow finds the file system by its URL, too, once it may ask fsspec.
    assert pa.dataset.dataset("tables/csv", filesystem=tables, format="csv").count_rows() == 60


def test_other_file_systems_stand_on_it(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Archives in samples, compression, copies kept by fsspec, a folder as root, a copy of a tree."""
    tree = base / "chained"
    tree.mkdir()
    with zipfile.ZipFile(tree / "a.zip", "w") as archive:
        archive.writestr("in.txt", "zipped")
    (tree / "b.txt.gz").write_bytes(gzip.compress(b"text"))
    config = config_below(base, catalog=base / "chained-catalog")
    pack(str(tree), "odd", config=config)
    monkeypatch.setenv("DEEPLINK_CATALOG", str(config.catalog))
    monkeypatch.setenv("DEEPLINK_STORE", str(config.store))
    with fsspec.open("zip://in.txt::deeplink://odd/a.zip") as file:
        assert file.read() == b"zipped"
    with fsspec.open("deeplink://odd/b.txt.gz", "rt", compression="infer") as file:
        assert file.read() == "text"
    kept = {"cache_storage": str(base / "kept")}
    with fsspec.open("simplecache::deeplink://odd/b.txt.gz", simplecache=kept) as file:
        assert gzip.decompress(file.read()) == b"text"
    folder = fsspec.filesystem("dir", path="odd", fs=fsspec.filesystem("deeplink"))
    assert folder.ls("", detail=False) == ["a.zip", "b.txt.gz"]
    fsspec.generic.rsync("deeplink://odd", f"file://{base}/copied")
    assert sorted(path.name for path in (base / "copied").iterdir()) == ["a.zip", "b.txt.gz"]
    assert "b.txt.gz" in fsspec.filesystem("deeplink").tree("odd")


def test_an_image_folder_loader_reads_through_it(base: Path) -> None:
    """torchvision's ImageFolder, on an fsspec file system in place of os: find_classes, make_dataset, loader."""
    from PIL import Image

    tree = base / "pictures"
    for number in range(12):
        folder = tree / "train" / "cab"[number % 3]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4), number).save(folder / f"{number}.png")
    write_tree(tree, {"train/a/notes.txt": b"no picture"})
    config = config_below(base, catalog=base / "pictures-catalog")
    pack(str(tree), "pictures", config=config)
    fs = fsspec.filesystem("deeplink", config=config)
    root = "deeplink://pictures/train"
    classes = sorted(entry["name"].rpartition("/")[2] for entry in fs.ls(root) if entry["type"] == "directory")
    assert classes == ["a", "b", "c"]
    samples = [
        (f"{folder}/{name}", label)
        for label, target in enumerate(classes)
        for folder, _, names in sorted(fs.walk(f"{root}/{target}"))
        for name in sorted(names)
        if name.endswith(".png")
    ]
    assert len(samples) == 12
    for path, label in samples:
        with fs.open(path, "rb") as file:
            picture = Image.open(file).convert("L")
        number = int(Path(path).stem)
        assert (picture.getpixel((0, 0)), "cab"[number % 3]) == (number, classes[label])
