"""Reads samples from this node's own store. Opened lazily, per process; safe to use from several threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from deeplink.cache import block
from deeplink.cache.batch import Batch
from deeplink.cache.errors import IndexMendedError, ShardCorruptError
from deeplink.cache.reads.ahead import joined
from deeplink.cache.reads.copying import Copying, by_shard
from deeplink.cache.reads.mapped import ColdGauge
from deeplink.cache.reads.shard_pool import OpenShards
from deeplink.cache.reads.verify_once import Touched
from deeplink.errors import DeepLinkError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deeplink.cache.index import Index
    from deeplink.cache.reads.mapped import ShardFile
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
        shards = by_shard(self._index.shard[rows])
        files = [(number, self._file(number), positions) for number, positions in shards]
        if not any(file for _, file, _ in files):
            return np.arange(len(rows))
        work = Copying(self._index, rows, batch)
        cold = self._cold.is_cold()
        for number, file, positions in files:
            if file is None:
                work.missing.append(positions)
            else:
                work.add(number, file, positions, cold=cold)
        problems = work.copy()
        if problems:
            self._ask_index(rows)
        for number, problem in problems:
            self._set_aside(number, problem)
        self._check(rows, batch, work)
        return work.left()

    def one(self, row: int) -> memoryview | None:
        """Return one sample with the fewest steps; None where anything is in the way, which `fill` will find."""
        index = self._index
        try:
            file, length = self.shards.get(int(index.shard[row])), int(index.lengths[row])
            if file is None or length > min(block.SPAN, file.bytes):
                return None
            data = memoryview(bytearray(length))
            file.read_into([data], index.file_offsets(np.array([row])).tolist())
        except (DeepLinkError, OSError):
            return None
        is_wrong = self._touched.is_due(row) and len(self._touched.wrong(np.array([row]), [data]))
        return None if is_wrong else data

    def will_need(self, rows: np.ndarray) -> None:
        """Ask the disk for samples that this node holds, and do not wait for them."""
        offsets, lengths = self._index.file_offsets(rows), self._index.sizes(rows)
        for number, positions in by_shard(self._index.shard[rows]):
            file = self._file(number)
            if file is not None:
                file.will_need(*joined(offsets[positions], lengths[positions]))

    def fill_again(self, rows: np.ndarray, positions: np.ndarray, batch: Batch) -> np.ndarray:
        """Copy the samples whose shards have come since they were last looked for; return who is still missing.

        Args:
            rows: int64, each within the index.
            positions: places in `rows` that are wanted.
            batch: with room for each of `rows`, in order.
        """
        if not len(positions):
            return positions
        wanted = rows[positions]
        self.shards.look_anew(self._index.shard[wanted].tolist())
        found = Batch.empty(self._index.lengths[wanted])
        missing = self.fill(wanted, found)
        is_here = np.ones(len(wanted), bool)
        is_here[missing] = False
        for place in np.flatnonzero(is_here).tolist():
            batch[int(positions[place])][:] = found[place]
        left: np.ndarray = positions[missing]
        return left

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
        if len(wrong):
            self._ask_index(rows[unseen[wrong]])
        for number, positions in by_shard(self._index.shard[rows[unseen[wrong]]]):
            if self.shards.is_vouched(number):  # the index is wrong about these samples alone
                work.missing.append(unseen[wrong[positions]])
                continue
            work.missing.append(np.flatnonzero(self._index.shard[rows] == number))
            self._set_aside(number, self._changed(int(rows[unseen[wrong[positions[0]]]])))

    def _changed(self, row: int) -> ShardCorruptError:
        shard = self._index.shards[int(self._index.shard[row])].id
        return ShardCorruptError(shard, f"the bytes of {self._index.key(row)!r} have changed")

    def views(self, rows: np.ndarray) -> tuple[list[memoryview | None], list[int]]:
        """Return views of mapped files, and the positions of samples that no mapping here holds: there is None.

        Their pages are brought in and their bytes compared when this process first asks for them. A view is only
        as safe as the file below it: one that is cut short, or a disk that fails once its pages were dropped from
        memory, ends the process that touches it (SIGBUS).
        """
        index = self._index
        shards, starts, lengths = index.shard[rows], index.file_offsets(rows), index.lengths[rows].view(np.int64)
        unseen, cold = self._touched.unseen(rows), self._cold.is_cold()
        maps: dict[int, memoryview] = {}
        missing: list[int] = []
        groups = list(by_shard(shards))
        for number, positions in groups:
            file = self._mapped(number)
            due = (
                positions if cold else positions[_chosen(unseen, len(rows))[positions]] if len(unseen) else unseen
            )
            if file is None or (len(due) and not self._is_populated(number, file, rows[due], cold=cold)):
                missing.extend(positions.tolist())
            elif file.view is not None:
                maps[number] = file.view
        if len(groups) == 1 and maps:
            found: list[memoryview | None] = _slices(
                maps.popitem()[1], starts.tolist(), (starts + lengths).tolist()
            )
        else:
            found = _slices_of(maps, shards.tolist(), starts.tolist(), (starts + lengths).tolist())
        if int(lengths.max()) > block.SPAN:  # it lies in several pieces
            missing.extend(np.flatnonzero(lengths > block.SPAN).tolist())
        if len(unseen):
            missing.extend(self._wrong(rows, _without(unseen, missing, len(rows)), found))
        for position in missing:
            found[position] = None
        return found, missing

    def _mapped(self, number: int) -> ShardFile | None:
        file = self._file(number)
        if file is None or file.view is None:
            return None
        try:
            file.check()
        except (ShardCorruptError, OSError) as problem:
            self._set_aside(number, problem)
            return None
        return file

    def _is_populated(self, number: int, file: ShardFile, rows: np.ndarray, *, cold: bool) -> bool:
        """Bring in the pages of samples of one shard: whole blocks where they are in memory."""
        if not cold:
            rows = rows[~self._has_blocks(number, file, self._index.block[rows])]
        starts, lengths = self._index.file_offsets(rows).tolist(), self._index.lengths[rows].tolist()
        try:
            if len(starts) > 1:
                file.will_need(starts, lengths)
            return all(file.populate(start, length) for start, length in zip(starts, lengths, strict=True))
        except OSError as problem:
            self._set_aside(number, problem)
            return False
        except ValueError:  # beyond the file's end: the index is wrong
            self._ask_index(rows)
            return False

    def _has_blocks(self, number: int, file: ShardFile, blocks: np.ndarray) -> np.ndarray:
        """Tell of each block whether all its pages are in memory, now or when it was first looked at."""
        offsets = self._index.block_offsets(number)
        if file.populated is None:
            file.populated = np.zeros(len(offsets), np.int8)
        for place in sorted(set(blocks[file.populated[blocks] == 0].tolist())):
            # The next block's header begins a page before its payload, and so this one's payload ends before.
            stop = int(offsets[place + 1]) - block.PAGE if place + 1 < len(offsets) else file.bytes
            there = file.populate_resident(int(offsets[place]), min(stop - int(offsets[place]), block.SPAN))
            file.populated[place] = 1 if there else -1
        found: np.ndarray = file.populated[blocks] > 0
        return found

    def _wrong(self, rows: np.ndarray, due: np.ndarray, found: list[memoryview | None]) -> list[int]:
        """Compare samples with their checksums; return the positions of all in a shard with a wrong one."""
        samples = [view for position in due.tolist() if (view := found[position]) is not None]
        wrong: list[int] = []
        differing = due[self._touched.wrong(rows[due], samples)]
        if len(differing):
            self._ask_index(rows[differing])
        for position in differing.tolist():
            row = int(rows[position])
            number = int(self._index.shard[row])
            if self.shards.is_vouched(number):  # the index is wrong about this sample alone
                wrong.append(position)
                continue
            self._set_aside(number, self._changed(row))
            wrong.extend(np.flatnonzero(self._index.shard[rows] == number).tolist())
        return wrong

    def _ask_index(self, rows: np.ndarray) -> None:
        """Return if what the index says of rows is what was written: then it is the shard that is damaged.

        Raises:
            IndexMendedError: it was not, and is restored.
        """
        if self._index.mend(rows):
            raise IndexMendedError(self._index.path)

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


def _chosen(positions: np.ndarray, count: int) -> np.ndarray:
    found = np.zeros(count, bool)
    found[positions] = True
    return found


def _without(positions: np.ndarray, others: Sequence[int], count: int) -> np.ndarray:
    if not others:
        return positions
    is_other = _chosen(np.array(others, np.int64), count)
    found: np.ndarray = positions[~is_other[positions]]
    return found


def _slices(whole: memoryview, starts: Sequence[int], stops: Sequence[int]) -> list[memoryview | None]:
    return [whole[start:stop] for start, stop in zip(starts, stops, strict=True)]


def _slices_of(
    maps: dict[int, memoryview], shards: Sequence[int], starts: Sequence[int], stops: Sequence[int]
) -> list[memoryview | None]:
    return [
        maps[number][start:stop] if number in maps else None
        for number, start, stop in zip(shards, starts, stops, strict=True)
    ]
