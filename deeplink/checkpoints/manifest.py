"""A checkpoint's manifest, and whether the files beside it are as it says.

`manifest.json` lists every file with its size and xxh3-64, and ends with the xxh3-64 of itself: of all its other
keys as JSON with sorted keys and no blanks. So a flipped bit shows wherever it is.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import xxhash

from deeplink.core.errors import DeepLinkError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

FORMAT: Final = 1
NAME: Final = "manifest.json"
PART: Final = ".part.json"
"""Beside the manifest where only some of the files are in this folder: their paths."""
_CHECKSUM: Final = "xxh3_64"
_NOT_THE_FILE: Final = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR}
"""Errors where nothing lies, or something else. Any other error of the storage says nothing about the file."""
_PIECE = 4 << 20


class CheckpointError(DeepLinkError):
    """Something about checkpoints cannot be done; message and remedy say what."""


class CheckpointDamagedError(DeepLinkError):
    """A checkpoint is not what was saved."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"checkpoint {path}: {reason}",
            remedy="The next attempt of the job falls back to the newest whole checkpoint by itself."
            " What is damaged is kept, as .damaged-*.",
        )
        self.path, self.reason = path, reason


class CheckpointWriteError(DeepLinkError):
    """A checkpoint could not be saved; nothing of it is left, those before are as they were."""

    def __init__(self, folder: Path, problem: OSError) -> None:
        full = problem.errno in {errno.ENOSPC, errno.EDQUOT}
        super().__init__(
            f"no checkpoint saved in {folder}: {problem}",
            remedy="Make room there, or keep fewer checkpoints (keep=)." if full else "Is the storage in order?",
        )
        self.folder, self.problem = folder, problem


def no_folder(path: Path) -> CheckpointError:
    """Return the error of a path that cannot be a folder of checkpoints."""
    return CheckpointError(f"{path} is no folder", remedy="Name a folder of checkpoints, or a new one.")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of a checkpoint: its path below the checkpoint, size in bytes, xxh3-64 in hexadecimal."""

    path: str
    bytes: int
    xxh3_64: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The files of a checkpoint and its saver; `attempt` is empty for a process outside of a job."""

    step: int
    attempt: str
    claim: int
    created_unix: float
    files: tuple[FileEntry, ...]
    meta: dict[str, Any]
    stall_s: float = 0.0  # how long training stood still for it; 0: not known
    save_s: float = 0.0  # until it was written
    nonfinite: dict[str, str] = field(default_factory=dict)  # names of tensors, `nan` or `inf`
    world: int = 1  # ranks that wrote it together

    @property
    def bytes(self) -> int:
        """The size of its files."""
        return sum(entry.bytes for entry in self.files)


def is_there(path: Path) -> bool:
    """Tell whether anything lies at `path`, also a link to nowhere; `Path.exists` may say no to any error."""
    try:
        path.lstat()
    except OSError as problem:
        if problem.errno not in _NOT_THE_FILE:
            raise
        return False
    return True


def _damage(folder: Path, name: str, problem: OSError) -> CheckpointDamagedError:
    """Return what an error of the storage proves about a file; raise it again where it proves nothing."""
    if problem.errno not in _NOT_THE_FILE:
        raise problem
    is_absent = problem.errno == errno.ENOENT
    return CheckpointDamagedError(folder, f"{name} is missing" if is_absent else f"{name} is no file: {problem}")


def _sealed(facts: dict[str, Any]) -> str:
    return f"{xxhash.xxh3_64_intdigest(json.dumps(facts, sort_keys=True, separators=(',', ':')).encode()):016x}"


def checksum(path: Path, read: Callable[[int], None] = lambda _size: None) -> str:
    """Return the xxh3-64 of a file, 16 hexadecimal digits; `read` gets the bytes of each piece."""
    digest = xxhash.xxh3_64()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
            read(len(piece))
    return f"{digest.intdigest():016x}"


def list_files(folder: Path) -> tuple[FileEntry, ...]:
    """Return every file below `folder` by path."""
    entries = []
    for parent, _, names in os.walk(folder, onerror=_raised):
        for name in names:
            path = Path(parent, name)
            below = path.relative_to(folder).as_posix()
            facts = path.lstat()
            if not stat.S_ISREG(facts.st_mode) or below in {NAME, PART}:
                raise ValueError(
                    f"{below} cannot be part of a checkpoint: only files and folders, none named {NAME}"
                )
            entries.append(FileEntry(below, facts.st_size, checksum(path)))
    return tuple(sorted(entries, key=lambda entry: entry.path))


def _raised(problem: OSError) -> None:
    raise problem


