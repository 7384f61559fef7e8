"""Lists, verifies and prunes a folder of checkpoints from outside: nothing is claimed."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from deeplink.checkpoints import manifest as manifests
from deeplink.checkpoints.claims import (
    DAMAGED_PREFIX,
    CheckpointName,
    Claims,
    Retention,
    abandoned_drafts,
    entries,
    fenced,
    surplus,
)
from deeplink.checkpoints.manifest import CheckpointDamagedError, CheckpointError, Manifest, no_folder
from deeplink.checkpoints.saving import retire, set_aside

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from deeplink.checkpoints.claims import Claim


class CheckpointState(Enum):
    """Whether a checkpoint counts, and why not."""

    WHOLE = "whole"
    DAMAGED = "damaged"
    UNREADABLE = "unreadable"
    FENCED = "fenced"


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedCheckpoint:
    """A checkpoint as it was found."""

    entry: CheckpointName
    state: CheckpointState
    reason: str = ""  # why it does not count, or that it is a part
    manifest: Manifest | None = None  # None where it cannot be read
    is_latest: bool = False  # whether a job that starts now goes on from it, as far as was looked


def _existing(folder: Path) -> Path:
    if not folder.is_dir():
        raise no_folder(folder)
    return folder


def newest_claim(folder: Path) -> Claim:
    """Return the claim that holds the folder; NO_CLAIM where there is none."""
    return Claims(_existing(folder)).newest()


def chosen(folder: Path, names: tuple[str, ...] = ()) -> list[CheckpointName]:
    """Return the checkpoints of these names, or all, newest first."""
    found = entries(_existing(folder))
    known = {entry.name for entry in found}
    if unknown := [name for name in names if name not in known]:
        remedy = "`deeplink checkpoints ls` lists what is there."
        raise CheckpointError(f"{folder} has no {unknown[0]}", remedy=remedy)
    return [entry for entry in found if not names or entry.name in names]


def look(
    folder: Path,
    found: list[CheckpointName],
    *,
    contents: bool,
    read: Callable[[int], None] = lambda _size: None,
) -> Iterator[InspectedCheckpoint]:
    """Yield each of the checkpoints, newest first, looked at in sizes, and with `contents` in checksums."""
    claim = newest_claim(folder)
    has_latest = False
    for entry in found:
        one = _inspected(folder / entry.name, entry, claim, contents=contents, read=read)
        is_whole = one.state is CheckpointState.WHOLE
        yield replace(one, is_latest=is_whole and not has_latest)
        # A job that starts now does not pass over what it cannot read.
        is_unread = one.state is CheckpointState.UNREADABLE and entry.counts(claim)
        has_latest = has_latest or is_whole or is_unread


def _inspected(
    path: Path, entry: CheckpointName, claim: Claim, *, contents: bool, read: Callable[[int], None]
) -> InspectedCheckpoint:
    manifest, state, reason = None, CheckpointState.WHOLE, ""
    try:
        manifest = manifests.read_manifest(path)
        here = manifests.files_here(path, manifest)
        manifests.check_files(path, here, contents=contents, read=read)
    except CheckpointDamagedError as damaged:
        state, reason = CheckpointState.DAMAGED, damaged.reason
    except OSError as problem:
        state, reason = CheckpointState.UNREADABLE, str(problem)
    else:
        if not entry.counts(claim):
            state, reason = CheckpointState.FENCED, fenced(entry)
        elif len(here) < len(manifest.files):
            reason = f"{len(here)} of {len(manifest.files)} files, a node's part"
    return InspectedCheckpoint(entry=entry, state=state, reason=reason, manifest=manifest)


def set_aside_before(folder: Path) -> list[str]:
    """Return the damaged ones that are kept under another name."""
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(DAMAGED_PREFIX))


@dataclass(frozen=True, slots=True)
class Pruning:
    """The files that a pruning removes, and the bytes that come free."""

    names: tuple[str, ...]  # checkpoints, newest first
    drafts: tuple[str, ...]  # unfinished saves of earlier holders of the folder
    bytes: int
    damaged: tuple[str, ...]  # these are set aside
    claim: int  # that it was planned under


def plan_pruning(folder: Path, retention: Retention) -> Pruning:
    """Return what may be removed: what is older than the newest that is whole to its last byte, which is read."""
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
    """Remove what was planned, and set aside what is damaged; what is gone already is no error."""

    def check() -> None:
        if Claims(folder).newest_number() != pruning.claim:
            raise CheckpointError(f"a job began on {folder} meanwhile", remedy="Run the command again.")

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
