"""Reads samples from this node's own store. Opened lazily, per process; safe to use from several threads."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from deeplink.cache.errors import ShardCorruptError
from deeplink.cache.format import block
from deeplink.cache.read.batch import Batch, Copying, by_shard
from deeplink.cache.read.mapped import ColdGauge, OpenShards
from deeplink.core.errors import DeepLinkError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deeplink.cache.format.index import Index
    from deeplink.cache.read.mapped import ShardFile
    from deeplink.cache.store.store import Store
    from deeplink.core.clock import Clock

_GAP = 64 << 10
"""Bytes between two places that are read along with them: a disk takes longer for a second request."""
_MOST = 256 << 10
"""Bytes of one request: Linux cuts a longer one off at the device's read-ahead (`force_page_cache_readahead`)."""


def joined(offsets: np.ndarray, lengths: np.ndarray) -> tuple[list[int], list[int]]:
    """Return offsets and lengths of the requests that read all of these places ahead, ascending.

    >>> joined(np.array([0, 4096, 1 << 20]), np.array([4096, 100, 8]))
    ([0, 1048576], [4196, 8])
    """
    if not len(offsets):
        return [], []
    order = np.argsort(offsets, kind="stable")
    begins = offsets[order]
    ends = np.maximum.accumulate(begins + lengths[order])
    is_first = np.append(True, begins[1:] > ends[:-1] + _GAP)
    is_last = np.append(is_first[1:], True)
    starts, sizes = begins[is_first], ends[is_last] - begins[is_first]
    parts = -(-np.maximum(sizes, 1) // _MOST)
    number = np.arange(int(parts.sum())) - np.repeat(np.cumsum(parts) - parts, parts)
    cut = np.repeat(starts, parts) + number * _MOST
    return cut.tolist(), np.minimum(np.repeat(starts + sizes, parts) - cut, _MOST).tolist()


class Touched:
    """Which samples this process has compared with their checksums. Safe to use from several threads."""

    def __init__(self, checksums: np.ndarray, *, always: bool = False) -> None:
        self._checksums, self._always = checksums, always
        self._seen = np.zeros((len(checksums) + 7) // 8, np.uint8)
        self._left = len(checksums)
        self._lock = threading.Lock()

    def unseen(self, rows: np.ndarray) -> np.ndarray:
        """Return the positions in `rows` whose samples are to be compared; int64."""
        if self._always:
            return np.arange(len(rows))
        if not self._left:
            return rows[:0]
        return np.flatnonzero((self._seen[rows >> 3] >> (rows & 7).astype(np.uint8)) & 1 == 0)

    def is_due(self, row: int) -> bool:
        """Tell whether a row's sample is to be compared."""
        return self._always or (self._left > 0 and not int(self._seen[row >> 3]) >> (row & 7) & 1)

    def wrong(self, rows: np.ndarray, samples: Sequence[memoryview]) -> np.ndarray:
        """Return the positions in `rows` whose bytes are not those that were packed, and remember the others."""
        found = np.fromiter(map(block.checksum, samples), np.uint64, len(samples))
        is_wrong = found != self._checksums[rows]
        self._remember(rows[~is_wrong] if is_wrong.any() else rows)
        return np.flatnonzero(is_wrong)

    def _remember(self, rows: np.ndarray) -> None:
        bits = np.uint8(1) << (rows & 7).astype(np.uint8)
        with self._lock:
            before = self._seen[rows >> 3] & bits
            np.bitwise_or.at(self._seen, rows >> 3, bits)
            # A row that stands in a batch twice counts twice here, so what is left is made exact before threads
            # that do not wait for the lock see that it is nothing.
            left = self._left - int(np.count_nonzero(before == 0))
            self._left = left if left > 0 else len(self._checksums) - int(np.unpackbits(self._seen).sum())

    def forget(self, rows: np.ndarray) -> None:
        """Take samples for never seen: another file has come in place of theirs."""
        with self._lock:
            np.bitwise_and.at(self._seen, rows >> 3, ~(np.uint8(1) << (rows & 7).astype(np.uint8)))
            self._left = len(self._checksums) - int(np.unpackbits(self._seen).sum())


class LocalReader:
    """The samples of one index that this node holds.

    Each sample's checksum is compared when this process first reads it, or whenever it does (`always`). A shard
    found damaged is set aside; `shards.take_damaged` returns it.
    """

    def __init__(self, index: Index, store: Store, clock: Clock, *, always: bool = False) -> None:
        self._index = index
        self.shards = OpenShards(index, store, clock)
        self._touched = Touched(index.checksums, always=always)
        self._cold = ColdGauge()

    def fill(self, rows: np.ndarray, batch: Batch) -> np.ndarray:
        """Copy the samples that this node holds into `batch`; return the positions of those still missing.

        Nothing that happens to a file meanwhile is worse than a missing sample.
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
            self._index.raise_if_mended(rows)  # else the shards are what is damaged
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
        """Copy the samples whose shards have come since they were last looked for; return those still missing."""
        if not len(positions):
            return positions
        wanted = rows[positions]
        self.shards.forget_absent(self._index.shard[wanted].tolist())
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
            unseen = _without(unseen, work.left(), len(rows))
        if not len(unseen):
            return
        data, starts = batch.data, batch.offsets[unseen].tolist()
        samples = [data[a:b] for a, b in zip(starts, batch.offsets[unseen + 1].tolist(), strict=True)]
        work.missing += self._wrong(rows, unseen, samples)

    def _wrong(self, rows: np.ndarray, due: np.ndarray, samples: Sequence[memoryview]) -> list[np.ndarray]:
        """Compare samples at positions of `rows`; return the positions of all in a shard with a wrong one."""
        wrong = due[self._touched.wrong(rows[due], samples)]
        if not len(wrong):
            return []
        self._index.raise_if_mended(rows[wrong])
        index, found = self._index, []
        for number, places in by_shard(index.shard[rows[wrong]]):
            if self.shards.is_vouched(number):  # the index is wrong about these samples alone
                found.append(wrong[places])
                continue
            key = index.key(int(rows[wrong[places[0]]]))
            problem = ShardCorruptError(index.shards[number].id, f"the bytes of {key!r} have changed")
            found.append(np.flatnonzero(index.shard[rows] == number))
            self._set_aside(number, problem)
        return found

    def views(self, rows: np.ndarray) -> tuple[list[memoryview | None], list[int]]:
        """Return views of mapped files, None where no mapping here holds the sample, and the positions of these.

        Their pages are brought in and their bytes compared when this process first asks for them. A file that is
        cut short later, or a disk that fails once pages were dropped, ends the process that touches it (SIGBUS).
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
        ends = zip(starts.tolist(), (starts + lengths).tolist(), strict=True)
        found: list[memoryview | None]
        if len(groups) == 1 and maps:
            whole = maps.popitem()[1]
            found = [whole[start:stop] for start, stop in ends]
        else:
            files = map(maps.get, shards.tolist())
            pairs = zip(files, ends, strict=True)
            found = [None if whole is None else whole[start:stop] for whole, (start, stop) in pairs]
        if int(lengths.max()) > block.SPAN:  # it lies in several pieces
            missing.extend(np.flatnonzero(lengths > block.SPAN).tolist())
        if len(unseen):
            due = _without(unseen, missing, len(rows))
            samples = [view for position in due.tolist() if (view := found[position]) is not None]
            for wrong in self._wrong(rows, due, samples):
                missing.extend(wrong.tolist())
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
            self._index.raise_if_mended(rows)
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


def _without(positions: np.ndarray, others: Sequence[int] | np.ndarray, count: int) -> np.ndarray:
    if not len(others):
        return positions
    found: np.ndarray = positions[~_chosen(np.asarray(others, np.int64), count)[positions]]
    return found
