"""Memory for batches, used again once nobody refers to the batch that was in it.

The kernel zeroes each page of new memory when it is first touched. For a batch of 256 samples of 33 KB that takes
longer than receiving it (measured: 2.4 of 3.3 ms in the kernel), so memory goes from batch to batch instead.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SMALL = 1 << 18
"""For less than this malloc's own memory is as good."""
_MOST_LENT = 16
"""Batches that are watched at once: who keeps more of them has no use for their memory being used again."""
_MOST_KEPT = 64 << 20
"""Bytes of memory that nobody uses at the moment."""
_UNIT = 2 << 20
"""Memory is got in whole huge pages of x86, so that batches of about one length fit into one another's."""


class Arenas:
    """Memory that batches are read into. Safe to use from several threads; each process needs its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[mmap.mmap] = []
        # Looked at, not called back: an error that a signal raises in a weak reference's callback would be lost.
        self._lent: list[tuple[weakref.ref[NDArray[np.uint8]], mmap.mmap]] = []

    def room(self, size: int) -> NDArray[np.uint8]:
        """Return an arena of `size` bytes, uint8, whose content is anything."""
        if size < _SMALL:
            return np.empty(size, np.uint8)
        with self._lock:
            self._take_back()
            if len(self._lent) >= _MOST_LENT:
                return np.empty(size, np.uint8)
            memory = self._fitting(size) or _new(-(-size // _UNIT) * _UNIT)
            arena = np.frombuffer(memory, np.uint8, size)
            self._lent.append((weakref.ref(arena), memory))
            return arena

    def _take_back(self) -> None:
        still, free = [], []
        for entry in self._lent:
            if entry[0]() is None:
                free.append(entry[1])
            else:
                still.append(entry)
        # In this order: what a signal's error comes between is lost, and never twice there for two batches.
        self._lent = still
        self._free += free
        while sum(map(len, self._free)) > _MOST_KEPT:
            del self._free[0]

    def _fitting(self, size: int) -> mmap.mmap | None:
        """Take the smallest free memory that has room, if it is not far too large."""
        fitting = [memory for memory in self._free if size <= len(memory) <= 2 * size + _UNIT]
        if not fitting:
            return None
        memory = min(fitting, key=len)
        self._free.remove(memory)
        return memory


def _new(size: int) -> mmap.mmap:
    # Private, so that a forked child's writes are its own.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # EINVAL: a kernel built without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
