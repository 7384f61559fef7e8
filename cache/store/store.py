"""One node's folder of sealed shards, which agent, packer and training processes use at once.

Nothing is remembered but what is in the folder.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from deeplink.cache.errors import ShardCorruptError, StoreError, StoreFullError
from deeplink.cache.format import block
from deeplink.cache.format.block import checked_shard_id, is_shard_id
from deeplink.core.descriptors import opened
from deeplink.core.private import PrivateFolderError, private_folder
from deeplink.core.publish import DRAFT_PREFIX, fsync_path, published_file, write_text
from deeplink.core.types import ShardId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

log = logging.getLogger(__name__)

_SHARD = ".mdb"
"""A sealed shard; appears whole, never changes."""
_VERIFIED = ".verified"
"""Beside a shard: the identity of the very file that was read and found whole."""
_USED = ".used"
"""Beside a shard: its modification time is when the shard was last read."""
_WANTED = ".wanted"
"""A folder with a file for each shard that was lost here and is to be brought again."""
_DROPPED = ".dropped"
"""A folder with a file for each shard that left for want of room or use, and stays away until it is asked for."""
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_UNREAD = {errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.ESTALE, errno.ETIMEDOUT}
_DRAFT_KEPT_S = 3600.0
_MOST_QUARANTINED = 4
"""Damaged files kept for a look; they must not fill the SSD."""


def _identity(facts: os.stat_result) -> dict[str, int]:
    """Return numbers that tell a file from every other, and from itself before it was changed."""
    return {"dev": facts.st_dev, "ino": facts.st_ino, "size": facts.st_size, "mtime_ns": facts.st_mtime_ns}


def _look_at(root: Path) -> tuple[dict[ShardId, os.stat_result], dict[ShardId, os.stat_result]]:
    """Return what the file system says of all shards below `root`, and of the marks that they were verified."""
    files: dict[ShardId, os.stat_result] = {}
    marks: dict[ShardId, os.stat_result] = {}
    # One pass over the folder: an agent is asked twice a second, about thousands of shards.
    with os.scandir(root) as entries:
        for entry in entries:
            name, dot, kind = entry.name.partition(".")
            into = {_SHARD: files, _VERIFIED: marks}.get(dot + kind)
            if into is not None and is_shard_id(name):
                with contextlib.suppress(FileNotFoundError):  # removed since
                    into[ShardId(name)] = entry.stat()
    return files, marks


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """What a store holds."""

    shards: int
    bytes: int  # of all shards' files
    free_bytes: int  # of the store's file system
    ids: tuple[ShardId, ...]  # sorted
    verified: int = field(
        metadata={"wire": "verified_shards"}
    )  # of the shards: read whole on this mount and found right
    verified_bytes: int
    sizes: tuple[int, ...]  # bytes of each shard, in the order of `ids`


class Store:
    """The shards in one folder. Safe to use from several threads and processes."""

    def __init__(self, root: Path, *, make: bool = True) -> None:
        """Use `root`; with `make` it is made when it is not there, for this user alone."""
        self.root = root
        self.reserve: Callable[[int], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
        """Entered with the bytes of a shard while it comes; may drop others, or raise StoreFullError."""
        self.missed: Callable[[ShardId], None] = lambda _shard: None
        """Called, and must return at once, with shards that others ask for and that are not here."""
        self._seen: dict[ShardId, tuple[int, ...]] = {}
        if make:
            self.make()

    def make(self) -> None:
        """Make its folder where it is not there, for this user alone."""
        with self._errors():
            private_folder(self.root)  # the files may be copies of some that others must not read

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except PrivateFolderError:
            raise
        except OSError as problem:
            raise StoreError(self.root, problem.strerror or str(problem)) from problem

    def path(self, shard: ShardId) -> Path:
        """Return where a shard's file is, or would be."""
        return self._beside(shard, _SHARD)

    def _beside(self, shard: ShardId, kind: str) -> Path:
        return self.root / f"{checked_shard_id(shard)}{kind}"

    def has(self, shard: ShardId) -> bool:
        """Tell whether a shard is here, damaged or not."""
        return self.path(shard).is_file()

    def has_whole(self, shard: ShardId, size: int) -> bool:
        """Tell whether a shard is here with all the bytes its file is to have; looks at no byte of them."""
        try:
            return self.path(shard).stat().st_size == size
        except OSError:
            return False

    def inode(self, shard: ShardId) -> int:
        """Return the inode of a shard's file, 0 where it is not here: tells whether it is still the one opened."""
        try:
            return self.path(shard).stat().st_ino
        except OSError:
            return 0

    def ids(self) -> list[ShardId]:
        """Return the names of all shards here, sorted."""
        found = (path.stem for path in self.root.glob(f"*{_SHARD}"))
        return sorted(ShardId(name) for name in found if is_shard_id(name))

    def status(self) -> StoreStatus:
        """Return what is here now."""
        with self._errors():
            files, marks = _look_at(self.root)
            sizes = {shard: files[shard].st_size for shard in sorted(files)}
            verified = [
                shard for shard in sizes if shard in marks and self._is_mark_of(shard, marks[shard], files[shard])
            ]
            return StoreStatus(
                shards=len(sizes),
                bytes=sum(sizes.values()),
                free_bytes=self.free_bytes(),
                ids=tuple(sizes),
                verified=len(verified),
                verified_bytes=sum(sizes[shard] for shard in verified),
                sizes=tuple(sizes.values()),
            )

    def free_bytes(self) -> int:
        """Return the bytes the store's file system has left for this user."""
        return shutil.disk_usage(self.root).free

    def is_verified(self, shard: ShardId) -> bool:
        """Tell whether the very file that is here now was read and found whole on this mount."""
        try:
            return self._is_mark_of(shard, self._beside(shard, _VERIFIED).stat(), self.path(shard).stat())
        except OSError:
            self._seen.pop(shard, None)
            return False

    def _is_mark_of(self, shard: ShardId, mark: os.stat_result, file: os.stat_result) -> bool:
        """Tell whether a shard's mark says that a file was verified; reads a mark only when it is new."""
        found = _identity(file)
        seen = (mark.st_ino, mark.st_mtime_ns, *found.values())
        if self._seen.get(shard) == seen:  # asked of every shard twice a second
            return True
        try:
            if json.loads(self._beside(shard, _VERIFIED).read_text(encoding="ascii")) != found:
                return False
        except (OSError, ValueError):
            self._seen.pop(shard, None)
            return False
        self._seen[shard] = seen
        return True

    def _set_verified(self, shard: ShardId, identity: dict[str, int]) -> None:
        try:
            write_text(self._beside(shard, _VERIFIED), json.dumps(identity), durable=False)
        except OSError as problem:
            # Only speed is lost: an unmarked shard is read with system calls.
            log.warning("shard %s cannot be marked as verified: %s", shard, problem)

    def verified_unix(self, shard: ShardId) -> float:
        """Return when the file that is here now was last found whole, seconds since 1970; 0 where it was not."""
        try:
            return self._beside(shard, _VERIFIED).stat().st_mtime if self.is_verified(shard) else 0.0
        except FileNotFoundError:
            return 0.0

    def touch(self, shard: ShardId) -> None:
        """Note that a shard is being read; a disk that takes no writes is no reason not to read it."""
        mark = self._beside(shard, _USED)
        with contextlib.suppress(OSError):
            mark.touch(mode=0o600)

    def used_unix(self, shard: ShardId) -> float:
        """Return when a shard was last read, or came here, seconds since 1970; 0 where it is not here."""
        try:
            came = self.path(shard).stat().st_mtime
        except OSError:
            return 0.0
        with contextlib.suppress(OSError):
            return max(came, self._beside(shard, _USED).stat().st_mtime)
        return came

    def lost(self) -> list[ShardId]:
        """Return the shards that were lost here and have not come back, sorted."""
        lost = self._noted(_WANTED)
        for shard in lost:
            if self.has(shard):
                self._take_back(_WANTED, shard)
        return [shard for shard in lost if not self.has(shard)]

    def dismissed(self) -> set[ShardId]:
        """Return the shards that were dropped and have not come again."""
        return set(self._noted(_DROPPED))

    def _note(self, kind: str, shard: ShardId) -> None:
        with contextlib.suppress(OSError):
            private_folder(self.root / kind, parents=False)
            (self.root / kind / shard).touch(mode=0o600)

    def _take_back(self, kind: str, shard: ShardId) -> None:
        with contextlib.suppress(OSError):
            (self.root / kind / shard).unlink(missing_ok=True)

    def _noted(self, kind: str) -> list[ShardId]:
        return sorted(ShardId(path.name) for path in (self.root / kind).glob("*") if is_shard_id(path.name))

    def _came(self, shard: ShardId, identity: dict[str, int]) -> None:
        """Note that a shard has come, and was read and found whole."""
        self._set_verified(shard, identity)
        self._take_back(_WANTED, shard)
        self._take_back(_DROPPED, shard)

    def verify(self, shard: ShardId) -> bool:
        """Read all of a shard; mark it verified if it is whole. False: it was not, and is in quarantine now."""
        with opened(self.path(shard)) as descriptor:
            before = _identity(os.fstat(descriptor))
            try:
                block.verify_shard(descriptor, shard)
            except ShardCorruptError as problem:
                self.quarantine(shard, str(problem), inode=before["ino"])
                return False
            except OSError as problem:
                if is_doubtful(problem):
                    with contextlib.suppress(OSError):
                        self.doubt(shard)
                raise
        self._set_verified(shard, before)
        return True

    def doubt(self, shard: ShardId) -> bool:
        """Take a shard for unverified from now on: it gave a reader wrong bytes. False: it was so already."""
        try:
            self._beside(shard, _VERIFIED).unlink()
        except FileNotFoundError:
            return False
        return True

    def add(self, shard: ShardId, chunks: Iterable[bytes], total: int) -> bool:
        """Take a shard's file in `chunks` of `total` bytes; it appears once verified. False: it was here."""
        if self.has_whole(shard, total):  # of one that was cut off, what comes takes the place
            return False
        with self.room_for(total):
            try:
                with published_file(self.path(shard), mode=0o600) as draft:
                    _write_chunks(draft, shard, chunks, total)
                    with opened(draft) as descriptor:
                        block.verify_shard(descriptor, shard)
                        identity = _identity(os.fstat(descriptor))
            except OSError as problem:
                self.raise_as_store_error(problem, total)
        self._came(shard, identity)
        return True

    @contextlib.contextmanager
    def room_for(self, total: int) -> Iterator[None]:
        """Keep room for a shard of `total` bytes while it is being written."""
        with contextlib.ExitStack() as kept:
            with self._errors():
                kept.enter_context(self.reserve(total))
                free = self.free_bytes()
            if free < total:
                raise StoreFullError(self.root, total, free)
            yield

    def adopt(self, draft: Path, shard: ShardId) -> bool:
        """Move a sealed file of this file system, just read back, into the store. False: it was here."""
        with self._errors():
            identity = _identity(draft.stat())
            if self.has_whole(shard, identity["size"]):
                draft.unlink()
                return False
            draft.rename(self.path(shard))  # also in place of one that was cut off
            fsync_path(self.root)
        self._came(shard, identity)
        return True

    def raise_as_store_error(self, problem: OSError, needed: int) -> NoReturn:
        """Raise what writing below the store met as StoreFullError or StoreError."""
        if problem.errno in _NO_ROOM:
            raise StoreFullError(self.root, needed, self.free_bytes()) from problem
        raise StoreError(self.root, problem.strerror or str(problem)) from problem

    def remove(self, shard: ShardId) -> bool:
        """Remove a shard; readers that have it open read on. False: it was not here."""
        self.doubt(shard)
        try:
            self.path(shard).unlink()
        except FileNotFoundError:
            return False
        self.doubt(shard)  # another process may have verified it meanwhile
        self._beside(shard, _USED).unlink(missing_ok=True)
        self._take_back(_WANTED, shard)
        return True

    def drop(self, shard: ShardId) -> bool:
        """Remove a shard that is not to come again before it is asked for. False: it was not here."""
        if self.has(shard):  # noted first: once it is seen gone, it is also seen to stay away
            self._note(_DROPPED, shard)
        return self.remove(shard)

    def quarantine(self, shard: ShardId, why: str, *, inode: int | None = None) -> bool:
        """Take a damaged shard out of service, keeping the file. False: it was no longer here."""
        folder = self.root / "quarantine"
        try:
            if inode is not None and self.path(shard).stat().st_ino != inode:
                return False
            private_folder(folder)
            self.path(shard).rename(folder / f"{shard}-{time.time_ns()}{_SHARD}")
            self.doubt(shard)
            self._note(_WANTED, shard)
            kept = sorted(folder.iterdir(), key=lambda path: path.name.partition("-")[2])
            for older in kept[:-_MOST_QUARANTINED]:
                older.unlink(missing_ok=True)
        except PrivateFolderError as refused:
            log.warning("shard %s is damaged and cannot be put aside: %s. %s", shard, refused, refused.remedy)
            return False
        except OSError:  # another process was first, or the disk takes no writes: readers skip it by themselves
            return False
        log.error("shard %s is damaged and was put into %s: %s", shard, folder, why)
        return True

    def sweep(self, now: float) -> int:
        """Remove drafts that were not written to for an hour; return how many."""
        removed = 0
        for path in self.root.glob(f"{DRAFT_PREFIX}*"):
            try:
                if now - path.stat().st_mtime <= _DRAFT_KEPT_S:
                    continue
            except OSError:  # published since, or unreadable: not a reason to remove it
                continue
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
                removed += 1
        return removed


def is_doubtful(problem: Exception) -> bool:
    """Tell whether an error met in reading a shard means that it no longer counts as verified.

    Wrong bytes do. So do unreadable ones, which are no proof of damage and may be a matter of a moment: but
    touching such a page of a mapped file would kill the process.
    """
    return isinstance(problem, ShardCorruptError) or (isinstance(problem, OSError) and problem.errno in _UNREAD)


def _write_chunks(draft: Path, shard: ShardId, chunks: Iterable[bytes], total: int) -> None:
    written = 0
    with draft.open("wb") as file:
        for chunk in chunks:
            written += len(chunk)
            if written > total:
                raise ShardCorruptError(shard, f"more than the {total:,} bytes announced")
            file.write(chunk)
    if written != total:
        raise ShardCorruptError(shard, f"{written:,} of {total:,} bytes came")
