"""An open shard file, read at recorded offsets: mapped where the file was verified on this mount, else by preadv.

Touching a mapping beyond the file's end, or on a failing disk, is SIGBUS, which no Python program survives. So
what is copied out of a mapping is copied by system calls, which report such things (`gather`), and before a view
is handed out its pages are brought in by one (`populate`). What is left is a view that somebody holds while the
file is cut short, or whose pages are dropped and cannot be read again.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import resource
from typing import TYPE_CHECKING

import numpy as np

from deeplink.cache import layout
from deeplink.cache.errors import ShardCorruptError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from deeplink.cache.layout import FileLayout
    from deeplink.types import ShardId

_MADV_POPULATE_READ = 22
"""Linux 5.14; Python has no name for it."""
_mincore = ctypes.CDLL(None).mincore
_mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


class ShardFile:
    """One shard's file, open for reading until nobody refers to it or its views. Safe to use from several threads.

    Attributes:
        shard: its name.
        bytes: the size it has and must keep.
        is_mapped: whether reads are views of a mapping; copies otherwise.
        view: all of the mapping; None where there is none.
        address: where the mapping begins in memory; 0 where there is none.
        populated: per block 1 or -1, what `populate_resident` said of it, or 0; kept here for who asks.
        inode: of the file, to tell it from one that took its place.
    """

    def __init__(self, path: Path, shard: ShardId, *, mapped: bool, expected: int | None = None) -> None:
        """Open `path`.

        Args:
            path: the file.
            shard: its name.
            mapped: whether it was verified on this mount, so that it may be mapped.
            expected: the size it must have; what it has when not given.

        Raises:
            ShardCorruptError: it has not.
            OSError: it cannot be opened.
        """
        self.shard = shard
        self.is_mapped = mapped
        self._fd = -1
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        found = os.fstat(self._fd)
        self.bytes = found.st_size if expected is None else expected
        self.inode = found.st_ino
        # To others the kernel says of every page that it is in memory.
        self._tells_residency = found.st_uid == os.geteuid() or os.geteuid() == 0
        self.check()
        self._map: mmap.mmap | None = None
        self.view: memoryview | None = None
        self.address = 0
        self.populated: np.ndarray | None = None
        if mapped and self.bytes:
            self._map = mmap.mmap(self._fd, self.bytes, access=mmap.ACCESS_READ)
            self._map.madvise(mmap.MADV_RANDOM)
            self.view = memoryview(self._map)
            self.address = int(np.frombuffer(self.view, np.uint8).ctypes.data)

    def check(self) -> None:
        """Return if the file still has its size.

        Raises:
            ShardCorruptError: it has not.
            OSError: it cannot be looked at.
        """
        found = os.fstat(self._fd).st_size
        if found != self.bytes:
            raise ShardCorruptError(self.shard, f"its file has {found:,} bytes instead of {self.bytes:,}")

    def read(self, offsets: Sequence[int], lengths: Sequence[int], *, cold: bool) -> list[memoryview]:
        """Return the bytes at `offsets`, in order.

        Args:
            offsets: where in the file; all within it.
            lengths: how many bytes each.
            cold: whether to ask the kernel for all of them at once before the first is touched.

        Raises:
            ShardCorruptError: the file does not have its size any more, or ended while it was read.
            OSError: the disk failed.
        """
        self.check()
        if cold and len(offsets) > 1:
            self.will_need(offsets, lengths)
        view = self.view
        if view is not None:
            return [view[offset : offset + length] for offset, length in zip(offsets, lengths, strict=True)]
        arena = memoryview(bytearray(sum(lengths)))
        ends = list(itertools.accumulate(lengths, initial=0))
        parts = [arena[start:stop] for start, stop in itertools.pairwise(ends)]
        self.read_into(parts, offsets)
        return [part.toreadonly() for part in parts]

    def will_need(self, offsets: Sequence[int], lengths: Sequence[int]) -> None:
        """Ask the kernel to fetch all of these places, and do not wait for it."""
        advise, descriptor, willneed = os.posix_fadvise, self._fd, os.POSIX_FADV_WILLNEED
        for offset, length in zip(offsets, lengths, strict=True):
            advise(descriptor, offset, length, willneed)

    def populate(self, offset: int, length: int) -> bool:
        """Bring a place of the mapping in, so that touching it is safe now. False: this kernel cannot.

        Linux can from 5.14 on.

        Raises:
            OSError: the place cannot be read.
        """
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
        """Return where the file's blocks lie (see `layout.scan`)."""
        return layout.scan(self._fd, self.shard)

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
        except OSError:  # dropped meanwhile: who wants a part of it will be told
            return False

    def read_into(self, parts: Sequence[memoryview], offsets: Sequence[int]) -> None:
        """Fill each of `parts` from its offset, by system calls.

        Raises:
            ShardCorruptError: the file ended while it was read.
            OSError: the disk failed.
        """
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
    """Tell whether all pages of a mapping of ours are in memory.

    Args:
        address: on a page boundary.
        length: bytes.
    """
    pages = np.empty(-(-length // mmap.PAGESIZE), np.uint8)
    if _mincore(address, length, pages.ctypes.data):
        return False
    return bool((pages & 1).all())


class ColdGauge:
    """Tells whether this process has read from disk since it was last asked; true when asked first.

    Asking the kernel for a batch ahead costs time where all is in memory, and gives three times the speed where it
    is not.
    """

    def __init__(self) -> None:
        self._blocks = -1

    def is_cold(self) -> bool:
        """Return whether the kernel has fetched blocks for this process since the last call."""
        before, self._blocks = self._blocks, resource.getrusage(resource.RUSAGE_SELF).ru_inblock
        return self._blocks != before
