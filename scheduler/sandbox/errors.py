"""What can go wrong with a sandbox, one class for each thing a caller may do differently."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.errors import DeepLinkError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge", "slurm-wlm-basic-plugins", "iproute2")
"""Debian packages a sandbox runs on."""
INSTALL = "apt-get install -y --no-install-recommends " + " ".join(PACKAGES)
_BESIDES = {"pivot_root": "util-linux-extra", "mkfs.ext4": "e2fsprogs"}
"""Packages of some programs that a minimal Debian lacks from 13 on."""


class SandboxError(DeepLinkError):
    """Base of everything a sandbox raises."""


class ShapeError(SandboxError):
    """A cluster of the wanted shape cannot be built."""

    exit_code = 2

    def __init__(self, wanted: str, problem: str) -> None:
        super().__init__(
            f"no cluster of shape {wanted}: {problem}",
            remedy="A shape is SPINESxLEAVESxNODES: spines, leaves per spine, nodes per leaf, as in 1x2x4.",
        )
        self.wanted, self.problem = wanted, problem


class SandboxNameError(SandboxError):
    """A sandbox cannot be called so, or cannot lie where it would."""

    exit_code = 2

    def __init__(self, name: str, problem: str, remedy: str) -> None:
        super().__init__(f"sandbox {name!r}: {problem}", remedy=remedy)
        self.name, self.problem = name, problem


class AlreadyUpError(SandboxError):
    """A sandbox of this name is up."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"sandbox {name!r} is up already",
            remedy=f"Use it, take it down (`deeplink sandbox down --name {name}`), or give another --name.",
        )
        self.name = name


class NotUpError(SandboxError):
    """No sandbox of this name is up."""

    def __init__(self, name: str, others: Sequence[str] = ()) -> None:
        known = f" (up: {', '.join(others)})" if others else ""
        super().__init__(
            f"no sandbox {name!r} is up{known}", remedy=f"Bring it up: `deeplink sandbox up --name {name}`."
        )
        self.name, self.others = name, tuple(others)


class RecordUnreadableError(SandboxError):
    """What a sandbox was made of cannot be read: damaged, or written by another version of DeepLink."""

    def __init__(self, name: str, record: Path, problem: str) -> None:
        super().__init__(
            f"sandbox {name!r}: {record} is damaged, or of another version of DeepLink ({problem})",
            remedy=f"`deeplink sandbox down --name {name}` ends and removes it all the same.",
        )
        self.name, self.record, self.problem = name, record, problem


class BusyError(SandboxError):
    """Another command is changing the same sandbox and did not finish in time."""

    def __init__(self, name: str, waited_s: float) -> None:
        super().__init__(
            f"another command has been working on sandbox {name!r} for {waited_s:g} s",
            remedy="Let it finish, or end it; then try again.",
        )
        self.name, self.waited_s = name, waited_s


class UnknownPartError(SandboxError):
    """The cluster has no node or switch of this name."""

    exit_code = 2

    def __init__(self, part: str, known: Sequence[str]) -> None:
        super().__init__(f"the sandbox has no {part!r}", remedy=f"It has: {' '.join(known)}.")
        self.part, self.known = part, tuple(known)


class NotMachineError(SandboxError):
    """A switch has no processes to end; only its cable can fail."""

    exit_code = 2

    def __init__(self, switch: str, machines: Sequence[str]) -> None:
        super().__init__(
            f"{switch} is a switch, not a machine: it cannot crash or boot",
            remedy=f"`deeplink sandbox cut {switch}` cuts it off. Machines: {' '.join(machines)}.",
        )
        self.switch, self.machines = switch, tuple(machines)


class NotRunningError(SandboxError):
    """The machine is powered off: it crashed and was not booted."""

    def __init__(self, machine: str, name: str) -> None:
        super().__init__(
            f"{machine} is powered off", remedy=f"Start it again: `deeplink sandbox boot --name {name} {machine}`."
        )
        self.machine = machine


class NotRootError(SandboxError):
    """That takes root."""

    exit_code = 2

    def __init__(self, verb: str) -> None:
        super().__init__(f"{verb}: only root can do that", remedy="Run it as root (sudo).")
        self.verb = verb


class NoNetworkError(SandboxError):
    """Links can be cut and healed only where each node has a network of its own."""

    exit_code = 2

    def __init__(self, verb: str) -> None:
        super().__init__(
            f"{verb}: the nodes of this sandbox share the host's loopback, so there is no link to cut or heal",
            remedy="Bring the sandbox up as root for links that can be cut; `crash` works here too.",
        )
        self.verb = verb


class NotFreezableError(SandboxError):
    """The shared storage cannot stall: it is a folder of the host's own file system."""

    exit_code = 2

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the homes of sandbox {name!r} lie on the host's own file system, which nobody may freeze",
            remedy="Bring the sandbox up with `--freezable`: the homes are then a file system of their own.",
        )
        self.name = name


class SlurmMissingError(SandboxError):
    """Programs the sandbox needs are not on this machine."""

    exit_code = 127

    def __init__(self, programs: Sequence[str], remedy: str = "") -> None:
        packages = [INSTALL, *(_BESIDES[program] for program in programs if program in _BESIDES)]
        remedy = remedy or f"As root: {' '.join(packages)}"
        super().__init__(f"not installed: {', '.join(programs)}", remedy=remedy)
        self.programs = tuple(programs)


class ExposeError(SandboxError):
    """A path cannot be shown to the sandbox's ordinary user."""

    exit_code = 2

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(
            f"cannot expose {path}: {problem}",
            remedy="Name a folder or file that exists and that others may read (chmod -R o+rX).",
        )
        self.path, self.problem = path, problem


class UserError(SandboxError):
    """Jobs cannot run as the wanted user."""

    exit_code = 2

    def __init__(self, wanted: str, problem: str) -> None:
        super().__init__(
            f"user {wanted!r}: {problem}",
            remedy="Leave --user out for a user that exists only inside the sandbox.",
        )
        self.wanted, self.problem = wanted, problem


class BootError(SandboxError):
    """Part of the cluster did not come up."""

    def __init__(self, part: str, problem: str, said: str = "") -> None:
        super().__init__(
            f"{part} did not come up: {problem}" + (f"\n{said.rstrip()}" if said.strip() else ""),
            remedy="All that had been started is stopped again. Try once more; on a loaded machine give --wait.",
        )
        self.part, self.problem, self.said = part, problem, said
