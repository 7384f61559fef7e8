"""Open shard files, read at recorded offsets: mapped where the file was verified on this mount, else by preadv.

Touching a mapping beyond the file's end, or on a failing disk, is SIGBUS. So system calls, which report that, copy
out of a mapping (`gather`), and bring a view's pages in before it is handed out (`populate`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import logging
import mmap
import os
import resource
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from deeplink.cache.errors import IndexFormatError, ShardCorruptError
from deeplink.cache.format import block
from deeplink.cache.store.pins import Pin
from deeplink.cache.store.store import is_doubtful

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from deeplink.cache.format.block import FileLayout
    from deeplink.cache.format.index import Index
    from deeplink.cache.store.store import Store
    from deeplink.core.clock import Clock
    from deeplink.core.types import ShardId

log = logging.getLogger(__name__)

_LEAST_OPEN, _MOST_OPEN = 200, 16_384
_LOOK_AGAIN_S = 5.0
"""How long a shard that is not here is taken to be absent."""
_VOUCHED_S = 600.0
"""How long a shard that was read whole and found right is not doubted again: the index is at fault, or memory."""
_USED_EVERY_S = 60.0

_MADV_POPULATE_READ = 22
"""Linux 5.14; Python has no name for it."""
_mincore = ctypes.CDLL(None).mincore
_mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


class ShardFile:
    """One shard's file, open while anything refers to it or its views. Safe to use from several threads."""

    def __init__(self, path: Path, shard: ShardId, *, mapped: bool, expected: int | None = None) -> None:
        self.shard = shard
        self.is_mapped = mapped  # reads are views of a mapping; else copies
        self._fd = -1
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        found = os.fstat(self._fd)
        self.bytes = found.st_size if expected is None else expected  # the size it has and must keep
        self.inode = found.st_ino  # tells it from a file that took its place
        # To others the kernel says of every page that it is in memory.
        self._tells_residency = found.st_uid == os.geteuid() or os.geteuid() == 0
        self.check()
        self._map: mmap.mmap | None = None
        self.view: memoryview | None = None  # of all of the mapping
        self.address = 0  # where the mapping begins in memory; 0 where there is none
        self.populated: np.ndarray | None = (
            None  # per block 1 or -1, what `populate_resident` returned for it, or 0
        )
        if mapped and self.bytes:
            self._map = mmap.mmap(self._fd, self.bytes, access=mmap.ACCESS_READ)
            self._map.madvise(mmap.MADV_RANDOM)
            self.view = memoryview(self._map)
            self.address = int(np.frombuffer(self.view, np.uint8).ctypes.data)

    def check(self) -> None:
        """Return if the file still has its size."""
        found = os.fstat(self._fd).st_size
        if found != self.bytes:
            raise ShardCorruptError(self.shard, f"its file has {found:,} bytes instead of {self.bytes:,}")

    def read(
        self, offsets: Sequence[int], lengths: Sequence[int], *, cold: bool, copied: bool = False
    ) -> list[memoryview]:
        """Return the bytes at `offsets`: views of the mapping, or copies where there is none or if `copied`."""
        self.check()
        if cold and len(offsets) > 1:
            self.will_need(offsets, lengths)
        view = self.view
        if view is not None and not copied:
            return [view[offset : offset + length] for offset, length in zip(offsets, lengths, strict=True)]
        arena = memoryview(bytearray(sum(lengths)))
        ends = list(itertools.accumulate(lengths, initial=0))
        parts = [arena[start:stop] for start, stop in itertools.pairwise(ends)]
        self.read_into(parts, offsets)
        self.check()  # a page cut through reads as zeros beyond the cut
        return [part.toreadonly() for part in parts]

    def will_need(self, offsets: Sequence[int], lengths: Sequence[int]) -> None:
        """Ask the kernel to fetch all of these places, and do not wait for it."""
        advise, descriptor, willneed = os.posix_fadvise, self._fd, os.POSIX_FADV_WILLNEED
        for offset, length in zip(offsets, lengths, strict=True):
            advise(descriptor, offset, length, willneed)

    def populate(self, offset: int, length: int) -> bool:
        """Bring a place of the mapping in, so that touching it is safe now. False: Linux is older than 5.14."""
        if self._map is None:
            return False
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        try:
            self._map.madvise(_MADV_POPULATE_READ, start, offset + length - start)
        except OSError as problem:
            if problem.errno == errno.EINVAL:
                return False
            raise OSError(errno.EIO, "its file cannot be read", self.shard) from problem
        return True

    def scan(self) -> FileLayout:
        """Return where the file's blocks lie (see `block.scan_shard`)."""
        return block.scan_shard(self._fd, self.shard)

    def populate_resident(self, offset: int, length: int) -> bool:
        """Bring a place of the mapping in if all of it is in memory already; tell whether it was.

        One call for a block of 256 samples, where each would be a call and a page fault of its own.
        """
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        size = offset + length - start
        if not self._tells_residency or not is_resident(self.address + start, size):
            return False
        try:
            return self.populate(start, size)
        except OSError:  # dropped meanwhile: reading a part of it will report it
            return False

    def read_into(self, parts: Sequence[memoryview], offsets: Sequence[int]) -> None:
        """Fill each of `parts` from its offset, by system calls."""
        read, descriptor = os.preadv, self._fd
        for part, offset in zip(parts, offsets, strict=True):
            done = read(descriptor, [part], offset)
            while done < len(part):
                count = read(descriptor, [part[done:]], offset + done)
                if not count:
                    raise ShardCorruptError(self.shard, "its file ended while it was read")
                done += count

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # Not a `close`: another thread may be reading, and a closed number may be another file's a moment later.
        # Bound beforehand: as the interpreter ends, modules lose their names before the last object is gone.
        if self._fd >= 0:
            close(self._fd)


