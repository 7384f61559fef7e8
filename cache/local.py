"""Reads samples from this node's own store. Opened lazily, per process; safe to use from several threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from deeplink.cache import block
from deeplink.cache.copying import Copying, by_shard
from deeplink.cache.errors import ShardCorruptError
from deeplink.cache.mapped import ColdGauge
from deeplink.cache.opened import OpenShards
from deeplink.cache.touched import Touched

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deeplink.cache.batch import Batch
    from deeplink.cache.index import Index
    from deeplink.cache.mapped import ShardFile
    from deeplink.cache.store import Store
    from deeplink.clock import Clock


class LocalReader:
    """The samples of one index that this node holds.

    Each sample's checksum is compared when this process first reads it, or whenever it does. A shard found damaged
    is put aside; `shards.take_damaged` tells of it.

    Args:
        index: the dataset's version.
        store: this node's store.
        clock: where time comes from.
        always: compare checksums at every read.
    """

    def __init__(self, index: Index, store: Store, clock: Clock, *, always: bool = False) -> None:
        self._index = index
        self.shards = OpenShards(index, store, clock)
        self._touched = Touched(index.checksums, always=always)
        self._cold = ColdGauge()

    def fill(self, rows: np.ndarray, batch: Batch) -> np.ndarray:
        """Copy the samples that this node holds into `batch`; return the positions of those still missing.

        Nothing that happens to a file meanwhile is worse than a missing sample.

        Args:
            rows: int64, each within the index.
            batch: with room for each of `rows`, in order.
        """
        work = Copying(self._index, rows, batch)
        cold = self._cold.is_cold()
        for number, positions in by_shard(self._index.shard[rows]):
            file = self._file(number)
            if file is None:
                work.missing.append(positions)
            else:
                work.add(number, file, positions, cold=cold)
        for number, problem in work.copy():
            self._set_aside(number, problem)
        self._check(rows, batch, work)
        return work.left()

    def _check(self, rows: np.ndarray, batch: Batch, work: Copying) -> None:
        """Compare the samples that are new to this process; those that are wrong are missing."""
        unseen = self._touched.unseen(rows)
        if work.missing and len(unseen):
            is_missing = np.zeros(len(rows), bool)
            is_missing[work.left()] = True
            unseen = unseen[~is_missing[unseen]]
        if not len(unseen):
            return
        data, starts = batch.data, batch.offsets[unseen].tolist()
        samples = [data[a:b] for a, b in zip(starts, batch.offsets[unseen + 1].tolist(), strict=True)]
        wrong = self._touched.wrong(rows[unseen], samples)
        for number, positions in by_shard(self._index.shard[rows[unseen[wrong]]]):
            work.missing.append(np.flatnonzero(self._index.shard[rows] == number))
            self._set_aside(number, self._changed(int(rows[unseen[wrong[positions[0]]]])))

    def _changed(self, row: int) -> ShardCorruptError:
        shard = self._index.shards[int(self._index.shard[row])].id
        return ShardCorruptError(shard, f"the bytes of {self._index.key(row)!r} have changed")

    def views(self, rows: np.ndarray) -> list[memoryview | None]:
        """Return views of mapped files, None for each sample that no mapping here holds whole.

        Their pages are brought in and their bytes compared when this process first asks for them. A view is only
        as safe as the file below it: one that is cut short, or a disk that fails once its pages were dropped from
        memory, ends the process that touches it (SIGBUS).
        """
        shards, offsets = self._index.shard[rows], self._index.file_offsets(rows)
        stops = offsets + self._index.lengths[rows].astype(np.int64)
        unseen = self._touched.unseen(rows)
        cold = self._cold.is_cold()
        is_due = np.full(len(rows), cold)
        is_due[unseen] = True
        maps: dict[int, memoryview] = {}
        for number, positions in by_shard(shards):
            file = self._mapped(number)
            if file is None or file.view is None:
                continue
            mine = positions[is_due[positions]]
            if self._is_populated(number, file, offsets[mine].tolist(), stops[mine].tolist(), cold=cold):
                maps[number] = file.view
        found = _sliced(maps, shards.tolist(), offsets.tolist(), stops.tolist())
        self._leave_out_long(rows, found)
        if len(unseen):
            self._compare(rows, unseen, found)
        return found

    def _mapped(self, number: int) -> ShardFile | None:
        file = self._file(number)
        if file is None or not file.is_mapped:
            return None
        try:
            file.check()
        except (ShardCorruptError, OSError) as problem:
            self._set_aside(number, problem)
            return None
        return file

    def _is_populated(
        self, number: int, file: ShardFile, starts: Sequence[int], stops: Sequence[int], *, cold: bool
    ) -> bool:
        lengths = [stop - start for start, stop in zip(starts, stops, strict=True)]
        try:
            if cold:
                file.will_need(starts, lengths)
            return all(file.populate(start, length) for start, length in zip(starts, lengths, strict=True))
        except OSError as problem:
            self._set_aside(number, problem)
            return False

    def _leave_out_long(self, rows: np.ndarray, found: list[memoryview | None]) -> None:
        lengths = self._index.lengths[rows]
        if len(lengths) and int(lengths.max()) > block.SPAN:  # it lies in several pieces
            for position in np.flatnonzero(lengths > block.SPAN).tolist():
                found[position] = None

    def _compare(self, rows: np.ndarray, unseen: np.ndarray, found: list[memoryview | None]) -> None:
        here = [position for position in unseen.tolist() if found[position] is not None]
        samples = [view for position in here if (view := found[position]) is not None]
        mine = rows[here]
        for position in self._touched.wrong(mine, samples).tolist():
            number = int(self._index.shard[mine[position]])
            self._set_aside(number, self._changed(int(mine[position])))
            for other in np.flatnonzero(self._index.shard[rows] == number).tolist():
                found[other] = None

    def _file(self, number: int) -> ShardFile | None:
        try:
            return self.shards.get(number)
        except (ShardCorruptError, OSError) as problem:
            self._set_aside(number, problem)
            return None

    def _set_aside(self, number: int, problem: Exception) -> None:
        self.shards.set_aside(number, problem)
        # The file that comes to replace it has never been looked at.
        self._touched.forget(np.flatnonzero(self._index.shard == number))

    def close(self) -> None:
        """Let go of all files; views that were handed out stay valid."""
        self.shards.close()


def _sliced(
    maps: dict[int, memoryview], shards: Sequence[int], starts: Sequence[int], stops: Sequence[int]
) -> list[memoryview | None]:
    if len(maps) == 1 and shards.count(number := next(iter(maps))) == len(shards):
        whole = maps[number]
        return [whole[start:stop] for start, stop in zip(starts, stops, strict=True)]
    return [
        maps[number][start:stop] if number in maps else None
        for number, start, stop in zip(shards, starts, stops, strict=True)
    ]
