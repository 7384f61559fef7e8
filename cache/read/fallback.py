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
    from deeplink.cache.source.home import PackedHome
    from deeplink.cache.source.opening import SourceCap
    from deeplink.cache.source.source import Source
    from deeplink.core.clock import Clock

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
        with self._opening:
            home = self._home = self._home or open_home(self._index.home)
        number = int(self._index.shard[row])
        shard, starts, at = self._index.shards[number], self._index.block_offsets(number), 0
        for place, offset, length in self._index.pieces(row):
            self._cap.spend(length)
            piece = home.fetch_range(shard.id, int(starts[place]) + offset, length)
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
        """Begin no more reads; the threads end after those under way."""
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


_SLOW_S = 0.005
"""Seconds a sample below which nothing is compared: the source is spared the reads."""
_WINDOW = 256
"""Samples that say how fast reading is."""
_PAUSE_S = 10.0
"""Between two comparisons, each of which costs the source some reads."""
_TIMES = 3
"""So many comparisons in a row must agree."""
_FASTER = 1.5
"""How much faster the files must be."""
_ASIDE_S = 600.0


class RawComparison:
    """Whether samples are to come from the small files for a time. Safe to use from several threads."""

    def __init__(self, clock: Clock, *, allowed: bool) -> None:
        self._clock, self._allowed = clock, allowed
        self._lock = threading.Lock()
        self._samples, self._seconds = 0, 0.0
        self._slower = 0
        self._not_before = self._aside_until = float("-inf")

    def is_aside(self) -> bool:
        """Tell whether the small files are to be read now."""
        return self._clock.monotonic() < self._aside_until

    def end_aside(self) -> None:
        """The small files cannot be read: use the cache again."""
        with self._lock:
            self._aside_until, self._slower = float("-inf"), 0

    def is_due(self, samples: int, seconds: float) -> bool:
        """Note how long so many samples took; tell whether as many should be read at the source to compare."""
        if not self._allowed:
            return False
        with self._lock:
            self._samples += samples
            self._seconds += seconds
            if self._samples < _WINDOW:
                return False
            is_slow = self._seconds > _SLOW_S * self._samples
            if not is_slow:
                self._slower = 0
            if is_slow and (now := self._clock.monotonic()) >= self._not_before:
                self._not_before = now + _PAUSE_S
                return True
            self._samples, self._seconds = 0, 0.0
            return False

    def compared(self, raw_s: float) -> str:
        """Take in how long a sample took at the source; return what is to be said where that was faster.

        Then `is_aside` for ten minutes, after which both are compared again.
        """
        with self._lock:
            ours_s = self._seconds / max(self._samples, 1)
            self._samples, self._seconds = 0, 0.0
            self._slower = self._slower + 1 if ours_s > _FASTER * raw_s else 0
            if self._slower < _TIMES:
                return ""
            self._slower = 0
            self._aside_until = self._clock.monotonic() + _ASIDE_S
        return f"{1e3 * ours_s:.1f} ms a sample where its small files take {1e3 * raw_s:.1f} ms"