def is_resident(address: int, length: int) -> bool:
    """Tell whether all pages of a mapping of ours are in memory."""
    pages = np.empty(-(-length // mmap.PAGESIZE), np.uint8)
    if _mincore(address, length, pages.ctypes.data):
        return False
    return bool((pages & 1).all())


class ColdGauge:
    """Tells whether this process has read from disk since it was last asked; true when asked first.

    Reading ahead costs time where all is in memory, and is three times as fast where it is not.
    """

    def __init__(self) -> None:
        self._blocks = -1

    def is_cold(self) -> bool:
        """Return whether the kernel has fetched blocks for this process since the last call."""
        before, self._blocks = self._blocks, resource.getrusage(resource.RUSAGE_SELF).ru_inblock
        return self._blocks != before


def read_piece(store: Store, index: Index, row: int, number: int) -> memoryview | None:
    """Return one piece of a sample longer than SPAN; None where this node does not hold it whole.

    Each piece has a block of its own, whose checksum it is compared with. Damage is not reported here: reading the
    whole sample finds it.
    """
    try:
        shard = int(index.shard[row])
        entry = index.shards[shard]
        where, _, length = index.pieces(row)[number]
        file = ShardFile(store.path(entry.id), entry.id, mapped=False, expected=entry.bytes)
        data = memoryview(bytearray(block.HEADER + length))
        file.read_into([data], [int(index.block_offsets(shard)[where]) - block.HEADER])
        header = block.decode_header(data[: block.HEADER], entry.id)
    except (ShardCorruptError, IndexFormatError, IndexError, OSError):
        return None
    piece = data[block.HEADER :]
    is_whole = (header.number, header.payload, header.checksum) == (where, length, block.checksum(piece))
    return piece if is_whole else None


def most_open() -> int:
    """Return how many shards may be open at once: each holds two descriptors, and half of them are others'."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST_OPEN
    return min(max(soft // 4, _LEAST_OPEN), _MOST_OPEN)


class OpenShards:
    """Shard numbers of an index -> open files, opened at first use. Safe to use from several threads."""

    def __init__(self, index: Index, store: Store, clock: Clock) -> None:
        self._index, self._store, self._clock = index, store, clock
        self._lock = threading.Lock()
        self._open: OrderedDict[int, ShardFile] = OrderedDict()
        self._most = most_open()
        self._absent_until: dict[int, float] = {}
        self._damaged: set[int] = set()
        self._vouched_until: dict[int, float] = {}
        self._used: dict[int, float] = {}
        self._pin: Pin | None = None
        self._leader = ""
        self._is_refused = False

    def get(self, number: int) -> ShardFile | None:
        """Return the open file of a shard; None where it is not here."""
        with self._lock:
            file = self._open.get(number)
            if file is not None:
                self._open.move_to_end(number)
                self._note_use(number)
                return file
            if self._absent_until.get(number, 0.0) > self._clock.monotonic():
                return None
            file = self._opened(number)
            if file is None:
                self._absent_until[number] = self._clock.monotonic() + _LOOK_AGAIN_S
                return None
            self._open[number] = file
            self._note_use(number)
            if len(self._open) > self._most:
                self._open.popitem(last=False)
            return file

    def announce(self, numbers: Sequence[int], needed: int) -> str:
        """Say in which order shards are needed from now on, and how many of them the running epoch still needs.

        Before, all shards of the version count as needed. Return a name for processes to `follow` that read on
        this one's behalf.
        """
        with self._lock:
            self._pinned().announce([self._index.shards[number].id for number in numbers], needed)
            return self._pinned().holder

    def follow(self, leader: str) -> None:
        """Let another process's announcement hold for what is read here; before the first read."""
        self._leader = leader

    def _pinned(self) -> Pin:
        if self._pin is None:
            self._pin = Pin(self._store.root, self._index, self._clock, leader=self._leader)
        return self._pin

    def _note_use(self, number: int) -> None:
        now = self._clock.monotonic()
        self._pinned().renew()
        if now - self._used.get(number, float("-inf")) > _USED_EVERY_S:
            self._used[number] = now
            self._store.touch(self._index.shards[number].id)

    def _opened(self, number: int) -> ShardFile | None:
        entry = self._index.shards[number]
        verified = self._store.is_verified(entry.id)
        try:
            file = ShardFile(self._store.path(entry.id), entry.id, mapped=verified, expected=entry.bytes)
        except FileNotFoundError:
            return None
        except PermissionError as problem:  # another user's store: that is no damage
            if not self._is_refused:
                self._is_refused = True
                log.warning("what lies in %s is not this user's to read: %s", self._store.root, problem)
            return None
        starts = self._index.block_offsets(number)
        # The offsets are the packer's; a file of the same content could in principle be laid out otherwise.
        head = bytearray(block.HEADER)
        file.read_into([memoryview(head)], [int(starts[-1]) - block.HEADER])
        if block.decode_header(bytes(head), entry.id).number != len(starts) - 1:
            raise ShardCorruptError(entry.id, "its blocks are not where the index says")
        return file

    def set_aside(self, number: int, problem: Exception) -> None:
        """Stop reading a shard: something is wrong with it, or with what the index says of it.

        It is not quarantined here: the healer (see `take_damaged`) reads it whole first.
        """
        shard = self._index.shards[number].id
        log.error("%s; reading its samples from elsewhere", problem)
        with self._lock:
            now = self._clock.monotonic()
            self._open.pop(number, None)
            is_vouched = self._vouched_until.get(number, 0.0) > now
            self._absent_until[number] = now + (_VOUCHED_S if is_vouched else _LOOK_AGAIN_S)
            if is_vouched:
                return
            self._damaged.add(number)
        if is_doubtful(problem):
            with contextlib.suppress(OSError):
                self._store.doubt(shard)

    def is_vouched(self, number: int) -> bool:
        """Tell whether a shard was read whole not long ago and found right, so that it is not what is at fault."""
        return self._vouched_until.get(number, 0.0) > self._clock.monotonic()

    def take_damaged(self) -> set[int]:
        """Return the numbers of the shards put aside since the last call."""
        if not self._damaged:
            return set()
        with self._lock:
            taken, self._damaged = self._damaged, set()
        return taken

    def forget_absent(self, numbers: Iterable[int]) -> None:
        """Look for these shards again: they may have come."""
        with self._lock:
            for number in numbers:
                self._absent_until.pop(number, None)

    def vouch(self, number: int) -> None:
        """Note that a shard is here and is what its name promises."""
        with self._lock:
            self._absent_until.pop(number, None)
            self._vouched_until[number] = self._clock.monotonic() + _VOUCHED_S

    def close(self) -> None:
        """Let go of all files; views that were handed out stay valid."""
        with self._lock:
            self._open.clear()
            if self._pin is not None:
                self._pin.release()
                self._pin = None
