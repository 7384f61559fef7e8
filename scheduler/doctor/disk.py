"""How fast a disk is, measured in bounded time with a file that nobody else ever sees."""

from __future__ import annotations

import errno
import mmap
import os
import random
from contextlib import contextmanager
from typing import TYPE_CHECKING

from deeplink.scheduler.doctor.report import Disk

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from deeplink.clock import Clock

SIZE = 256 << 20
LONGEST_S = 8.0
"""Bound on writing, on reading and on the random reads, each."""
_CHUNK = 4 << 20
_PAGE = 4096
_RANDOM_S = 0.5
_MOST_RANDOM = 20_000


def measured_disk(folder: Path, size: int, clock: Clock, *, longest_s: float = LONGEST_S) -> Disk:
    """Write, read back and read at random a file of `size` bytes in a folder; nothing stays, also when killed.

    Reads go past the page cache where the file system allows it; `Disk.cold` tells whether they did.
    """
    try:
        free = os.statvfs(folder)
        if free.f_bavail * free.f_frsize < 2 * size:
            return Disk(problem=f"too little room for {size} bytes")
        with nameless(folder) as file:
            written, write_s = _write(file, size, clock, longest_s)
            return _read(file, written, write_s, clock, longest_s)
    except OSError as problem:
        return Disk(problem=problem.strerror or str(problem))


@contextmanager
def nameless(folder: Path) -> Iterator[int]:
    """Give the descriptor of a new file in a folder that has no name there, and is gone when closed.

    Raises:
        OSError: no file can be made there.
    """
    try:
        file = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError as problem:
        if problem.errno not in {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL}:
            raise
        path = folder / f".deeplink-doctor-{os.getpid()}-{random.randrange(1 << 30)}"  # noqa: S311 - a name
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        path.unlink()
    try:
        yield file
    finally:
        os.close(file)


def _write(file: int, size: int, clock: Clock, longest_s: float) -> tuple[int, float]:
    block = os.urandom(_CHUNK)  # a disk that compresses or leaves out zeros would look too fast
    began = clock.monotonic()
    written = 0
    while written < size and clock.monotonic() - began < longest_s:
        written += os.write(file, block[: min(_CHUNK, size - written)])
    os.fsync(file)
    return written, clock.monotonic() - began


def _read(file: int, written: int, write_s: float, clock: Clock, longest_s: float) -> Disk:
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    cold, reader = _reopened(file)
    try:
        with mmap.mmap(-1, _CHUNK) as room:  # aligned, as O_DIRECT wants it
            began = clock.monotonic()
            place = 0
            while place < written and clock.monotonic() - began < longest_s:
                place += os.preadv(reader, [room], place) or written  # nothing more comes at the end
            read_s = (clock.monotonic() - began) * written / min(max(place, 1), written)
            reads, random_s = _read_at_random(reader, room, written, clock)
    finally:
        if reader != file:
            os.close(reader)
    return Disk(written=written, write_s=write_s, read_s=read_s, cold=cold, random_reads=reads, random_s=random_s)


def _reopened(file: int) -> tuple[bool, int]:
    try:
        return True, os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return False, file


def _read_at_random(reader: int, room: mmap.mmap, written: int, clock: Clock) -> tuple[int, float]:
    places = written // _PAGE
    if not places:
        return 0, 0.0
    dice = random.Random(0)  # noqa: S311 - places in a file
    page = memoryview(room)[:_PAGE]
    began = clock.monotonic()
    reads = 0
    try:
        while reads < _MOST_RANDOM and clock.monotonic() - began < _RANDOM_S:
            os.preadv(reader, [page], dice.randrange(places) * _PAGE)
            reads += 1
    finally:
        page.release()
    return reads, clock.monotonic() - began
