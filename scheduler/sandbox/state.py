"""A sandbox's folder: made, locked, recorded, removed."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeplink.publish import write_text
from deeplink.scheduler.sandbox import storage
from deeplink.scheduler.sandbox.errors import BusyError, NotUpError, RecordUnreadableError, ShapeError
from deeplink.scheduler.sandbox.processes import ProcessId
from deeplink.scheduler.sandbox.programs import Programs
from deeplink.scheduler.sandbox.settings import SandboxSettings, User
from deeplink.scheduler.sandbox.shape import Shape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deeplink.clock import Clock
    from deeplink.scheduler.sandbox.layout import SandboxLayout

LOCK_WAIT_S = 60.0
_LOCK_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a sandbox that is up was made of.

    Attributes:
        settings: what was asked for.
        path: PATH of commands and jobs.
        keeper: the process that everything ends with; None for a cluster on loopback.
        programs: Slurm's, for a cluster on loopback; else the machines have the system's.
        addresses: `host:port` by machine, for a cluster on loopback; else the shape says them.
    """

    settings: SandboxSettings
    path: str
    keeper: ProcessId | None = None
    programs: Programs | None = None
    addresses: dict[str, str] = dataclasses.field(default_factory=dict)

    def write(self, layout: SandboxLayout) -> None:
        """Keep it in the sandbox's folder."""
        write_text(layout.record, json.dumps(dataclasses.asdict(self), default=str, indent=1) + "\n")

    @classmethod
    def read(cls, layout: SandboxLayout) -> Record | None:
        """Return what is kept; None where nothing is.

        Raises:
            RecordUnreadableError: it is damaged, or another version of DeepLink wrote it.
        """
        try:
            text = layout.record.read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            return _record(json.loads(text))
        except (ValueError, LookupError, TypeError, AttributeError, ShapeError) as problem:
            said = f"{type(problem).__name__}: {problem}"
            raise RecordUnreadableError(layout.name, layout.record, said) from problem


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
    """Let nobody else change the sandbox meanwhile. The lock is on its folder, so that no lock file outlives it.

    Raises:
        NotUpError: there is no folder, and none is to be made.
        BusyError: somebody else did not let go in time.
    """
    with _held(layout, layout.folder, clock, make=make, wait_s=wait_s):
        yield


@contextmanager
def laboratory(layout: SandboxLayout, clock: Clock) -> Iterator[None]:
    """Let nobody else do or undo a fault meanwhile. Whoever does one changes the sandbox: a lock of its own.

    Raises:
        NotUpError: the sandbox was taken down.
        BusyError: somebody else did not let go in time.
    """
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
            if _take(handle) and _same(handle, folder):
                yield
                return
        finally:
            os.close(handle)
        if clock.monotonic() > deadline:
            raise BusyError(layout.name, wait_s)
        clock.sleep(_LOCK_PAUSE_S)


def _take(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _same(handle: int, folder: Path) -> bool:
    """Whether the folder is still the one that is locked: whoever had it before may have removed it."""
    try:
        return os.path.samestat(os.fstat(handle), folder.stat())
    except FileNotFoundError:
        return False


def names(root: Path) -> list[str]:
    """Return the names of all sandboxes that have a record."""
    return sorted(path.parent.name for path in root.glob("*/sandbox.json"))


def empty(layout: SandboxLayout) -> None:
    """Remove what an earlier sandbox left; the folder itself stays, because it is what is locked."""
    storage.remove(layout)
    for entry in layout.folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def remove(layout: SandboxLayout) -> None:
    """Remove the folder, and the folder of all sandboxes when it was the last."""
    # The record first: what is left of a removal that is broken off is not taken for a sandbox.
    layout.record.unlink(missing_ok=True)
    storage.remove(layout)
    shutil.rmtree(layout.folder)
    try:
        layout.folder.parent.rmdir()
    except OSError:
        return  # others are up
