"""Publishing files and folders whole or not at all: write, fsync, rename, fsync the parent folder.

A text too long for an environment variable (Linux bounds one to 128 KiB) is published under its digest; so is a
list of members, `@FILE`. Who has such a file's name knows its content: another content, another name.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeplink.core.descriptors import opened
from deeplink.core.errors import DeepLinkError
from deeplink.core.types import parse_members

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from deeplink.core.types import Member

DRAFT_PREFIX = ".draft-"
"""Names that begin so are unfinished: readers skip them, and the owner of the folder may remove them."""

_MOST_NAME = 200
"""Bytes of the final name in a draft's: file systems end a name at 255."""


def fsync_path(path: Path) -> None:
    """Return once what `path` (a file or a folder) holds is on stable storage."""
    with opened(path) as descriptor:
        os.fsync(descriptor)


def _draft_of(final: Path) -> Path:
    # A random part, not a process id: on a shared file system two hosts may have the same process id.
    name = os.fsencode(final.name)[:_MOST_NAME].decode(errors="ignore")
    return final.with_name(f"{DRAFT_PREFIX}{name}-{os.urandom(6).hex()}")


@contextmanager
def published_file(final: Path, *, mode: int | None = None, durable: bool = True) -> Iterator[Path]:
    """Give a path to write to; on success it becomes `final` (replacing it), on failure nothing is left."""
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
    """
    draft = _draft_of(final)
    draft.mkdir()
    try:
        yield draft
        publish_draft(draft, final, check=check)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def publish_draft(draft: Path, final: Path, *, check: Callable[[], None] | None = None) -> None:
    """Publish a folder as `final`: sync all of it, call `check`, rename (see `published_folder`)."""
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
    """Write a file that appears whole or not at all, and may be lost with the machine; makes its folder."""
    final.parent.mkdir(parents=True, exist_ok=True)
    with published_file(final, durable=False) as draft:
        draft.write_bytes(data)


def kept_object(path: Path) -> dict[str, Any]:
    """Return the JSON object that a file of ours holds; an empty one where there is none, or not a whole one."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


STANDARD_OUTPUT = 1


def file_trouble(doing: str, path: Path, problem: OSError) -> DeepLinkError:
    """Return the error of a file that cannot be read, or not be written; then what was there before still is."""
    return DeepLinkError(
        f"cannot {doing} {path}: {problem.strerror or problem}",
        remedy=f"Name a place that you may {doing}, on storage that answers.",
    )


def standard_output_file() -> str:
    """Return the file that standard output goes to; empty where it is a terminal, a pipe or nothing.

    For a batch script's launcher that is the job's output file.
    """
    try:
        target = Path(f"/proc/self/fd/{STANDARD_OUTPUT}").readlink()
        return str(target) if stat.S_ISREG(os.fstat(STANDARD_OUTPUT).st_mode) and target.exists() else ""
    except OSError:
        return ""


def write_output(path: Path, text: str) -> None:
    """Write a file, whole or not at all."""
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")  # a pipe, or /dev/null: nothing to put in its place
            return
        # What a link leads to is replaced, not the link; and who could read the file still can.
        final = path.resolve()
        write_text(final, text, mode=stat.S_IMODE(final.stat().st_mode) if final.exists() else None)
    except OSError as problem:
        raise file_trouble("write", path, problem) from problem


BY_FILE = "@"
"""Before the path of a file, in the place of a list of members."""
_NAMED = re.compile(r".*\.[0-9a-f]{32}")


def leave(folder: Path, kind: str, content: bytes) -> Path:
    """Publish `content` in `folder` as `KIND.DIGEST`, unless it is there; return where. OSError: it cannot be."""
    path = folder / f"{kind}.{_digest(content)}"
    if not path.exists() or path.stat().st_size != len(content):  # cut short where a node died
        with published_file(path, mode=0o600, durable=False) as draft:
            draft.write_bytes(content)
    return path


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def leave_members(folder: Path, text: str) -> str:
    """Publish a list of members and return what stands for it, `@FILE`. OSError: it cannot be."""
    return f"{BY_FILE}{leave(folder, 'members', text.encode())}"


def read_members(value: str) -> tuple[Member, ...]:
    """Return the members that a value of `members` names: the list itself, or `@FILE`, which holds it.

    ValueError: it is no list; DeepLinkError: its file cannot be read.
    """
    if not value.startswith(BY_FILE):
        return parse_members(value)
    path = Path(value.removeprefix(BY_FILE)).expanduser()
    try:
        content = path.read_bytes()
    except OSError as problem:
        raise file_trouble("read", path, problem) from problem
    if _NAMED.fullmatch(path.name) and not path.name.endswith(_digest(content)):
        raise ValueError(f"{path}: it is not what its name says: cut short, or changed")
    try:
        return parse_members(content.decode())
    except ValueError as problem:
        raise ValueError(f"{path}: {problem}") from problem
