"""What process 1 of the fabric and of each machine does, as shell scripts. Pure: plans in, text out."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from deeplink.scheduler.sandbox import network
from deeplink.scheduler.sandbox.settings import SSD
from deeplink.scheduler.sandbox.shape import CTL

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deeplink.scheduler.sandbox.layout import SandboxLayout
    from deeplink.scheduler.sandbox.shape import Shape
    from deeplink.scheduler.sandbox.tree import Step

FABRIC = "fabric"
BOOTED = "booted"
STAY = "stay"
"""What the fabric's process 1 must read, or it ends, and everything with it."""

# Process 1 adopts orphans: `wait` takes their exit codes.
_FOR_EVER = ["while :; do sleep 86400 & wait; done"]
# In the machines' own copy of /etc: the host may lack them, and keeps what it has.
_NAMES = ("hosts", "passwd", "group", "nsswitch.conf")
BOOT_ID = "/run/deeplink-boot-id"
"""Another one at each boot. All machines share one kernel, and its boot id would be the same on all of them."""
_BOOT_ID_OF_KERNEL = "/proc/sys/kernel/random/boot_id"


def _lines(steps: Iterable[Step]) -> list[str]:
    return [shlex.join(step) for step in steps]


def _script(lines: Iterable[str]) -> str:
    return "\n".join(["#!/bin/sh", "set -eu", "umask 022", *lines]) + "\n"


def fabric(layout: SandboxLayout, tree: Iterable[Step]) -> str:
    """Return the script of the namespaces around all machines: tree, switches, munge. They live while it does."""
    new = layout.new_root
    enter: list[Step] = [
        ("mkdir", "-p", f"{new}{SSD}", f"{new}/.old"),
        ("mount", "-t", "proc", "proc", f"{new}/proc"),
        ("pivot_root", str(new), f"{new}/.old"),
        ("cd", "/"),
        ("umount", "-l", "/.old"),
        ("rmdir", "/.old"),
        *(("cp", "--remove-destination", str(layout.etc / name), f"/etc/{name}") for name in _NAMES),
        ("mount", "-t", "tmpfs", "-o", "mode=700", "networks", str(layout.networks)),
        ("mount", "-o", "remount,bind,ro", "/"),
        ("hostname", FABRIC),
    ]
    munge = layout.munge
    munged: Step = (
        "munged",
        f"--key-file={munge}/key",
        f"--socket={layout.munge_socket}",
        f"--pid-file={munge}/pid",
        f"--log-file={munge}/log",
        f"--seed-file={munge}/seed",
    )
    ready: Step = ("touch", str(layout.log / f"{FABRIC}.{BOOTED}"))
    stay = ["read -r word || exit 1", f'[ "$word" = {STAY} ] || exit 1', "exec < /dev/null > /dev/null 2>&1"]
    return _script([*_lines([*tree, *enter, munged, ready]), *stay, *_FOR_EVER])


def machine(layout: SandboxLayout, shape: Shape, name: str, exposed: Iterable[Step], path: str) -> str:
    """Return the script of one machine: its own disks, its network, its daemon."""
    own, conf = layout.own, str(layout.slurm_conf)
    mounts: list[Step] = [
        ("hostname", name),
        ("mount", "-t", "proc", "proc", "/proc"),
        ("mount", "-t", "sysfs", "sysfs", "/sys"),
        ("mount", "--bind", str(layout.machine(name)), str(own)),
        # The disks of other machines, and their networks, are none of this one's business.
        ("mount", "-t", "tmpfs", "-o", "mode=755,ro", "others", str(layout.machines)),
        ("umount", "-l", str(layout.networks)),
        ("mount", "--bind", f"{own}/tmp", "/tmp"),  # noqa: S108 - the machine's own
        ("mount", "-t", "tmpfs", "-o", "mode=755,nosuid,nodev", "run", "/run"),
        ("mount", "-t", "tmpfs", "-o", "mode=1777,nosuid,nodev", "shm", "/dev/shm"),  # noqa: S108
    ]
    if name != CTL:
        mounts.append(("mount", "--bind", f"{own}/ssd", str(SSD)))
    booted = [
        f"cat /proc/sys/kernel/random/uuid > {BOOT_ID}",
        f"mount --bind {BOOT_ID} {_BOOT_ID_OF_KERNEL} || echo 'the boot id stays that of the host'",
    ]
    batch = ["ip -batch - <<'END'", *network.interface(shape, name), "END"]
    return _script(
        [
            *_lines([*mounts, *exposed]),
            *booted,
            *batch,
            shlex.join(("export", f"PATH={path}", f"SLURM_CONF={conf}")),
            # Whether the daemon came up is for Slurm to say, not for process 1 to die of.
            shlex.join(daemon(name, conf, rebooted=True)) + " || echo 'the daemon did not start'",
            shlex.join(("touch", f"{own}/{BOOTED}")),
            *_FOR_EVER,
        ]
    )


def daemon(name: str, conf: str, *, rebooted: bool) -> Step:
    """Return the command that starts a machine's Slurm daemon."""
    if name == CTL:
        return ("slurmctld", "-f", conf)
    # -b: the machine's boot time, which Slurm compares, is now, and not when the host booted.
    return ("slurmd", *(["-b"] if rebooted else []), "-N", name, "-f", conf)
