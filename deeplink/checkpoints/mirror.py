"""Checkpoints of this node's own disk on their way to the shared folder, and back into account after a restart.

A save is whole on the node's disk first. A thread then copies it to the shared folder, checksums compared on the
way, under the same fence as any save. Where the copying falls behind, what waits gives way to what is newer.
"""

from __future__ import annotations

import logging
import shutil
import threading
from typing import TYPE_CHECKING, Final

import xxhash

from deeplink.checkpoints import manifest as manifests
from deeplink.checkpoints.background import Background
from deeplink.checkpoints.entries import Retention, entries
from deeplink.checkpoints.found import CheckpointExistsError
from deeplink.checkpoints.manifest import CheckpointDamagedError, CheckpointWriteError
from deeplink.checkpoints.saving import remove, tidy
from deeplink.publish import published_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from deeplink.checkpoints.claims import Claim
    from deeplink.checkpoints.entries import Entry
    from deeplink.checkpoints.hold import Hold

log = logging.getLogger(__name__)

LOCAL_KEEP: Final = 2
_PIECE = 4 << 20


def copy_entry(source: Path, final: Path, check: Callable[[], None] = lambda: None) -> None:
    """Copy a whole checkpoint; nothing to do where it is already. A damaged one of its name is replaced.

    Raises:
        CheckpointDamagedError: the source is not what was saved.
        CheckpointExistsError: another whole one has its name.
        OSError: the storage refuses.
    """
    manifest = manifests.read_manifest(source)
    if final.exists():
        try:
            there = manifests.check(final, contents=True)
        except CheckpointDamagedError as damaged:
            log.warning("%s; it is replaced by %s", damaged, source)
            check()
            remove(final)
        else:
            if there != manifest:
                raise CheckpointExistsError(final)
            return
    with published_folder(final, check=check) as draft:
        for entry in manifest.files:
            target = draft / entry.path
            target.parent.mkdir(parents=True, exist_ok=True)
            if _copied(source / entry.path, target) != entry.xxh3_64:
                raise CheckpointDamagedError(source, f"{entry.path} was altered: its checksum differs")
        shutil.copyfile(source / manifests.NAME, draft / manifests.NAME)


def _copied(source: Path, target: Path) -> str:
    digest = xxhash.xxh3_64()
    with source.open("rb", buffering=0) as reading, target.open("wb", buffering=0) as writing:
        while piece := reading.read(_PIECE):
            digest.update(piece)
            view = memoryview(piece)
            while view:
                view = view[writing.write(view) :]
    return f"{digest.intdigest():016x}"


class Mirror:
    """Copies this node's checkpoints to the shared folder, one at a time, the newest first of what waits.

    Args:
        hold: of the shared folder.
        local: the folder on this node's disk.
        retention: what the shared folder keeps; the node's disk keeps the newest two.
    """

    def __init__(self, hold: Hold, local: Path, retention: Retention) -> None:
        self._hold, self._local, self._retention = hold, local, retention
        self._background = Background("copying a checkpoint to shared storage")
        self._lock = threading.Lock()
        self._waiting: str | None = None
        self._is_running = False

    def offer(self, name: str) -> None:
        """Have a checkpoint copied; it replaces one that waits."""
        with self._lock:
            self._waiting, displaced = name, self._waiting
            if displaced is not None:
                log.info("%s is not copied to %s: %s is newer", displaced, self._hold.folder, name)
            if self._is_running:
                return
            self._is_running = True
        self._background.start(self._run)

    def wait(self) -> None:
        """Return once all is copied.

        Raises:
            DeepLinkError: a copy failed so.
        """
        self._background.wait()

    def raise_failure(self) -> None:
        """Raise what failed since the last time; waits for nothing."""
        self._background.raise_failure()

    def _run(self) -> None:
        while True:
            with self._lock:
                name, self._waiting = self._waiting, None
                if name is None:
                    self._is_running = False
                    return
            try:
                self._copy(name)
            except Exception as problem:  # noqa: BLE001 - the training loop gets it; the next copy may do well
                self._background.note(problem)

    def _copy(self, name: str) -> None:
        try:
            copy_entry(self._local / name, self._hold.folder / name, self._hold.refuse_if_fenced)
        except OSError as problem:
            self._hold.refuse_if_fenced()
            raise CheckpointWriteError(self._hold.folder, problem) from problem
        claim = self._hold.claimed()
        tidy(self._hold.folder, claim, self._retention, self._hold.refuse_if_fenced)
        tidy(self._local, claim, Retention(keep=min(LOCAL_KEEP, self._retention.keep)))


def rescue(local: Path, hold: Hold, newest: Claim) -> str | None:
    """Copy this node's newest whole checkpoint to the shared folder if none there is as new; return its name.

    For an attempt that is about to claim the folder: the copying may have ended with the attempt before, and what
    was copied may have been damaged since.

    Args:
        local: the folder on this node's disk.
        hold: of the shared folder.
        newest: its newest claim.

    Raises:
        OSError: the storage refuses.
    """
    there = next(
        (entry for entry in entries(hold.folder) if entry.counts(newest) and _is_whole(hold, entry)), None
    )
    for entry in entries(local):
        if there is not None and entry <= there:
            return None
        if not entry.counts(newest):
            continue
        try:
            copy_entry(local / entry.name, hold.folder / entry.name)
        except CheckpointDamagedError as damaged:
            log.warning("this node's %s", damaged)
            continue
        return entry.name
    return None


def _is_whole(hold: Hold, entry: Entry) -> bool:
    try:
        hold.check_once(hold.folder / entry.name, contents=True)
    except CheckpointDamagedError:
        return False
    return True
