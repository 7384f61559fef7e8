"""Where a packer works: a folder in the store that outlives a killed packer, so that its rerun goes on from there.

For each shard that was sealed and placed there is a note with everything the index needs of it. A lock keeps a
second packer of the same plan out; it goes with the process that held it, however that ended.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from deeplink.cache.errors import PackRunningError, StoreError
from deeplink.cache.layout import checked_shard_id
from deeplink.errors import DeepLinkError
from deeplink.private import private_folder
from deeplink.publish import published_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from deeplink.cache.packing.building import BuiltShard
    from deeplink.types import ShardId

_PREFIX = ".packing-"
_KEPT_S = 86_400.0


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """What the index needs to know of one shard.

    Attributes:
        id: its name.
        bytes: size of its file.
        block_offsets: uint64, where each block's payload begins in the file.
        checksums: uint64, xxh3-64 of its samples in order.
    """

    id: ShardId
    bytes: int
    block_offsets: np.ndarray
    checksums: np.ndarray

    @classmethod
    def of(cls, built: BuiltShard) -> Self:
        """Return the piece of a shard that was just built."""
        return cls(built.sealed.id, built.sealed.bytes, built.sealed.layout.offsets, built.checksums)


class Staging:
    """The working folder of one plan; use `staging` to enter it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def draft(self, number: int) -> Path:
        """Return where to write the shard of this number; nothing is there."""
        path = self.folder / f"{number}.mdb"
        path.unlink(missing_ok=True)
        return path

    def note(self, number: int, piece: Piece) -> None:
        """Keep what is known of a shard that was sealed and placed.

        Raises:
            OSError: it cannot be written.
        """
        with published_file(self.folder / f"{number}.npz", durable=False) as draft, draft.open("wb") as file:
            np.savez(
                file,
                id=np.frombuffer(piece.id.encode(), np.uint8),
                bytes=np.array([piece.bytes], np.int64),
                block_offsets=piece.block_offsets,
                checksums=piece.checksums,
            )

    def noted(self, number: int, samples: int) -> Piece | None:
        """Return what an earlier packer left of the shard of this number; None where that is nothing usable."""
        try:
            with np.load(self.folder / f"{number}.npz", allow_pickle=False) as kept:
                shard = checked_shard_id(kept["id"].tobytes().decode("ascii"))
                piece = Piece(shard, int(kept["bytes"][0]), kept["block_offsets"], kept["checksums"])
        except (OSError, ValueError, KeyError, IndexError, DeepLinkError):
            return None
        return piece if len(piece.checksums) == samples else None


@contextmanager
def staging(root: Path, plan: str, now: float) -> Iterator[Staging]:
    """Give the working folder of a plan; it is removed when the packing succeeds, and kept when it fails.

    Raises:
        PackRunningError: another process works there.
        StoreError: it cannot be made.
    """
    folder = root / f"{_PREFIX}{plan}"
    try:
        _remove_old(root, folder, now)
        private_folder(folder, parents=False)
    except OSError as problem:
        raise StoreError(root, problem.strerror or str(problem)) from problem
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PackRunningError(folder) from None
        try:
            yield Staging(folder)
        finally:
            for draft in folder.glob("*.mdb"):
                draft.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


def _remove_old(root: Path, own: Path, now: float) -> None:
    """Remove what packers left that nobody came back for."""
    for folder in root.glob(f"{_PREFIX}*"):
        if folder == own:
            continue
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if now - os.fstat(descriptor).st_mtime > _KEPT_S:
                shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(descriptor)
