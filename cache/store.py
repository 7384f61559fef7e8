"""One node's folder of sealed shards.

    <root>/<shard>.mdb         a sealed shard; appears whole, never changes
    <root>/<shard>.verified    says that this very file was read and found whole (device, inode, size, time)
    <root>/<shard>.used        when it was last read: its modification time
    <root>/quarantine/         shards found damaged, kept for a look
    <root>/.wanted/<shard>     a shard that was lost here and is to be brought again
    <root>/.dropped/<shard>    a shard that left for want of room or use, and stays away until it is asked for
    <root>/.pins/              what running jobs need (`pins`)
    <root>/.draft-*            unfinished

Several processes use one store at once: agent, packer, training processes. Nothing is remembered but what is in
the folder.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from deeplink.cache import layout
from deeplink.cache.errors import ShardCorruptError, StoreError, StoreFullError
from deeplink.cache.keeping.marks import SUFFIX, Marks, file_identity, look_at
from deeplink.private import PrivateFolderError, private_folder
from deeplink.publish import DRAFT_PREFIX, fsync_path, published_file
from deeplink.types import ShardId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

log = logging.getLogger(__name__)

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_UNREAD = {errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.ESTALE, errno.ETIMEDOUT}
_DRAFT_KEPT_S = 3600.0
_MOST_QUARANTINED = 4
"""Damaged files kept for a look; they must not fill the SSD."""


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """What a store holds.

    Attributes:
        shards, bytes: all shards' files.
        free_bytes: what the store's file system has left.
        ids: the shards' names, sorted.
        verified, verified_bytes: of those, what was read whole on this mount and found right.
        sizes: bytes of each shard, in the order of `ids`.
    """

    shards: int
    bytes: int
    free_bytes: int
    ids: tuple[ShardId, ...]
    verified: int
    verified_bytes: int
    sizes: tuple[int, ...]


class Store:
    """The shards in one folder."""

    def __init__(self, root: Path, *, make: bool = True) -> None:
        """Use `root`, which is made when it is not there, for this user alone, unless told otherwise.

        Raises:
            PrivateFolderError: the folder is not this user's alone.
            StoreError: it cannot be made.
        """
        self.root = root
        self.reserve: Callable[[int], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
        """Entered with the bytes of a shard while it comes; may drop others, or raise StoreFullError."""
        self.missed: Callable[[ShardId], None] = lambda _shard: None
        """Told, in passing, of shards that others ask for and that are not here."""
        self.marks = Marks(root)
        if not make:
            return
        try:
            private_folder(root)  # the files may be copies of some that others must not read
        except PrivateFolderError:
            raise
        except OSError as problem:
            raise StoreError(root, problem.strerror or str(problem)) from problem

    def path(self, shard: ShardId) -> Path:
        """Return where a shard's file is, or would be.

        Raises:
            ShardIdError: the name is not a shard's.
        """
        return self.root / f"{layout.checked_shard_id(shard)}{SUFFIX}"

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
        found = (path.stem for path in self.root.glob(f"*{SUFFIX}"))
        return sorted(ShardId(name) for name in found if layout.is_shard_id(name))

    def status(self) -> StoreStatus:
        """Return what is here now.

        Raises:
            StoreError: the folder cannot be looked at.
        """
        try:
            files, marks = look_at(self.root)
            sizes = {shard: files[shard].st_size for shard in sorted(files)}
            verified = [
                shard for shard in sizes if shard in marks and self.marks.is_of(shard, marks[shard], files[shard])
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
        except OSError as problem:
            raise StoreError(self.root, problem.strerror or str(problem)) from problem

    def free_bytes(self) -> int:
        """Return the bytes the store's file system has left for this user."""
        return shutil.disk_usage(self.root).free

    def is_verified(self, shard: ShardId) -> bool:
        """Tell whether the very file that is here now was read and found whole on this mount."""
        return self.marks.is_verified(shard, self.path(shard))

    def verified_unix(self, shard: ShardId) -> float:
        """Return when the file that is here now was last found whole, seconds since 1970; 0 where it was not."""
        return self.marks.verified_unix(shard, self.path(shard))

    def touch(self, shard: ShardId) -> None:
        """Note that a shard is being read."""
        self.marks.touch(layout.checked_shard_id(shard))

    def used_unix(self, shard: ShardId) -> float:
        """Return when a shard was last read, or came here, seconds since 1970; 0 where it is not here."""
        try:
            return max(self.path(shard).stat().st_mtime, self.marks.used_unix(shard))
        except OSError:
            return 0.0

    def lost(self) -> list[ShardId]:
        """Return the shards that were lost here and have not come back, sorted."""
        lost = self.marks.lost()
        for shard in lost:
            if self.has(shard):
                self.marks.find(shard)
        return [shard for shard in lost if not self.has(shard)]

    def verify(self, shard: ShardId) -> bool:
        """Read all of a shard; mark it verified if it is whole. False: it was not, and is in quarantine now.

        Raises:
            FileNotFoundError: it is not here.
            OSError: it cannot be opened or read, which says nothing about what it holds: it stays, unverified
                where reading it failed.
        """
        descriptor = os.open(self.path(shard), os.O_RDONLY | os.O_CLOEXEC)
        try:
            before = file_identity(os.fstat(descriptor))
            try:
                layout.verify(descriptor, shard)
            except ShardCorruptError as problem:
                self.quarantine(shard, str(problem), inode=before["ino"])
                return False
            except OSError as problem:
                if is_doubtful(problem):
                    with contextlib.suppress(OSError):
                        self.doubt(shard)
                raise
        finally:
            os.close(descriptor)
        self.marks.set_verified(shard, before)
        return True

    def doubt(self, shard: ShardId) -> bool:
        """Take a shard for unverified from now on: it gave somebody wrong bytes. False: it was so already.

        Raises:
            ShardIdError: the name is not a shard's.
            OSError: the mark cannot be removed.
        """
        return self.marks.unset_verified(layout.checked_shard_id(shard))

    def add(self, shard: ShardId, chunks: Iterable[bytes], total: int) -> bool:
        """Take a shard's file in `chunks` of `total` bytes; it appears once it was verified. False: it was here.

        Raises:
            ShardCorruptError: what came is not `shard`, or not of that many bytes.
            StoreFullError: there is no room for it.
            StoreError: it cannot be written for another reason.
        """
        if self.has_whole(shard, total):  # of one that was cut off, what comes takes the place
            return False
        with self.room_for(total):
            try:
                with published_file(self.path(shard), mode=0o600) as draft:
                    _write_chunks(draft, shard, chunks, total)
                    identity = _verified_identity(draft, shard)
            except OSError as problem:
                self.raise_as_store_error(problem, total)
        self.marks.welcome(shard, identity)
        return True

    @contextlib.contextmanager
    def room_for(self, total: int) -> Iterator[None]:
        """Keep room for a shard of `total` bytes while it is being written.

        Raises:
            StoreFullError: there is none.
            StoreError: the store cannot be looked at.
        """
        with contextlib.ExitStack() as kept:
            try:
                kept.enter_context(self.reserve(total))
                free = self.free_bytes()
            except OSError as problem:
                raise StoreError(self.root, problem.strerror or str(problem)) from problem
            if free < total:
                raise StoreFullError(self.root, total, free)
            yield

    def adopt(self, draft: Path, shard: ShardId) -> bool:
        """Move a sealed file of this file system, just written and read back, into the store. False: it was here.

        Raises:
            StoreError: it cannot be moved.
        """
        try:
            identity = file_identity(draft.stat())
            if self.has_whole(shard, identity["size"]):
                draft.unlink()
                return False
            draft.rename(self.path(shard))  # also in place of one that was cut off
            fsync_path(self.root)
        except OSError as problem:
            raise StoreError(self.root, problem.strerror or str(problem)) from problem
        self.marks.welcome(shard, identity)
        return True

    def raise_as_store_error(self, problem: OSError, needed: int) -> NoReturn:
        """Raise what writing below the store met as StoreFullError or StoreError."""
        if problem.errno in _NO_ROOM:
            raise StoreFullError(self.root, needed, self.free_bytes()) from problem
        raise StoreError(self.root, problem.strerror or str(problem)) from problem

    def remove(self, shard: ShardId) -> bool:
        """Remove a shard; who has it open reads on. False: it was not here."""
        self.marks.unset_verified(layout.checked_shard_id(shard))
        try:
            self.path(shard).unlink()
        except FileNotFoundError:
            return False
        self.marks.forget(shard)
        return True

    def drop(self, shard: ShardId) -> bool:
        """Remove a shard that is not to come again before somebody asks for it. False: it was not here."""
        if self.has(shard):  # noted first: who sees that it has gone is to see that it stays away
            self.marks.dismiss(shard)
        return self.remove(shard)

    def quarantine(self, shard: ShardId, why: str, *, inode: int | None = None) -> bool:
        """Take a damaged shard out of service, keeping the file. False: it was no longer here.

        Args:
            shard: which.
            why: what is wrong with it, for the log.
            inode: of the file that was found damaged; if another has taken its place, that one stays.
        """
        folder = self.root / "quarantine"
        try:
            if inode is not None and self.path(shard).stat().st_ino != inode:
                return False
            private_folder(folder)
            self.path(shard).rename(folder / f"{shard}-{time.time_ns()}{SUFFIX}")
            self.marks.unset_verified(shard)
            self.marks.lose(shard)
            for older in sorted(folder.iterdir(), key=lambda path: path.name.partition("-")[2])[
                :-_MOST_QUARANTINED
            ]:
                older.unlink(missing_ok=True)
        except PrivateFolderError as refused:
            log.warning("shard %s is damaged and cannot be put aside: %s. %s", shard, refused, refused.remedy)
            return False
        except OSError:  # another process was first, or the disk takes no writes: readers skip it by themselves
            return False
        log.error("shard %s is damaged and was put into %s: %s", shard, folder, why)
        return True

    def sweep(self, now: float) -> int:
        """Remove drafts that nobody has written to for an hour; return how many."""
        stale = [path for path in self.root.glob(f"{DRAFT_PREFIX}*") if _age(path, now) > _DRAFT_KEPT_S]
        for path in stale:
            path.unlink(missing_ok=True)
        return len(stale)


def is_doubtful(problem: Exception) -> bool:
    """Tell whether what reading a shard met says that it must not be taken for verified any more.

    That its bytes are wrong does. So does that they could not be read, which is no proof of damage and may be over
    in a moment: but to touch such a page of a mapped file would kill the process.
    """
    return isinstance(problem, ShardCorruptError) or (isinstance(problem, OSError) and problem.errno in _UNREAD)


def _age(path: Path, now: float) -> float:
    try:
        return now - path.stat().st_mtime
    except OSError:
        return 0.0


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


def _verified_identity(draft: Path, shard: ShardId) -> dict[str, int]:
    descriptor = os.open(draft, os.O_RDONLY | os.O_CLOEXEC)
    try:
        layout.verify(descriptor, shard)
        return file_identity(os.fstat(descriptor))
    finally:
        os.close(descriptor)
