"""What of some files is in memory, and how to get it out of there."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *([ctypes.c_int] * 3), ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def files_below(folder: Path) -> list[str]:
    """Return all files below a folder."""
    return [os.path.join(at, name) for at, _, names in os.walk(folder) for name in names]  # noqa: PTH118


def evict(paths: Iterable[str]) -> None:
    """Drop the pages of files, as far as nobody maps them and they are on disk."""
    for path in paths:
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:  # a reader's own mark that it is there, taken away when it closed
            continue
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def forget_names() -> bool:
    """Drop names and inodes from memory, all of this machine's; return whether we may."""
    try:
        Path("/proc/sys/vm/drop_caches").write_text("2\n", encoding="ascii")
    except OSError:
        return False
    return True


def resident(paths: Iterable[str]) -> float:
    """Return which share of the files' pages is in memory.

    Raises:
        OSError: a file cannot be opened or asked about.
    """
    pages = there = 0
    for path in paths:
        found = _pages(path)
        pages += len(found)
        there += sum(byte & 1 for byte in found)
    return there / pages if pages else 0.0


def _pages(path: str) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return b""
    try:
        size = os.fstat(descriptor).st_size
        if not size:
            return b""
        address = _LIBC.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        found = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
        failed = _LIBC.mincore(address, size, found)
        _LIBC.munmap(address, size)
        if failed:
            raise OSError(ctypes.get_errno(), f"mincore: {path}")
        return found.raw
    finally:
        os.close(descriptor)
