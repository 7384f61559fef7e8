"""Makes shards as a pipeline: the next is read while the last is written, sealed and sent."""

from __future__ import annotations

import contextlib
import logging
import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from deeplink.cache import layout
from deeplink.cache.errors import ShardCorruptError
from deeplink.cache.packing.building import ShardBuilder
from deeplink.cache.packing.byte_queue import AbandonedError
from deeplink.cache.packing.staging import Piece

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType

    import numpy as np

    from deeplink.cache.names import Names
    from deeplink.cache.packing.placing import Placer
    from deeplink.cache.packing.staging import Staging
    from deeplink.cache.sources.home import PackedHome
    from deeplink.cache.sources.origin import Source
    from deeplink.cache.sources.reading import FileReader
    from deeplink.cache.store import Store
    from deeplink.types import ShardId

log = logging.getLogger(__name__)

_WRITERS = 2
"""One shard is hashed and written while the one before waits for the disk and for its copies to be taken."""


@dataclass(frozen=True, slots=True)
class PipelineContext:
    """Where shards are made, and where they go.

    Attributes:
        store: this node's own; drafts lie on its file system.
        stage: the working folder there.
        placer: brings copies to their owners.
        home: where every shard is kept besides; None for nowhere.
    """

    store: Store
    stage: Staging
    placer: Placer
    home: PackedHome | None


class ShardPipeline:
    """Makes one shard after another. Use `with`: at its end no thread works any more.

    Args:
        origin: what to read from.
        reader: reads many small files of it.
        yard: where shards are made and go.
        done: told, after each block, how many files and bytes were read, in the thread that reads.
    """

    def __init__(
        self, origin: Source, reader: FileReader, yard: PipelineContext, done: Callable[[int, int], None]
    ) -> None:
        self._origin, self._reader, self._yard, self._done = origin, reader, yard, done
        self._pool = ThreadPoolExecutor(_WRITERS, thread_name_prefix="deeplink-pack")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True)

    def build(self, number: int, names: Names, sizes: np.ndarray) -> Future[Piece]:
        """Return when all files of a shard were read; the future is done once it lies where it belongs.

        The future raises StoreFullError, StoreError, ShardWriteError, PlacementError or HomeError.

        Raises:
            SourceFileError, SourceChangedError: a file cannot be read, or is not what was listed.
            Any of those of the future, where that came to an end before all was read.
        """
        builder = ShardBuilder(self._origin, self._reader, names, sizes, self._done)
        finished = self._pool.submit(self._finish, number, builder, builder.file_bytes())
        try:
            builder.read()
        except AbandonedError:
            finished.result()
            raise
        return finished

    def _finish(self, number: int, builder: ShardBuilder, size: int) -> Piece:
        yard = self._yard
        try:
            with yard.store.room_for(size):
                draft = yard.stage.draft(number)
                piece = Piece.of(builder.write(draft))
                if yard.home is not None:
                    yard.home.put(piece.id, draft)
                yard.placer.place(piece.id, draft)
            yard.stage.note(number, piece)
        except OSError as problem:
            yard.store.raise_as_store_error(problem, size)
        finally:
            builder.abandon()
        return piece

    def keep(self, number: int, piece: Piece) -> bool:
        """Give a shard that was packed before the copies it lacks. False: nobody has it whole any more.

        Raises:
            StoreFullError, StoreError, PlacementError, HomeError: it cannot be brought where it belongs.
        """
        yard = self._yard
        yard.placer.needed.add(piece.id)
        at_home = yard.home is None or yard.home.has(piece.id, piece.bytes)
        if at_home and yard.placer.is_placed(piece.id, piece.bytes):
            return True
        is_here = yard.store.has_whole(piece.id, piece.bytes)
        with contextlib.nullcontext() if is_here else yard.store.room_for(piece.bytes):
            draft = yard.stage.draft(number)
            try:
                if not self._fetched(piece, draft):
                    return False
            except OSError as problem:
                yard.store.raise_as_store_error(problem, piece.bytes)
            if yard.home is not None:
                yard.home.put(piece.id, draft)
            yard.placer.place(piece.id, draft)
        return True

    def _fetched(self, piece: Piece, draft: Path) -> bool:
        """Write a whole copy of a shard to `draft`. False: nobody has one."""
        yard = self._yard
        while yard.placer.fetch(piece.id, piece.bytes, draft) or self._from_home(piece, draft):
            try:
                _verify(draft, piece.id)
            except ShardCorruptError as problem:
                log.warning("%s", problem)
                # The draft may be the very file of this node's store. That must be no holder any more, or what is
                # made in its place would be thrown away; and another holder's copy may be whole.
                own = yard.store.quarantine(piece.id, str(problem), inode=draft.stat().st_ino)
                draft.unlink()
                if not own:
                    return False
            else:
                return True
        return False

    def _from_home(self, piece: Piece, draft: Path) -> bool:
        home = self._yard.home
        if home is None or not home.has(piece.id, piece.bytes):
            return False
        with draft.open("wb") as file:
            for chunk in home.fetch(piece.id, piece.bytes):
                file.write(chunk)
        return True


def _verify(path: Path, shard: ShardId) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        layout.verify(descriptor, shard)
    finally:
        os.close(descriptor)
