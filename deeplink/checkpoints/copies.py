"""The runs that a node knows of: where its own checkpoints lie, and copies that it keeps for other nodes.

RUN/own                     where this node's own checkpoints of the run lie
RUN/claims/                 who holds the run, as far as this node knows (deeplink.checkpoints.claims)
RUN/from-n3/step-...        what is kept for n3: whole, or the part that n3 had of it
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from deeplink.checkpoints import manifest as manifests
from deeplink.checkpoints.agents import FROM, OWN
from deeplink.checkpoints.claims import (
    DAMAGED_PREFIX,
    NO_CLAIM,
    CheckpointName,
    Claim,
    ClaimDamagedError,
    Claims,
    Retention,
    entries,
    in_order,
    is_newer,
    looks_whole,
)
from deeplink.checkpoints.manifest import NAME, CheckpointDamagedError, FileEntry
from deeplink.checkpoints.saving import replaced, tidy, withdraw
from deeplink.core.clock import Clock, SystemClock
from deeplink.core.errors import DeepLinkError
from deeplink.core.private import open_beneath, private_folder
from deeplink.core.publish import published_folder, write_unsynced
from deeplink.core.types import FencedError
from deeplink.v1 import keep_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from deeplink.checkpoints.agents import There

log = logging.getLogger(__name__)

KEEP: Final = 2
"""Copies of one node's checkpoints: while the next comes, the one before is there."""
FORGET_S: Final = 14 * 86_400.0
"""A job may wait in the queue for days before it comes back to its copies."""
_CLAIMS_KEPT = 4
_RUN = re.compile(r"[0-9a-f]{32}")
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_OWN_FILE = "own"


class NoRoomError(DeepLinkError):
    """A copy would not fit into what may be kept for others."""

    def __init__(self, needed: int, budget: int, others: int) -> None:
        super().__init__(
            f"{needed} bytes do not fit: {others} of {budget} are in use",
            remedy="Give the agents a larger copies_bytes, or nodes with larger disks. Copies of jobs that have "
            "ended go after 14 days; below the agents' store, in `checkpoints`, you may remove them before.",
        )
        self.needed, self.budget, self.others = needed, budget, others


