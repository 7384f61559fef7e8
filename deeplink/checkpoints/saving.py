"""Putting one checkpoint into one folder, whole or not at all, and tidying up after it."""

from __future__ import annotations

import logging
import shutil
import uuid
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deeplink.checkpoints import manifest as manifests
from deeplink.checkpoints.claims import DAMAGED_PREFIX, abandoned_drafts, entries, entry_name, surplus
from deeplink.checkpoints.manifest import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointWriteError,
    FileEntry,
    Manifest,
)
from deeplink.checkpoints.multirank_save import collect_parts, remove_others
from deeplink.core.private import private_folder
from deeplink.core.publish import DRAFT_PREFIX, publish_draft, published_folder
from deeplink.core.types import FencedError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
    from pathlib import Path

    from deeplink.checkpoints.claims import Claim, Retention
    from deeplink.checkpoints.multirank_save import Exchange
    from deeplink.checkpoints.ownership import FolderOwnership
    from deeplink.core.clock import Clock

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Save:
    """One save: what is known of it before and while it is written."""

    step: int
    meta: dict[str, Any]
    began: float  # by the clock's monotonic time
    stall_s: float = 0.0
    nonfinite: dict[str, str] = field(default_factory=dict)
    world: int = 1
    any_object: bool = False  # the state may hold what `Checkpoint.load` does not read
    path: Path | None = None  # once it is published
    to_shared: bool = True  # it is to be copied to the shared folder


class Saver:
    """Puts checkpoints into a folder, under a hold."""

    def __init__(self, hold: FolderOwnership, folder: Path, clock: Clock) -> None:
        self.hold, self.folder = hold, folder
        self._clock = clock

    def check(self) -> None:
        """Raise FencedError if a newer attempt holds the folder.

        On this node's own disk a save goes on while the shared storage does not answer: it is refused, or ignored,
        when it gets there.
        """
        if self.folder == self.hold.folder:
            self.hold.refuse_if_fenced()
        else:
            self.hold.refuse_if_known_fenced()

    def make_folder(self) -> None:
        """Make the folder: a node's for this user alone; of a shared one its owner decides who may what."""
        if self.folder == self.hold.folder:
            self.folder.mkdir(parents=True, exist_ok=True)
        else:
            private_folder(self.folder)

    @contextmanager
    def saving(self, save: Save) -> Iterator[Path]:
        """Give an empty folder to write into; see `Checkpoints.save`."""
        final = self.folder
        in_body = False
        try:
            claim = self.hold.claimed()
            self.check()
            self.make_folder()
            final = self._free_path(save.step, claim)
            with published_folder(final, check=self.check) as draft:
                in_body = True
                yield draft
                in_body = False
                self._seal(draft, save, claim, manifests.list_files(draft))
            withdraw_if_late(final, self.hold, self.check)
            save.path = final
        except OSError as problem:
            if in_body:
                self._refuse_first()
                raise
            raise self._explained(problem, final) from problem

    def together(self, save: Save, exchange: Exchange) -> None:
        """Publish what several ranks wrote into the exchange's draft, on rank 0."""
        final = self.folder
        try:
            claim = self.hold.claimed()
            self._seal(exchange.draft, save, claim, collect_parts(exchange))
            final = self._free_path(save.step, claim)
            publish_draft(exchange.draft, final, check=self.check)
            withdraw_if_late(final, self.hold, self.check)
            save.path = final
        except OSError as problem:
            raise self._explained(problem, final) from problem

    def _refuse_first(self) -> None:
        if self.hold.claim is not None:
            self.check()  # a newer attempt removes our drafts: then this is the reason

    def _explained(self, problem: OSError, final: Path) -> CheckpointError | CheckpointWriteError:
        self._refuse_first()
        if final != self.folder and manifests.is_there(final):
            return saved_meanwhile(final)
        return CheckpointWriteError(self.folder, problem)

    def _free_path(self, step: int, claim: Claim) -> Path:
        there = entries(self.folder)
        if self.folder != self.hold.folder:
            try:
                there += self.hold.shared.ask(lambda: entries(self.hold.folder))
            except OSError as problem:
                log.debug("what the shared folder has is not known: %s", problem)
        serials = [entry.serial for entry in there if (entry.claim, entry.step) == (claim.number, step)]
        return self.folder / entry_name(step, claim, max(serials) + 1 if serials else 0)

    def planned(self, save: Save, files: Sequence[FileEntry]) -> tuple[str, str]:
        """Return the name of what several ranks wrote on their nodes' disks, and its manifest, on rank 0."""
        claim = self.hold.claimed()
        manifest = self._manifest(save, claim, files)
        return self._free_path(save.step, claim).name, manifests.manifest_text(manifest)

    def publish_part(self, draft: Path, final: Path, text: str) -> None:
        """Publish what ranks of this node wrote, beside the manifest of the whole."""
        manifest = manifests.manifest_of(text, final)
        try:
            here = [entry.path for entry in manifest.files if (draft / entry.path).exists()]
            remove_others(draft, set(here))
            if len(here) < len(manifest.files):
                manifests.write_part(draft, here)
            (draft / manifests.NAME).write_text(text, encoding="utf-8")
            publish_draft(draft, final, check=self.check)
            withdraw_if_late(final, self.hold, self.check)
        except OSError as problem:
            raise self._explained(problem, final) from problem

    def _seal(self, draft: Path, save: Save, claim: Claim, files: Sequence[FileEntry]) -> None:
        text = manifests.manifest_text(self._manifest(save, claim, files))
        (draft / manifests.NAME).write_text(text, encoding="utf-8")

    def _manifest(self, save: Save, claim: Claim, files: Sequence[FileEntry]) -> Manifest:
        return Manifest(
            step=save.step,
            attempt=str(self.hold.attempt or ""),
            claim=claim.number,
            created_unix=self._clock.unix(),
            files=tuple(files),
            meta=save.meta,
            stall_s=save.stall_s,
            save_s=self._clock.monotonic() - save.began,
            nonfinite=save.nonfinite,
            world=save.world,
        )


