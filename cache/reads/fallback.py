"""Reads samples that no member gave: pieces of the packed home's shards, else the small files themselves."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deeplink.cache import block
from deeplink.cache.errors import HomeError, SourceChangedError
from deeplink.cache.source import open_source
from deeplink.cache.sources.bucket import CappedSource
from deeplink.cache.sources.home import open_home
from deeplink.errors import DeepLinkError

if TYPE_CHECKING:
    import numpy as np

    from deeplink.cache.batch import Batch
    from deeplink.cache.index import Index
    from deeplink.cache.sources.bucket import SourceCap
    from deeplink.cache.sources.home import PackedHome
    from deeplink.cache.sources.origin import Source

log = logging.getLogger(__name__)

_THREADS = 16
_FEW = 4
"""So many samples are read one after another: threads would take longer to start."""


@dataclass(slots=True)
class Fallen:
    """What became of samples that were read from home or source.

    Attributes:
        problems: per position that neither gave, why.
        samples, bytes: what was read, by both.
    """

    problems: dict[int, list[str]] = field(default_factory=dict)
    samples: int = 0
    bytes: int = 0


class Fallback:
    """Home and source of one version. Safe to use from several threads; each process needs its own.

    Args:
        index: the version.
        cap: bounds what is read.
    """

    def __init__(self, index: Index, cap: SourceCap) -> None:
        self._index, self._cap = index, cap
        self._source: Source | None = None
        self._home: PackedHome | None = None
        self._pool: ThreadPoolExecutor | None = None

    def fill(self, rows: np.ndarray, positions: np.ndarray, batch: Batch) -> Fallen:
        """Fill `batch[p]` with the bytes of `rows[p]` for each of `positions`; many of them many at a time.

        Args:
            rows: of the index, one per place of the batch.
            positions: int64.
            batch: where the bytes go.
        """
        wanted = positions.tolist()
        if len(wanted) > _FEW:
            self._pool = self._pool or ThreadPoolExecutor(_THREADS, thread_name_prefix="deeplink-fallback")
            calls = [self._pool.submit(self._read, int(rows[p]), batch[p]) for p in wanted]
            try:
                tried = [call.result() for call in calls]
            finally:
                # Whatever ends this: nothing is written into the batch any more once it is given back.
                for call in calls:
                    call.cancel()
                wait(calls)
        else:
            tried = [self._read(int(rows[p]), batch[p]) for p in wanted]
        done = Fallen()
        for position, problems in zip(wanted, tried, strict=True):
            if problems is not None:
                done.problems[position] = problems
            else:
                done.samples += 1
                done.bytes += len(batch[position])
        return done

    def _read(self, row: int, into: memoryview) -> list[str] | None:
        """Read one sample; return why that was not possible, None where it was."""
        problems: list[str] = []
        for read in (self._from_home, self._from_source):
            try:
                if read(row, into):
                    return None
            except DeepLinkError as problem:
                problems.append(str(problem))
        return problems

    def _from_home(self, row: int, into: memoryview) -> bool:
        if not self._index.home:
            return False
        self._home = self._home or open_home(self._index.home)
        number = int(self._index.shard[row])
        shard, starts, at = self._index.shards[number], self._index.block_offsets(number), 0
        for place, offset, length in self._index.pieces(row):
            self._cap.spend(length)
            piece = self._home.fetch_range(shard.id, int(starts[place]) + offset, length)
            into[at : at + length] = piece
            at += length
        if block.checksum(into) != int(self._index.checksums[row]):
            raise HomeError(self._index.home, f"its copy of shard {shard.id} is damaged")
        return True

    def _from_source(self, row: int, into: memoryview) -> bool:
        key = self._index.key(row)
        self._source = self._source or CappedSource(open_source(self._index.source), self._cap)
        into[:] = self._source.read(key, len(into))
        if block.checksum(into) != int(self._index.checksums[row]):
            raise SourceChangedError(self._index.source, key, "its bytes are not those that were packed")
        return True

    def close(self) -> None:
        """End the threads once what they read has come."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
