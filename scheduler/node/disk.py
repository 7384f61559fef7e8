"""The store's disk: room, whether it takes writes, and how long a small probe takes. And mounts: do they answer.

That it is slow is never a reason to drain: under a full load of training every disk may be. One that hangs is,
once nothing that was asked of it comes back for minutes. A mount is asked by a child that may hang, which is then
left alone until it returns.
"""

from __future__ import annotations

import dataclasses
import errno
import mmap
import os
import random
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from deeplink.core.store_place import file_system, is_shared, parse_mounts
from deeplink.scheduler.node.check_result import Complaint, Look, NodeCheck, comment, drain, observe, one_line
from deeplink.scheduler.node.child import KILLED_WAIT_S, NOT_FOUND, CheckProcess
from deeplink.scheduler.node.reading import text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from deeplink.core.clock import Clock
    from deeplink.scheduler.node.reading import HighWaterMarks
    from deeplink.scheduler.node.settings import DiskSettings, MountSettings

PROBE_BYTES = 64 << 10
# What Linux says of a disk that is broken or gone, in the order of trying: not of one that is full or busy.
_BROKEN = frozenset({errno.EIO, errno.ENXIO, errno.ENODEV, errno.ESTALE, errno.EUCLEAN, errno.ENOTCONN})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
WAITS_INSIDE = frozenset({"D", "S"})
"""States, as in proc(5), of a thread that waits for something else than a processor."""
_READS, _WRITES, _DISCARDS, _FLUSHES = 0, 4, 11, 15  # requests completed, of Documentation/block/stat.rst
SIZE = 256 << 20
LONGEST_S = 8.0  # bound on writing, on reading and on the random reads, each
_CHUNK = 4 << 20
_PAGE = 4096
_RANDOM_S = 0.5
_MOST_RANDOM = 20_000

