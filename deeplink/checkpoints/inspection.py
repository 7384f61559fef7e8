"""What is in a folder of checkpoints, for who looks at it from outside: nothing is claimed."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from deeplink.checkpoints import manifest as manifests
from deeplink.checkpoints.claims import Claims
from deeplink.checkpoints.entries import (
    DAMAGED_PREFIX,
    CheckpointName,
    Retention,
    abandoned_drafts,
    entries,
    fenced,
    surplus,
)
from deeplink.checkpoints.manifest import CheckpointDamagedError, Manifest
from deeplink.checkpoints.saving import retire, set_aside
from deeplink.errors import DeepLinkError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from deeplink.checkpoints.claims import Claim


class NoFolderError(DeepLinkError):
    """There is no folder of checkpoints where one was looked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"{folder} is no folder", remedy="Name the folder that was given to `Checkpoints`.")
        self.folder = folder


class NoSuchCheckpointError(DeepLinkError):
    """A checkpoint of this name is not in the folder."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(f"{folder} has no {name}", remedy="`deeplink checkpoints ls` lists what is there.")
        self.folder, self.name = folder, name


class ClaimedMeanwhileError(DeepLinkError):
    """An attempt has claimed the folder after it was decided what to remove."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"a job began on {folder} meanwhile", remedy="Run the command again.")
        self.folder = folder


class CheckpointState(Enum):
    """What a checkpoint is good for."""

    WHOLE = "whole"
    DAMAGED = "damaged"
    UNREADABLE = "unreadable"
    FENCED = "fenced"


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedCheckpoint:
    """A checkpoint as it was found.

    Attributes:
        entry: its name, read.
        state: whether it counts.
        reason: why it does not, or that it is a part; else empty.
        manifest: what it says of itself; None where that cannot be read.
        is_latest: whether a job that starts now goes on from it, as far as was looked.
    """

    entry: CheckpointName
    state: CheckpointState
    reason: str = ""
    manifest: Manifest | None = None
    is_latest: bool = False


def newest_claim(folder: Path) -> Claim:
    """Return the claim that holds the folder; NO_CLAIM where nobody has.

    Raises:
        NoFolderError: it is no folder.
        ClaimDamagedError: the claim cannot be read.
    """
    if not folder.is_dir():
        raise NoFolderError(folder)
    return Claims(folder).newest()


def chosen(folder: Path, names: tuple[str, ...] = ()) -> list[CheckpointName]:
    """Return the checkpoints of these names, or all, newest first.

    Raises:
        NoFolderError: it is no folder.
        NotThereError: there is none of a name.
    """
    if not folder.is_dir():
        raise NoFolderError(folder)
    found = entries(folder)
    known = {entry.name for entry in found}
    for name in names:
        if name not in known:
            raise NoSuchCheckpointError(folder, name)
    return [entry for entry in found if not names or entry.name in names]


def look(
    folder: Path,
    found: list[CheckpointName],
    *,
    contents: bool,
    begun: Callable[[CheckpointName], None] = lambda _entry: None,
    read: Callable[[int], None] = lambda _size: None,
) -> Iterator[InspectedCheckpoint]:
    """Yield each of the checkpoints, looked at in sizes, and with `contents` in checksums.

    Args:
        folder: where they are.
        found: which, newest first.
        contents: read every byte.
        begun: told each before it is looked at.
        read: told the bytes of each piece that was read.

    Raises:
        ClaimDamagedError: what holds the folder cannot be read.
    """
    claim = newest_claim(folder)
    has_latest = False
    for entry in found:
        begun(entry)
        path, manifest = folder / entry.name, None
        try:
            manifest = manifests.read_manifest(path)
            here = manifests.files_here(path, manifest)
            manifests.check_files(path, here, contents=contents, read=read)
        except CheckpointDamagedError as damaged:
            yield InspectedCheckpoint(
                entry=entry, state=CheckpointState.DAMAGED, reason=damaged.reason, manifest=manifest
            )
            continue
        except OSError as problem:
            yield InspectedCheckpoint(
                entry=entry, state=CheckpointState.UNREADABLE, reason=str(problem), manifest=manifest
            )
            has_latest = has_latest or entry.counts(claim)  # a job that starts now does not pass over it
            continue
        if not entry.counts(claim):
            yield InspectedCheckpoint(
                entry=entry, state=CheckpointState.FENCED, reason=fenced(entry), manifest=manifest
            )
            continue
        part = (
            f"{len(here)} of {len(manifest.files)} files, a node's part" if len(here) < len(manifest.files) else ""
        )
        yield InspectedCheckpoint(
            entry=entry, state=CheckpointState.WHOLE, reason=part, manifest=manifest, is_latest=not has_latest
        )
        has_latest = True


def set_aside_before(folder: Path) -> list[str]:
    """Return the damaged ones that are kept under another name.

    Raises:
        OSError: the folder cannot be listed.
    """
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(DAMAGED_PREFIX))


@dataclass(frozen=True, slots=True)
class Pruning:
    """What a pruning removes, and the bytes that come free.

    Attributes:
        names: checkpoints, newest first.
        drafts: unfinished saves of those who held the folder before.
        damaged: those that are set aside, newest first.
        claim: number of the claim that it was planned under.
    """

    names: tuple[str, ...]
    drafts: tuple[str, ...]
    bytes: int
    damaged: tuple[str, ...] = field(default=())
    claim: int = 0


def plan_pruning(folder: Path, retention: Retention) -> Pruning:
    """Return what may be removed: what is older than the newest that is whole to its last byte, which is read.

    Raises:
        NoFolderError: it is no folder.
        ClaimDamagedError: what holds the folder is torn.
        OSError: it cannot be listed, or what may be its newest whole one cannot be read.
    """
    claim = newest_claim(folder)
    proved, damaged = "", []
    for entry in entries(folder):
        if not entry.counts(claim):
            continue
        try:
            manifests.check_part(folder / entry.name, contents=True)
        except CheckpointDamagedError:
            damaged.append(entry.name)
        else:
            proved = entry.name
            break
    found = surplus(folder, claim, retention, proved, damaged)
    drafts = [path.name for path in abandoned_drafts(folder, claim)]
    size = sum(_size(folder / name) for name in (*found.superseded, *drafts))
    return Pruning(found.superseded, tuple(drafts), size, found.damaged, claim.number)


def prune(folder: Path, pruning: Pruning, removed: Callable[[str], None] = lambda _name: None) -> None:
    """Remove what was planned, and set aside what is damaged; what is gone already is no error.

    Raises:
        ClaimedMeanwhileError: an attempt has begun since, which may go on from what was to be removed.
        OSError: the file system refuses; what was removed before stays removed.
    """

    def check() -> None:
        if Claims(folder).newest_number() != pruning.claim:
            raise ClaimedMeanwhileError(folder)

    if pruning.damaged:
        check()
    for name in pruning.damaged:
        if manifests.is_there(folder / name):
            set_aside(folder / name)
    for name in pruning.names:
        retire(folder, [name], check)
        removed(name)
    check()
    for name in pruning.drafts:
        shutil.rmtree(folder / name, ignore_errors=True)
        removed(name)


def _size(path: Path) -> int:
    return sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())
