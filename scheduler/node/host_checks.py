"""The node itself: clock, memory, processes that are stuck or dead, and GPU errors in the kernel's log."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from deeplink.core.text import counted
from deeplink.scheduler.node.check_result import (
    Complaint,
    Counters,
    Look,
    NodeCheck,
    Recent,
    comment,
    drain,
    observe,
)
from deeplink.scheduler.node.reading import group_oom_kills, number_of, table_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from deeplink.core.clock import Clock
    from deeplink.scheduler.node.settings import MemorySettings, ProcessSettings

JUMP_S = 1.0
"""The clock for people and the one that never jumps may drift so far apart between looks: slewing is slower."""
FAR_S = 60.0
JUMP_HELD_S = 1800.0
SKEW_S = 1.0  # so far apart may this clock and the watchdog's be, the time that asking took left out
COMPARED_S = 60.0  # a comparison counts for so long: the watchdog may be away
_UNSYNC = 0x40  # STA_UNSYNC of adjtimex(2)
_ERROR = 5  # TIME_ERROR: what adjtimex returns for a clock that is not synchronised
OOM_HELD_S = 600.0
_KIB = 1024
_KILLED = re.compile(r"Killed process (\d+) \((.{0,64}?)\)(?:,| total-vm)")
ZOMBIES_MANY = 100
_NAMED = 3  # of several processes so many are named
_AFTER_NAME = 19  # starttime is so many fields behind the state, proc(5)
_MOST_RECORDS = 200_000
_RECORD = 8192  # the longest that /dev/kmsg gives at once
_HEAD = re.compile(r"\d+,\d+,(\d+),[^;]*;(.*)")
XID_HELD_S = 3600.0  # an Xid is told for so long after it came
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)(?:, ?(.*))?$")
# What NVIDIA's catalogue of Xid errors says is the hardware's: the GPU is not to be used before it was reset or
# replaced. Those that a program causes (13, 31, 43, 45 and others) say nothing of the node.
DRAINED = {
    48: "uncorrectable ECC error",
    62: "internal microcontroller halt",
    64: "row remapping failed",
    74: "NVLink error",
    79: "fallen off the bus",
    95: "uncontained ECC error",
    109: "context switch timeout",
    119: "GSP does not answer",
    120: "GSP error",
    136: "link training failed",
    140: "unrecovered ECC error",
    143: "GPU did not initialise",
}
COMMENTED = {63: "row remapping or page retirement", 92: "many correctable ECC errors", 94: "contained ECC error"}


class _Timex(ctypes.Structure):
    """The beginning of `struct timex`, and room for the rest of it."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_long * 64),
    )


def read_clock() -> bool | None:
    """Return whether a daemon of NTP or PTP keeps the clock synchronised; None where the kernel does not tell."""
    timex = _Timex()
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.byref(timex))
    except (OSError, AttributeError):
        return None
    # Below 0: forbidden by a filter of system calls.
    return None if state < 0 else state != _ERROR and not timex.status & _UNSYNC


@dataclass(frozen=True, slots=True)
class Comparison:
    """This clock beside the watchdog's."""

    ahead_s: float  # by how much this one is ahead; negative where it is behind
    within_s: float  # the figure is right to so much either way: half of what asking took
    at: float  # when it was compared, monotonic


@dataclass(slots=True)
class Compared:
    """The newest comparison: who tells the watchdog of this node leaves it here for the check."""

    newest: Comparison | None = None


