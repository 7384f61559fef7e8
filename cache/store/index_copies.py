"""Copies of indexes on a node's SSD: all ranks of the node map one, and shared storage gives its bytes once."""

from __future__ import annotations

import hashlib
import logging
import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from deeplink.cache.errors import CatalogError, IndexFormatError
from deeplink.cache.format.block import DIGEST_DIGITS
from deeplink.core.descriptors import opened, try_lock
from deeplink.core.errors import DeepLinkError
from deeplink.core.private import private_folder
from deeplink.core.publish import DRAFT_PREFIX, published_file
from deeplink.core.store_place import file_system, is_shared
from deeplink.core.types import Version

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from deeplink.cache.catalog import Catalog
    from deeplink.cache.format.index import Index
    from deeplink.cache.store.store import Store
    from deeplink.core.clock import Clock

log = logging.getLogger(__name__)

_FOLDER, _COPY, _LOCK = "indexes", ".arrow", ".lock"
_CHUNK = 8 << 20
_LOOK_S = 0.05
_WAIT_S, _SLOWEST_BYTES_PER_S = 30.0, 50e6
"""A copy that another process makes is waited for as long as this many bytes per second take, and a little."""
_AGAIN_S = 600.0
"""A copy that could not be made is not tried again sooner, by any process of the node."""
_GONE_S = 3600.0
"""A copy stays that was opened so recently: its version may be of another catalog than this one."""

_REMEDY = "`deeplink index rebuild` makes it again of its shards."

_said: set[Path] = set()


class IndexCopies:
    """The copies in one store. Safe to use from several threads and processes.

    A copy is compared with the digest that names its version, and appears whole or not at all.
    """

    def __init__(self, store: Store, catalog: Catalog, clock: Clock) -> None:
        self._store, self._catalog, self._clock = store, catalog, clock
        self._folder = store.root / _FOLDER

    def path(self, name: str, version: Version) -> Path:
        """Return where the copy of a version's index is, or would be."""
        return self._folder / f"{name}@{version}{_COPY}"

    def open(self, name: str, version: str | None = None) -> Index:
        """Return the index as `Catalog.open` does: of a catalog that nodes share, mapped from this node's copy."""
        if not is_shared(file_system(self._catalog.root)) or is_shared(file_system(self._store.root)):
            return self._catalog.open(name, version)
        return self.open_copy(name, version)

    def open_copy(self, name: str, version: str | None = None) -> Index:
        """Return the index as `open` does, whatever storage the catalog lies on.

        The copy is made where there is none; another process that makes it is waited for, within a bound. Where
        there cannot be one the catalog's own file is mapped, which is logged once.
        """
        from deeplink.cache.format.index import Index  # noqa: PLC0415 - pyarrow: no agent needs it to start

        chosen = self._catalog.chosen(name, version)
        shared, copy = self._catalog.path(name, chosen), self.path(name, chosen)
        try:
            # The catalog says which versions there are; no byte of the file is read for it.
            size = shared.stat().st_size
        except FileNotFoundError:
            return self._catalog.open(name, chosen)  # says what is missing
        except OSError:
            size = _size(copy)  # the storage is away, the copy is here
        try:
            if problem := self._made(shared, copy, chosen, size):
                return self._fallen_back(name, chosen, problem)
            found = Index(copy, chosen)
            with suppress(OSError):
                os.utime(copy)
        except IndexFormatError as damage:
            with suppress(OSError):
                copy.unlink(missing_ok=True)
            return self._fallen_back(name, chosen, f"its copy was damaged and is removed: {damage}")
        except (DeepLinkError, OSError) as problem:
            return self._fallen_back(name, chosen, str(problem))
        return found

    def _fallen_back(self, name: str, version: Version, problem: str) -> Index:
        index = self._catalog.open(name, version)
        say = log.debug if index.path in _said else log.warning
        _said.add(index.path)
        say("the index of %s@%s is read from shared storage, %s: %s", name, version, index.path, problem)
        return index

    def _made(self, shared: Path, copy: Path, version: Version, size: int) -> str:
        """Return once there is a copy of `size` bytes; why there is none, otherwise."""
        waited_until = self._clock.monotonic() + _WAIT_S + size / _SLOWEST_BYTES_PER_S
        while _size(copy) != size:
            private_folder(self._store.root)
            private_folder(self._folder, parents=False)
            lock = copy.with_suffix(_LOCK)
            with opened(lock, os.O_CREAT | os.O_RDWR) as descriptor:
                if try_lock(descriptor, lock):
                    if problem := self._failed_lately(descriptor):
                        return problem
                    if _size(copy) == size:
                        break
                    with self._noting_failure(descriptor):
                        self._make(shared, copy, version, size)
                    lock.unlink(missing_ok=True)
                    break
            if self._clock.monotonic() > waited_until:
                return "another process has been making a copy for too long"
            self._clock.sleep(_LOOK_S)
        return ""

    def _failed_lately(self, descriptor: int) -> str:
        """Return why the last try to make a copy failed; empty where none did, or long ago."""
        facts = os.fstat(descriptor)
        if not facts.st_size or self._clock.unix() - facts.st_mtime > _AGAIN_S:
            return ""
        return os.pread(descriptor, facts.st_size, 0).decode(errors="replace")

    @contextmanager
    def _noting_failure(self, descriptor: int) -> Iterator[None]:
        """Leave in the lock why a copy could not be made, so that a node's ranks do not try one after another."""
        try:
            yield
        except (DeepLinkError, OSError) as problem:
            with suppress(OSError):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, str(problem).encode(), 0)
            raise

    def _make(self, shared: Path, copy: Path, version: Version, size: int) -> None:
        """Copy the index once; call it with its lock held."""
        for left in self._folder.glob(f"{DRAFT_PREFIX}{copy.name}-*"):  # of processes that were killed
            left.unlink(missing_ok=True)
        self.collect(0.0)
        with self._store.room_for(size), published_file(copy, mode=0o600) as draft:
            digest = hashlib.sha256()
            # Not mapped: a file that is cut short or taken away is an error here, not a signal.
            with shared.open("rb", buffering=0) as source, draft.open("wb") as target:
                while chunk := source.read(_CHUNK):
                    digest.update(chunk)
                    target.write(chunk)
            if digest.hexdigest()[:DIGEST_DIGITS] != version:
                raise CatalogError(f"{shared} is not, byte for byte, the version it is named by", _REMEDY)
        log.info("the index %s was copied to %s", shared, copy)

    def collect(self, unused_before: float) -> int:
        """Remove copies not opened since then (seconds since 1970), or whose version is gone; return how many.

        Ranks that have one mapped read on.
        """
        if not self._catalog.root.is_dir():  # not mounted, perhaps: what is gone is not known
            return 0
        removed = 0
        # Drafts of killed processes, too, and what was noted of failures.
        for path in self._folder.glob("*"):
            with suppress(OSError):
                opened_unix = path.stat().st_mtime
                if opened_unix < unused_before or (
                    self._clock.unix() - opened_unix > _GONE_S and not self._has_version(path)
                ):
                    path.unlink()
                    removed += 1
        return removed

    def _has_version(self, copy: Path) -> bool:
        """Tell whether the catalog has the version of a copy; of another file, False."""
        name, _, version = copy.name.removesuffix(_COPY).rpartition("@")
        try:
            self._catalog.path(name, Version(version)).stat()
        except (FileNotFoundError, DeepLinkError):
            return False
        return True


def copied_bytes(root: Path) -> int:
    """Return the bytes of all copies in the store at `root`."""
    return sum(max(_size(path), 0) for path in (root / _FOLDER).glob(f"*{_COPY}"))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