def checked_meta(meta: dict[str, Any] | None) -> dict[str, Any]:
    """Return `meta` as reading it back will give it."""
    remedy = "Put tensors into a file of the checkpoint instead."
    try:
        loaded = json.loads(json.dumps(meta or {}))
    except (TypeError, ValueError, RecursionError) as problem:
        raise CheckpointError(f"meta is not JSON: {problem}", remedy=remedy) from problem
    if not isinstance(loaded, dict):
        raise CheckpointError("meta is not JSON: it must be a dictionary", remedy=remedy)
    return loaded


def manifest_text(manifest: Manifest) -> str:
    """Return a manifest as it is written."""
    facts = {"format": FORMAT, **asdict(manifest)}
    return json.dumps({**facts, _CHECKSUM: _sealed(facts)}, indent=1)


def read_manifest(folder: Path) -> Manifest:
    """Return what a checkpoint's manifest says."""
    try:
        text = (folder / NAME).read_text(encoding="utf-8")
    except OSError as problem:
        raise _damage(folder, NAME, problem) from problem
    except ValueError as problem:
        raise CheckpointDamagedError(folder, f"{NAME} is no manifest: {problem}") from problem
    return manifest_of(text, folder)


def manifest_of(text: str, folder: Path) -> Manifest:
    """Return what the text of `folder`'s manifest says."""
    try:
        facts = json.loads(text)
        sealed = facts.pop(_CHECKSUM)
        if facts.get("format") != FORMAT:
            raise CheckpointDamagedError(folder, f"{NAME} has format {facts.get('format')!r}, known is {FORMAT}")
        if sealed != _sealed(facts):
            raise CheckpointDamagedError(folder, f"{NAME} was altered")
        del facts["format"]
        files = tuple(FileEntry(**entry) for entry in facts.pop("files"))
        for entry in files:
            if not is_below(entry.path):
                raise CheckpointDamagedError(folder, f"{NAME} names a file outside of it: {entry.path!r}")
        return Manifest(files=files, **facts)
    except (ValueError, TypeError, KeyError, AttributeError) as problem:
        raise CheckpointDamagedError(folder, f"{NAME} is no manifest: {problem}") from problem


def is_below(path: str) -> bool:
    """Tell whether a path leads below the folder it is joined to: manifests come from other nodes, too.

    >>> is_below("deep/state.pt"), is_below("../state.pt"), is_below("/state.pt"), is_below("")
    (True, False, False, False)
    """
    return bool(path) and all(part not in {"", ".", ".."} and "\0" not in part for part in path.split("/"))


def write_part(folder: Path, paths: Iterable[str]) -> None:
    """Say that a checkpoint's folder is to hold only these files of its manifest; the others are elsewhere."""
    (folder / PART).write_text(json.dumps(sorted(paths)), encoding="utf-8")


def files_here(folder: Path, manifest: Manifest) -> tuple[FileEntry, ...]:
    """Return the files of the manifest that this folder is to hold: all, unless it is a part."""
    try:
        named = set(json.loads((folder / PART).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return manifest.files
    except OSError as problem:
        raise _damage(folder, PART, problem) from problem
    except (ValueError, TypeError) as problem:
        raise CheckpointDamagedError(folder, f"{PART} is torn: {problem}") from problem
    return tuple(entry for entry in manifest.files if entry.path in named)


def check(folder: Path, *, contents: bool, read: Callable[[int], None] = lambda _size: None) -> Manifest:
    """Return the manifest once every file was found as it says: in size, and with `contents` in checksum too."""
    manifest = read_manifest(folder)
    check_files(folder, manifest.files, contents=contents, read=read)
    return manifest


def check_part(folder: Path, *, contents: bool) -> Manifest:
    """Return the manifest once every file that this folder is to hold was found as it says."""
    manifest = read_manifest(folder)
    check_files(folder, files_here(folder, manifest), contents=contents)
    return manifest


def check_files(
    folder: Path, files: Iterable[FileEntry], *, contents: bool, read: Callable[[int], None] = lambda _size: None
) -> None:
    """Return once every file was found as it says."""
    for entry in files:
        path = folder / entry.path
        try:
            facts = path.lstat()
            if not stat.S_ISREG(facts.st_mode):
                raise CheckpointDamagedError(folder, f"{entry.path} is no file")
            if facts.st_size != entry.bytes:
                raise CheckpointDamagedError(
                    folder, f"{entry.path} has {facts.st_size} bytes, saved were {entry.bytes}"
                )
            if contents and checksum(path, read) != entry.xxh3_64:
                raise CheckpointDamagedError(folder, f"{entry.path} was altered: its checksum differs")
        except OSError as problem:
            raise _damage(folder, entry.path, problem) from problem
