"""Putting one checkpoint into one folder, whole or not at all, and tidying up after it."""

from __future__ import annotations

import logging
import shutil
import uuid
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deeplink.checkpoints import manifest as manifests
from deeplink.checkpoints.entries import abandoned_drafts, entries, entry_name, superfluous
from deeplink.checkpoints.found import CheckpointExistsError
from deeplink.checkpoints.manifest import CheckpointWriteError, FileEntry, Manifest
from deeplink.publish import DRAFT_PREFIX, publish_draft, published_folder
from deeplink.types import FencedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from deeplink.checkpoints.claims import Claim
    from deeplink.checkpoints.entries import Retention
    from deeplink.checkpoints.hold import Hold
    from deeplink.checkpoints.parts import Exchange
    from deeplink.clock import Clock

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Save:
    """One save: what is known of it before and while it is written.

    Attributes:
        began: by the clock's monotonic time.
        stall_s, nonfinite, world: as `Manifest` has them.
        any_object: whether the state may hold what `Checkpoint.load` does not read.
        path: where it is, once it is published.
    """

    step: int
    meta: dict[str, Any]
    began: float
    stall_s: float = 0.0
    nonfinite: dict[str, str] = field(default_factory=dict)
    world: int = 1
    any_object: bool = False
    path: Path | None = None


class Saver:
    """Puts checkpoints into a folder, under a hold.

    Args:
        hold: who this process is; its folder is where claims lie.
        folder: where the checkpoints go: the hold's, or one on this node.
        clock: where time comes from.
    """

    def __init__(self, hold: Hold, folder: Path, clock: Clock) -> None:
        self.hold, self.folder = hold, folder
        self._clock = clock

    def check(self) -> None:
        """Raise FencedError if a newer attempt holds the folder.

        On this node's own disk a save goes on while the shared storage does not answer: it is refused, or ignored,
        when it gets there.
        """
        try:
            self.hold.refuse_if_fenced()
        except OSError as problem:
            if self.hold.claim is None or self.folder == self.hold.folder:
                raise
            log.warning("whether a newer attempt has begun is not known: %s", problem)

    @contextmanager
    def saving(self, save: Save) -> Iterator[Path]:
        """Give an empty folder to write into; see `Checkpoints.save`."""
        final = self.folder
        in_body = False
        try:
            claim = self.hold.claimed()
            self.check()
            self.folder.mkdir(parents=True, exist_ok=True)
            final = self._free_path(save.step, claim)
            with published_folder(final, check=self.check) as draft:
                in_body = True
                yield draft
                in_body = False
                self._seal(draft, save, claim, manifests.list_files(draft))
            save.path = final
        except OSError as problem:
            if in_body:
                self._refuse_first()
                raise
            raise self._explained(problem, final) from problem

    def together(self, save: Save, exchange: Exchange, files: Callable[[], tuple[FileEntry, ...]]) -> None:
        """Publish what several ranks wrote into the exchange's draft, on rank 0.

        Args:
            save: what is saved.
            exchange: how the ranks met.
            files: waits for the others and returns all that was written.

        Raises:
            FencedError, CheckpointWriteError, CheckpointExistsError, PartsMissingError: nothing was published.
        """
        final = self.folder
        try:
            claim = self.hold.claimed()
            self._seal(exchange.draft, save, claim, files())
            final = self._free_path(save.step, claim)
            publish_draft(exchange.draft, final, check=self.check)
            save.path = final
        except OSError as problem:
            raise self._explained(problem, final) from problem

    def _refuse_first(self) -> None:
        if self.hold.claim is not None:
            self.check()  # a newer attempt removes our drafts: then this is the reason

    def _explained(self, problem: OSError, final: Path) -> CheckpointExistsError | CheckpointWriteError:
        self._refuse_first()
        if final != self.folder and final.exists():
            return CheckpointExistsError(final)
        return CheckpointWriteError(self.folder, problem)

    def _free_path(self, step: int, claim: Claim) -> Path:
        serials = [
            entry.serial
            for folder in {self.folder, self.hold.folder}
            for entry in entries(folder)
            if (entry.claim, entry.step) == (claim.number, step)
        ]
        return self.folder / entry_name(step, claim, max(serials) + 1 if serials else 0)

    def _seal(self, draft: Path, save: Save, claim: Claim, files: Sequence[FileEntry]) -> None:
        manifest = Manifest(
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
        manifests.write_manifest(draft, manifest)


def tidy(folder: Path, claim: Claim, retention: Retention, check: Callable[[], None] = lambda: None) -> None:
    """Remove what is no longer needed. Trouble with that is logged: the save itself has succeeded.

    A newer attempt may claim meanwhile, and go on from what is about to be removed. So it is hidden, `check` looks
    for a newer claim, and only then is it removed. Whoever claims looks afterwards whether what it goes on from is
    still there (`Hold.claimed`): whichever comes first, one of the two sees the other.
    """
    hidden: list[tuple[Path, Path]] = []
    try:
        doomed = superfluous(folder, claim, retention)
        if doomed:
            check()
        hidden.extend((folder / name, _hidden(folder / name)) for name in doomed)
        if hidden:
            check()
        for _path, trash in hidden:
            shutil.rmtree(trash)
        for draft in abandoned_drafts(folder, claim):
            shutil.rmtree(draft)
    except FencedError as fenced:
        for path, trash in hidden:
            trash.rename(path)
        log.warning("old checkpoints in %s stay: %s", folder, fenced)
    except OSError as problem:
        log.warning("old checkpoints in %s are not all removed: %s", folder, problem)


def remove(path: Path) -> None:
    """Remove a checkpoint; gone under its own name at once: half removed it would look like a torn save.

    Raises:
        OSError: the file system refuses.
    """
    shutil.rmtree(_hidden(path))


def _hidden(path: Path) -> Path:
    trash = path.with_name(f"{DRAFT_PREFIX}{path.name}-{uuid.uuid4().hex[:12]}")
    path.rename(trash)
    return trash
