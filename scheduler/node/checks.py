"""All checks of a node, put together from its configuration."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deeplink.scheduler.node.check_result import Look, NodeCheck
from deeplink.scheduler.node.command_checks import MountCheck, SiteCheck, site_checks
from deeplink.scheduler.node.disk import DiskCheck
from deeplink.scheduler.node.gpucheck import GpuCheck, GpuTools, tools_here
from deeplink.scheduler.node.host_checks import ClockCheck, Compared, MemoryCheck, ProcessCheck, XidCheck
from deeplink.scheduler.node.network_check import NetworkCheck
from deeplink.scheduler.node.reading import HighWaterMarks, file_in
from deeplink.scheduler.node.settings import REFUSED, HealthSettings, load_settings
from deeplink.scheduler.node.slurmd import SlurmdCheck

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from deeplink.core.clock import Clock
    from deeplink.core.config import Config
    from deeplink.scheduler.node.settings import CheckTiming


OF_A_JOB = frozenset({"disk", "memory", "clock", "network", "gpu", "xid", "slurmd", "processes"})
"""What a job's agent looks at. A child that hangs on a mount would keep its step from ending."""
_LONGEST_ID = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthCheck:
    """A check of this node, as the schedule sees it."""

    name: str  # of the findings
    look: Callable[[], Look]  # called from one thread at a time; what it raises means that it could not tell
    timing: CheckTiming
    hung: Callable[[float], Look | None] | None = None  # says, at once, how a look is that is so old
    about: str = ""  # what it looks at, for people
    close: Callable[[], None] = lambda: None  # ends what a look may have left behind
    absent: str = ""  # why there is nothing for it to look at on this node; empty where there is


def hung_look(check: HealthCheck, age_s: float) -> Look:
    """Return what a look of a check says that has not ended for so many seconds."""
    said = f"the check has not ended for {age_s:.0f} s"
    try:
        return (check.hung(age_s) if check.hung else None) or Look((), said)
    except Exception as problem:  # noqa: BLE001 - as with a look: that it fails says nothing of the node
        return Look((), f"{said}; {type(problem).__name__}: {problem}")


def closed(checks: Iterable[HealthCheck], longest_s: float) -> None:
    """Have the checks end what their looks left behind, all at the same time; return within `longest_s`."""
    threads = []
    for check in checks:
        name = f"deeplink-close-{check.name}"[:60]
        thread = threading.Thread(target=_close, args=(check,), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads: what there is to end is no less there
            _close(check)
        else:
            threads.append(thread)
    end = time.monotonic() + longest_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


def _close(check: HealthCheck) -> None:
    with contextlib.suppress(OSError, ValueError):  # a look of it may still be waiting for the same child
        check.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckPaths:
    """Where the checks look."""

    node: str  # this node's name
    store: Path  # the folder of the shards
    of_job: bool = False  # for a job's agent: the cheap ones, and nothing is kept or started again
    # they are looked at by a command that ends: nothing is started again, and a store that never was is nothing
    # to look at
    once: bool = False
    gpus: GpuTools | None = None  # which tools for GPUs there are; looked for when not given
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)  # the environment; our own when not given
    # where it is left how far this clock is from the watchdog's
    compared: Compared = field(default_factory=Compared)


def checks_of(config: Config, place: CheckPaths, clock: Clock) -> list[HealthCheck]:
    """Return the checks of this node, with those for which there is nothing here, and the site's own."""
    settings = load_settings(config.health_file)
    if not place.of_job:
        return [*_built_in(config, settings, place, clock), *_sites(config, settings, clock)]
    return [check for check in _built_in(config, settings, place, clock) if check.name in OF_A_JOB]


def boot_id_of(config: Config) -> str:
    """Return what names this boot of the node's kernel; empty where it cannot be read."""
    try:
        with config.boot_id_file.open(encoding="ascii", errors="replace") as file:
            return file.read(_LONGEST_ID).strip()
    except OSError:
        return ""


def _built_in(config: Config, settings: HealthSettings, place: CheckPaths, clock: Clock) -> Iterator[HealthCheck]:
    # A job's task may see its own share of the GPUs and links alone: the next job's may be another one.
    is_share = place.of_job or (place.once and "SLURM_PROCID" in place.env)
    seen = HighWaterMarks(None if is_share else file_in(config.state))
    disk = DiskCheck(place.store, settings.disk, clock, seen)
    no_store = place.once and not disk.known and not place.store.exists()
    tools = place.gpus or tools_here(place.env.get("PATH", ""))
    no_gpus = "" if tools.any else "neither nvidia-smi nor NVML is here"
    xid = XidCheck(clock)
    no_log = "" if no_gpus or xid.log.may_read() else "the kernel's log may not be read"
    slurmd = SlurmdCheck(
        settings.slurmd,
        clock,
        place.node,
        restart=config.slurmd_restart if not (place.once or place.of_job) else "",
        expected="SLURM_JOB_ID" in place.env and bool(place.env.get("SLURMD_NODENAME")),
    )
    yield _check(
        "disk",
        disk,
        settings.disk,
        f"{place.store}: space, takes writes, gives back what was written, in time",
        f"there is no {place.store} yet" if no_store else "",
    )
    memory = MemoryCheck(settings.memory, clock)
    yield _check("memory", memory, settings.memory, "available memory, OOM kills, ECC")
    synchronised = ClockCheck(clock, compared=place.compared)
    yield _check("clock", synchronised, settings.clock, "synchronised, has not jumped, is where the watchdog's is")
    yield _check("mount", MountCheck(settings.mount, clock), settings.mount, "shared file systems answer")
    about = "links up, as fast as they were, without errors; InfiniBand ports"
    yield _check("network", NetworkCheck(settings.network, clock, seen), settings.network, about)
    about = "all there, ECC, retired and remapped memory, clocks, NVLink"
    yield _check("gpu", GpuCheck(settings.gpu, clock, seen, tools), settings.gpu, about, no_gpus)
    yield _check("xid", xid, settings.xid, "GPUs' errors in the kernel's log", no_gpus or no_log)
    yield _check("slurmd", slurmd, settings.slurmd, "lives; started again where slurmd_restart is set")
    processes = ProcessCheck(settings.processes, clock)
    yield _check("processes", processes, settings.processes, "zombies, uninterruptible sleep")


def _check(name: str, check: NodeCheck, timing: CheckTiming, about: str, absent: str = "") -> HealthCheck:
    return HealthCheck(
        name=name, look=check.look, timing=timing, hung=check.hung, about=about, close=check.close, absent=absent
    )


def _sites(config: Config, settings: HealthSettings, clock: Clock) -> Iterator[HealthCheck]:
    found = site_checks(config.health_folder, settings.site)
    for name, one in found.checks.items():
        yield _check(name, SiteCheck(one, clock), one, " ".join(one.command))
    if found.refused:
        look = Look((), "; ".join(found.refused))
        about = "programs that cannot be checks"
        yield HealthCheck(name=REFUSED, look=lambda: look, timing=settings.processes, about=about)
