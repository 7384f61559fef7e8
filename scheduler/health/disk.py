"""The store's disk: room, whether it takes writes, and how long a small probe takes.

That it is slow is never a reason to drain: under a full load of training every disk may be. One that hangs is,
once nothing that was asked of it comes back for minutes.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deeplink.mounts import file_system, is_shared
from deeplink.scheduler.doctor.disk import nameless
from deeplink.scheduler.health.hang import Hang, completed, starved_s, state_of
from deeplink.scheduler.health.look import Complaint, Look, comment, drain, observe

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from deeplink.clock import Clock
    from deeplink.scheduler.health.seen import HighWaterMarks
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
        probe_s: seconds to write a small file, have it on the disk, and read it back, without those that we waited
            for a processor; None where that failed.
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
    thread = threading.get_native_id()
    began, starved = clock.monotonic(), starved_s(thread)
    try:
        differs = not _probed(folder)
    except OSError as problem:
        return dataclasses.replace(reading, error=problem.errno or errno.EIO)
    took_s = clock.monotonic() - began - (starved_s(thread) - starved)
    return dataclasses.replace(reading, probe_s=max(0.0, took_s), differs=differs)


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
        yield _slow(reading.probe_s, said, settings)


def _slow(took_s: float, said: str, settings: DiskSettings) -> Complaint:
    return comment("slow", said) if took_s > 2 * settings.slow_s else observe("slow", said)


def judge_hang(hang: Hang, folder: str, settings: DiskSettings, *, shared: bool) -> Look:
    """Return what a look at the disk of `folder` that has not ended says.

    Args:
        hang: how it stands.
        folder: as it is called.
        settings: from when on it counts as hung.
        shared: the folder lies on storage of many nodes, whose standing still is no fault of this one.

    Of a file system without a disk of its own (Btrfs, ZFS) it is unknown whether others are served: no node is
    drained for that.
    """
    said = f"{folder}: {PROBE_BYTES >> 10} KiB are not written and read back after {hang.age_s:.0f} s"
    if hang.starved:
        return Look((), f"{said}, but {hang.starved}")
    if hang.goes_on:
        return Look((_slow(hang.waited_s, f"{said}, while its disk goes on", settings),), said)
    if hang.waited_s < settings.hung_s:
        return Look((_slow(hang.waited_s, said, settings),), said)
    hangs = drain("hangs", said) if hang.goes_on is False and not shared else comment("hangs", said)
    return Look((hangs,), said)


@dataclass(slots=True)
class DiskCheck:
    """Looks at the disk of a folder; `hung` may be asked meanwhile, from another thread.

    Attributes:
        seen: where it is kept that the folder was there.
    """

    folder: Path
    settings: DiskSettings
    clock: Clock
    seen: HighWaterMarks
    _under_way: _UnderWay | None = field(default=None)

    @property
    def known(self) -> bool:
        """Whether the folder was ever seen to be there."""
        return self.seen.best(f"folder {self.folder}") > 0

    def look(self) -> Look:
        """Look once; may hang as long as the disk does."""
        thread = threading.get_native_id()
        self._under_way = under_way = _UnderWay(thread, starved_s(thread))
        name = str(self.folder)
        try:
            under_way.device = self.folder.stat().st_dev
            under_way.shared = is_shared(file_system(self.folder))
        except OSError:
            pass  # reading it tells
        reading = read_disk(self.folder, self.clock)
        self.seen.best(f"folder {name}", float(reading.there))
        return judge_disk(reading, name, self.settings, was_there=self.known)

    def hung(self, age_s: float) -> Look:
        """Return what the look under way says, which has not ended for so many seconds; waits for no disk."""
        one = self._under_way
        if one is None:
            return Look((), "the look has not begun")
        before, one.completed = one.completed, completed(one.device) if one.device is not None else None
        hang = Hang(
            age_s=age_s,
            state=state_of(one.thread),
            starved_s=starved_s(one.thread) - one.starved_s,
            goes_on=None if before is None or one.completed is None else one.completed != before,
        )
        return judge_hang(hang, str(self.folder), self.settings, shared=one.shared)


@dataclass(slots=True)
class _UnderWay:
    """The look under way: its thread, and what is known of the folder's storage."""

    thread: int
    starved_s: float
    device: int | None = None
    shared: bool = False
    completed: int | None = None