MOST_MOUNTS = 64
_SETTLE_S = 0.5  # of the look's deadline kept for what comes after the waiting
# What stat(1) says, in English, of storage that is broken; a mount we may not look at is another matter.
_BROKEN_MOUNT = (
    "Stale file handle",
    "Input/output error",
    "Transport endpoint is not connected",
    "Host is down",
    "No such device",
    "Connection timed out",
    "Remote I/O error",
    "Cannot send after transport endpoint shutdown",
    "No such file or directory",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskReading:
    """What was seen of a disk."""

    there: bool = True  # the folder is
    free_bytes: int | None = None  # what an ordinary user may still write; None where it cannot be told
    files_free: int | None = None  # files that can still be made; None where the file system has no such bound
    read_only: bool = False  # it is mounted so
    # seconds to write a small file, have it on the disk, and read it back, without those that we waited for a
    # processor; None where that failed
    probe_s: float | None = None
    error: int = 0  # errno of what failed; 0 where nothing did
    differs: bool = False  # what was read back is not what was written


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
        yield comment("space", f"{folder}: {os.strerror(reading.error)}{room}", certain=True)
    elif reading.free_bytes is not None and reading.free_bytes < settings.min_free_bytes:
        said = f"{folder}: {reading.free_bytes >> 20} MiB free of at least {settings.min_free_bytes >> 20}"
        yield comment("space", said, certain=True)  # counted, not timed: one look is enough
    elif reading.files_free == 0:
        yield comment("space", f"{folder}: no more files can be made on its file system", certain=True)
    if reading.probe_s is not None and reading.probe_s > settings.slow_s:
        said = f"{folder}: {PROBE_BYTES >> 10} KiB took {reading.probe_s:.1f} s to write and read back"
        yield _slow(reading.probe_s, said, settings)


def _slow(took_s: float, said: str, settings: DiskSettings) -> Complaint:
    return comment("slow", said) if took_s > 2 * settings.slow_s else observe("slow", said)


def judge_hang(hang: Hang, folder: str, settings: DiskSettings, *, shared: bool) -> Look:
    """Return what a look at the disk of `folder` that has not ended says.

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
class DiskCheck(NodeCheck):
    """Looks at the disk of a folder; `hung` may be asked meanwhile, from another thread."""

    folder: Path
    settings: DiskSettings
    clock: Clock
    seen: HighWaterMarks  # where it is kept that the folder was there
    _under_way: _UnderWay | None = field(default=None)

    @property
    def known(self) -> bool:
        """Whether the folder was ever seen to be there."""
        return self.seen.best(f"folder {self.folder}") > 0

    @override
    def look(self) -> Look:
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

    @override
    def hung(self, age_s: float, /) -> Look:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """How a look that has not ended stands."""

    age_s: float  # for how long it has been under way
    state: str  # of its thread, a letter as in proc(5); empty where unknown
    starved_s: float = 0.0  # for how much of that it waited for a processor
    # its disk has completed requests since it was last asked; None where that cannot be told
    goes_on: bool | None = None

    @property
    def starved(self) -> str:
        """Why it says nothing of the disk; empty where it does."""
        if self.state in WAITS_INSIDE:
            return ""
        return "its thread is stopped" if self.state in {"T", "t"} else "its thread waits for a processor"

    @property
    def waited_s(self) -> float:
        """For how long it waited for the disk, and not for a processor."""
        return max(0.0, self.age_s - self.starved_s)


def starved_s(thread: int, proc: Path = Path("/proc")) -> float:
    """Return how long a thread of ours has waited for a processor in its life; 0 where the kernel does not say."""
    words = (text_of(proc / "self" / "task" / str(thread) / "schedstat") or "").split()
    return int(words[1]) / 1e9 if len(words) > 1 and words[1].isdigit() else 0.0


def state_of(thread: int, proc: Path = Path("/proc")) -> str:
    """Return the state of a thread of ours; empty where there is none such."""
    _, _, after = (text_of(proc / "self" / "task" / str(thread) / "stat") or "").rpartition(")")
    return after.split()[0] if after.split() else ""


def completed(device: int, sys: Path = Path("/sys")) -> int | None:
    """Return how many requests a block device has completed; None where the file system is on no single one."""
    text = text_of(sys / "dev" / "block" / f"{os.major(device)}:{os.minor(device)}" / "stat")
    return total(text.split()) if text else None


def total(words: Sequence[str]) -> int | None:
    """Return the completed requests in the words of a device's `stat`; None where it is none.

    >>> total("10 0 80 1 5 0 40 2 1 3 3".split()), total([])
    (15, None)
    """
    numbers = [words[at] for at in (_READS, _WRITES, _DISCARDS, _FLUSHES) if at < len(words)]
    return sum(map(int, numbers)) if numbers and all(number.isdigit() for number in numbers) else None


def measured_disk(folder: Path, size: int, clock: Clock, *, longest_s: float = LONGEST_S) -> Disk:
    """Write, read back and read at random a file of `size` bytes in a folder; nothing stays, also when killed."""
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
    """Give the descriptor of a new file in a folder that has no name there, and is gone when closed."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """How fast a folder's disk was for a moment."""

    written: int = 0  # bytes; fewer than were asked for where the time was up
    write_s: float = 0.0  # seconds, until fsync had returned
    read_s: float = 0.0  # seconds to read them back
    cold: bool = False  # whether the read came from the disk, not from memory (O_DIRECT)
    random_reads: int = 0  # reads of 4 KiB at random places, one after another
    random_s: float = 0.0  # seconds for all of them
    problem: str = ""  # why nothing was measured


def ask_statfs(path: str) -> list[str]:
    """Return a command that asks a file system for its room: a small program, and nothing of ours in memory."""
    return ["stat", "--file-system", "--format=%S", "--", path]


def watched_mounts(mountinfo: str, settings: MountSettings) -> list[str]:
    """Return the mount points to ask: those the site names, and each that lies on a shared file system."""
    # The later of two on one point hides the earlier one, which cannot be asked then.
    found = [point for point, kind in dict(parse_mounts(mountinfo)).items() if is_shared(kind)]
    return [point for point in dict.fromkeys([*settings.paths, *found]) if point not in settings.skip][
        :MOST_MOUNTS
    ]


@dataclass(slots=True)
class MountCheck(NodeCheck):
    """Asks every mount at once, each by a child of its own."""

    settings: MountSettings
    clock: Clock
    mountinfo: Path = Path("/proc/self/mountinfo")  # where the mounts are read
    command: Callable[[str], Sequence[str]] = ask_statfs  # returns the command that asks a mount point
    _children: dict[str, CheckProcess] = field(default_factory=dict)

    @override
    def look(self) -> Look:
        mountinfo = text_of(self.mountinfo)
        if mountinfo is None:
            return Look((), f"{self.mountinfo} cannot be read")
        mounted = {point for point, _ in parse_mounts(mountinfo)}
        asked = watched_mounts(mountinfo, self.settings)
        complaints = [
            drain(path, f"{path} is not mounted")
            for path in self.settings.paths
            if path not in mounted and path in asked
        ]
        missing = {complaint.subject for complaint in complaints}
        # One that hangs is asked about also after it was unmounted by force: its child says when it is over.
        hanging = [path for path, child in self._children.items() if child.age_s]
        asked = [path for path in dict.fromkeys([*asked, *hanging]) if path not in missing]
        end = self.clock.monotonic() + max(0.1, self.settings.deadline_s - _SETTLE_S)
        for path in asked:
            self._children.setdefault(path, CheckProcess(self.clock)).begin(self.command(path))
        unknown = []
        for path in asked:
            said, broken = self._answer(path, end)
            if broken:
                complaints.append(drain(path, said))
            elif said:
                unknown.append(said)
        self._children = {path: child for path, child in self._children.items() if path in asked}
        return Look(tuple(complaints), "; ".join(unknown))

    @override
    def close(self) -> None:
        children = list(self._children.values())  # a look may still be adding to them
        for child in children:
            child.kill(0.0)
        end = self.clock.monotonic() + KILLED_WAIT_S
        for child in children:
            child.answer(max(0.0, end - self.clock.monotonic()))

    def _answer(self, path: str, end: float) -> tuple[str, bool]:
        child = self._children[path]
        answer = child.answer(max(0.0, end - self.clock.monotonic()))
        if answer is None:
            return f"{path} has not answered for {child.age_s:.0f} s", True
        return judge_mount(path, answer.code, answer.stderr)


def judge_mount(path: str, code: int, stderr: str) -> tuple[str, bool]:
    """Return what is to be said of a mount that answered, empty where all is well, and whether it is broken."""
    if not code:
        return "", False
    said = one_line(stderr) or f"stat of {path} exited {code}"
    # Without the program itself nothing was asked.
    return f"{path}: {said}", code != NOT_FOUND and any(word in stderr for word in _BROKEN_MOUNT)
