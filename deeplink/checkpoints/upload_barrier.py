"""Before an attempt claims the folder, its nodes upload what only their own disks hold.

The claim lists what counts, and all ranks go on from its first. So whoever claims waits until each node has
looked, or for a bounded time. They meet in files: `claims/offer-<attempt>-<node's number>`. One that is not empty
says what is wrong with that node's disk.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from deeplink.checkpoints.claims import fresh_names
from deeplink.checkpoints.entries import survey
from deeplink.checkpoints.mirror import rescue
from deeplink.checkpoints.recovery_agreement import NoAgreementError
from deeplink.errors import DeepLinkError
from deeplink.publish import write_unsynced
from deeplink.types import Attempt, AttemptFormatError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from deeplink.checkpoints.claims import Claim
    from deeplink.checkpoints.ownership import FolderOwnership
    from deeplink.clock import Clock

log = logging.getLogger(__name__)

PATIENCE_S: Final = 60.0
"""A node that has not looked by then is gone without if anything is whole; its copy does not count any more."""
_PAUSE_S: Final = 0.05
_OFFER: Final = "offer-"


class Meeting:
    """The nodes of an attempt, each with a folder of its own.

    Args:
        hold: of the shared folder.
        local: the folder on this node's disk.
        env: names this rank's place: LOCAL_RANK, GROUP_RANK, GROUP_WORLD_SIZE.
        clock: where time comes from.
    """

    def __init__(self, hold: FolderOwnership, local: Path, env: Mapping[str, str], clock: Clock) -> None:
        self._hold, self._local, self._clock = hold, local, clock
        self._is_first = env.get("LOCAL_RANK", "0") == "0"
        self._node = int(env.get("GROUP_RANK") or 0)
        self._nodes = int(env.get("GROUP_WORLD_SIZE") or 1)

    def bring_together(self, newest: Claim) -> None:
        """Return once every node has brought in what it has, or the attempt has claimed, or time is up.

        Raises:
            FencedError: a newer attempt has claimed.
            NoAgreementError: a node cannot bring in what it has; or one is missing, and nothing else is whole.
            DeepLinkError: this one cannot.
            OSError: the shared folder refuses.
        """
        meets = self._hold.attempt is not None and not (self._nodes == 1 and self._is_first)
        folder = self._hold.claims.folder
        if meets:
            folder.mkdir(exist_ok=True)
        if self._is_first:
            try:
                self._bring_in(newest)
            except DeepLinkError as problem:
                if meets:
                    write_unsynced(folder / self._offer(self._node), str(problem).encode())
                raise
        if not meets:
            return
        if self._is_first:
            write_unsynced(folder / self._offer(self._node), b"")
        self._wait_for_all(folder, newest)
        if self._is_first and not self._node:
            self._clear_before(folder)

    def _bring_in(self, newest: Claim) -> None:
        name = rescue(self._local, self._hold, newest)
        if name:
            log.warning("%s was on this node alone, and is brought in", name)

    def _clear_before(self, folder: Path) -> None:
        """Remove what the nodes of earlier attempts of this job said."""
        for path in folder.glob(f"{_OFFER}*"):
            with suppress(OSError, AttemptFormatError):
                said_by = Attempt.parse(path.name.removeprefix(_OFFER).rpartition("-")[0])
                if self._hold.attempt and said_by.job == self._hold.attempt.job and said_by < self._hold.attempt:
                    path.unlink()

    def _offer(self, node: int) -> str:
        return f"{_OFFER}{self._hold.attempt}-{node:05d}"

    def _wait_for_all(self, folder: Path, newest: Claim) -> None:
        wanted = {self._offer(node) for node in range(self._nodes)}
        deadline = self._clock.monotonic() + PATIENCE_S
        while missing := wanted.difference(fresh_names(folder)):
            if self._hold.is_claimed():
                return
            if self._clock.monotonic() > deadline:
                self._go_without(len(missing), newest)
                return
            self._hold.stir()
            self._clock.sleep(_PAUSE_S)
        for name in sorted(wanted):
            if problem := (folder / name).read_text(encoding="utf-8", errors="replace"):
                raise NoAgreementError(f"node {int(name.rpartition('-')[2])}: {problem}")

    def _go_without(self, missing: int, newest: Claim) -> None:
        said = f"{missing} of {self._nodes} nodes did not say what they hold within {PATIENCE_S:g} s"
        if newest.number and not survey(self._hold.folder, newest, self._hold.check_once).recognised:
            raise NoAgreementError(f"{said}, and nothing else is whole")
        log.warning("%s", said)
