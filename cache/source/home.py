"""A packed home: every shard and index once more, on shared or object storage that outlives the nodes' SSDs.

Each file, `<shard>.mdb` or `<name>/<version>.arrow`, appears whole or not at all, and is never changed.
"""

from __future__ import annotations

import os
import shutil
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from typing_extensions import override

from deeplink.cache.errors import HomeError
from deeplink.cache.format.block import checked_shard_id
from deeplink.core.publish import DRAFT_PREFIX, published_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deeplink.core.types import ShardId, Version

_CHUNK = 4 << 20
_WHOLE_AT_ONCE = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oci", "memory"}
"""Kinds where a file appears when it is complete: no rename is needed, which would cost a copy."""


class PackedHome(Protocol):
    """Where packed files are kept besides the nodes' SSDs. Safe to use from several threads."""

    url: str  # a folder, or any fsspec URL

    def has(self, shard: ShardId, size: int) -> bool:
        """Tell whether a shard of so many bytes is there."""
        return self._size(_file_of(shard)) == size

    def put(self, shard: ShardId, path: Path) -> bool:
        """Keep the sealed file at `path` as a shard. False: it was there."""
        return self._put(_file_of(shard), path)

    def put_index(self, name: str, version: Version, path: Path) -> bool:
        """Keep the index at `path` as a version of dataset `name`. False: it was there."""
        return self._put(f"{name}/{version}.arrow", path)

    def fetch(self, shard: ShardId, size: int) -> Iterator[bytes]:
        """Yield a shard's file in pieces, `size` bytes in all; the caller verifies them."""
        came = 0
        for chunk in self._chunks(_file_of(shard)):
            came += len(chunk)
            yield chunk
        if came != size:
            raise HomeError(self.url, f"shard {shard} has {came:,} bytes there instead of {size:,}")

    def fetch_range(self, shard: ShardId, start: int, length: int) -> bytes:
        """Return a part of a shard's file; the caller verifies it."""
        part = self._part(_file_of(shard), start, length)
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


def _file_of(shard: ShardId) -> str:
    return f"{checked_shard_id(shard)}.mdb"


def open_home(url: str) -> PackedHome:
    """Return the home a folder or an fsspec URL names; nothing is looked at yet."""
    if "://" not in url:
        return FolderHome(url)
    return FolderHome(url.removeprefix("file://")) if url.startswith("file://") else RemoteHome(url)


class FolderHome(PackedHome):
    """A home in a folder of a file system, usually one that all nodes share."""

    def __init__(self, path: str) -> None:
        self._root = Path(path).absolute()
        self.url = str(self._root)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as problem:
            raise HomeError(self.url, problem.strerror or str(problem)) from problem

    @override
    def _size(self, name: str) -> int | None:
        with self._errors():
            try:
                return (self._root / name).stat().st_size
            except FileNotFoundError:
                return None

    @override
    def _write(self, name: str, path: Path) -> None:
        final = self._root / name
        with self._errors():
            final.parent.mkdir(parents=True, exist_ok=True)
            with published_file(final, mode=0o644) as draft:
                shutil.copyfile(path, draft)

    @override
    def _chunks(self, name: str) -> Iterator[bytes]:
        with self._errors(), (self._root / name).open("rb") as file:
            while chunk := file.read(_CHUNK):
                yield chunk

    @override
    def _part(self, name: str, start: int, length: int) -> bytes:
        with self._errors(), (self._root / name).open("rb", buffering=0) as file:
            file.seek(start)
            return file.read(length)


class RemoteHome(PackedHome):
    """A home on whatever fsspec can reach and write."""

    def __init__(self, url: str) -> None:
        if "@" in url.partition("://")[2].partition("/")[0]:
            raise HomeError("(hidden)", "the URL holds credentials, which the index would show")
        import fsspec  # noqa: PLC0415 - fsspec: no agent needs it to start

        self.url = url.rstrip("/")
        try:
            # What others put there must be seen.
            self._fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except (ValueError, ImportError, OSError, TypeError) as problem:
            raise HomeError(self.url, str(problem).partition("\n")[0]) from problem
        self._root = str(root).rstrip("/")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as problem:
            # What a driver raises is its own affair: botocore, aiohttp, paramiko ...
            raise HomeError(self.url, f"{type(problem).__name__}: {problem}".partition("\n")[0]) from problem

    @override
    def _size(self, name: str) -> int | None:
        with self._errors():
            try:
                found = self._fs.info(f"{self._root}/{name}").get("size")
            except FileNotFoundError:
                return None
            return None if found is None else int(found)

    @override
    def _write(self, name: str, path: Path) -> None:
        kinds = self._fs.protocol if isinstance(self._fs.protocol, tuple) else (self._fs.protocol,)
        final = f"{self._root}/{name}"
        folder, _, last = final.rpartition("/")
        at_once = bool(_WHOLE_AT_ONCE.intersection(kinds))
        target = final if at_once else f"{folder}/{DRAFT_PREFIX}{last}-{uuid.uuid4().hex[:12]}"
        with self._errors():
            self._fs.makedirs(folder, exist_ok=True)
            self._fs.put_file(os.fspath(path), target)
            if not at_once:
                self._fs.mv(target, final)

    @override
    def _chunks(self, name: str) -> Iterator[bytes]:
        with self._errors(), self._fs.open(f"{self._root}/{name}", "rb", block_size=_CHUNK) as file:
            while chunk := file.read(_CHUNK):
                yield chunk

    @override
    def _part(self, name: str, start: int, length: int) -> bytes:
        with self._errors():
            part: bytes = self._fs.cat_file(f"{self._root}/{name}", start=start, end=start + length)
            return part
