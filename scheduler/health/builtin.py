"""All checks of a node, put together from its configuration."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deeplink.scheduler.health.check import HealthCheck
from deeplink.scheduler.health.clock import ClockCheck, Compared
from deeplink.scheduler.health.disk import DiskCheck
from deeplink.scheduler.health.gpucheck import GpuCheck, GpuTools, tools_here
from deeplink.scheduler.health.look import Look
from deeplink.scheduler.health.memory import MemoryCheck
from deeplink.scheduler.health.mount import MountCheck
from deeplink.scheduler.health.network import NetworkCheck
from deeplink.scheduler.health.processes import ProcessCheck
from deeplink.scheduler.health.seen import HighWaterMarks, file_in
from deeplink.scheduler.health.settings import REFUSED, HealthSettings, load_settings
from deeplink.scheduler.health.site import SiteCheck, site_checks
from deeplink.scheduler.health.slurmd import SlurmdCheck
from deeplink.scheduler.health.xid import XidCheck

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from deeplink.clock import Clock
    from deeplink.config import Config

OF_A_JOB = frozenset({"disk", "memory", "clock", "network", "gpu", "xid", "slurmd", "processes"})
"""What a job's agent looks at. A child that hangs on a mount would keep its step from ending."""
_LONGEST_ID = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckPaths:
    """Where the checks look.

    Attributes:
        node: this node's name.
        store: the folder of the shards.
        of_job: for a job's agent: the cheap ones, and nothing is kept or started anew.
        once: they are looked at by a command that ends: nothing is started anew, and a store that never was is
            nothing to look at.
        gpus: which tools for GPUs there are; looked for when not given.
        env: the environment; our own when not given.
        compared: where it is left how far this clock is from the watchdog's.
    """

    node: str
    store: Path
    of_job: bool = False
    once: bool = False
    gpus: GpuTools | None = None
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)
    compared: Compared = field(default_factory=Compared)


def checks_of(config: Config, place: CheckPaths, clock: Clock) -> list[HealthCheck]:
    """Return the checks of this node, with those for which there is nothing here, and the site's own.

    Raises:
        ConfigError: the settings of the checks cannot be used.
    """
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
    yield _disk(settings, place, clock, seen)
    memory = MemoryCheck(settings.memory, clock)
    yield HealthCheck(
        name="memory",
        look=memory.look,
        timing=settings.memory,
        close=memory.close,
        about="available memory, OOM kills, ECC",
    )
    yield HealthCheck(
        name="clock",
        look=ClockCheck(clock, compared=place.compared).look,
        timing=settings.clock,
        about="synchronised, has not jumped, is where the watchdog's is",
    )
    mount = MountCheck(settings.mount, clock)
    yield HealthCheck(
        name="mount", look=mount.look, timing=settings.mount, close=mount.close, about="shared file systems answer"
    )
    network = NetworkCheck(settings.network, clock, seen)
    yield HealthCheck(
        name="network",
        look=network.look,
        timing=settings.network,
        about="links up, as fast as they were, without errors; InfiniBand ports",
    )
    yield from _gpus(settings, place, clock, seen)
    yield _slurmd(config, settings, place, clock)
    processes = ProcessCheck(settings.processes, clock)
    yield HealthCheck(
        name="processes", look=processes.look, timing=settings.processes, about="zombies, uninterruptible sleep"
    )


def _disk(settings: HealthSettings, place: CheckPaths, clock: Clock, seen: HighWaterMarks) -> HealthCheck:
    disk = DiskCheck(place.store, settings.disk, clock, seen)
    nothing = place.once and not disk.known and not place.store.exists()
    return HealthCheck(
        name="disk",
        look=disk.look,
        timing=settings.disk,
        hung=disk.hung,
        absent=f"there is no {place.store} yet" if nothing else "",
        about=f"{place.store}: space, takes writes, gives back what was written, in time",
    )


def _gpus(
    settings: HealthSettings, place: CheckPaths, clock: Clock, seen: HighWaterMarks
) -> Iterator[HealthCheck]:
    tools = place.gpus or tools_here(place.env.get("PATH", ""))
    gpu, xid = GpuCheck(settings.gpu, clock, seen, tools), XidCheck(clock)
    none = "" if tools.any else "neither nvidia-smi nor NVML is here"
    yield HealthCheck(
        name="gpu",
        look=gpu.look,
        timing=settings.gpu,
        close=gpu.close,
        about="all there, ECC, retired and remapped memory, clocks, NVLink",
        absent=none,
    )
    yield HealthCheck(
        name="xid",
        look=xid.look,
        timing=settings.xid,
        close=xid.close,
        about="GPUs' errors in the kernel's log",
        absent=none or ("" if xid.log.may_read() else "the kernel's log may not be read"),
    )


def _slurmd(config: Config, settings: HealthSettings, place: CheckPaths, clock: Clock) -> HealthCheck:
    slurmd = SlurmdCheck(
        settings.slurmd,
        clock,
        place.node,
        restart=config.slurmd_restart if not (place.once or place.of_job) else "",
        expected="SLURM_JOB_ID" in place.env and bool(place.env.get("SLURMD_NODENAME")),
    )
    return HealthCheck(
        name="slurmd",
        look=slurmd.look,
        timing=settings.slurmd,
        close=slurmd.close,
        about="lives; started anew where slurmd_restart is set",
    )


def _sites(config: Config, settings: HealthSettings, clock: Clock) -> Iterator[HealthCheck]:
    found = site_checks(config.health_folder, settings.site)
    for name, one in found.checks.items():
        site = SiteCheck(one, clock)
        about = " ".join(one.command)
        yield HealthCheck(name=name, look=site.look, timing=one, close=site.close, about=about)
    if found.refused:
        said = "; ".join(found.refused)
        timing = settings.processes
        yield HealthCheck(
            name=REFUSED, look=lambda: Look((), said), timing=timing, about="programs that cannot be checks"
        )
