"""The newest whole checkpoint under a claim, wherever it lies."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from deeplink.checkpoints import manifest as manifests
from deeplink.checkpoints.entries import entries
from deeplink.checkpoints.found import Skipped
from deeplink.checkpoints.manifest import CheckpointDamagedError, Manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from deeplink.checkpoints.claims import Claim

log = logging.getLogger(__name__)


def newest_whole(
    folders: Sequence[Path],
    claim: Claim,
    skipped: list[Skipped],
    *,
    agreed: Claim | None,
    read: Callable[[int], None] = lambda _size: None,
) -> tuple[Path, Manifest] | None:
    """Return the newest checkpoint that counts under `claim` and is whole, and what it says of itself.

    Args:
        folders: where they may lie, the quicker first, the shared one last.
        claim: what counts.
        skipped: what is passed over is added here.
        agreed: the claim that this attempt's ranks share; None for who only looks.
        read: told the bytes of each piece that was read.

    Raises:
        CheckpointDamagedError: what the ranks agreed on was damaged since.
        OSError: what may be the newest cannot be read, and lies whole nowhere else.
    """
    own = sorted({entry for folder in folders for entry in entries(folder) if entry.is_own(claim)}, reverse=True)
    if not own and claim.recognised and agreed is not None:
        return _agreed(folders, claim.recognised[0], read)
    passed: list[Skipped] = []
    for name in [*(entry.name for entry in own), *claim.recognised]:
        found = _whole_of(name, folders, passed, read)
        if found is not None:
            break
    else:
        found = None
    skipped.extend(passed)
    return found


def _whole_of(
    name: str, folders: Sequence[Path], passed: list[Skipped], read: Callable[[int], None]
) -> tuple[Path, Manifest] | None:
    unread: OSError | None = None
    is_anywhere = False
    for path in (folder / name for folder in folders):
        try:
            if manifests.is_there(path):
                is_anywhere = True
                return path, manifests.check(path, contents=True, read=read)
        except CheckpointDamagedError as problem:
            passed.append(Skipped(path, problem.reason))
        except OSError as problem:
            unread = problem
    if unread is not None:
        raise unread
    if not is_anywhere:
        passed.append(Skipped(folders[-1] / name, "it is not there any more"))
    return None


def _agreed(folders: Sequence[Path], name: str, read: Callable[[int], None]) -> tuple[Path, Manifest]:
    """Return the checkpoint that the rank that claimed has verified: all ranks go on from it, or none does."""
    path = folders[-1] / name
    manifest = manifests.check(path, contents=False)
    for folder in folders[:-1]:
        try:
            if not manifests.is_there(folder / name):
                continue
            if manifests.check(folder / name, contents=True, read=read) == manifest:
                return folder / name, manifest
        except (CheckpointDamagedError, OSError) as problem:
            log.warning("this node's %s: %s", name, problem)
    return path, manifest