class ClockCheck(NodeCheck):
    """Looks at the clock, and remembers jumps."""

    def __init__(
        self, clock: Clock, read: Callable[[], bool | None] = read_clock, compared: Compared | None = None
    ) -> None:
        self._clock, self._read, self._compared = clock, read, compared or Compared()
        self._last: tuple[float, float] | None = None
        self._recent = Recent(JUMP_HELD_S)

    @override
    def look(self) -> Look:
        now, unix = self._clock.monotonic(), self._clock.unix()
        if self._last is not None:
            jumped = judge_jump(unix - self._last[1], now - self._last[0])
            if jumped is not None:
                self._recent.note(jumped, now)
        self._last = (now, unix)
        newest = self._compared.newest
        skewed = judge_skew(newest) if newest is not None and now - newest.at < COMPARED_S else ()
        complaints = (*skewed, *self._recent.complaints(now))
        synchronised = self._read()
        if synchronised is None:
            return Look(complaints, "the kernel does not say whether its clock is synchronised")
        # A kernel whose clock a virtual machine's host keeps right looks unsynchronised, too: only observed.
        said = "the clock is not synchronised: is chronyd, ntpd or timesyncd running?"
        return Look(complaints if synchronised else (observe("unsynchronised", said), *complaints))


def judge_jump(unix_s: float, monotonic_s: float) -> Complaint | None:
    """Return a complaint when by one clock another time has passed than by the other."""
    jump_s = unix_s - monotonic_s
    if abs(jump_s) <= JUMP_S:
        return None
    said = f"the clock jumped by {jump_s:+.1f} s"
    return (comment if abs(jump_s) > FAR_S else observe)("jump", said, certain=True)


def judge_skew(found: Comparison) -> tuple[Complaint, ...]:
    """Return a complaint when this clock and the watchdog's are surely apart; which is wrong is not known here."""
    apart_s = abs(found.ahead_s)
    if apart_s - found.within_s <= SKEW_S:
        return ()
    said = f"the clock is {apart_s:.1f} s {'ahead of' if found.ahead_s > 0 else 'behind'} the watchdog's"
    return (observe("skew", said),)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """What was seen of memory."""

    total: int = 0  # bytes; 0 where unknown
    available: int = 0  # bytes that can be had without swapping
    # processes killed for want of memory since the boot, on the whole node; None where unknown
    oom_kills: int | None = None
    # the same in our own control group, a job's bound of memory, since it was made
    group_oom_kills: int | None = None
    # errors that a memory controller could not correct, by controller, since the boot
    uncorrected: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MemoryPaths:
    """Where it is read."""

    proc: Path = Path("/proc")
    cgroup: Path = Path("/sys/fs/cgroup")
    edac: Path = Path("/sys/devices/system/edac/mc")


def read_memory(paths: MemoryPaths) -> MemoryReading:
    """Look at memory."""
    sizes = table_of(paths.proc / "meminfo")
    return MemoryReading(
        total=sizes.get("MemTotal", 0) * _KIB,
        available=sizes.get("MemAvailable", 0) * _KIB,
        oom_kills=table_of(paths.proc / "vmstat").get("oom_kill"),
        group_oom_kills=group_oom_kills(paths.proc, paths.cgroup),
        uncorrected=_uncorrected(paths.edac),
    )


def _uncorrected(edac: Path) -> dict[str, int]:
    try:
        controllers = sorted(path for path in edac.iterdir() if path.name.startswith("mc"))
    except OSError:
        return {}
    counts = {path.name: number_of(path / "ue_count") for path in controllers}
    return {name: count for name, count in counts.items() if count is not None}


