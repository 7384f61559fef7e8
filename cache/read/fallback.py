"""Reads samples that no node gave: pieces of the packed home's shards, else the small files themselves."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deeplink.cache.errors import HomeError, SourceChangedError
from deeplink.cache.format import block
from deeplink.cache.source.home import open_home
from deeplink.cache.source.opening import open_source
from deeplink.core.errors import DeepLinkError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np

    from deeplink.cache.format.index import Index
    from deeplink.cache.read.batch import Batch
    from deeplink.cache.source.cap import SourceCap
    from deeplink.cache.source.home import PackedHome
    from deeplink.cache.source.source import Source

_FALLBACK_THREADS = 16
_FEW = 4
"""So many samples are read from the source one after another: threads would take longer to start."""


@dataclass(frozen=True, slots=True)
class Fallen:
    """Samples that were read from home or source, and per position that neither gave, why."""

    problems: dict[int, list[str]]
    counts: Counter[str]  # for fields of `ReadStats`
    forbidden: frozenset[int] = frozenset()  # of them, those that the source does not let this user read


@dataclass(slots=True)
class _Missed:
    problems: list[str] = field(default_factory=list)
    is_forbidden: bool = False


class Fallback:
    """Reads samples that no member gave: pieces of the packed home's shards, else the small files themselves.

    Safe to use from several threads; each process needs its own.
    """

    def __init__(self, index: Index, cap: SourceCap) -> None:
        self._index, self._cap = index, cap
        self._source: Source | None = None
        self._opening = threading.Lock()  # one pool and one source for all threads: a source keeps what it finds
        self._home: PackedHome | None = None
        self._pool: ThreadPoolExecutor | None = None

    def fill(self, rows: np.ndarray, positions: np.ndarray, batch: Batch, *, source_only: bool = False) -> Fallen:
        """Fill `batch[p]` with the bytes of `rows[p]` for each of `positions`; many of them many at a time."""
        wanted = positions.tolist()
        ways = {} if source_only or not self._index.home else {"home": self._from_home}
        ways["source"] = self._from_source
        if len(wanted) > _FEW:
            with self._opening:
                pool = self._pool = self._pool or ThreadPoolExecutor(
                    _FALLBACK_THREADS, thread_name_prefix="deeplink-fallback"
                )
            calls = [pool.submit(_read, int(rows[p]), batch[p], ways) for p in wanted]
            try:
                tried = [call.result() for call in calls]
            finally:
                # Whatever ends this: nothing is written into the batch any more once it is given back.
                for call in calls:
                    call.cancel()
                wait(calls)
        else:
            tried = [_read(int(rows[p]), batch[p], ways) for p in wanted]
        missed = {position: why for position, why in zip(wanted, tried, strict=True) if not isinstance(why, str)}
        counts: Counter[str] = Counter()
        for position, place in zip(wanted, tried, strict=True):
            if isinstance(place, str):
                counts[f"{place}_samples"] += 1
                counts[f"{place}_bytes"] += len(batch[position])
        forbidden = frozenset(position for position, why in missed.items() if why.is_forbidden)
        return Fallen({position: why.problems for position, why in missed.items()}, counts, forbidden)

    def _from_home(self, row: int, into: memoryview) -> None:
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

    def _from_source(self, row: int, into: memoryview) -> None:
        key = self._index.key(row)
        with self._opening:
            source = self._source = self._source or open_source(self._index.source, self._cap)
        into[:] = source.read(key, len(into))
        if block.checksum(into) != int(self._index.checksums[row]):
            raise SourceChangedError(self._index.source, key, "its bytes are not those that were packed")

    def close(self) -> None:
        """End the threads once what they read has come."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


def _read(row: int, into: memoryview, ways: Mapping[str, Callable[[int, memoryview], None]]) -> str | _Missed:
    """Read one sample; return where it was, or why no place gave it."""
    missed = _Missed()
    for place, read in ways.items():
        try:
            read(row, into)
        except (DeepLinkError, OSError) as problem:
            missed.problems.append(str(problem))
            is_of_system = isinstance(problem, PermissionError) or isinstance(problem.__cause__, PermissionError)
            missed.is_forbidden = place == "source" and is_of_system
        else:
            return place
    return missed