class Copies:
    """The runs that a node knows of. Safe to use from several threads, as long as one alone keeps what is new.

    Where a run's own checkpoints lie and who holds it is kept in memory, too: ranks agree though the disk refuses.
    The folder is its user's alone: nodes may be shared, and no other user is to read checkpoints.
    """

    def __init__(self, root: Path, budget: int = 0, clock: Clock | None = None) -> None:
        self.root, self._budget, self._clock = root, budget, clock or SystemClock()
        self._lock = threading.Lock()
        self._own: dict[str, Path] = {}
        self._claims: dict[str, Claim] = {}

    def _run(self, run: str) -> Path:
        if not _RUN.fullmatch(run):
            raise _unknown(run)
        return self.root / run

    # -- whose the run is

    def own(self, run: str, folder: Path) -> None:
        """Note where this node's own checkpoints lie."""
        where = self._run(run) / _OWN_FILE
        with self._lock:
            if self._own.get(run) == folder:
                return
            self._own[run] = folder
        try:
            private_folder(self.root)
            write_unsynced(where, str(folder).encode())
        except OSError as problem:
            log.warning("where checkpoints lie is kept in memory alone: %s", problem)

    def own_folder(self, run: str) -> Path | None:
        """Return where this node's own checkpoints lie; None where that is not known."""
        where = self._run(run)
        with self._lock:
            if run in self._own:
                return self._own[run]
        try:
            return Path((where / _OWN_FILE).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None

    def claim(self, run: str) -> Claim:
        """Return the newest claim that this node knows of; NO_CLAIM for none."""
        claims = Claims(self._run(run))
        with self._lock:
            known = [self._claims[run]] if run in self._claims else []
        try:
            numbers = claims.numbers()
        except OSError as problem:
            log.warning("this node's disk: %s", problem)
            numbers = []
        for number in numbers:
            try:
                known.append(claims.read(number))
            except (ClaimDamagedError, OSError) as problem:  # lost with a power failure: others know it, too
                log.warning("%s", problem)
        return in_order(known)[-1] if known else NO_CLAIM

    def learn(self, run: str, claim: Claim) -> Claim:
        """Take note of a claim; return the newest one known. Of two with one number the first stays."""
        newest = self.claim(run)
        with self._lock:
            if not is_newer(claim, newest) or not is_newer(claim, self._claims.get(run, NO_CLAIM)):
                return self._claims.get(run, newest)
            self._claims[run] = claim
        try:
            folder = self._run(run)
            private_folder(self.root)
            folder.mkdir(parents=True, exist_ok=True)
            claims = Claims(folder)
            claims.publish(claim)
            for number in claims.numbers()[:-_CLAIMS_KEPT]:
                shutil.rmtree(claims.path(number), ignore_errors=True)
        except OSError as problem:
            log.warning("who holds a run is kept in memory alone: %s", problem)
        return self.claim(run)

    # -- what is here

    def _folders(self, run: str) -> Iterator[tuple[str, Path]]:
        own = self.own_folder(run)
        if own is not None:
            yield OWN, own
        with suppress(FileNotFoundError):
            names = os.listdir(self._run(run))  # noqa: PTH208 - names are wanted
            yield from sorted((name, self._run(run) / name) for name in names if name.startswith(FROM))

    def held(self, run: str, *, name: str = "", contents: bool = False) -> list[keep_pb2.HeldCheckpoint]:
        """Return what is here of a run, newest first in each place."""
        found = []
        for origin, folder in self._folders(run):
            try:
                there = [entry for entry in entries(folder) if not name or entry.name == name]
            except OSError as problem:
                found.append(_unread(name, origin, problem))
                continue
            found += [_looked_at(folder / entry.name, origin, contents=contents) for entry in there]
        return found

    def open(self, run: str, name: str, origin: str, path: str) -> BinaryIO:
        """Open a file of a checkpoint to read it."""
        folder = dict(self._folders(run)).get(origin)
        if folder is None or CheckpointName.parse(name) is None:
            raise _unknown(f"{origin}/{name}")
        manifest = manifests.read_manifest(folder / name)
        if path not in {entry.path for entry in manifest.files}:
            raise _unknown(path)
        return open_beneath(folder, f"{name}/{path}")

    # -- what is kept for others

    def keep(
        self,
        run: str,
        there: There,
        claim: Claim,
        fetch: Callable[[Iterable[FileEntry], Path], None],
        check: Callable[[], None],
    ) -> None:
        """Keep a copy of another node's checkpoint: whole, or not at all."""
        if not _NODE.fullmatch(there.node) or CheckpointName.parse(there.name) is None:
            raise _unknown(f"{there.node}/{there.name}")
        folder = self._run(run) / f"{FROM}{there.node}"
        final = folder / there.name
        if manifests.is_there(final) and _is_alike(final, there):
            return
        private_folder(self.root)
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)  # its run is at work: `forget` is not for it
        files = there.files
        self._make_room(folder, sum(entry.bytes for entry in files))
        with published_folder(final, check=lambda: replaced(final, check)) as draft:
            fetch(files, draft)
            if there.absent:
                manifests.write_part(draft, [entry.path for entry in files])
            (draft / NAME).write_text(there.text, encoding="utf-8")
        try:
            check()  # once more: this process may have stood still before the rename
        except FencedError:
            newer = self.claim(run)
            # A newer attempt that has not claimed yet may go on from it, as in `withdraw_if_late`.
            if is_newer(newer, claim) and there.name not in newer.recognised:
                withdraw(final)
            raise
        tidy(folder, claim, Retention(keep=KEEP), check, proved=there.name)

    def forget(self) -> None:
        """Remove what is known and kept of runs that were still for `FORGET_S`: their jobs have ended."""
        for folder in self.root.glob("*"):
            if not _RUN.fullmatch(folder.name):
                continue
            try:
                looked_at = [folder, folder / "claims", folder / _OWN_FILE, *folder.glob(f"{FROM}*")]
                touched = max(map(_touched, looked_at))
            except OSError as problem:
                log.warning("how old copies of checkpoints in %s are is not known: %s", folder, problem)
                continue
            if self._clock.unix() - touched > FORGET_S:
                log.info("copies of checkpoints in %s are removed: nothing was heard of the run for long", folder)
                shutil.rmtree(folder, ignore_errors=True)

    def _make_room(self, folder: Path, needed: int) -> None:
        """Remove copies until `needed` bytes fit beside them: of runs that are forgotten, then what is superseded.

        Of every node's copies, this run's or another's, the newest whole one stays, and so does what may be newer:
        the other run may be at work, too, or wait in the queue. What is damaged is of no use to anybody.
        """
        budget = self._budget or shutil.disk_usage(self.root).total // 10
        if self._taken() + needed > budget:
            self.forget()
        others = sorted(set(self.root.glob(f"*/{FROM}*")) - {folder}, key=_touched)  # unreadable: nothing goes
        spare = [path for kept in (*others, folder) for path in _spare(kept)]
        while spare and self._taken() + needed > budget:
            path = spare.pop(0)
            log.info("%s gives way to a newer copy of a checkpoint", path)
            shutil.rmtree(path, ignore_errors=True)
        taken = self._taken()
        free = shutil.disk_usage(self.root).free
        if taken + needed > budget or needed > free:
            raise NoRoomError(needed, min(budget, taken + free), taken)

    def _taken(self) -> int:
        return sum(map(_size, self.root.glob(f"*/{FROM}*")))


