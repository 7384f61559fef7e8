"""What is in a folder of checkpoints, for who looks at it from outside: nothing is claimed."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from deeplink.checkpoints import manifest as manifests
from deeplink.checkpoints.claims import Claims
from deeplink.checkpoints.entries import FENCED, Entry, Retention, abandoned_drafts, entries, superfluous
from deeplink.checkpoints.manifest import CheckpointDamagedError, Manifest
from deeplink.checkpoints.saving import retire
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


class NotThereError(DeepLinkError):
    """A checkpoint of this name is not in the folder."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(f"{folder} has no {name}", remedy="`deeplink checkpoints ls` lists what is there.")
        self.folder, self.name = folder, name


class ClaimedMeanwhileError(DeepLinkError):
    """An attempt has claimed the folder after it was decided what to remove."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"a job began on {folder} meanwhile", remedy="Run the command again.")
        self.folder = folder


class State(Enum):
    """What a checkpoint is good for."""

    WHOLE = "whole"
    DAMAGED = "damaged"
    FENCED = "fenced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A checkpoint as it was found.

    Attributes:
        entry: its name, read.
        state: whether it counts.
        reason: why it does not, or that it is a part; else empty.
        manifest: what it says of itself; None where that cannot be read.
        is_latest: whether a job that starts now goes on from it, as far as was looked.
    """

    entry: Entry
    state: State
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


def chosen(folder: Path, names: tuple[str, ...] = ()) -> list[Entry]:
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
            raise NotThereError(folder, name)
    return [entry for entry in found if not names or entry.name in names]


def look(
    folder: Path,
    found: list[Entry],
    *,
    contents: bool,
    begun: Callable[[Entry], None] = lambda _entry: None,
    read: Callable[[int], None] = lambda _size: None,
) -> Iterator[Found]:
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
            yield Found(entry=entry, state=State.DAMAGED, reason=damaged.reason, manifest=manifest)
            continue
        if not entry.counts(claim):
            yield Found(entry=entry, state=State.FENCED, reason=FENCED.format(entry.claim), manifest=manifest)
            continue
        part = (
            f"{len(here)} of {len(manifest.files)} files, a node's part" if len(here) < len(manifest.files) else ""
        )
        yield Found(entry=entry, state=State.WHOLE, reason=part, manifest=manifest, is_latest=not has_latest)
        has_latest = True


@dataclass(frozen=True, slots=True)
class Pruning:
    """What a pruning removes, and the bytes that come free.

    Attributes:
        names: checkpoints, newest first.
        drafts: unfinished saves of those who held the folder before.
        spared: what the rule would have removed, but nothing else in the folder is whole.
        claim: number of the claim that it was planned under.
    """

    names: tuple[str, ...]
    drafts: tuple[str, ...]
    bytes: int
    spared: tuple[str, ...] = field(default=())
    claim: int = 0


def plan_pruning(folder: Path, retention: Retention) -> Pruning:
    """Return what may be removed; reads the checkpoint that is left as the newest whole one to its last byte.

    Raises:
        NoFolderError: it is no folder.
        ClaimDamagedError: what holds the folder cannot be read.
        OSError: it cannot be listed.
    """
    claim = newest_claim(folder)
    doomed = superfluous(folder, claim, retention)
    spared: list[str] = []
    for entry in entries(folder):
        if not entry.counts(claim) or not _is_whole(folder / entry.name):
            continue
        if entry.name in doomed:
            doomed.remove(entry.name)
            spared.append(entry.name)
        break
    drafts = [path.name for path in abandoned_drafts(folder, claim)]
    size = sum(_size(folder / name) for name in (*doomed, *drafts))
    return Pruning(tuple(doomed), tuple(drafts), size, tuple(spared), claim.number)


def prune(folder: Path, pruning: Pruning, removed: Callable[[str], None] = lambda _name: None) -> None:
    """Remove what was planned; what is gone already is no error.

    Raises:
        ClaimedMeanwhileError: an attempt has begun since, which may go on from what was to be removed.
        OSError: the file system refuses; what was removed before stays removed.
    """

    def check() -> None:
        if Claims(folder).newest_number() != pruning.claim:
            raise ClaimedMeanwhileError(folder)

    for name in pruning.names:
        retire(folder, [name], check)
        removed(name)
    check()
    for name in pruning.drafts:
        shutil.rmtree(folder / name, ignore_errors=True)
        removed(name)


def _is_whole(path: Path) -> bool:
    try:
        manifests.check_part(path, contents=True)
    except CheckpointDamagedError:
        return False
    return True


def _size(path: Path) -> int:
    return sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())
