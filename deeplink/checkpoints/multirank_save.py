"""Saves by several ranks: they meet in files, and nothing is published until every part is there.

    .draft-step-0000000120.a3-<session and count>/          all ranks write their files here
        .parts/done-00002                                   rank 2's are written; what they are
        .parts/plan-00002, ...                              what ranks tell each other before

No process group is used, so a save can go on beside training. A rank that dies in between is missed after a while:
rank 0 then removes the draft. Rank 0 publishes; should it die itself, the draft is nobody's checkpoint.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from deeplink.checkpoints import manifest as manifests
from deeplink.checkpoints import messages
from deeplink.checkpoints.claims import fresh_names
from deeplink.checkpoints.manifest import FileEntry
from deeplink.errors import DeepLinkError
from deeplink.publish import fsync_path, write_unsynced
from deeplink.text import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import TracebackType

    from deeplink.clock import Clock

FOLDER: Final = ".parts"
PATIENCE_S = 600.0
"""How long rank 0 waits for the others' parts; they write as much as it does, on storage as slow."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.5
_CHECK_EVERY_S = 5.0


class PartsMissingError(DeepLinkError):
    """Ranks did not write their part of a checkpoint in time; it is not published."""

    def __init__(self, draft: Path, kind: str, missing: list[int], patience_s: float) -> None:
        super().__init__(
            f"{draft.name}: nothing from rank {listed(missing)} within {patience_s:g} s ({kind}); not published",
            remedy="Every rank must save the same steps. A rank that died is restarted with all others.",
        )
        self.draft, self.kind, self.missing = draft, kind, missing


class SaveAbandonedError(DeepLinkError):
    """Another rank could not do its part of a checkpoint, or gave up; it is not published."""

    def __init__(self, draft: Path, why: str) -> None:
        super().__init__(f"{draft.name}: {why}; not published", remedy="The log of that rank says why.")
        self.draft, self.why = draft, why


class RankFailedError(SaveAbandonedError):
    """Another rank said that it could not do its part: nobody takes the checkpoint for whole."""


@dataclass(frozen=True, slots=True)
class SaveGroup:
    """The ranks that save together, and this one among them."""

    rank: int
    world: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """How the ranks of one save tell each other something.

    Attributes:
        draft: the folder that becomes the checkpoint.
        group: this rank among them.
        check: raises where this attempt has no business any more; called now and then while waiting.
    """

    draft: Path
    group: SaveGroup
    clock: Clock
    check: Callable[[], None]
    patience_s: float = PATIENCE_S

    def __enter__(self) -> Self:
        """Make the folder, unless another rank was quicker."""
        (self.draft / FOLDER).mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Tell the others of a failure, so that they do not wait for what will not come."""
        if error is None:
            return
        with suppress(DeepLinkError, OSError):
            self.put("failed", str(error).encode())
        if self.group.rank == 0:
            shutil.rmtree(self.draft, ignore_errors=True)

    def put(self, kind: str, data: bytes) -> None:
        """Tell the others something; whole or not at all.

        Raises:
            SaveAbandonedError: rank 0 gave up, and removed the draft.
        """
        if not self.draft.exists():
            raise SaveAbandonedError(self.draft, "rank 0 gave up")
        write_unsynced(self._path(kind, self.group.rank), data)

    def take(self, kind: str, *, of: int) -> bytes:
        """Return what rank `of` told; waits for it.

        Raises:
            PartsMissingError: it did not in time.
        """
        self._wait(kind, [of])
        return self._said(kind, of)

    def gather(self, kind: str) -> list[bytes]:
        """Return what every rank told, in their order; waits for all of them.

        Raises:
            PartsMissingError: one did not in time.
        """
        everyone = range(self.group.world)
        self._wait(kind, everyone)
        return [self._said(kind, rank) for rank in everyone]

    def _path(self, kind: str, rank: int) -> Path:
        return self.draft / FOLDER / f"{kind}-{rank:05d}"

    def _said(self, kind: str, rank: int) -> bytes:
        """Return what a rank told that is not missing."""
        return self._path(kind, rank).read_bytes()

    def _wait(self, kind: str, ranks: Sequence[int]) -> None:
        began = checked = self.clock.monotonic()
        pause = _FIRST_PAUSE_S
        while missing := self._missing(kind, ranks):
            now = self.clock.monotonic()
            if now - began > self.patience_s:
                raise PartsMissingError(self.draft, kind, missing, self.patience_s)
            if now - checked > _CHECK_EVERY_S:
                self.check()
                checked = now
            self.clock.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _missing(self, kind: str, ranks: Sequence[int]) -> list[int]:
        """Return which of the ranks have not told yet.

        Raises:
            SaveAbandonedError: one of them never will.
        """
        there = fresh_names(self.draft / FOLDER)
        missing = [rank for rank in ranks if self._path(kind, rank).name not in there]
        if missing:
            self._give_up_if_another_did(there)
        return missing

    def _give_up_if_another_did(self, there: list[str]) -> None:
        failed = sorted(name for name in there if name.startswith("failed-"))
        if failed:
            why = (self.draft / FOLDER / failed[0]).read_text(encoding="utf-8", errors="replace")
            raise RankFailedError(self.draft, f"rank {int(failed[0].removeprefix('failed-'))} failed: {why}")
        if not self.draft.exists():
            raise SaveAbandonedError(self.draft, "rank 0 gave up")


def finish_part(exchange: Exchange, files: list[Path]) -> None:
    """Bring this rank's files to stable storage and tell rank 0 what they are.

    Raises:
        OSError: the storage refused.
        PartsMissingError: rank 0 gave up waiting.
    """
    entries = []
    for path in files:
        fsync_path(path)
        below = path.relative_to(exchange.draft).as_posix()
        entries.append(FileEntry(below, path.stat().st_size, manifests.checksum(path)))
    exchange.put("done", messages.files_message(entries))


def collect_parts(exchange: Exchange) -> tuple[FileEntry, ...]:
    """Return what all ranks wrote, once they have; leaves nothing in the draft but that.

    Raises:
        PartsMissingError: a rank did not in time.
        MessageError: what a rank said is not usable.
        CheckpointDamagedError: a file is not there in its size.
    """
    entries = messages.all_files(exchange.gather("done"))
    shutil.rmtree(exchange.draft / FOLDER)
    manifests.check_files(exchange.draft, entries, contents=False)
    expected = {entry.path for entry in entries}
    for path in list(exchange.draft.rglob("*")):  # what a rank of an earlier, torn save may have left
        if path.is_file() and path.relative_to(exchange.draft).as_posix() not in expected:
            path.unlink()
    return entries
