"""Checkpoints of this node's own disk on their way to the shared folder and to a partner's disk.

A save is whole on the node's disk first. One thread then copies it to the shared folder, checksums compared on the
way, under the same fence as any save; another has a partner node fetch it. Neither waits for the other, nor is the
node's disk tidied later because one of them hangs. Where copying falls behind, what waits gives way to the newest.
"""

from __future__ import annotations

import logging
import shutil
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import xxhash

from deeplink.checkpoints import manifest as manifests
from deeplink.checkpoints.background import BackgroundQueue
from deeplink.checkpoints.claims import Retention, entries, fresh_names, survey
from deeplink.checkpoints.found import FolderGoneError
from deeplink.checkpoints.manifest import CheckpointDamagedError, CheckpointWriteError
from deeplink.checkpoints.multirank_save import FOLDER as PARTS
from deeplink.checkpoints.multirank_save import Exchange, SaveAbandonedError
from deeplink.checkpoints.recovery_agreement import no_agreement
from deeplink.checkpoints.saving import replaced, saved_meanwhile, tidy, tidy_shared, withdraw_if_late
from deeplink.core.errors import DeepLinkError
from deeplink.core.private import PrivateFolderError, private_folder
from deeplink.core.process_identity import boot_id
from deeplink.core.publish import DRAFT_PREFIX, fsync_path, publish_draft, published_folder, write_unsynced
from deeplink.core.types import Attempt, AttemptFormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from deeplink.checkpoints.agents import JobAgents
    from deeplink.checkpoints.claims import CheckpointName, Claim
    from deeplink.checkpoints.manifest import FileEntry, Manifest
    from deeplink.checkpoints.multirank_save import SaveGroup
    from deeplink.checkpoints.ownership import FolderOwnership
    from deeplink.core.clock import Clock


log = logging.getLogger(__name__)

LOCAL_KEEP: Final = 2
PARTNER_S: Final = 10.0
"""How long `wait` waits for a partner once all else is done: its agent goes on without us."""
RESCUE_S: Final = 20.0
"""How long `rescue` retries errors: well below what the other nodes wait (`PATIENCE_S`)."""
PATIENCE_S: Final = 60.0
"""A node that has not looked by then is gone without if anything is whole; its copy does not count any more."""
FAILED: Final = "!"
"""Begins a rank's answer that it failed, and why."""
_PAUSE_S: Final = 0.05
_OFFER: Final = "offer-"
_PIECE = 4 << 20
_STORAGE = (CheckpointWriteError, FolderGoneError, SaveAbandonedError)


def copy_entry(
    source: Path,
    final: Path,
    check: Callable[[], None] = lambda: None,
    read: Callable[[int], None] = lambda _size: None,
) -> None:
    """Copy a whole checkpoint, unless it is there already; a damaged one of its name is set aside."""
    manifest = manifests.read_manifest(source)
    if _is_there_whole(final, manifest, read):
        return

    def make_way() -> None:
        if _is_there_whole(final, manifest, read):
            raise _OvertakenError
        replaced(final, check)

    with suppress(_OvertakenError), published_folder(final, check=make_way) as draft:
        for entry in manifest.files:
            _copy_file(source, draft, entry, read)
        shutil.copyfile(source / manifests.NAME, draft / manifests.NAME)


class _OvertakenError(Exception):
    """Another process has copied the same checkpoint meanwhile."""


def _is_there_whole(final: Path, manifest: Manifest, read: Callable[[int], None]) -> bool:
    if not manifests.is_there(final):
        return False
    try:
        there = manifests.check(final, contents=True, read=read)
    except CheckpointDamagedError as damaged:
        log.warning("%s; a whole one is brought in", damaged)
        return False
    if there != manifest:
        raise saved_meanwhile(final)
    return True


def _copy_file(
    source: Path, draft: Path, entry: FileEntry, read: Callable[[int], None] = lambda _size: None
) -> Path:
    """Copy a file of a checkpoint, its checksum compared on the way."""
    target = draft / entry.path
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = xxhash.xxh3_64()
    with (source / entry.path).open("rb", buffering=0) as reading, target.open("wb", buffering=0) as writing:
        while piece := reading.read(_PIECE):
            digest.update(piece)
            view = memoryview(piece)
            while view:
                view = view[writing.write(view) :]
            read(len(piece))
    if f"{digest.intdigest():016x}" != entry.xxh3_64:
        raise CheckpointDamagedError(source, f"{entry.path} was altered: its checksum differs")
    return target


