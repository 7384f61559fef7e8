"""How many files are asked for at once follows from what the source gives."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pytest
from fsspec.asyn import AsyncFileSystem
from typing_extensions import override

from deeplink.cache.errors import SourceChangedError, SourceError
from deeplink.cache.format.names import Names
from deeplink.cache.pack.building import FileReader
from deeplink.cache.packer import pack
from deeplink.cache.reader import Reader
from deeplink.cache.source.opening import open_source
from deeplink.cache.source.selection import Selection
from deeplink.cache.source.source import EVERYTHING, Listing, Source
from deeplink.core.clock import SystemClock
from tests.waiting import LIMIT_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from deeplink.core.config import Config

HEAD = 7


class Gate:
    """Lets nobody through until so many stand before it at once: proof that they were asked for together."""

    def __init__(self, wanted: int) -> None:
        self.wanted, self.waiting, self.most = wanted, 0, 0
        self.changed = threading.Condition()

    def pass_through(self) -> None:
        with self.changed:
            self.waiting += 1
            self.most = max(self.most, self.waiting)
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.most >= self.wanted, timeout=LIMIT_S)
            self.waiting -= 1


class SlowSource(Source):
    """A source far away that has no call for many files."""

    url, local = "slow://", False

    def __init__(self, files: dict[str, bytes], gate: Gate) -> None:
        self._files, self._gate = files, gate

    @override
    def check(self) -> None:
        return

    @override
    def listing(self, wanted: Selection = EVERYTHING) -> Listing:
        raise NotImplementedError

    @override
    def stat(self, key: str) -> tuple[int, int]:
        return len(self._files[key]), 1

    @override
    def read(self, key: str, size: int) -> bytes:
        self._gate.pass_through()
        return self._files[key]

    @override
    def read_range(self, key: str, start: int, length: int) -> bytes:
        return self._files[key][start : start + length]


def blocks(source: Source, files: dict[str, bytes], each: int) -> Iterator[bytes]:
    names = Names.of(sorted(files))
    sizes = np.array([len(files[name]) for name in names], np.int64)
    runs = [slice(start, min(start + each, len(names))) for start in range(0, len(names), each)]
    with FileReader(source, SystemClock()) as reader:
        for run, arena in reader.runs(names, sizes, runs, HEAD):
            assert arena[:HEAD] == bytes(HEAD)
            assert len(arena) == HEAD + int(sizes[run].sum())
            yield bytes(arena[HEAD:])


def test_files_of_a_slow_source_are_asked_for_together_also_across_blocks() -> None:
    files = {f"{i:03d}": bytes([i]) * (i % 7) for i in range(100)}
    gate = Gate(16)
    found = b"".join(blocks(SlowSource(files, gate), files, 5))
    assert found == b"".join(files.values())
    assert gate.most >= 16


def test_a_warm_folder_is_read_without_threads(source: Path, files: dict[str, bytes]) -> None:
    before = threading.active_count()
    found = b""
    for block in blocks(open_source(str(source)), files, 9):
        found += block
        assert threading.active_count() == before
    assert found == b"".join(files[name] for name in sorted(files))


def test_a_file_that_goes_missing_ahead_is_named(source: Path, files: dict[str, bytes]) -> None:
    (source / max(files)).unlink()
    with pytest.raises(SourceError, match="cannot be read") as missing:
        list(blocks(open_source(str(source)), files, 9))
    assert missing.value.key == max(files)


@pytest.mark.parametrize("change", [b"more", b""])
def test_a_file_of_another_size_is_named(source: Path, files: dict[str, bytes], change: bytes) -> None:
    name = max(files)
    (source / name).write_bytes(files[name] + b"x" if change else files[name][:-1])
    with pytest.raises(SourceChangedError) as changed:
        list(blocks(open_source(str(source)), files, 9))
    assert changed.value.key == name


class SlowBucket(AsyncFileSystem):  # type: ignore[misc]  # fsspec has no types
    """An object store that answers when eight files were asked for at once, and lists one folder at a time."""

    protocol = "slowbucket"
    cachable = False
    objects: dict[str, bytes] = {}  # noqa: RUF012 - the store itself
    waiting = most = 0

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        kind = type(self)
        kind.waiting += 1
        kind.most = max(kind.most, kind.waiting)
        for _attempt in range(1000):
            if kind.most >= 8:
                break
            await asyncio.sleep(0.005)
        kind.waiting -= 1
        return self.objects[path][start:end]

    async def _ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        below = {name for name in self.objects if name.startswith(f"{path}/")}
        parts = {name[len(path) + 1 :].split("/")[0] for name in below}
        return [await self._info(f"{path}/{part}") for part in sorted(parts)]

    async def _info(self, path: str, **_: Any) -> dict[str, Any]:
        if path in self.objects:
            return {"name": path, "size": len(self.objects[path]), "type": "file", "ETag": path}
        if any(name.startswith(f"{path}/") for name in self.objects):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)


@pytest.fixture
def slow_bucket(files: dict[str, bytes]) -> Iterator[str]:
    fsspec.register_implementation("slowbucket", SlowBucket, clobber=True)
    SlowBucket.objects = {f"data/{name}": data for name, data in files.items()} | {"data/a[1]*?.bin": b"odd"}
    SlowBucket.waiting = SlowBucket.most = 0
    yield "slowbucket://data"
    SlowBucket.objects = {}


def test_an_object_store_is_asked_for_many_files_in_a_call(
    slow_bucket: str, config: Config, files: dict[str, bytes]
) -> None:
    assert open_source(slow_bucket).batched
    pack(slow_bucket, "digits", config=config)
    with Reader.open("digits", config=config) as reader:
        found = [bytes(view) for view in reader.read(range(len(reader)))]
        assert dict(zip(reader.index.keys(), found, strict=True)) == files | {"a[1]*?.bin": b"odd"}
    assert SlowBucket.most >= 8