def _unknown(name: str) -> LookupError:
    """Return the error for a name that came over the wire, and is no run's, no node's or no checkpoint's here."""
    return LookupError(f"{name!r} names nothing here")


def _spare(folder: Path) -> list[Path]:
    """Return what is damaged of a node's copies, and those older than the newest whole one, the oldest first."""
    kept = [folder / entry.name for entry in entries(folder)]
    newest_whole = next((at for at, path in enumerate(kept) if looks_whole(path)), len(kept))
    return [*folder.glob(f"{DAMAGED_PREFIX}*"), *reversed(kept[newest_whole + 1 :])]


def _looked_at(path: Path, origin: str, *, contents: bool) -> keep_pb2.HeldCheckpoint:
    found = keep_pb2.HeldCheckpoint(name=path.name, origin=origin)
    try:
        manifest = manifests.read_manifest(path)
        here = manifests.files_here(path, manifest)
        found.manifest = (path / NAME).read_text(encoding="utf-8")
    except (CheckpointDamagedError, ValueError) as damaged:
        found.problem = damaged.reason if isinstance(damaged, CheckpointDamagedError) else str(damaged)
        return found
    except OSError as problem:
        return _unread(path.name, origin, problem)
    named = {entry.path for entry in here}
    found.absent.extend(entry.path for entry in manifest.files if entry.path not in named)
    for entry in here:
        try:
            manifests.check_files(path, [entry], contents=contents)
        except CheckpointDamagedError:
            found.damaged.append(entry.path)
        except OSError as problem:
            return _unread(path.name, origin, problem)
    return found


def _unread(name: str, origin: str, problem: OSError) -> keep_pb2.HeldCheckpoint:
    return keep_pb2.HeldCheckpoint(name=name, origin=origin, problem=str(problem), is_unreadable=True)


def _is_alike(path: Path, there: There) -> bool:
    try:
        return manifests.check_part(path, contents=False) == there.manifest
    except CheckpointDamagedError:
        return False


def _size(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):  # what cannot be read is left out
        for name in names:
            with suppress(OSError):
                total += Path(parent, name).lstat().st_size
    return total


def _touched(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:
        return 0.0
