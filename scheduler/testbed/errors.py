"""What can go wrong with a sandbox, one class for each thing a caller may do differently."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.core.errors import DeepLinkError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge", "slurm-wlm-basic-plugins", "iproute2")
"""Debian packages a sandbox runs on."""
INSTALL = "apt-get install -y --no-install-recommends " + " ".join(PACKAGES)
_BESIDES = {"pivot_root": "util-linux-extra", "mkfs.ext4": "e2fsprogs"}
"""Packages of some programs that a minimal Debian lacks from 13 on."""


class SandboxError(DeepLinkError):
    """A sandbox cannot be, or do, what was asked."""


class NotUpError(SandboxError):
    """No sandbox of this name is up."""

    def __init__(self, name: str, others: Sequence[str] = ()) -> None:
        known = f" (up: {', '.join(others)})" if others else ""
        super().__init__(
            f"no sandbox {name!r} is up{known}", remedy=f"Bring it up: `deeplink sandbox up --name {name}`."
        )


class NotRunningError(SandboxError):
    """The machine is powered off: it crashed and was not booted."""

    def __init__(self, machine: str, name: str) -> None:
        super().__init__(
            f"{machine} is powered off", remedy=f"Start it again: `deeplink sandbox boot --name {name} {machine}`."
        )


class SlurmMissingError(SandboxError):
    """Programs the sandbox needs are not on this machine."""

    exit_code = 127

    def __init__(self, programs: Sequence[str], remedy: str = "") -> None:
        packages = [INSTALL, *(_BESIDES[program] for program in programs if program in _BESIDES)]
        remedy = remedy or f"As root: {' '.join(packages)}"
        super().__init__(f"not installed: {', '.join(programs)}", remedy=remedy)


def did_not_start(part: str, problem: str, said: str = "") -> SandboxError:
    """Return the error of a part of the cluster that did not come up."""
    return SandboxError(
        f"{part} did not come up: {problem}" + (f"\n{said.rstrip()}" if said.strip() else ""),
        remedy="All that had been started is stopped again. Try once more; on a loaded machine give --wait.",
    )


def bad_name(name: str, problem: str, remedy: str) -> SandboxError:
    """Return the error of a sandbox that cannot be called so, or cannot lie where it would."""
    return SandboxError(f"sandbox {name!r}: {problem}", remedy=remedy, exit_code=2)


def bad_user(wanted: str, problem: str) -> SandboxError:
    """Return the error of a user that jobs cannot run as."""
    remedy = "Leave --user out for a user that exists only inside the sandbox."
    return SandboxError(f"user {wanted!r}: {problem}", remedy=remedy, exit_code=2)


def not_exposed(path: Path, problem: str) -> SandboxError:
    """Return the error of a path that cannot be shown to the sandbox's ordinary user."""
    remedy = "Name a folder or file that exists and that others may read (chmod -R o+rX)."
    return SandboxError(f"cannot expose {path}: {problem}", remedy=remedy, exit_code=2)


def not_root(verb: str) -> SandboxError:
    """Return the error of what takes root."""
    return SandboxError(f"{verb}: only root can do that", remedy="Run it as root (sudo).", exit_code=2)
