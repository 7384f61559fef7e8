"""A sandbox's folder: what lies where in it; how it is made, locked, recorded and removed."""

from __future__ import annotations

import dataclasses
import json
import os
import pwd
import re
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeplink.core.descriptors import try_lock
from deeplink.core.publish import DRAFT_PREFIX, write_text
from deeplink.scheduler.slurm import command
from deeplink.scheduler.testbed.errors import NotUpError, SandboxError, bad_name, bad_user, did_not_start
from deeplink.scheduler.testbed.processes import ProcessId
from deeplink.scheduler.testbed.programs import Programs
from deeplink.scheduler.testbed.settings import SandboxSettings, User
from deeplink.scheduler.testbed.shape import Shape

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from deeplink.core.clock import Clock

IMAGE_BYTES = 4 << 30
"""Size of the image; it takes what is written to it."""
PROGRAMS = ("mkfs.ext4", "fsfreeze", "losetup", "mount")
_MAKE_S = 30.0
LOCK_WAIT_S = 60.0
_LOCK_PAUSE_S = 0.05


def is_mounted(layout: SandboxLayout) -> bool:
    """Whether the homes are a file system of their own."""
    return os.path.ismount(layout.homes)


def make(layout: SandboxLayout) -> None:
    """Make the file system and mount it over the empty folder of the homes."""
    image = layout.storage_image
    with image.open("wb") as file:
        file.truncate(IMAGE_BYTES)
    _run("mkfs.ext4", "-q", "-m", "0", "-E", "lazy_itable_init=1,lazy_journal_init=1", str(image))
    # Without atime a reader writes nothing, and so does not hang when nothing can be written.
    _run("mount", "-o", "loop,noatime", str(image), str(layout.homes))
    layout.homes.chmod(0o755)


def _run(*argv: str) -> None:
    try:
        done = command.finish(argv, timeout_s=_MAKE_S)
    except (command.CommandMissingError, command.CommandTimeoutError) as problem:
        raise did_not_start("shared storage", str(problem)) from problem
    if done.code:
        raise did_not_start("shared storage", f"{argv[0]} exited {done.code}", done.stderr)


def freeze(layout: SandboxLayout) -> None:
    """Let whoever writes to the homes hang until `thaw`; frozen already is no error."""
    if not is_mounted(layout):
        raise SandboxError(
            f"the homes of sandbox {layout.name!r} lie on the host's own file system, which nobody may freeze",
            remedy="Bring the sandbox up with `--freezable`: the homes are then a file system of their own.",
            exit_code=2,
        )
    argv = ["fsfreeze", "--freeze", str(layout.homes)]
    done = command.finish(argv, timeout_s=_MAKE_S, env={**os.environ, "LC_ALL": "C"})
    if done.code and "busy" not in done.stderr:  # frozen already
        raise command.CommandError(done.argv, done.code, done.stderr)


def thaw(layout: SandboxLayout) -> None:
    """Let writers go on; nothing happens where nothing is frozen."""
    if is_mounted(layout):
        argv = ["fsfreeze", "--unfreeze", str(layout.homes)]
        done = command.finish(argv, timeout_s=_MAKE_S, env={**os.environ, "LC_ALL": "C"})
        if done.code and "Invalid argument" not in done.stderr:  # what is not frozen
            raise command.CommandError(done.argv, done.code, done.stderr)


def remove_storage(layout: SandboxLayout) -> None:
    """Take the file system away, if there is one; what was in it is gone."""
    if is_mounted(layout):
        thaw(layout)
        command.finish(["umount", "--lazy", str(layout.homes)], timeout_s=_MAKE_S)
    layout.storage_image.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a sandbox that is up was made of."""

    settings: SandboxSettings  # what was asked for
    path: str  # PATH of commands and jobs
    keeper: ProcessId | None = None  # the process that everything ends with; None for a cluster on loopback
    programs: Programs | None = None  # Slurm's, for a cluster on loopback; else the machines have the system's
    # `host:port` by machine, for a cluster on loopback; else the shape says them
    addresses: dict[str, str] = dataclasses.field(default_factory=dict)

    def write(self, layout: SandboxLayout) -> None:
        """Keep it in the sandbox's folder."""
        write_text(layout.record, json.dumps(dataclasses.asdict(self), default=str, indent=1) + "\n")

    @classmethod
    def read(cls, layout: SandboxLayout) -> Record | None:
        """Return what is kept; None where nothing is."""
        try:
            text = layout.record.read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            return _record(json.loads(text))
        except (ValueError, LookupError, TypeError, AttributeError, SandboxError) as problem:
            said = f"{type(problem).__name__}: {problem}"
            raise SandboxError(
                f"sandbox {layout.name!r}: {layout.record} is damaged, or of another version of DeepLink ({said})",
                remedy=f"`deeplink sandbox down --name {layout.name}` ends and removes it all the same.",
            ) from problem


def _record(raw: dict[str, Any]) -> Record:
    # What is not known is an error: the cluster of another version is not guessed at.
    settings = raw["settings"]
    user = User(**{**settings["user"], "home": Path(settings["user"]["home"])})
    parts = {"shape": Shape(**settings["shape"]), "user": user, "extra": tuple(settings["extra"])}
    keeper = ProcessId(**raw["keeper"]) if raw["keeper"] else None
    programs = _programs(raw["programs"]) if raw["programs"] else None
    if keeper is None and programs is None:
        raise ValueError("it names neither keeper nor programs")
    return Record(
        settings=SandboxSettings(**{**settings, **parts}),
        path=raw["path"],
        keeper=keeper,
        programs=programs,
        addresses=raw["addresses"],
    )


def _programs(raw: dict[str, Any]) -> Programs:
    return Programs(**{**raw, "plugins": Path(raw["plugins"]) if raw["plugins"] else None})


@contextmanager
def locked(
    layout: SandboxLayout,
    clock: Clock,
    *,
    faults: bool = False,
    make: bool = False,
    wait_s: float = LOCK_WAIT_S,
) -> Iterator[None]:
    """Lock the sandbox against other changes, or `faults`; the lock is on a folder, so no file outlives it."""
    folder = layout.log if faults else layout.folder  # whoever does a fault changes the sandbox
    deadline = clock.monotonic() + wait_s
    while True:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            if make:
                continue
            raise NotUpError(layout.name, names(layout.folder.parent)) from None
        try:
            if try_lock(handle, folder):
                yield
                return
        finally:
            os.close(handle)
        if clock.monotonic() > deadline:
            raise SandboxError(
                f"another command has been working on sandbox {layout.name!r} for {wait_s:g} s",
                remedy="Let it finish, or end it; then try again.",
            )
        clock.sleep(_LOCK_PAUSE_S)


def names(root: Path) -> list[str]:
    """Return the names of all sandboxes that have a record."""
    return sorted(path.parent.name for path in root.glob("*/sandbox.json"))


def empty(layout: SandboxLayout) -> None:
    """Remove what an earlier sandbox left; the folder itself stays, because it is what is locked."""
    remove_storage(layout)
    for entry in layout.folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def remove(layout: SandboxLayout) -> None:
    """Remove the folder, and the folder of all sandboxes when it was the last."""
    # The record first: what is left of a removal that is broken off is not taken for a sandbox.
    layout.record.unlink(missing_ok=True)
    remove_storage(layout)
    shutil.rmtree(layout.folder)
    try:
        layout.folder.parent.rmdir()
    except OSError:
        return  # others are up


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
