"""Where a sandbox keeps what: every file name is made here."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deeplink.scheduler.sandbox.errors import SandboxNameError

if TYPE_CHECKING:
    from collections.abc import Mapping

# In names of folders, clusters and sockets.
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")
# Slurm and munge put sockets there, and a socket's path has at most 107 bytes (unix(7)).
_LONGEST_SOCKET = "machines/n239/spool/n239_99999.4294967291"
_SOCKET_PATH_LIMIT = 107


def default_root(env: Mapping[str, str], *, root: bool) -> Path:
    """Return the folder of all sandboxes: DEEPLINK_SANDBOX_ROOT, or the place for root or for an ordinary user.

    Not below /run: that is small and mounted noexec, while jobs run scripts from their home and fill SSD folders.
    """
    if env.get("DEEPLINK_SANDBOX_ROOT"):
        return Path(env["DEEPLINK_SANDBOX_ROOT"]).absolute()
    if root:
        return Path("/var/lib/deeplink-sandbox")
    return Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deeplink" / "sandbox"


@dataclass(frozen=True, slots=True)
class SandboxLayout:
    """The folder of one sandbox, and what lies where in it."""

    folder: Path

    @classmethod
    def of(cls, root: Path, name: str) -> SandboxLayout:
        """Return the layout of a sandbox by name.

        Raises:
            SandboxNameError: no sandbox can be called so, or its sockets would have too long names there.
        """
        if not _NAME.fullmatch(name):
            raise SandboxNameError(
                name, "no sandbox can be called so", "Use small letters, digits and dashes, at most 31 of them."
            )
        layout = cls(root / name)
        if len(os.fsencode(layout.folder / _LONGEST_SOCKET)) > _SOCKET_PATH_LIMIT:
            raise SandboxNameError(
                name,
                f"sockets in {layout.folder} would have longer names than Linux allows",
                "Give a shorter --name, or a shorter folder in DEEPLINK_SANDBOX_ROOT.",
            )
        return layout

    @property
    def name(self) -> str:
        """Name of the sandbox."""
        return self.folder.name

    @property
    def record(self) -> Path:
        """What the sandbox is; there while it is up."""
        return self.folder / "sandbox.json"

    @property
    def etc(self) -> Path:
        """Configuration files."""
        return self.folder / "etc"

    @property
    def slurm_conf(self) -> Path:
        """Slurm's configuration."""
        return self.etc / "slurm.conf"

    @property
    def log(self) -> Path:
        """Logs of daemons and of the machines' starts."""
        return self.folder / "log"

    @property
    def munge(self) -> Path:
        """Munge's key, socket and log."""
        return self.folder / "munge"

    @property
    def munge_socket(self) -> Path:
        """Where munged listens."""
        return self.munge / "socket"

    @property
    def boot(self) -> Path:
        """Scripts that processes 1 run."""
        return self.folder / "boot"

    @property
    def state(self) -> Path:
        """What slurmctld remembers."""
        return self.folder / "state"

    @property
    def homes(self) -> Path:
        """Home folders: the cluster's shared file system, at the same path on every machine."""
        return self.folder / "home"

    @property
    def machines(self) -> Path:
        """What each machine has on disks of its own."""
        return self.folder / "machines"

    def machine(self, name: str) -> Path:
        """Return the folder of one machine's own disks."""
        return self.machines / name

    def ssd(self, node: str) -> Path:
        """Return the folder that a node sees as its SSD."""
        return self.machine(node) / "ssd"

    @property
    def storage_image(self) -> Path:
        """The file that holds the homes, where they are a file system of their own."""
        return self.folder / "home.img"

    @property
    def faults(self) -> Path:
        """Which faults are in effect."""
        return self.folder / "faults.json"

    @property
    def kept(self) -> Path:
        """What faults took away and will put back."""
        return self.folder / "kept"

    @property
    def own(self) -> Path:
        """Where a machine sees its own folder; it does not see those of others."""
        return self.folder / "self"

    @property
    def networks(self) -> Path:
        """Where the fabric keeps the machines' network namespaces."""
        return self.folder / "net"

    @property
    def new_root(self) -> Path:
        """Where the machines' file tree is put together."""
        return self.folder / "root"

    @property
    def exposed(self) -> Path:
        """Exposed paths, for places that each machine has its own of."""
        return self.folder / "exposed"

    def is_all_ours(self) -> bool:
        """Whether what lies in the folder is a sandbox's: another folder beside is never taken for one.

        Raises:
            OSError: it cannot be listed.
        """
        files = (self.record, self.storage_image, self.faults, self.kept)
        ours = {path.name for path in (*files, *self.folders)}
        return all(entry.name in ours or entry.name.startswith(".") for entry in self.folder.iterdir())

    @property
    def folders(self) -> tuple[Path, ...]:
        """Every folder that is there before anything starts."""
        return (
            self.etc,
            self.etc / "dev",
            self.log,
            self.munge,
            self.boot,
            self.state,
            self.homes,
            self.machines,
            self.own,
            self.networks,
            self.new_root,
            self.exposed,
        )
