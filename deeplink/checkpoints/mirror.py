"""Checkpoints of this node's own disk on their way to the shared folder and to a partner's disk.

A save is whole on the node's disk first. One thread then copies it to the shared folder, checksums compared on the
way, under the same fence as any save; another has a partner node fetch it. Neither waits for the other, nor is the
node's disk tidied later because one of them hangs. Where copying falls behind, what waits gives way to the newest.
"""

from __future__ import annotations

import logging
import shutil
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import xxhash

from deeplink.checkpoints import manifest as manifests
from deeplink.checkpoints.background_queue import BackgroundQueue
from deeplink.checkpoints.entries import Retention, entries
from deeplink.checkpoints.found import CheckpointExistsError, FolderGoneError
from deeplink.checkpoints.manifest import CheckpointDamagedError, CheckpointWriteError
from deeplink.checkpoints.multirank_save import FOLDER as PARTS
from deeplink.checkpoints.multirank_save import Exchange, PartsMissingError, SaveAbandonedError
from deeplink.checkpoints.saving import replaced, tidy, withdraw_if_late
from deeplink.publish import DRAFT_PREFIX, fsync_path, publish_draft, published_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from deeplink.checkpoints.agents import JobAgents
    from deeplink.checkpoints.claims import Claim
    from deeplink.checkpoints.entries import CheckpointName
    from deeplink.checkpoints.multirank_save import SaveGroup
    from deeplink.checkpoints.ownership import FolderOwnership
    from deeplink.clock import Clock

log = logging.getLogger(__name__)

LOCAL_KEEP: Final = 2
PARTNER_S: Final = 10.0
"""How long `wait` waits for a partner once all else is done: its agent goes on without us."""
RESCUE_S: Final = 20.0
"""How long `rescue` retries errors: well below what the other nodes wait (`upload_barrier.PATIENCE_S`)."""
_PIECE = 4 << 20
_STORAGE = (CheckpointWriteError, FolderGoneError, PartsMissingError, SaveAbandonedError)


def _unheard(_size: int) -> None:
    pass


def copy_entry(
    source: Path,
    final: Path,
    check: Callable[[], None] = lambda: None,
    read: Callable[[int], None] = _unheard,
) -> None:
    """Copy a whole checkpoint; nothing to do where it is already. A damaged one of its name is set aside.

    Args:
        source: the checkpoint.
        final: where it is to appear.
        check: raises where that is not to be any more.
        read: told the bytes of each piece that was read.

    Raises:
        CheckpointDamagedError: the source is not what was saved.
        CheckpointExistsError: another whole one has its name.
        OSError: the storage refuses.
    """
    manifest = manifests.read_manifest(source)
    damaged: CheckpointDamagedError | None = None
    if manifests.is_there(final):
        try:
            there = manifests.check(final, contents=True, read=read)
        except CheckpointDamagedError as problem:
            damaged = problem
        else:
            if there != manifest:
                raise CheckpointExistsError(final)
            return
    if damaged is not None:
        log.warning("%s; a whole one comes from %s", damaged, source)
    with published_folder(final, check=lambda: replaced(final, check)) as draft:
        for entry in manifest.files:
            target = draft / entry.path
            target.parent.mkdir(parents=True, exist_ok=True)
            if _copied(source / entry.path, target, read) != entry.xxh3_64:
                raise CheckpointDamagedError(source, f"{entry.path} was altered: its checksum differs")
        shutil.copyfile(source / manifests.NAME, draft / manifests.NAME)


def _copied(source: Path, target: Path, read: Callable[[int], None] = _unheard) -> str:
    digest = xxhash.xxh3_64()
    with source.open("rb", buffering=0) as reading, target.open("wb", buffering=0) as writing:
        while piece := reading.read(_PIECE):
            digest.update(piece)
            view = memoryview(piece)
            while view:
                view = view[writing.write(view) :]
            read(len(piece))
    return f"{digest.intdigest():016x}"