def saved_meanwhile(path: Path) -> CheckpointError:
    """Return the error of two processes that save the same step at the same time."""
    return CheckpointError(
        f"{path} was saved by another process just now", remedy="Save on one rank only (rank 0)."
    )


def withdraw_if_late(path: Path, hold: FolderOwnership, check: Callable[[], None]) -> None:
    """Take back what was published a moment ago if a newer attempt claimed between the check and the rename.

    A process may stand still there for as long as it likes. What it then publishes is on no list and counts for
    nothing, but it should not be found. Unless the newer attempt was quick to see it, and goes on from it: it may
    while its claim is not known.
    """
    try:
        check()
    except FencedError:
        newer = hold.newer_claim()
        if newer is not None and path.name not in newer.recognised:
            withdraw(path)
        raise
    except OSError as problem:
        log.debug("whether a newer attempt has begun since is not known: %s", problem)


def withdraw(path: Path) -> None:
    """Take back a checkpoint that counts for nothing, hidden before it is removed. Trouble with that is logged."""
    try:
        _removed(_hidden(path))
    except OSError as problem:
        log.warning("%s counts for nothing, and is not all removed: %s", path, problem)


def tidy(
    folder: Path,
    claim: Claim,
    retention: Retention,
    check: Callable[[], object],
    *,
    proved: str,
    suspected: set[Path] | None = None,
    spared: Collection[str | None] = (),
) -> None:
    """Remove what is no longer needed. Trouble with that is logged: the save itself has succeeded.

    What is damaged is set aside. A newer attempt may claim meanwhile, and go on from what is about to be removed:
    see `retire`.
    """
    try:
        damaged = {path.name for path in _damaged_of(folder, suspected) if path.name not in spared}
        found = surplus(folder, claim, retention, proved, damaged)
        torn = [name for name in found.damaged if name not in spared]
        doomed = [name for name in found.superseded if name not in spared]
        if doomed or torn:
            check()
            for name in torn:
                set_aside(folder / name)
            retire(folder, doomed, check)
        for draft in abandoned_drafts(folder, claim):
            shutil.rmtree(draft)
    except FencedError as fenced:
        log.warning("old checkpoints in %s stay: %s", folder, fenced)
    except OSError as problem:
        log.warning("old checkpoints in %s are not all removed: %s", folder, problem)


def tidy_shared(hold: FolderOwnership, retention: Retention, *, proved: str) -> None:
    """Remove what is no longer needed in the shared folder; see `tidy`."""
    check, suspected = hold.refuse_if_fenced, hold.suspected
    tidy(hold.folder, hold.claimed(), retention, check, proved=proved, suspected=suspected)


def _damaged_of(folder: Path, suspected: set[Path] | None) -> list[Path]:
    """Return which of those in `folder` are damaged, read to the last byte; the unreadable stay suspected."""
    damaged = []
    for path in [path for path in tuple(suspected or ()) if path.parent == folder]:  # other threads add to it
        try:
            if manifests.is_there(path):
                manifests.check_part(path, contents=True)
        except CheckpointDamagedError:
            damaged.append(path)
        except OSError:
            continue
        if suspected is not None:
            suspected.discard(path)
    return damaged


def set_aside(path: Path) -> None:
    """Rename a damaged checkpoint, so that it is neither looked at nor removed any more."""
    aside = path.with_name(f"{DAMAGED_PREFIX}{path.name}-{uuid.uuid4().hex[:12]}")
    path.rename(aside)
    log.warning("%s is damaged, and is kept as %s: remove it when nobody needs it", path, aside.name)


def retire(folder: Path, names: Iterable[str], check: Callable[[], object]) -> None:
    """Remove checkpoints, unless a newer attempt has claimed the folder by then.

    They are hidden, `check` looks for a newer claim, and only then are they removed. The next to claim looks
    afterwards whether what it goes on from is still there (`FolderOwnership.claimed`): whichever comes first, one
    of the two sees the other. And a process that stands still in between removes what no attempt can go on from.
    """
    hidden: list[tuple[Path, Path]] = []
    try:
        for name in names:
            if manifests.is_there(folder / name):
                hidden.append((folder / name, _hidden(folder / name)))  # noqa: PERF401 - each is noted at once
        if hidden:
            check()
    except BaseException:  # whatever it is, also Ctrl-C, goes on
        for path, trash in hidden:
            try:
                trash.rename(path)
            except OSError as problem:
                log.error("%s stays hidden as %s: %s", path, trash.name, problem)  # noqa: TRY400
        raise
    for _path, trash in hidden:
        _removed(trash)


def _removed(path: Path) -> None:
    if path.is_symlink():  # what it leads to is somebody's own
        path.unlink()
    else:
        shutil.rmtree(path)


def replaced(path: Path, check: Callable[[], None]) -> None:
    """Make way for what is about to be published as `path`: `check`, and a damaged one of its name set aside."""
    check()
    if manifests.is_there(path):
        set_aside(path)


def _hidden(path: Path) -> Path:
    trash = path.with_name(f"{DRAFT_PREFIX}{path.name}-{uuid.uuid4().hex[:12]}")
    path.rename(trash)
    return trash
