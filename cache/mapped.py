"""An open shard file, read at recorded offsets: mapped where the file was verified on this mount, else by preadv.

Touching a mapping beyond the file's end, or on a failing disk, is SIGBUS, which no Python program survives. So the
size is checked before each batch, and a file that was not verified here is read with system calls, which report
such things. What is left: a verified file that is cut short, or a disk that fails, between check and touch.
"""

from __future__ import annotations

import mmap
import os
import resource
from typing import TYPE_CHECKING

from deeplink.cache import layout
from deeplink.cache.errors import ShardCorruptError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from deeplink.cache.layout import Layout
    from deeplink.types import ShardId


class ShardFile:
    """One shard's file, open for reading until nobody refers to it or its views. Safe to use from several threads.

    Attributes:
        shard: its name.
        bytes: the size it has and must keep.
        is_mapped: whether reads are views of a mapping; copies otherwise.
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
        self.check()
        self._view: memoryview | None = None
        if mapped and self.bytes:
            whole = mmap.mmap(self._fd, self.bytes, access=mmap.ACCESS_READ)
            whole.madvise(mmap.MADV_RANDOM)
            self._view = memoryview(whole)

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
            for offset, length in zip(offsets, lengths, strict=True):
                os.posix_fadvise(self._fd, offset, length, os.POSIX_FADV_WILLNEED)
        view = self._view
        if view is not None:
            return [view[offset : offset + length] for offset, length in zip(offsets, lengths, strict=True)]
        return self._copied(offsets, lengths)

    def scan(self) -> Layout:
        """Return where the file's blocks lie (see `layout.scan`)."""
        return layout.scan(self._fd, self.shard)

    def _copied(self, offsets: Sequence[int], lengths: Sequence[int]) -> list[memoryview]:
        arena = memoryview(bytearray(sum(lengths)))
        found, at = [], 0
        for offset, length in zip(offsets, lengths, strict=True):
            part = arena[at : at + length]
            done = 0
            while done < length:
                count = os.preadv(self._fd, [part[done:]], offset + done)
                if not count:
                    raise ShardCorruptError(self.shard, "its file ended while it was read")
                done += count
            found.append(part.toreadonly())
            at += length
        return found

    def __del__(self) -> None:
        # Not a `close`: another thread may be reading, and a closed number may be another file's a moment later.
        if self._fd >= 0:
            os.close(self._fd)


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
