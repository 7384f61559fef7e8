"""A packed home: every shard and every index once more, on shared or object storage that outlives the nodes' SSDs.

    <home>/<shard>.mdb              a sealed shard
    <home>/<name>/<version>.arrow   an index

Each file appears whole or not at all, and is never changed.
"""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import fsspec
from typing_extensions import override

from deeplink.cache.errors import HomeError
from deeplink.cache.layout import checked_shard_id
from deeplink.publish import DRAFT_PREFIX, published_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deeplink.types import ShardId, Version

_CHUNK = 4 << 20
_WHOLE_AT_ONCE = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oci", "memory"}
"""Kinds where a file appears when it is complete: no rename is needed, which would cost a copy."""


class PackedHome(Protocol):
    """Where packed files are kept besides the nodes' SSDs. Safe to use from several threads.

    Attributes:
        url: a folder, or any fsspec URL.
    """

    url: str

    def has(self, shard: ShardId, size: int) -> bool:
        """Tell whether a shard of so many bytes is there.

        Raises:
            HomeError: the home cannot be asked.
        """
        return self._size(f"{checked_shard_id(shard)}.mdb") == size

    def put(self, shard: ShardId, path: Path) -> bool:
        """Keep the sealed file at `path` as a shard. False: it was there.

        Raises:
            HomeError: the home does not take it.
        """
        return self._put(f"{checked_shard_id(shard)}.mdb", path)

    def put_index(self, name: str, version: Version, path: Path) -> bool:
        """Keep the index at `path` as a version of dataset `name`. False: it was there.

        Raises:
            HomeError: the home does not take it.
        """
        return self._put(f"{name}/{version}.arrow", path)

    def fetch(self, shard: ShardId, size: int) -> Iterator[bytes]:
        """Yield a shard's file in pieces, `size` bytes in all; whoever takes them verifies them.

        Raises:
            HomeError: it is not there, is not of that size, or cannot be read.
        """
        came = 0
        for chunk in self._chunks(f"{checked_shard_id(shard)}.mdb"):
            came += len(chunk)
            yield chunk
        if came != size:
            raise HomeError(self.url, f"shard {shard} has {came:,} bytes there instead of {size:,}")

    def fetch_range(self, shard: ShardId, start: int, length: int) -> bytes:
        """Return a part of a shard's file; whoever takes it verifies it.

        Raises:
            HomeError: it is not there, ends before, or cannot be read.
        """
        part = self._part(f"{checked_shard_id(shard)}.mdb", start, length)
        if len(part) != length:
            raise HomeError(self.url, f"shard {shard} ends too soon there")
        return part

    def _put(self, name: str, path: Path) -> bool:
        if self._size(name) == path.stat().st_size:
            return False
        self._write(name, path)
        return True

    def _size(self, name: str) -> int | None: ...

    def _write(self, name: str, path: Path) -> None: ...

    def _chunks(self, name: str) -> Iterator[bytes]: ...

    def _part(self, name: str, start: int, length: int) -> bytes: ...


def open_home(url: str) -> PackedHome:
    """Return the home a folder or an fsspec URL names; nothing is looked at yet.

    Raises:
        HomeError: the URL is of an unknown kind.
    """
    if "://" not in url:
        return FolderHome(url)
    return FolderHome(url.removeprefix("file://")) if url.startswith("file://") else RemoteHome(url)


class FolderHome(PackedHome):
    """A home in a folder of a file system, usually one that all nodes share."""

    def __init__(self, path: str) -> None:
        self._root = Path(path).absolute()
        self.url = str(self._root)

    def _failed(self, problem: OSError) -> HomeError:
        return HomeError(self.url, problem.strerror or str(problem))

    @override
    def _size(self, name: str) -> int | None:
        try:
            return (self._root / name).stat().st_size
        except FileNotFoundError:
            return None
        except OSError as problem:
            raise self._failed(problem) from problem

    @override
    def _write(self, name: str, path: Path) -> None:
        final = self._root / name
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            with published_file(final, mode=0o644) as draft:
                shutil.copyfile(path, draft)
        except OSError as problem:
            raise self._failed(problem) from problem

    @override
    def _chunks(self, name: str) -> Iterator[bytes]:
        try:
            with (self._root / name).open("rb") as file:
                while chunk := file.read(_CHUNK):
                    yield chunk
        except OSError as problem:
            raise self._failed(problem) from problem

    @override
    def _part(self, name: str, start: int, length: int) -> bytes:
        try:
            with (self._root / name).open("rb", buffering=0) as file:
                file.seek(start)
                return file.read(length)
        except OSError as problem:
            raise self._failed(problem) from problem


class RemoteHome(PackedHome):
    """A home on whatever fsspec can reach and write."""

    def __init__(self, url: str) -> None:
        if "@" in url.partition("://")[2].partition("/")[0]:
            raise HomeError("(hidden)", "the URL holds credentials, which the index would show")
        self.url = url.rstrip("/")
        try:
            # What others put there must be seen.
            self._fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except (ValueError, ImportError, OSError, TypeError) as problem:
            raise HomeError(self.url, str(problem).partition("\n")[0]) from problem
        self._root = str(root).rstrip("/")

    def _failed(self, problem: Exception) -> HomeError:
        return HomeError(self.url, f"{type(problem).__name__}: {problem}".partition("\n")[0])

    @override
    def _size(self, name: str) -> int | None:
        try:
            found = self._fs.info(f"{self._root}/{name}").get("size")
        except FileNotFoundError:
            return None
        except Exception as problem:
            # What a driver raises is its own affair: botocore, aiohttp, paramiko ...
            raise self._failed(problem) from problem
        return None if found is None else int(found)

    @override
    def _write(self, name: str, path: Path) -> None:
        kinds = self._fs.protocol if isinstance(self._fs.protocol, tuple) else (self._fs.protocol,)
        final = f"{self._root}/{name}"
        folder, _, last = final.rpartition("/")
        at_once = bool(_WHOLE_AT_ONCE.intersection(kinds))
        target = final if at_once else f"{folder}/{DRAFT_PREFIX}{last}-{uuid.uuid4().hex[:12]}"
        try:
            self._fs.makedirs(folder, exist_ok=True)
            self._fs.put_file(os.fspath(path), target)
            if not at_once:
                self._fs.mv(target, final)
        except Exception as problem:
            raise self._failed(problem) from problem

    @override
    def _chunks(self, name: str) -> Iterator[bytes]:
        try:
            with self._fs.open(f"{self._root}/{name}", "rb", block_size=_CHUNK) as file:
                while chunk := file.read(_CHUNK):
                    yield chunk
        except HomeError:
            raise
        except Exception as problem:
            raise self._failed(problem) from problem

    @override
    def _part(self, name: str, start: int, length: int) -> bytes:
        try:
            part: bytes = self._fs.cat_file(f"{self._root}/{name}", start=start, end=start + length)
        except Exception as problem:
            raise self._failed(problem) from problem
        return part
