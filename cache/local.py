"""Reads samples from this node's own store. Opened lazily, per process; safe to use from several threads."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from deeplink.cache import block
from deeplink.cache.errors import ShardCorruptError
from deeplink.cache.mapped import ColdGauge, ShardFile
from deeplink.cache.store import is_damage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deeplink.cache.index import Index
    from deeplink.cache.store import Store
    from deeplink.clock import Clock

log = logging.getLogger(__name__)

_MOST_OPEN = 400
"""Shards open at once: each holds two of the process's descriptors, of which 1,024 are customary."""
_LOOK_AGAIN_S = 5.0
"""How long a shard that is not here is taken to be absent."""


class LocalReader:
    """The shards of one index that this node holds.

    Each sample's checksum is compared when this process first reads it. A shard found damaged is put into
    quarantine; `take_damaged` tells of it.

    Args:
        index: the dataset's version.
        store: this node's store.
        clock: where time comes from.
    """

    def __init__(self, index: Index, store: Store, clock: Clock) -> None:
        self._index, self._store, self._clock = index, store, clock
        self._lock = threading.Lock()
        self._open: OrderedDict[int, ShardFile] = OrderedDict()
        self._absent_until: dict[int, float] = {}
        self._checked = np.zeros((len(index) + 7) // 8, np.uint8)
        self._cold = ColdGauge()
        self._damaged: list[int] = []

    def read(self, rows: np.ndarray, out: list[memoryview | None]) -> np.ndarray:
        """Fill `out[i]` with the bytes of `rows[i]` where this node holds them; return the positions left empty.

        Args:
            rows: int64, each within the index.
            out: as long as `rows`.
        """
        shards = self._index.shard[rows]
        cold = self._cold.is_cold()
        left: list[np.ndarray] = []
        # Not np.unique: it imports modules when first called, which a fork at that moment turns into a deadlock.
        for number in sorted(set(shards.tolist())):
            positions = np.flatnonzero(shards == number)
            left.append(self._read_shard(number, rows, positions, out, cold=cold))
        return np.sort(np.concatenate(left)) if left else np.empty(0, np.int64)

    def _read_shard(
        self, number: int, rows: np.ndarray, positions: np.ndarray, out: list[memoryview | None], *, cold: bool
    ) -> np.ndarray:
        """Read the rows at `positions`, all of one shard; return the positions that could not be read."""
        try:
            file = self._file(number)
            if file is None:
                return positions
            mine = rows[positions]
            found = self._read_rows(file, mine, cold=cold)
            self._check_first_touch(number, mine, found)
        except (ShardCorruptError, OSError) as problem:
            self._set_aside(number, problem)
            return positions
        for position, view in zip(positions.tolist(), found, strict=True):
            out[position] = view
        return positions[:0]

    def _read_rows(self, file: ShardFile, rows: np.ndarray, *, cold: bool) -> list[memoryview]:
        lengths = self._index.lengths[rows]
        if (lengths > block.SPAN).any():
            return [self._read_long(file, int(row)) for row in rows]
        return file.read(self._index.file_offsets(rows).tolist(), lengths.tolist(), cold=cold)

    def _read_long(self, file: ShardFile, row: int) -> memoryview:
        starts = self._index.block_offsets(int(self._index.shard[row]))
        pieces = self._index.pieces(row)
        offsets = [int(starts[number]) + offset for number, offset, _ in pieces]
        parts = file.read(offsets, [length for _, _, length in pieces], cold=True)
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))

    def _check_first_touch(self, number: int, rows: np.ndarray, found: Sequence[memoryview]) -> None:
        bits = np.uint8(1) << (rows & 7).astype(np.uint8)
        unseen = np.flatnonzero((self._checked[rows >> 3] & bits) == 0)
        if not len(unseen):
            return
        expected = self._index.checksums[rows[unseen]].tolist()
        for position, checksum in zip(unseen.tolist(), expected, strict=True):
            if block.checksum(found[position]) != checksum:
                key = self._index.key(int(rows[position]))
                raise ShardCorruptError(self._index.shards[number].id, f"the bytes of {key!r} have changed")
        with self._lock:
            np.bitwise_or.at(self._checked, rows[unseen] >> 3, bits[unseen])

    def _file(self, number: int) -> ShardFile | None:
        """Return the open file of a shard; None where it is not here.

        Raises:
            ShardCorruptError: it is here and damaged.
            OSError: it cannot be opened.
        """
        with self._lock:
            file = self._open.get(number)
            if file is not None:
                self._open.move_to_end(number)
                return file
            if self._absent_until.get(number, 0.0) > self._clock.monotonic():
                return None
            file = self._opened(number)
            if file is None:
                self._absent_until[number] = self._clock.monotonic() + _LOOK_AGAIN_S
                return None
            self._open[number] = file
            if len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)
            return file

    def _opened(self, number: int) -> ShardFile | None:
        entry = self._index.shards[number]
        verified = self._store.is_verified(entry.id)
        try:
            file = ShardFile(self._store.path(entry.id), entry.id, mapped=verified, expected=entry.bytes)
        except FileNotFoundError:
            return None
        starts = self._index.block_offsets(number)
        # The offsets are the packer's; a file of the same content could in principle be laid out otherwise.
        (head,) = file.read([int(starts[-1]) - block.HEADER], [block.HEADER], cold=False)
        if block.decode_header(bytes(head), entry.id).number != len(starts) - 1:
            raise ShardCorruptError(entry.id, "its blocks are not where the index says")
        return file

    def _set_aside(self, number: int, problem: Exception) -> None:
        shard = self._index.shards[number].id
        log.error("%s; reading its samples from elsewhere", problem)
        with self._lock:
            file = self._open.pop(number, None)
            self._absent_until[number] = self._clock.monotonic() + _LOOK_AGAIN_S
            self._damaged.append(number)
            # The file that comes to replace it has never been looked at.
            rows = np.flatnonzero(self._index.shard == number)
            np.bitwise_and.at(self._checked, rows >> 3, ~(np.uint8(1) << (rows & 7).astype(np.uint8)))
        if is_damage(problem):
            self._store.quarantine(shard, str(problem), inode=file.inode if file else None)

    def take_damaged(self) -> set[int]:
        """Return the numbers of the shards found damaged since the last call."""
        if not self._damaged:
            return set()
        with self._lock:
            taken, self._damaged = set(self._damaged), []
        return taken

    def look_again(self, number: int) -> None:
        """Take notice that a shard may have come."""
        with self._lock:
            self._absent_until.pop(number, None)

    def close(self) -> None:
        """Let go of all files; views that were handed out stay valid."""
        with self._lock:
            self._open.clear()
