"""Memory: what is available, who was killed for want of it, and what the memory controllers report."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from deeplink.scheduler.health.kernellog import KernelLog, Said
from deeplink.scheduler.health.look import Complaint, Look, comment, drain, observe
from deeplink.scheduler.health.reading import number_of, table_of, text_of
from deeplink.scheduler.health.recent import Counters, Recent
from deeplink.text import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from deeplink.clock import Clock
    from deeplink.scheduler.health.settings import MemorySettings

OOM_HELD_S = 600.0
_KIB = 1024
_NAMED = 3
"""Of several that were killed at once so many are named, the last."""
_KILLED = re.compile(r"Killed process (\d+) \((.{0,64}?)\)(?:,| total-vm)")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """What was seen of memory.

    Attributes:
        total: bytes; 0 where unknown.
        available: bytes that can be had without swapping.
        oom_kills: processes killed for want of memory since the boot, on the whole node; None where unknown.
        group_oom_kills: the same in our own control group, a job's bound of memory, since it was made.
        uncorrected: errors that a memory controller could not correct, by controller, since the boot.
    """

    total: int = 0
    available: int = 0
    oom_kills: int | None = None
    group_oom_kills: int | None = None
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
        group_oom_kills=_group_kills(paths),
        uncorrected=_uncorrected(paths.edac),
    )


def _group_kills(paths: MemoryPaths) -> int | None:
    """Return the kills in our own group of cgroup v2 (the line `0::/path`)."""
    for line in (text_of(paths.proc / "self" / "cgroup") or "").splitlines():
        if line.startswith("0::/"):
            return table_of(paths.cgroup / line.removeprefix("0::/") / "memory.events").get("oom_kill")
    return None


def _uncorrected(edac: Path) -> dict[str, int]:
    try:
        controllers = sorted(path for path in edac.iterdir() if path.name.startswith("mc"))
    except OSError:
        return {}
    counts = {path.name: number_of(path / "ue_count") for path in controllers}
    return {name: count for name, count in counts.items() if count is not None}


@dataclass(frozen=True, slots=True)
class Killed:
    """A process that the kernel killed for want of memory."""

    pid: int
    name: str


def killed_in(lines: Iterable[Said]) -> Iterator[Killed]:
    """Yield who was killed, from lines of the kernel's log.

    >>> line = "Memory cgroup out of memory: Killed process 4711 (pt (main)) total-vm:9kB, anon-rss:1kB"
    >>> list(killed_in([Said(line, 1.0)]))
    [Killed(pid=4711, name='pt (main)')]
    """
    for line in lines:
        found = _KILLED.search(line.text)
        if found:
            yield Killed(int(found[1]), found[2])


class MemoryCheck:
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

    def look(self) -> Look:
        """Look once."""
        reading, now = read_memory(self._paths), self._clock.monotonic()
        kills = {"node": reading.oom_kills, "group": reading.group_oom_kills}
        risen = self._counters.rises({name: count for name, count in kills.items() if count is not None})
        named = tuple(killed_in(self._log.news()))
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

    def close(self) -> None:
        """Read the kernel's log no more."""
        self._log.close()


def _told(count: int, where: str, named: Sequence[Killed] = ()) -> str:
    who = ", ".join(f"{killed.name} ({killed.pid})" for killed in named[-_NAMED:])
    return f"{counted(count, 'process')} {where} killed for want of memory{f': {who}' if who else ''}"


def judge_memory(reading: MemoryReading, settings: MemorySettings) -> Iterator[Complaint]:
    """Return what is wrong with memory as it is now."""
    if reading.total and 100 * reading.available < settings.min_available * reading.total:
        yield comment("available", f"{reading.available >> 20} MiB of {reading.total >> 20} are available")
    for name, count in reading.uncorrected.items():
        if count:
            yield drain(
                f"{name} errors",
                f"memory controller {name}: {counted(count, 'uncorrectable error')} since the boot",
                certain=True,
            )
