"""Memory: what is available, who was killed for want of it, and what the memory controllers report."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from deeplink.scheduler.health.look import Complaint, Look, comment, drain, observe
from deeplink.scheduler.health.reading import number_of, table_of, text_of
from deeplink.scheduler.health.recent import Counters, Recent
from deeplink.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deeplink.clock import Clock
    from deeplink.scheduler.health.settings import MemorySettings

OOM_HELD_S = 600.0
_KIB = 1024


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


class MemoryCheck:
    """Looks at memory, and remembers what was killed."""

    def __init__(self, settings: MemorySettings, clock: Clock, paths: MemoryPaths | None = None) -> None:
        self._settings, self._clock, self._paths = settings, clock, paths or MemoryPaths()
        self._counters, self._recent = Counters(), Recent(OOM_HELD_S)

    def look(self) -> Look:
        """Look once."""
        reading, now = read_memory(self._paths), self._clock.monotonic()
        kills = {"node": reading.oom_kills, "group": reading.group_oom_kills}
        risen = self._counters.rises({name: count for name, count in kills.items() if count is not None})
        for name, count in risen.items():
            where = "here" if name == "node" else "in the agent's control group"
            self._recent.note(observe(f"oom {name}", _killed(count, where), certain=True), now)
        return Look(
            (*judge_memory(reading, self._settings), *self._recent.complaints(now)),
            "" if reading.total else "/proc/meminfo does not say",
        )


def _killed(count: int, where: str) -> str:
    return f"{counted(count, 'process')} {where} killed for want of memory in the last {OOM_HELD_S / 60:g} minutes"


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
