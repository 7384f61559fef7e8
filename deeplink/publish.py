"""Publishing files and folders whole or not at all: write, fsync, rename, fsync the parent folder."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DRAFT_PREFIX = ".draft-"
"""Names that begin so are unfinished: readers skip them, and whoever owns the folder may remove them."""


def fsync_path(path: Path) -> None:
    """Return once what `path` (a file or a folder) holds is on stable storage.

    Raises:
        OSError: the storage refused; what was written must be taken as lost.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _draft_of(final: Path) -> Path:
    # A random part, not a process id: on a shared file system two hosts may have the same process id.
    return final.with_name(f"{DRAFT_PREFIX}{final.name}-{os.urandom(6).hex()}")


@contextmanager
def published_file(final: Path, *, mode: int | None = None, durable: bool = True) -> Iterator[Path]:
    """Give a path to write to; on success it becomes `final` (replacing it), on failure nothing is left.

    Args:
        final: where the file appears; its folder must exist.
        mode: permission bits, set before the file appears; the process's umask decides when not given.
        durable: wait for the disk. Without it the file may be lost, short or all zeros after a power failure: for
            what is checked when read, and not missed.

    Raises:
        OSError: writing, syncing or renaming failed; `final` is as it was.
    """
    draft = _draft_of(final)
    try:
        yield draft
        if mode is not None:
            draft.chmod(mode)
        if durable:
            fsync_path(draft)
        draft.replace(final)
        if durable:
            fsync_path(final.parent)
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def published_folder(final: Path, *, check: Callable[[], None] | None = None) -> Iterator[Path]:
    """Give an empty folder to fill; on success it becomes `final`, on failure nothing is left.

    Every file and folder below is synced before the rename. `final` must not exist, or be an empty folder. `check`
    is called when all is synced, immediately before the rename; if it raises, nothing is published.

    Raises:
        OSError: writing, syncing or renaming failed, or `final` is there already; `final` is as it was.
    """
    draft = _draft_of(final)
    draft.mkdir()
    try:
        yield draft
        publish_draft(draft, final, check=check)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def publish_draft(draft: Path, final: Path, *, check: Callable[[], None] | None = None) -> None:
    """Make a folder that is written become `final`: sync all of it, call `check`, rename (see `published_folder`).

    Raises:
        OSError: syncing or renaming failed, or `final` is there already; both are as they were.
    """
    for folder, _, files in os.walk(draft, topdown=False):
        for name in files:
            fsync_path(Path(folder, name))
        fsync_path(Path(folder))
    if check is not None:
        check()
    draft.rename(final)
    fsync_path(final.parent)


def write_text(final: Path, text: str, *, mode: int | None = None, durable: bool = True) -> None:
    """Publish a small text file (see `published_file`)."""
    with published_file(final, mode=mode, durable=durable) as draft:
        draft.write_text(text, encoding="utf-8")


def write_unsynced(final: Path, data: bytes | memoryview) -> None:
    """Write a file that appears whole or not at all, and may be lost with the machine; makes its folder.

    Raises:
        OSError: it cannot be written; nothing is left.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    draft = _draft_of(final)
    try:
        draft.write_bytes(data)
        draft.replace(final)
    finally:
        draft.unlink(missing_ok=True)
