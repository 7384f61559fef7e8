"""A packed home: every shard and index once more, on shared or object storage that outlives the nodes' SSDs.

Each file, `<shard>.mdb` or `<name>/<version>.arrow`, appears whole or not at all, and is never changed.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
import tempfile
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from typing_extensions import override

from deeplink.cache.errors import HomeError, ShardCorruptError
from deeplink.cache.format import block
from deeplink.cache.format.block import checked_shard_id
from deeplink.cache.source.source import SourceAccess
from deeplink.core.descriptors import opened
from deeplink.core.errors import DeepLinkError
from deeplink.core.publish import DRAFT_PREFIX, published_file
from deeplink.core.types import ShardId, Version

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from deeplink.cache.catalog import Catalog
    from deeplink.cache.format.index import Index

    Others = Callable[[int, ShardId], list[SourceAccess]]

log = logging.getLogger(__name__)

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

    def readmit(self, shards: Sequence[ShardId], others: Others) -> list[ShardId]:
        """Let shards' files be read by those who may read what is packed now, no more and no fewer.

        `others` returns the access of a user's other datasets that have a shard: that user's file stays as wide.
        Return the shards whose files cannot be changed.
        """
        with ThreadPoolExecutor(_ASKED_AT_ONCE, thread_name_prefix="deeplink-home") as pool:
            done = list(pool.map(lambda shard: self._readmit(shard, others), shards))
        return [shard for shard, is_done in zip(shards, done, strict=True) if not is_done]

    def _readmit(self, _shard: ShardId, _others: Others) -> bool:
        return True  # behind a URL the storage's own rules hold

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


@dataclass(frozen=True, slots=True)
class HomeCopy:
    """A shard's open file in a home that is a folder. Its bytes may be anything."""

    descriptor: int
    facts: os.stat_result
    access: SourceAccess | None  # whom the kernel lets read it; None: that is not known

    @property
    def identity(self) -> tuple[int, ...]:
        """Another one as soon as its bytes are others."""
        facts = self.facts
        return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns


class FolderHome(PackedHome):
    """A home in a folder of a file system, usually one that all nodes share."""

    def __init__(self, path: str, access: str = "") -> None:
        self._root = Path(path).expanduser().absolute()
        self._access = SourceAccess.parse(access) if access else SourceAccess(os.geteuid(), os.getegid(), 0o600)
        self.url = str(self._root)

    @contextmanager
    def copy_of(self, shard: ShardId) -> Iterator[HomeCopy]:
        """Open a shard's file. Raises HomeError, also where that is no file, or one with other names."""
        # Others may write to the folder: what they put there in a shard's place must not be taken for one.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        with self._errors(), opened(self._root / _file_of(shard), flags) as descriptor:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode) or facts.st_nlink != 1:
                raise HomeError(self.url, f"shard {shard} is no file of its own there")
            folder = SourceAccess.of_folder(Path(f"/proc/self/fd/{descriptor}").readlink().parent)
            yield HomeCopy(descriptor, facts, folder and folder.narrowed(facts))

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
                with opened(draft) as descriptor:
                    _admit(descriptor, self._access)

    @override
    def _put(self, name: str, path: Path) -> bool:
        is_there = self._size(name) == path.stat().st_size
        if is_there and not self._is_shut(name):
            return False
        try:
            self._write(name, path)
        except HomeError:
            if not is_there:
                raise
            log.info("home %s: %s stays another user's, who alone may replace it", self.url, name)
        return not is_there

    def _is_shut(self, name: str) -> bool:
        """Tell whether a file is another user's, and for fewer than may read what is packed."""
        with self._errors():
            facts = (self._root / name).lstat()
        return facts.st_uid != os.geteuid() and facts.st_mode & 0o044 < self._access.mode & 0o044

    @override
    def _readmit(self, shard: ShardId, others: Others) -> bool:
        own = self._access
        try:
            if _is_admitted((self._root / _file_of(shard)).lstat(), own):
                return True
            with self.copy_of(shard) as copy:
                theirs = others(copy.facts.st_uid, shard)
                wanted = max([own, *theirs], key=lambda one: one.mode)
                if copy.facts.st_uid == os.geteuid():
                    if wanted.mode & ~copy.facts.st_mode or not _is_of_group(copy.facts, wanted):
                        # A file of ours that is for fewer may have been put in its place.
                        block.verify_shard(copy.descriptor, shard)
                    _admit(copy.descriptor, wanted)
                elif wanted is own and not any(
                    one.mode == own.mode and _is_admitted(copy.facts, one) for one in theirs
                ):  # what is for another group is not narrower
                    self._replace(shard, copy.descriptor)
        except FileNotFoundError:  # nobody reads what is not there
            return True
        except (HomeError, OSError, ShardCorruptError) as problem:
            log.info("home %s: shard %s stays readable by whom it was: %s", self.url, shard, problem)
            return False
        return True

    def _replace(self, shard: ShardId, descriptor: int) -> None:
        with published_file(self._root / _file_of(shard)) as draft:
            draft.touch(0o600)
            with os.fdopen(os.dup(descriptor), "rb") as file, draft.open("r+b") as into:
                shutil.copyfileobj(file, into, _CHUNK)
                into.flush()
                block.verify_shard(into.fileno(), shard)
                _admit(into.fileno(), self._access)

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


