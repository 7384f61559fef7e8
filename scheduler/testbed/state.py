"""A sandbox's folder: made, locked, recorded, removed."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeplink.core.descriptors import try_lock
from deeplink.core.publish import write_text
from deeplink.scheduler.slurm import command
from deeplink.scheduler.testbed.errors import NotUpError, SandboxError, did_not_start
from deeplink.scheduler.testbed.processes import ProcessId
from deeplink.scheduler.testbed.programs import Programs
from deeplink.scheduler.testbed.settings import SandboxSettings, User
from deeplink.scheduler.testbed.shape import Shape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deeplink.core.clock import Clock
    from deeplink.scheduler.testbed.layout import SandboxLayout

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
    done = command.finish(["fsfreeze", "--freeze", str(layout.homes)], timeout_s=_MAKE_S)
    if done.code and "busy" not in done.stderr:  # frozen already
        raise command.CommandError(done.argv, done.code, done.stderr)


def thaw(layout: SandboxLayout) -> None:
    """Let writers go on; nothing happens where nothing is frozen."""
    if is_mounted(layout):
        command.finish(["fsfreeze", "--unfreeze", str(layout.homes)], timeout_s=_MAKE_S)


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
    layout: SandboxLayout, clock: Clock, *, make: bool = False, wait_s: float = LOCK_WAIT_S
) -> Iterator[None]:
    """Lock the sandbox against other changes; the lock is on its folder, so no file outlives it."""
    with _held(layout, layout.folder, clock, make=make, wait_s=wait_s):
        yield


@contextmanager
def laboratory(layout: SandboxLayout, clock: Clock) -> Iterator[None]:
    """Let no one else do or undo a fault meanwhile. Whoever does one changes the sandbox: a lock of its own."""
    with _held(layout, layout.log, clock, make=False, wait_s=LOCK_WAIT_S):
        yield


@contextmanager
def _held(layout: SandboxLayout, folder: Path, clock: Clock, *, make: bool, wait_s: float) -> Iterator[None]:
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