class Mirror:
    """Copies this node's checkpoints to the shared folder and to a partner, the newest first of what waits."""

    def __init__(
        self,
        hold: FolderOwnership,
        local: Path,
        retention: Retention,
        agents: JobAgents | None,
        *,
        node: SaveGroup,
        clock: Clock,
    ) -> None:
        self._hold, self._local, self._retention, self._agents = hold, local, retention, agents
        self._node, self._clock = node, clock  # this node among the nodes: the first one publishes parts
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
        """Have a checkpoint copied, and this node's disk tidied; it replaces one that waits."""
        if self._agents is not None and len(self._agents.members) > 1:
            self._to_partner.offer(name)
        if to_shared:
            self._to_shared.offer(name)
        self._saved = name
        self._tidy_here({self._to_shared.current, self._to_partner.current})

    def wait(self) -> None:
        """Return once all is copied to the shared folder, and to the partner if that does not take long."""
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
                self._hold.refuse_if_known_fenced,
                proved=self._saved,
                suspected=self._hold.suspected,
                spared=busy,
            )

    def has_time(self) -> bool:
        """Tell whether nothing is on its way to the shared folder."""
        return self._to_shared.is_done(0.0)

    def _copy(self, name: str) -> None:
        try:
            if (self._local / name / manifests.PART).exists():
                self._copy_part(self._local / name)
            else:
                copy_entry(self._local / name, self._hold.folder / name, self._hold.refuse_if_fenced)
            if self._node.rank == 0:
                withdraw_if_late(self._hold.folder / name, self._hold, self._hold.refuse_if_fenced)
        except FolderGoneError:
            raise
        except OSError as problem:
            with suppress(OSError):
                self._hold.refuse_if_fenced()
            raise CheckpointWriteError(self._hold.folder, problem) from problem
        self._to_shared.failed = None  # made good
        if self._node.rank == 0:
            tidy_shared(self._hold, self._retention, proved=name)
        self._tidy_here({self._to_partner.current})

    def _copy_part(self, source: Path) -> None:
        """Copy this node's part; the first node publishes the whole when all parts are there."""
        name, hold = source.name, self._hold
        final = hold.folder / name
        manifest = manifests.read_manifest(source)
        hold.refuse_if_fenced()
        if manifests.is_there(final):
            return
        draft = hold.folder / f"{DRAFT_PREFIX}{name}-{hold.claimed().number:06x}"
        with Exchange(draft, self._node, self._clock, hold.refuse_if_fenced) as exchange:
            for entry in manifests.files_here(source, manifest):
                fsync_path(_copy_file(source, draft, entry))
            exchange.put("copied", b"")
            if self._node.rank:
                return
            exchange.gather("copied")
            shutil.rmtree(draft / PARTS)
            manifests.check_files(draft, manifest.files, contents=False)
            shutil.copyfile(source / manifests.NAME, draft / manifests.NAME)
            publish_draft(draft, final, check=hold.refuse_if_fenced)

    def _give(self, name: str) -> None:
        if self._agents is None:
            return
        partner, why = self._agents.copy_to_partner(name, self._hold.claimed(), self._to_partner.stopped)
        self._is_on_partner = partner is not None
        if partner is not None:
            log.info("%s is on node %s, too", name, partner)
        elif why != self._complained:  # once, not with every save
            log.warning("%s is on no other node: %s", name, why)
        self._complained = why
        self._tidy_here({self._to_shared.current})


def rescue(local: Path, hold: FolderOwnership, newest: Claim) -> None:
    """Copy this node's newest whole checkpoint to the shared folder if none there is as new.

    For who is about to go on from it: the copying may have ended with the attempt before, and what
    was copied may have been damaged since. Errors are tried again for `RESCUE_S` altogether.
    """
    if name := hold.retried(lambda: _rescued(local, hold, newest), RESCUE_S):
        log.warning("%s was on this node alone, and is brought in", name)


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


def bring_together(local: Path, hold: FolderOwnership, rank: int, gathered: Callable[[str], list[str]]) -> None:
    """Have the first rank of each disk bring what it alone holds to the shared folder; every rank calls it."""
    disks = gathered(_disk_of(local))
    refuse_failures(disks)
    problem = ""
    if disks[rank] and disks.index(disks[rank]) == rank:
        try:
            hold.folder.mkdir(parents=True, exist_ok=True)
            rescue(local, hold, hold.patiently(hold.claims.newest))
        except (DeepLinkError, OSError) as failed:
            problem = f"{FAILED}{failed}"
    refuse_failures(gathered(problem))
    with suppress(OSError):  # the look for what to go on from says so
        fresh_names(hold.folder)  # a listing that was remembered lacks what other nodes brought


def _disk_of(local: Path) -> str:
    """Return what names a folder of this machine, alike in all its processes; empty where its disk refuses."""
    try:
        private_folder(local)
        found = local.stat()
    except PrivateFolderError as problem:
        return f"{FAILED}{problem}"
    except OSError:  # said by the look, too
        return ""
    return f"{socket.gethostname()} {boot_id()} {found.st_dev} {found.st_ino}"


def refuse_failures(answers: Sequence[str]) -> None:
    """Raise where one of the ranks' answers is that it failed."""
    for rank, said in enumerate(answers):
        if said.startswith(FAILED):
            raise no_agreement(f"rank {rank}: {said.removeprefix(FAILED)}")


def _is_whole(hold: FolderOwnership, entry: CheckpointName) -> bool:
    try:
        hold.check_once(hold.folder / entry.name, contents=True)
    except CheckpointDamagedError:
        return False
    return True


class UploadBarrier:
    """The nodes of an attempt, each with a folder of its own."""

    def __init__(self, hold: FolderOwnership, local: Path, env: Mapping[str, str], clock: Clock) -> None:
        self._hold, self._local, self._clock = hold, local, clock
        self._is_first = env.get("LOCAL_RANK", "0") == "0"
        self._node = int(env.get("GROUP_RANK") or 0)
        self._nodes = int(env.get("GROUP_WORLD_SIZE") or 1)

    def wait(self, newest: Claim) -> None:
        """Return once every node has brought in what it has, or the attempt has claimed, or time is up."""
        meets = self._hold.attempt is not None and not (self._nodes == 1 and self._is_first)
        folder = self._hold.claims.folder
        if meets:
            folder.mkdir(exist_ok=True)
        if self._is_first:
            try:
                rescue(self._local, self._hold, newest)
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
                raise no_agreement(f"node {int(name.rpartition('-')[2])}: {problem}")

    def _go_without(self, missing: int, newest: Claim) -> None:
        said = f"{missing} of {self._nodes} nodes did not say what they hold within {PATIENCE_S:g} s"
        if newest.number and not survey(self._hold.folder, newest, self._hold.check_once)[0]:
            raise no_agreement(f"{said}, and nothing else is whole")
        log.warning("%s", said)