def _is_admitted(facts: os.stat_result, access: SourceAccess) -> bool:
    return facts.st_mode & 0o777 == access.mode and _is_of_group(facts, access)


def _is_of_group(facts: os.stat_result, access: SourceAccess) -> bool:
    return facts.st_gid == access.group or not access.is_for_group


def _admit(descriptor: int, access: SourceAccess) -> None:
    """Let an open file of ours be read by the group, or by all, as the source is."""
    mode = access.mode
    if not _is_of_group(os.fstat(descriptor), access):
        try:
            os.fchmod(descriptor, 0o600)  # not for a group that it is not meant for, meanwhile
            os.chown(descriptor, -1, access.group)
        except PermissionError:  # of a group that this user is not in: nobody else's, then
            mode = 0o600
    os.fchmod(descriptor, mode)


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


def readmit(home: PackedHome, catalog: Catalog, name: str, shards: Collection[ShardId]) -> None:
    """Let shards at home be read as the source of dataset `name` is, whoever put them there."""
    if stay := home.readmit(list(shards), _OtherDatasets(catalog, name, shards)):
        said = "%d shards at home %s, of another user, are readable by others than the source is"
        log.warning(said, len(stay), home.url)


class _OtherDatasets:
    """The access of datasets that have some shards, too, by their publisher; looked for when it is needed."""

    def __init__(self, catalog: Catalog, but: str, shards: Collection[ShardId]) -> None:
        self._catalog, self._but, self._shards = catalog, but, shards
        self._lock = threading.Lock()

    def __call__(self, publisher: int, shard: ShardId) -> list[SourceAccess]:
        with self._lock:
            return self._found.get((publisher, shard), [])

    @cached_property
    def _found(self) -> dict[tuple[int, ShardId], list[SourceAccess]]:
        found: dict[tuple[int, ShardId], list[SourceAccess]] = {}
        for index, access in self._indexes():
            with suppress(DeepLinkError, OSError):
                publisher = index.path.stat().st_uid
                for shard in {entry.id for entry in index.shards}.intersection(self._shards):
                    found.setdefault((publisher, shard), []).append(access)
        return found

    def _indexes(self) -> Iterator[tuple[Index, SourceAccess]]:
        """Yield the indexes of the other datasets, with the access of their newest; a part's is its own."""
        from deeplink.cache.format.index import Index  # noqa: PLC0415 - pyarrow: no agent needs it to start

        catalog, but = self._catalog, self._but  # who packs a dataset again says who may read it
        # What is damaged, removed meanwhile, or says nothing, opens nothing. Parts first: a merge hides none.
        for path in [path for path in catalog.unmerged() if path.parents[1].name != but]:
            with suppress(DeepLinkError, OSError, ValueError):
                index = Index(path, Version(""))
                yield index, SourceAccess.parse(index.access)
        for name in [name for name in catalog.names() if name != but]:
            with suppress(DeepLinkError, OSError, ValueError):
                access = SourceAccess.parse(catalog.open(name).access)
                for version in catalog.versions(name):
                    with suppress(DeepLinkError):
                        yield catalog.open(name, version), access
