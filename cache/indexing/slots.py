"""Finding a key's row by hashing: a table of rows with open addressing, which lies in the file of an index.

The table has a few more slots than it has homes. A key's home is the upper half of its xxh3-64, scaled to the
number of homes; its row stands in the first slot from there on that was free when rows were put in, those of lower
hashes first. There are nine homes for eight rows, so that is the fifth slot in the mean, and hardly ever one
beyond PROBES.

A slot is 32 bits: the row in the lowest, as many as the number of rows has, and the lowest bits of the key's hash
above them. So nearly always the only key that is compared is the one that is looked for.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from deeplink.cache import block

if TYPE_CHECKING:
    import pyarrow as pa

    from deeplink.cache.indexing.key_column import KeyColumn

MOST_ROWS = (1 << 32) - 1
"""Rows are numbered in 32 bits."""
PROBES = 128
"""Slots looked at for a key, and slots behind the last home. One key in 10^11 or so would need more."""
_EMPTY = (1 << 32) - 1
_HASHED_AT_ONCE = 1 << 16


def make_slots(keys: pa.LargeStringArray) -> np.ndarray:
    """Return the table of some keys, uint32; takes about 16 bytes of memory per key."""
    return placed(_hashes(keys))


def placed(hashes: np.ndarray) -> np.ndarray:
    """Return the table of keys with these xxh3-64, uint64, in the order of their rows."""
    count, free = len(hashes), 0
    homes = min(count + count // 8, 1 << 32)
    slots = np.full(homes + PROBES, _EMPTY, np.uint32)
    # Part by part of the table: sorting all at once takes three times the memory, and is no faster.
    top = hashes.astype("<u8", copy=False).view(np.uint8)[7::8] >> 2
    for part in range(64):
        rows = np.flatnonzero(top == part)
        hashed = hashes[rows]
        order = np.argsort(hashed, kind="stable")
        rows, hashed, behind = rows[order], hashed[order], np.arange(len(rows))
        home = ((hashed >> np.uint64(32)) * np.uint64(homes) >> np.uint64(32)).astype(np.int64)
        # Each in its home, or in the slot behind the one before, whichever is later.
        place = np.maximum.accumulate(np.maximum(home - behind, free)) + behind
        there = place[: np.searchsorted(place, len(slots))]
        entries = (hashed << np.uint64(count.bit_length())).astype(np.uint32) | rows.astype(np.uint32)
        slots[there] = entries[: len(there)]
        free = int(place[-1]) + 1 if len(place) else free
    return slots


def _hashes(keys: pa.LargeStringArray) -> np.ndarray:
    """Return the xxh3-64 of each key."""
    hashes = np.empty(len(keys), np.uint64)
    if len(keys):
        _, ends, text = keys.buffers()
        bounds = np.frombuffer(ends, np.int64, len(keys) + 1)
        data, digest = memoryview(text or b""), block.checksum
        for start in range(0, len(keys), _HASHED_AT_ONCE):
            some = bounds[start : start + _HASHED_AT_ONCE + 1].tolist()
            hashes[start : start + len(some) - 1] = [digest(data[a:b]) for a, b in itertools.pairwise(some)]
    return hashes


class SlotTable:
    """A table as it lies in memory. It is not believed: what it finds was compared, what it misses may be there.

    Args:
        slots: uint32, as `make_slots` makes them.
        rows: how many keys there are.

    Raises:
        ValueError: there are fewer slots than any table has.
    """

    def __init__(self, slots: np.ndarray, rows: int) -> None:
        if len(slots) < PROBES:
            raise ValueError(f"a table of {len(slots)} slots, where there are {PROBES} at least")
        self._slots, self._rows = slots.data.cast("B").cast("I"), rows
        self._homes, self._row_bits = len(slots) - PROBES, rows.bit_length()

    def row(self, key: bytes, keys: KeyColumn) -> int | None:
        """Return the row of a key among `keys`; None where the table does not say.

        Raises:
            IndexFormatError: it came by a damaged key.
        """
        hashed = block.checksum(key)
        home = (hashed >> 32) * self._homes >> 32
        mark, rows = hashed << self._row_bits & _EMPTY, self._rows
        for slot in self._slots[home : home + PROBES]:
            if slot == _EMPTY:
                break
            row = slot ^ mark
            # Where the bits of the hash are those of another key, this is beyond all rows.
            if row < rows and keys.raw(row) == key:
                return row
        return None
