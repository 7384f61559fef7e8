"""The store's disk: room, whether it takes writes, and how long a small probe takes."""

from __future__ import annotations

import dataclasses
import errno
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.scheduler.doctor.disk import nameless
from deeplink.scheduler.health.look import Complaint, Look, comment, drain, observe

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from deeplink.clock import Clock
    from deeplink.scheduler.health.settings import DiskSettings

PROBE_BYTES = 64 << 10
# What Linux says of a disk that is broken or gone, in the order of trying: not of one that is full or busy.
_BROKEN = frozenset({errno.EIO, errno.ENXIO, errno.ENODEV, errno.ESTALE, errno.EUCLEAN, errno.ENOTCONN})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskReading:
    """What was seen of a disk.

    Attributes:
        there: the folder is.
        free_bytes: what an ordinary user may still write; None where it cannot be told.
        files_free: files that can still be made; None where the file system has no such bound.
        read_only: it is mounted so.
        probe_s: seconds to write a small file, have it on the disk, and read it back; None where that failed.
        error: errno of what failed; 0 where nothing did.
        differs: what was read back is not what was written.
    """

    there: bool = True
    free_bytes: int | None = None
    files_free: int | None = None
    read_only: bool = False
    probe_s: float | None = None
    error: int = 0
    differs: bool = False


def read_disk(folder: Path, clock: Clock) -> DiskReading:
    """Look at the disk of a folder; may hang as long as the disk does. Nothing stays, also when we are killed."""
    try:
        free = os.statvfs(folder)
    except FileNotFoundError:
        return DiskReading(there=False)
    except OSError as problem:
        return DiskReading(error=problem.errno or errno.EIO)
    reading = DiskReading(
        free_bytes=free.f_bavail * free.f_frsize,
        files_free=free.f_favail if free.f_files else None,
        read_only=bool(free.f_flag & os.ST_RDONLY),
    )
    if reading.read_only:
        return reading
    began = clock.monotonic()
    try:
        differs = not _probed(folder)
    except OSError as problem:
        return dataclasses.replace(reading, error=problem.errno or errno.EIO)
    return dataclasses.replace(reading, probe_s=clock.monotonic() - began, differs=differs)


def _probed(folder: Path) -> bool:
    """Write, sync and read back; return whether the same bytes came."""
    wrote = os.urandom(PROBE_BYTES)
    with nameless(folder) as file:
        if os.write(file, wrote) < PROBE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)  # or the page cache would answer
        return os.pread(file, PROBE_BYTES, 0) == wrote


def judge_disk(reading: DiskReading, folder: str, settings: DiskSettings, *, was_there: bool) -> Look:
    """Return what is wrong with the disk of `folder`."""
    if not reading.there:
        return Look((drain("gone", f"{folder} is gone: is its disk mounted?"),) if was_there else ())
    unknown = ""
    if reading.error in {errno.EACCES, errno.EPERM}:
        unknown = f"{folder}: {os.strerror(reading.error)}"
    return Look(tuple(_complaints(reading, folder, settings)), unknown)


def _complaints(reading: DiskReading, folder: str, settings: DiskSettings) -> Iterator[Complaint]:
    if reading.read_only or reading.error == errno.EROFS:
        said = f"{folder} takes no writes: its file system is mounted read-only"
        yield drain("read-only", said, certain=reading.read_only)
    elif reading.error in _BROKEN:
        yield drain("error", f"{folder}: {os.strerror(reading.error)}")
    elif reading.differs:
        yield drain("differs", f"{folder}: other bytes were read back than were written")
    if reading.error in _FULL:
        # A thin volume whose pool is used up, or a damaged map of free blocks, says so with room left.
        room = f", though {reading.free_bytes >> 20} MiB are free" if reading.free_bytes else ""
        yield comment("space", f"{folder}: {os.strerror(reading.error)}{room}")
    elif reading.free_bytes is not None and reading.free_bytes < settings.min_free_bytes:
        yield comment(
            "space", f"{folder}: {reading.free_bytes >> 20} MiB free of at least {settings.min_free_bytes >> 20}"
        )
    elif reading.files_free == 0:
        yield comment("space", f"{folder}: no more files can be made on its file system")
    if reading.probe_s is not None and reading.probe_s > settings.slow_s:
        said = f"{folder}: {PROBE_BYTES >> 10} KiB took {reading.probe_s:.1f} s to write and read back"
        far = reading.probe_s > 2 * settings.slow_s
        yield comment("slow", said) if far else observe("slow", said)