class Mirror:
    """Copies this node's checkpoints to the shared folder and to a partner, the newest first of what waits.

    Args:
        hold: of the shared folder.
        local: the folder on this node's disk.
        retention: what the shared folder keeps; the node's disk keeps the newest two.
        agents: of the job; None: there is no partner.
        parts: copies a checkpoint whose parts lie on several nodes.
    """

    def __init__(
        self,
        hold: FolderOwnership,
        local: Path,
        retention: Retention,
        agents: JobAgents | None = None,
        *,
        parts: PartsCopy,
    ) -> None:
        self._parts = parts
        self._hold, self._local, self._retention, self._agents = hold, local, retention, agents
        self._to_shared = BackgroundQueue("copying a checkpoint to shared storage", self._copy)
        self._to_partner = BackgroundQueue("copying a checkpoint to a partner node", self._give)
        self._complained = ""
        self._is_on_partner = agents is not None and len(agents.members) > 1  # until it is known better
        self._tidying = threading.Lock()
        self._saved = ""

    def begin(self) -> None:
        """Have the threads: at the end of a process none can be begun any more."""
        self._to_shared.begin()
        if self._agents is not None:
            self._to_partner.begin()

    def offer(self, name: str, *, to_shared: bool = True) -> None:
        """Have a checkpoint copied, and this node's disk tidied; it replaces one that waits.

        Args:
            name: of the checkpoint.
            to_shared: copy it to the shared folder, too. Of one in parts every node must, or none.
        """
        if self._agents is not None and len(self._agents.members) > 1:
            self._to_partner.offer(name)
        if to_shared:
            self._to_shared.offer(name)
        self._saved = name
        self._tidy_here({self._to_shared.current, self._to_partner.current})

    def wait(self) -> None:
        """Return once all is copied to the shared folder, and to the partner if that does not take long.

        Raises:
            DeepLinkError: a copy failed so.
        """
        self._to_shared.is_done()
        if not self._to_partner.is_done(PARTNER_S):
            log.info("the partner's copy is still under way")
        self._to_partner.raise_failure()
        self._to_shared.raise_failure()

    def close(self) -> None:
        """Let the threads end once they have nothing to do."""
        self._to_shared.close()
        self._to_partner.close()

    def raise_failure(self) -> None:
        """Raise what failed since the last time; waits for nothing.

        That shared storage refuses is raised by `wait` alone while a partner has what was saved: the next copy may
        get there, and a restart needs none.
        """
        self._to_partner.raise_failure()
        if not (self._is_on_partner and isinstance(self._to_shared.failed, _STORAGE)):
            self._to_shared.raise_failure()

    def _tidy_here(self, busy: set[str | None]) -> None:
        """Leave the newest two on this node's disk, and what is being copied: it goes when that is done."""
        keep = Retention(keep=min(LOCAL_KEEP, self._retention.keep))
        with self._tidying:
            tidy(
                self._local,
                self._hold.claimed(),
                keep,
                self._refuse_if_known,
                proved=self._saved,
                suspected=self._hold.suspected,
                spared=busy,
            )

    def _refuse_if_known(self) -> None:
        self._hold.refuse_if_known_fenced()

    def has_time(self) -> bool:
        """Tell whether nothing is on its way to the shared folder."""
        return self._to_shared.is_done(0.0)

    def _copy(self, name: str) -> None:
        try:
            if (self._local / name / manifests.PART).exists():
                self._parts.copy(self._local / name)
            else:
                copy_entry(self._local / name, self._hold.folder / name, self._hold.refuse_if_fenced)
            if self._parts.group.rank == 0:
                withdraw_if_late(self._hold.folder / name, self._hold, self._hold.refuse_if_fenced)
        except FolderGoneError:
            raise
        except OSError as problem:
            with suppress(OSError):
                self._hold.refuse_if_fenced()
            raise CheckpointWriteError(self._hold.folder, problem) from problem
        self._to_shared.forget_failure()
        if self._parts.group.rank == 0:
            hold = self._hold
            tidy(
                hold.folder,
                hold.claimed(),
                self._retention,
                hold.refuse_if_fenced,
                proved=name,
                suspected=hold.suspected,
            )
        self._tidy_here({self._to_partner.current})

    def _give(self, name: str) -> None:
        if self._agents is None:
            return
        said = self._agents.copy_to_partner(name, self._hold.claimed(), self._to_partner.stopped)
        self._is_on_partner = not said.startswith("!")
        if self._is_on_partner:
            self._complained = ""
            log.info("%s is on node %s, too", name, said)
        elif said != self._complained:  # once, not with every save
            self._complained = said
            log.warning("%s is on no other node: %s", name, said[1:])
        self._tidy_here({self._to_shared.current})


