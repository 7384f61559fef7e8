"""One rank's part of `deeplink calibrate --data`: samples read from one place, forced, counted and timed.

A place is forced by what the reader is told there is: no members, or an empty store, or neither. What really came
from where is what the reader itself counted: a batch of which a part came from elsewhere is not timed.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from deeplink.cache.catalog import Catalog
from deeplink.cache.reader import Reader
from deeplink.cache.store import Store
from deeplink.errors import DeepLinkError
from deeplink.path import DatasetPath, resolved_version
from deeplink.scheduler.model.read_sweep import MeasuredRead, ReadPlace

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from deeplink.clock import Clock
    from deeplink.config import Config

_MOST_ROWS = 1 << 18
"""Samples are drawn from so many rows of a version: all of one that has no more."""
_MOST_SHARDS = 256
"""Other nodes are asked for so many shards at most, to find out which of them they hold."""
_BATCH_SAMPLES, _BATCH_BYTES = 64, 8 << 20
_SEED = 20
_COUNTED = {
    ReadPlace.LOCAL: "local_bytes",
    ReadPlace.PEER: "peer_bytes",
    ReadPlace.SOURCE: "source_bytes",
    ReadPlace.TOGETHER: "source_bytes",
}
_NOTHING = {
    ReadPlace.LOCAL: "this node's store holds nothing of it",
    ReadPlace.PEER: "no other node gave any of it",
    ReadPlace.SOURCE: "it could not be read there",
    ReadPlace.TOGETHER: "it could not be read there",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBounds:
    """How much one rank reads from one place, at most: bytes, and seconds."""

    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSlice:
    """Which part of the samples a rank reads: no two ranks read the same, nor one the same from two places.

    Attributes:
        rank, ranks: which of how many.
        node: the number of its node.
    """

    rank: int
    ranks: int
    node: int


class ReadTimer:
    """Times reading of one version on this rank. A context manager; the version is opened when it is made.

    Args:
        dataset: NAME or NAME@VERSION.
        config: where catalog, store and members are.
        part: which samples.
        bounds: how many.
        clock: what tells the time.

    Raises:
        DatasetMissingError, DatasetNameError, VersionAmbiguousError: there is no such dataset.
        IndexFormatError: its index is damaged.
    """

    def __init__(self, dataset: str, config: Config, part: SampleSlice, bounds: ReadBounds, clock: Clock) -> None:
        self._config, self._part, self._bounds, self._clock = config, part, bounds, clock
        path = DatasetPath.parse(dataset)
        version = resolved_version(Catalog(config.catalog), path.name, path.version)
        self._open = ExitStack()
        nowhere = Path(self._open.enter_context(tempfile.TemporaryDirectory(prefix="deeplink-calibrate-")))
        told = {
            ReadPlace.LOCAL: replace(config, members=""),
            ReadPlace.PEER: replace(config, store=nowhere),
            ReadPlace.SOURCE: replace(config, store=nowhere, members=""),
        }
        self._readers = {
            place: self._open.enter_context(Reader.open(path.name, version=version, config=known))
            for place, known in told.items()
        }
        self._readers[ReadPlace.TOGETHER] = self._readers[ReadPlace.SOURCE]
        self._index = self._readers[ReadPlace.LOCAL].index

    def read(self, place: ReadPlace) -> MeasuredRead:
        """Read from a place, and return what came from there and how long that took; never fails."""
        try:
            return self._read(place)
        except (DeepLinkError, OSError) as problem:
            return MeasuredRead(self._part.node, problem=str(problem))

    def rows(self, place: ReadPlace) -> np.ndarray:
        """Return the rows for this rank and place, in the order in which they are read."""
        count, draw = len(self._index), np.random.default_rng(_SEED)
        drawn = draw.permutation(count) if count <= _MOST_ROWS else np.unique(draw.integers(0, count, _MOST_ROWS))
        draw.shuffle(drawn)
        places = list(ReadPlace)
        mine = drawn[self._part.rank * len(places) + places.index(place) :: self._part.ranks * len(places)]
        if place is ReadPlace.LOCAL:
            return self._of_shards(mine, self._here())
        return self._of_shards(mine, self._elsewhere(mine)) if place is ReadPlace.PEER else mine

    def _read(self, place: ReadPlace) -> MeasuredRead:
        rows = self.rows(place)
        if not len(rows):
            return MeasuredRead(self._part.node, problem=_NOTHING[place])
        self._came(place, rows[:1])  # connections are made, and threads started
        size, seconds = 0, 0.0
        began = self._clock.monotonic()
        for batch in self._batches(rows[1:] if len(rows) > 1 else rows):
            self._forget(place, batch)
            at = self._clock.monotonic()
            came = self._came(place, batch)
            took = self._clock.monotonic() - at
            if came == int(self._index.sizes(batch).sum()):
                size, seconds = size + came, seconds + took
            if size >= self._bounds.bytes or self._clock.monotonic() - began >= self._bounds.seconds:
                break
        return MeasuredRead(self._part.node, size, seconds, "" if size else _NOTHING[place])

    def _came(self, place: ReadPlace, rows: np.ndarray) -> int:
        """Read samples, and return how many bytes of them the reader counted as from that place."""
        reader, counted = self._readers[place], _COUNTED[place]
        before = getattr(reader.stats(), counted)
        reader.batch(rows)
        return int(getattr(reader.stats(), counted)) - int(before)

    def _of_shards(self, rows: np.ndarray, shards: list[int]) -> np.ndarray:
        chosen: np.ndarray = rows[np.isin(self._index.shard[rows], shards)]
        return chosen

    def _here(self) -> list[int]:
        held = set(Store(self._config.store, make=False).status().ids)
        return [number for number, shard in enumerate(self._index.shards) if shard.id in held]

    def _elsewhere(self, rows: np.ndarray) -> list[int]:
        """Return shards that other nodes hold: those found by asking for a sample of each."""
        numbers, firsts = np.unique(self._index.shard[rows], return_index=True)
        found = []
        began = self._clock.monotonic()
        for number, first in list(zip(numbers.tolist(), firsts.tolist(), strict=True))[:_MOST_SHARDS]:
            row = rows[first : first + 1]
            if self._came(ReadPlace.PEER, row) == int(self._index.sizes(row)[0]):
                found.append(number)
            if self._clock.monotonic() - began >= self._bounds.seconds:
                break
        return found

    def _batches(self, rows: np.ndarray) -> Iterator[np.ndarray]:
        sizes = self._index.sizes(rows)
        first = 0
        while first < len(rows):
            ends = np.cumsum(sizes[first : first + _BATCH_SAMPLES])
            count = max(int(np.searchsorted(ends, _BATCH_BYTES, side="right")), 1)
            yield rows[first : first + count]
            first += count

    def _forget(self, place: ReadPlace, rows: np.ndarray) -> None:
        """Have this node's memory let go of the source's files, where it is a folder: reading is to be cold."""
        if _COUNTED[place] != "source_bytes" or self._index.home or "://" in self._index.source:
            return
        for row in rows.tolist():
            with suppress(OSError):
                opened = os.open(Path(self._index.source) / self._index.key(row), os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(opened)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