class MemoryCheck(NodeCheck):
    """Looks at memory, and tells for a while what was killed: when last, and who, if the kernel's log says so."""

    def __init__(
        self,
        settings: MemorySettings,
        clock: Clock,
        paths: MemoryPaths | None = None,
        log: KernelLog | None = None,
    ) -> None:
        self._settings, self._clock, self._paths = settings, clock, paths or MemoryPaths()
        self._counters, self._recent = Counters(), Recent(OOM_HELD_S)
        self._log = log or KernelLog()
        self._log.news()  # what was before us

    @override
    def look(self) -> Look:
        reading, now = read_memory(self._paths), self._clock.monotonic()
        kills = {"node": reading.oom_kills, "group": reading.group_oom_kills}
        risen = self._counters.rises({name: count for name, count in kills.items() if count is not None})
        named = [f"{found[2]} ({found[1]})" for line in self._log.news() if (found := _KILLED.search(line.text))]
        if named:  # the kernel counts first and names then: a look may come between the two
            risen["node"] = max(len(named), risen.get("node", 0))
        for name, count in risen.items():
            said = _told(count, "here", named) if name == "node" else _told(count, "in the agent's control group")
            complaint = observe(f"oom {name}", said, certain=True)
            self._recent.note(replace(complaint, at_unix=self._clock.unix()), now)
        return Look(
            (*judge_memory(reading, self._settings), *self._recent.complaints(now)),
            "" if reading.total else "/proc/meminfo does not say",
        )

    @override
    def close(self) -> None:
        self._log.close()


def _told(count: int, where: str, named: Sequence[str] = ()) -> str:
    who = f": {', '.join(named[-_NAMED:])}" if named else ""
    return f"{counted(count, 'process')} {where} killed for want of memory{who}"


def judge_memory(reading: MemoryReading, settings: MemorySettings) -> Iterator[Complaint]:
    """Return what is wrong with memory as it is now."""
    if reading.total and 100 * reading.available < settings.min_available * reading.total:
        yield comment("available", f"{reading.available >> 20} MiB of {reading.total >> 20} are available")
    for name, count in reading.uncorrected.items():
        if count:
            said = f"memory controller {name}: {counted(count, 'uncorrectable error')} since the boot"
            yield drain(f"{name} errors", said, certain=True)


@dataclass(frozen=True, slots=True)
class Still:
    """A process that does nothing."""

    pid: int
    start: int  # when it began, in ticks: with the number it names one process for ever
    name: str
    state: str  # Z, or D
    switches: int = 0  # times it was given up the processor for another; it is the same sleep while this stays


def read_still(proc: Path) -> Iterator[Still]:
    """Yield the processes in state Z or D."""
    for path in proc.iterdir():
        if not path.name.isdigit():
            continue
        try:
            found = parse_stat((path / "stat").read_text(encoding="utf-8", errors="replace"))
            if found is None or found.state not in {"Z", "D"}:
                continue
            switches = _switches((path / "status").read_text(encoding="utf-8", errors="replace"))
        except OSError:  # it ended meanwhile
            continue
        yield Still(found.pid, found.start, found.name, found.state, switches)


def parse_stat(line: str) -> Still | None:
    """Return what a line of /proc/PID/stat says; None where it is none. A name may hold blanks and brackets.

    >>> parse_stat("7 (a) b) D 1 " + " ".join(map(str, range(17))) + " 4242")
    Still(pid=7, start=4242, name='a) b', state='D', switches=0)
    """
    head, bracket, tail = line.rpartition(")")
    pid, opened, name = head.partition(" (")
    words = tail.split()
    if not (bracket and opened and pid.isdigit()) or len(words) <= _AFTER_NAME or not words[_AFTER_NAME].isdigit():
        return None
    return Still(int(pid), int(words[_AFTER_NAME]), name, words[0])


def _switches(status: str) -> int:
    lines = [line.split() for line in status.splitlines() if "ctxt_switches:" in line]
    return sum(int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit())


@dataclass(slots=True)
class ProcessCheck(NodeCheck):
    """Looks at all processes, and remembers since when each has been still."""

    settings: ProcessSettings
    clock: Clock
    proc: Path = Path("/proc")
    _since: dict[Still, float] = field(default_factory=dict)

    @override
    def look(self) -> Look:
        now = self.clock.monotonic()
        self._since = {still: self._since.get(still, now) for still in read_still(self.proc)}
        ages = ((still, now - since) for still, since in self._since.items())
        return Look(tuple(judge_processes(ages, self.settings)))


