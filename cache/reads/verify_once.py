"""Remembers which samples this process has compared with their checksums: each at its first read."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from deeplink.cache import block

if TYPE_CHECKING:
    from collections.abc import Sequence


class Touched:
    """One bit per sample of an index. Safe to use from several threads.

    Args:
        checksums: uint64, xxh3-64 of each sample.
        always: compare whenever a sample is read, not only the first time.
    """

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
            # A row that stands in a batch twice counts twice here, so what is left is made exact before others,
            # who do not wait for the lock, see that it is nothing.
            left = self._left - int(np.count_nonzero(before == 0))
            self._left = left if left > 0 else len(self._checksums) - int(np.unpackbits(self._seen).sum())

    def forget(self, rows: np.ndarray) -> None:
        """Take samples for never seen: another file has come in place of theirs."""
        with self._lock:
            np.bitwise_and.at(self._seen, rows >> 3, ~(np.uint8(1) << (rows & 7).astype(np.uint8)))
            self._left = len(self._checksums) - int(np.unpackbits(self._seen).sum())