@dataclass(frozen=True, slots=True)
class PartsCopy:
    """Copies a checkpoint to the shared folder whose parts lie on several nodes: each node its own.

    Attributes:
        hold: of the shared folder.
        group: this node among the nodes; the first one publishes.
        clock: where time comes from.
    """

    hold: FolderOwnership
    group: SaveGroup
    clock: Clock

    def copy(self, source: Path) -> None:
        """Copy this node's part; the first node publishes the whole when all are there.

        Raises:
            CheckpointDamagedError: the source is not what was saved.
            PartsMissingError, SaveAbandonedError: another node did not copy its part.
            FencedError: a newer attempt has claimed.
            OSError: the storage refuses.
        """
        name, hold = source.name, self.hold
        final = hold.folder / name
        manifest = manifests.read_manifest(source)
        hold.refuse_if_fenced()
        if manifests.is_there(final):
            return
        draft = hold.folder / f"{DRAFT_PREFIX}{name}-{hold.claimed().number:06x}"
        with Exchange(draft, self.group, self.clock, hold.refuse_if_fenced) as exchange:
            for entry in manifests.files_here(source, manifest):
                target = draft / entry.path
                target.parent.mkdir(parents=True, exist_ok=True)
                if _copied(source / entry.path, target) != entry.xxh3_64:
                    raise CheckpointDamagedError(source, f"{entry.path} was altered: its checksum differs")
                fsync_path(target)
            exchange.put("copied", b"")
            if self.group.rank:
                return
            exchange.gather("copied")
            shutil.rmtree(draft / PARTS)
            manifests.check_files(draft, manifest.files, contents=False)
            shutil.copyfile(source / manifests.NAME, draft / manifests.NAME)
            publish_draft(draft, final, check=hold.refuse_if_fenced)


def rescue(local: Path, hold: FolderOwnership, newest: Claim) -> str | None:
    """Copy this node's newest whole checkpoint to the shared folder if none there is as new; return its name.

    For an attempt that is about to claim the folder: the copying may have ended with the attempt before, and what
    was copied may have been damaged since. Errors are tried again for `RESCUE_S` altogether.

    Args:
        local: the folder on this node's disk.
        hold: of the shared folder.
        newest: its newest claim.

    Raises:
        DeepLinkError: what this node has, newer than what is shared, cannot be read or copied.
    """
    return hold.retried(lambda: _rescued(local, hold, newest), RESCUE_S)


def _rescued(local: Path, hold: FolderOwnership, newest: Claim) -> str | None:
    there = next(
        (entry for entry in entries(hold.folder) if entry.counts(newest) and _is_whole(hold, entry)), None
    )
    for entry in entries(local):
        if there is not None and entry <= there:
            break
        if not entry.counts(newest):
            continue
        path = local / entry.name
        try:
            copy_entry(path, hold.folder / path.name, read=hold.stir)
        except CheckpointDamagedError as damaged:
            log.warning("this node's %s", damaged)
            hold.suspected.add(path)
        else:
            return entry.name
    return None


def _is_whole(hold: FolderOwnership, entry: CheckpointName) -> bool:
    try:
        hold.check_once(hold.folder / entry.name, contents=True)
    except CheckpointDamagedError:
        return False
    return True