def judge_processes(still: Iterable[tuple[Still, float]], settings: ProcessSettings) -> Iterator[Complaint]:
    """Return what is wrong, given each still process and for how many seconds it has been so."""
    found = list(still)
    stuck = [(one, age) for one, age in found if one.state == "D" and age >= settings.stuck_s]
    zombies = [(one, age) for one, age in found if one.state == "Z" and age >= settings.zombie_s]
    if stuck:
        oldest = max(age for _, age in stuck)
        said = f"{counted(len(stuck), 'process')} uninterruptible, for up to {oldest:.0f} s: {_named(stuck)}"
        yield comment("stuck", said)
    if zombies:
        said = f"{counted(len(zombies), 'process')} dead and not waited for: {_named(zombies)}"
        yield comment("zombies", said) if len(zombies) >= ZOMBIES_MANY else observe("zombies", said)


def _named(found: list[tuple[Still, float]]) -> str:
    longest = sorted(found, key=lambda one: (-one[1], one[0].pid))
    said = ", ".join(f"{one.name} ({one.pid})" for one, _ in longest[:_NAMED])
    return f"{said} and {len(found) - _NAMED} more" if len(found) > _NAMED else said


@dataclass(frozen=True, slots=True)
class Said:
    """One line of the log."""

    text: str
    at: float  # monotonic seconds of the kernel, about those of `time.monotonic`


def parse_kmsg(text: str) -> Iterator[Said]:
    r"""Yield the lines in records of /dev/kmsg.

    >>> list(parse_kmsg("4,1,9000000,-;eth0: link up\n SUBSYSTEM=net\n"))
    [Said(text='eth0: link up', at=9.0)]
    """
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head:
            yield Said(head[2], int(head[1]) / 1e6)


class KernelLog:
    """Reads /dev/kmsg from where it read last; the whole ring at first. Nothing where that is not allowed."""

    def __init__(self, path: Path = Path("/dev/kmsg")) -> None:
        self._path = path
        self._file = -1

    def may_read(self) -> bool:
        """Return whether the log is there, and we may read it."""
        return self._opened()

    def news(self) -> list[Said]:
        """Return what was said since the last call."""
        if not self._opened():
            return []
        return [said for text in self._records() for said in parse_kmsg(text)]

    def close(self) -> None:
        """Read no more."""
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = -1

    def _opened(self) -> bool:
        if self._file < 0:
            try:
                self._file = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK)
            except OSError:
                return False
        return True

    def _records(self) -> Iterator[str]:
        for _ in range(_MOST_RECORDS):
            try:
                record = os.read(self._file, _RECORD)
            except OSError as problem:
                if problem.errno == errno.EPIPE:  # overwritten before we read it
                    continue
                return
            if not record:
                return
            yield record.decode(errors="replace")


def judge_xid(line: Said) -> Complaint | None:
    """Return what an Xid in a line of the kernel's log asks for; None where there is none."""
    found = _XID.search(line.text)
    if found is None:
        return None
    gpu, number, said = found[1], int(found[2]), (found[3] or "").strip()
    known = DRAINED.get(number) or COMMENTED.get(number)
    text = f"Xid {number} of the GPU at {gpu}: {known or said or 'see NVIDIA catalogue of Xid errors'}"
    complain = drain if number in DRAINED else comment if number in COMMENTED else observe
    return complain(f"xid {number} {gpu}", text, certain=True)


@dataclass(slots=True)
class XidCheck(NodeCheck):
    """Tells the Xids of the last hour: within seconds, as what a rank died of is asked for at once."""

    clock: Clock
    log: KernelLog = field(default_factory=KernelLog)
    _recent: Recent = field(default_factory=lambda: Recent(XID_HELD_S))

    @override
    def look(self) -> Look:
        now = self.clock.monotonic()
        for line in self.log.news():
            if now - line.at < XID_HELD_S and (complaint := judge_xid(line)):
                self._recent.note(complaint, min(now, line.at))
        return Look(self._recent.complaints(now))

    @override
    def close(self) -> None:
        self.log.close()
