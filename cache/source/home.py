"""A packed home: every shard and index once more, on shared or object storage that outlives the nodes' SSDs.

Each file, `<shard>.mdb` or `<name>/<version>.arrow`, appears whole or not at all, and is never changed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from typing_extensions import override

from deeplink.cache.errors import HomeError
from deeplink.cache.format import block
from deeplink.cache.format.access import SourceAccess
from deeplink.cache.format.block import checked_shard_id
from deeplink.core.descriptors import opened
from deeplink.core.publish import DRAFT_PREFIX, published_file
from deeplink.core.types import ShardId

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from deeplink.core.types import Version

_CHUNK = 4 << 20
_ASKED_AT_ONCE = 16
_NO_SHARD = ShardId("0" * 40)
_WHOLE_AT_ONCE = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oci", "memory"}
"""Kinds where a file appears when it is complete: no rename is needed, which would cost a copy."""


def home_beside(catalog: Path) -> str:
    """Return where the home of a catalog is unless another one is named: in a folder beside it."""
    return f"{catalog.absolute()}.home"


def make_home_beside(catalog: Path) -> None:
    """Make that home, which whoever may write to the catalog may then write to.

    Raises HomeError where nothing can be written there.
    """
    folder = Path(home_beside(catalog))
    try:
        if catalog.is_dir() and not folder.exists():
            facts = catalog.stat()
            folder.mkdir()
            mode = facts.st_mode & 0o3777
            try:
                os.chown(folder, -1, facts.st_gid)
            except PermissionError:  # of a group that this user is not in: its rights are not another group's
                mode &= ~0o2070
            folder.chmod(mode)
    except OSError as problem:
        raise HomeError(str(folder), problem.strerror or str(problem)) from problem
    open_home(str(folder)).check_writable()


class PackedHome(Protocol):
    """Where packed files are kept besides the nodes' SSDs. Safe to use from several threads."""

    url: str  # a folder, or any fsspec URL

    def has(self, shard: ShardId, size: int) -> bool:
        """Tell whether a shard of so many bytes is there."""
        return self._size(_file_of(shard)) == size

    def lacking(self, shards: Sequence[tuple[ShardId, int]]) -> list[ShardId]:
        """Return which of some shards, each with its bytes, are not there."""
        with ThreadPoolExecutor(_ASKED_AT_ONCE, thread_name_prefix="deeplink-home") as pool:
            there = list(pool.map(lambda one: self.has(*one), shards))
        return [shard for (shard, _), is_there in zip(shards, there, strict=True) if not is_there]

    def check_writable(self) -> None:
        """Find out whether it can be used at all; a folder is made, and written to, where it is one."""
        self.has(_NO_SHARD, 0)

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

    def verify(self, shard: ShardId) -> None:
        """Read a shard whole and compare it with its name. Raises ShardCorruptError where it differs."""
        with tempfile.TemporaryFile() as file:
            for chunk in self._chunks(_file_of(shard)):
                file.write(chunk)
            file.flush()
            block.verify_shard(file.fileno(), shard)

    def fetch_range(self, shard: ShardId, start: int, length: int) -> bytes:
        """Return a part of a shard's file; the caller verifies it."""
        part = self._part(_file_of(shard), start, length) if length else b""  # object stores have no empty ranges
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


def open_home(url: str, access: str = "") -> PackedHome:
    """Return the home a folder or an fsspec URL names; nothing is looked at yet.

    `access` is that of files that are put into a folder (`SourceAccess`), their owner's alone where it is empty;
    behind a URL the storage's own rules hold.
    """
    if "://" in url and not url.startswith("file://"):
        return RemoteHome(url)
    return FolderHome(url.removeprefix("file://"), access)


class FolderHome(PackedHome):
    """A home in a folder of a file system, usually one that all nodes share."""

    def __init__(self, path: str, access: str = "") -> None:
        self._root = Path(path).expanduser().absolute()
        self._access = SourceAccess.parse(access) if access else None
        self.url = str(self._root)

    @override
    def check_writable(self) -> None:
        with self._errors():
            self._root.mkdir(parents=True, exist_ok=True)
            draft = self._root / f"{DRAFT_PREFIX}{uuid.uuid4().hex}"
            draft.touch()  # not access(2): root squashing, quotas and read-only mounts are beyond it
            draft.unlink()

    @override
    def verify(self, shard: ShardId) -> None:
        with self._errors(), opened(self._root / _file_of(shard)) as descriptor:
            block.verify_shard(descriptor, shard)

    def remove(self, shard: ShardId) -> None:
        """Take a shard away, if it is there."""
        with self._errors():
            (self._root / _file_of(shard)).unlink(missing_ok=True)

    def remove_index(self, name: str, version: Version) -> None:
        """Take the index of a version away, if it is there."""
        with self._errors():
            (self._root / name / f"{version}.arrow").unlink(missing_ok=True)

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
            with published_file(final) as draft:
                draft.touch(0o600)
                shutil.copyfile(path, draft)
                self._admit(draft)

    def _admit(self, draft: Path) -> None:
        mode = self._access.mode if self._access is not None else 0o600
        is_for_group = bool(mode & 0o040) and not mode & 0o004
        if self._access is not None and is_for_group and draft.stat().st_gid != self._access.group:
            try:
                os.chown(draft, -1, self._access.group)
            except PermissionError:  # of a group that this user is not in: nobody else's, then
                mode = 0o600
        draft.chmod(mode)

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
