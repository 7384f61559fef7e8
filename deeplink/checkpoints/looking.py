"""What `Checkpoints.latest` does: who may look or claims, what counts then, and what was passed over."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from deeplink.checkpoints.entries import is_fenced
from deeplink.checkpoints.finding import newest_whole
from deeplink.checkpoints.found import Checkpoint, Skipped
from deeplink.checkpoints.recovery_agreement import SHARED
from deeplink.checkpoints.restore_fetch import HERE, Chosen
from deeplink.types import Attempt

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from deeplink.checkpoints.claims import Claim
    from deeplink.checkpoints.ownership import FolderOwnership
    from deeplink.checkpoints.restore_fetch import Bringer
    from deeplink.checkpoints.saving import Saver

log = logging.getLogger(__name__)


class Finder:
    """Finds the newest whole checkpoint of a folder for one process.

    Args:
        hold: of the shared folder.
        saver: says whether a newer attempt holds it.
        local: the folder on this node's disk; None where there is none.
        bringer: finds it through the job's agents; None where they are not asked.
        readonly: never claim.

    Attributes:
        skipped: what the last look passed over, and why.
    """

    def __init__(
        self, hold: FolderOwnership, saver: Saver, local: Path | None, bringer: Bringer | None, *, readonly: bool
    ) -> None:
        self._hold, self._saver, self._local, self._bringer = hold, saver, local, bringer
        self._readonly = readonly
        self.skipped: tuple[Skipped, ...] = ()

    def newest(self) -> Checkpoint | None:
        """Return the newest whole checkpoint, None where there is nothing; see `Checkpoints.latest`."""
        claim = self._claim()
        skipped = [Skipped(self._hold.folder / name, reason) for name, reason in claim.skipped]
        chosen = self._chosen(claim, skipped)
        self._say(skipped)
        self._hold.suspected |= {item.path for item in skipped if not is_fenced(item.reason)}
        self._hold.refuse_if_nothing_is_whole(
            [chosen.path.name] if chosen else [], [(item.path.name, item.reason) for item in skipped]
        )
        self._hold.looked(claim, chosen.path.name if chosen else None)
        if chosen is None:
            return None
        manifest = chosen.manifest
        return Checkpoint(
            path=chosen.path,
            step=manifest.step,
            attempt=Attempt.parse(manifest.attempt) if manifest.attempt else None,
            meta=manifest.meta,
            skipped=self.skipped,
            nonfinite=manifest.nonfinite,
            world=manifest.world,
            origin=chosen.origin,
            parts=chosen.parts,
        )

    def _claim(self) -> Claim:
        """Return the claim under which checkpoints count for this process; a training one claims."""
        hold = self._hold
        if hold.attempt is None or self._readonly:
            return hold.claim or hold.patiently(hold.claims.newest)
        if self._local is None and (running := hold.patiently(hold.running_other)):  # who gives local= trains
            return running
        claim = hold.claimed()
        hold.patiently(self._saver.check)
        return claim

    def _chosen(self, claim: Claim, skipped: list[Skipped]) -> Chosen | None:
        hold = self._hold
        if self._bringer is not None and hold.agents is not None and hold.claim is not None:
            return self._bringer.newest(claim, skipped)
        folders = [*filter(None, [self._local]), hold.folder]
        found = hold.patiently(lambda: newest_whole(folders, claim, skipped, agreed=hold.claim, read=hold.stir))
        return found and Chosen(*found, HERE if found[0].parent == self._local else SHARED)

    def _say(self, skipped: Iterable[Skipped]) -> None:
        for item in skipped:
            if item not in self.skipped:
                log.warning("checkpoint %s skipped: %s", item.path, item.reason)
        self.skipped = tuple(skipped)
