"""Where a sandbox keeps what: every file name is made here."""

from __future__ import annotations

import os
import pwd
import re
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from deeplink.core.publish import DRAFT_PREFIX
from deeplink.scheduler.testbed.errors import bad_name, bad_user
from deeplink.scheduler.testbed.settings import User

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deeplink.scheduler.testbed.processes import ProcessEntry, ProcessId

# In names of folders, clusters and sockets.
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")
# Slurm and munge put sockets there, and a socket's path has at most 107 bytes (unix(7)).
_LONGEST_SOCKET = "machines/n239/spool/n239_99999.4294967291"
_SOCKET_PATH_LIMIT = 107
DEFAULT_USER = "deeplink"
_UID = 64100
_HIGHEST_UID = 2**31


def default_root(env: Mapping[str, str], *, root: bool) -> Path:
    """Return the folder of all sandboxes: DEEPLINK_SANDBOX_ROOT, or the place for root or for an ordinary user.

    Not below /run: that is small and mounted noexec, while jobs run scripts from their home and fill SSD folders.
    """
    if env.get("DEEPLINK_SANDBOX_ROOT"):
        return Path(env["DEEPLINK_SANDBOX_ROOT"]).absolute()
    if root:
        return Path("/var/lib/deeplink-sandbox")
    return Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deeplink" / "sandbox"


class SandboxLayout:
    """The folder of one sandbox, and what lies where in it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, folder.name
        self.record = folder / "sandbox.json"  # what the sandbox is; there while it is up
        self.etc = folder / "etc"
        self.slurm_conf = self.etc / "slurm.conf"
        self.log = folder / "log"  # of daemons, and of the machines' starts
        self.munge = folder / "munge"  # its key, socket and log
        self.munge_socket = self.munge / "socket"
        self.boot = folder / "boot"  # scripts that processes 1 run
        self.state = folder / "state"  # slurmctld's
        self.homes = folder / "home"  # the cluster's shared file system, at the same path on every machine
        self.machines = folder / "machines"  # what each has on disks of its own
        self.storage_image = folder / "home.img"  # holds the homes, where they are a file system of their own
        self.faults = folder / "faults.json"  # which faults are in effect
        self.kept = folder / "kept"  # what faults took away and will put back
        self.own = folder / "self"  # where a machine sees its own folder; it does not see those of others
        self.networks = folder / "net"  # where the fabric keeps the machines' network namespaces
        self.new_root = folder / "root"  # where the machines' file tree is put together
        self.exposed = folder / "exposed"  # exposed paths, for places that each machine has its own of
        # Every folder that is there before anything starts.
        self.folders = (
            *(self.etc, self.etc / "dev", self.log, self.munge, self.boot, self.state, self.homes),
            *(self.machines, self.own, self.networks, self.new_root, self.exposed),
        )

    @classmethod
    def of(cls, root: Path, name: str) -> SandboxLayout:
        """Return the layout of a sandbox by name."""
        if not _NAME.fullmatch(name):
            raise bad_name(
                name, "no sandbox can be called so", "Use small letters, digits and dashes, at most 31 of them."
            )
        layout = cls(root / name)
        if len(os.fsencode(layout.folder / _LONGEST_SOCKET)) > _SOCKET_PATH_LIMIT:
            raise bad_name(
                name,
                f"sockets in {layout.folder} would have longer names than Linux allows",
                "Give a shorter --name, or a shorter folder in DEEPLINK_SANDBOX_ROOT.",
            )
        return layout

    def machine(self, name: str) -> Path:
        """Return the folder of one machine's own disks."""
        return self.machines / name

    def ssd(self, node: str) -> Path:
        """Return the folder that a node sees as its SSD."""
        return self.machine(node) / "ssd"

    def is_all_ours(self) -> bool:
        """Whether what lies in the folder is a sandbox's: another folder beside is never taken for one."""
        files = (self.record, self.storage_image, self.faults, self.kept)
        ours = {path.name for path in (*files, *self.folders)}
        return all(entry.name in ours or entry.name.startswith(DRAFT_PREFIX) for entry in self.folder.iterdir())


def choose_user(wanted: str, layout: SandboxLayout) -> User:
    """Return the user of that name or number: the host's, or else a new one; the home is the sandbox's own."""
    try:
        known = pwd.getpwuid(int(wanted)) if wanted.isdecimal() else pwd.getpwnam(wanted)
    except KeyError:
        return _new_user(wanted, layout)
    except OverflowError:
        raise bad_user(wanted, "the number is too large") from None
    return User(known.pw_name, known.pw_uid, known.pw_gid, layout.homes / known.pw_name)


def _new_user(wanted: str, layout: SandboxLayout) -> User:
    if wanted.isdecimal():
        if int(wanted) >= _HIGHEST_UID:
            raise bad_user(wanted, "the number is too large")
        return User(f"u{wanted}", int(wanted), int(wanted), layout.homes / f"u{wanted}")
    if not (wanted.isascii() and wanted.replace("-", "_").isidentifier() and wanted.islower()):
        raise bad_user(wanted, "no user can be called so")
    return User(wanted, _UID, _UID, layout.homes / wanted)


class Hardware(Protocol):
    """The running machines of one sandbox."""

    def enter(self, machine: str, argv: Sequence[str], env: Mapping[str, str], *, root: bool) -> list[str]:
        """Return the command that runs `argv` on a machine, in the user's home."""

    def cut(self, part: str) -> None:
        """Take the cable out that connects a machine, leaf or spine to the switch above."""

    def heal(self, part: str) -> None:
        """Put the cable back in; raises what `cut` raises."""

    def crash(self, machine: str, *, keep_link: bool) -> None:
        """End all processes of a machine at once, its link cut first unless that is kept."""

    def boot(self, machine: str, timeout_s: float) -> None:
        """Start a crashed machine; on a running one start its daemon if that is gone, and heal its link."""

    def process_1(self, machine: str) -> ProcessId | None:
        """Return the process that all others of a machine end with; None when it is powered off."""

    def daemon(self, machine: str, processes: Mapping[int, ProcessEntry]) -> int | None:
        """Return the number, on the host, of a machine's Slurm daemon; None when it does not run."""

    def links(self) -> dict[str, bool]:
        """Return each cable by what hangs on it, and whether it is whole; empty where there are none."""

    def end(self) -> None:
        """End every process of the sandbox."""
