"""The sorted keys of an index as they lie in memory: found by halving, walked through as a tree of folders."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from deeplink.cache.errors import IndexFormatError
from deeplink.cache.keys import MOST_KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from deeplink.cache.indexing.first_touch import FirstTouch

_SLASH = ord("/")
_AFTER_SLASH = b"0"
"""What follows "/" in ASCII: the keys below a folder are those from `folder/` to before `folder0`."""
_FEW, _MANY = 16, 1 << 16


@dataclass(frozen=True, slots=True)
class FolderChild:
    """What lies directly in a folder: a folder and the rows below it, or a run of files, where `name` is empty."""

    name: bytes
    rows: range


class KeyColumn:
    """Keys one after another, and where each begins. Nothing is believed: damage is an error when it is met.

    Plain memory and not Arrow's scalars, which cost ten times as much.

    Args:
        path: of the index, for what goes wrong.
        ends: int64, shape (keys + 1,): where each begins in `text`.
        text: UTF-8.
        first: by which what is read is compared with the seal of the file where it lies; None where it has none.
        address: of that file in memory.

    Raises:
        IndexFormatError: they do not lie in that file.
    """

    def __init__(
        self, path: Path, ends: np.ndarray, text: memoryview, first: FirstTouch | None = None, address: int = 0
    ) -> None:
        self._path, self._bounds, self._text = path, ends, text
        self._ends, self._size = ends.data.cast("B").cast("q"), len(text)
        self._count = len(ends) - 1
        self._first = first if self._count and self._size else None
        self._ends_at = self._text_at = self._chunk = 0
        if self._first is not None:
            self._chunk = self._first.chunk
            self._ends_at = ends.ctypes.data - address
            self._text_at = np.frombuffer(text, np.uint8).ctypes.data - address
            covered = self._chunk * len(self._first.unseen)
            for at, size in ((self._ends_at, ends.nbytes), (self._text_at, self._size)):
                if not 0 <= at <= at + size < covered:
                    raise IndexFormatError(path, "its keys are not where they should be")

    def __len__(self) -> int:
        return self._count

    def _damaged(self, row: int) -> IndexFormatError:
        return IndexFormatError(self._path, f"the key of row {row:,} is damaged")

    def raw(self, row: int) -> bytes:
        """Return the key of a row, 0 to len - 1.

        Raises:
            IndexFormatError: where it begins or ends is damaged.
        """
        first, chunk = self._first, self._chunk
        if first is not None:  # as `_bounds_of` and `_text_of`, without a call each time
            at = self._ends_at + 8 * row
            if first.unseen[at // chunk] or first.unseen[(at + 15) // chunk]:
                first.see(at, at + 16)
        start, stop = self._ends[row], self._ends[row + 1]
        if not 0 <= start <= stop <= self._size or stop - start > MOST_KEY_BYTES:
            raise self._damaged(row)
        if first is not None:
            at = self._text_at + start
            if first.unseen[at // chunk] or first.unseen[(at + stop - start - 1) // chunk]:
                first.see(at, at + stop - start)
        return bytes(self._text[start:stop])

    def _bounds_of(self, start: int, stop: int) -> np.ndarray:
        """Return where the keys of some rows begin, and where the last one ends."""
        if self._first is not None:
            self._first.see(self._ends_at + 8 * start, self._ends_at + 8 * (stop + 1))
        return self._bounds[start : stop + 1]

    def _text_of(self, base: int, end: int) -> memoryview:
        """Return a run of text."""
        if self._first is not None:
            self._first.see(self._text_at + base, self._text_at + end)
        return self._text[base:end]

    def text(self, row: int) -> str:
        """Return the key of a row as text. Raises as `raw`."""
        try:
            return self.raw(row).decode()
        except UnicodeDecodeError:
            raise self._damaged(row) from None

    def texts(self, rows: range) -> list[str]:
        """Return the keys of a run of rows. Raises as `raw`."""
        bounds = self._bounds_of(rows.start, rows.stop)
        if not rows or bounds[0] < 0 or bounds[-1] > self._size or (bounds[1:] < bounds[:-1]).any():
            return [self.text(row) for row in rows]
        base = int(bounds[0])
        whole = bytes(self._text_of(base, int(bounds[-1])))
        try:
            # Each by itself: places are counted in bytes, not in letters.
            return [whole[a:b].decode() for a, b in itertools.pairwise((bounds - base).tolist())]
        except UnicodeDecodeError as problem:
            raise IndexFormatError(self._path, f"a key is damaged: {problem}") from None

    def run(self, rows: range) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes of the keys of a run of rows (uint8), and where each begins in them (int64, one more).

        Raises:
            IndexFormatError: where a key begins is damaged.
        """
        bounds = self._bounds_of(rows.start, rows.stop)
        base, end = (int(bounds[0]), int(bounds[-1])) if len(bounds) else (0, 0)
        if not 0 <= base <= end <= self._size or (bounds[1:] < bounds[:-1]).any():
            raise self._damaged(rows.start)
        return np.frombuffer(self._text_of(base, end), np.uint8), bounds - base

    def first_not_below(self, key: bytes, low: int = 0, high: int | None = None) -> int:
        """Return the first row from `low` on whose key is not less than `key`; `high` (the end) if there is none.

        Raises:
            IndexFormatError: it came by a damaged key.
        """
        high = self._count if high is None else high
        raw = self.raw
        while low < high:
            middle = (low + high) // 2
            if raw(middle) < key:
                low = middle + 1
            else:
                high = middle
        return low

    def next_not_below(self, key: bytes, low: int, high: int) -> int:
        """Return what `first_not_below` does, in steps that double: what is near is found at once."""
        raw, step = self.raw, 1
        while low + step < high and raw(low + step) < key:
            low, step = low + step, step * 2
        return self.first_not_below(key, low, min(low + step, high))

    def below(self, folder: bytes) -> range:
        """Return the rows below a folder, all where it is empty. Raises as `first_not_below`."""
        if not folder:
            return range(self._count)
        start = self.first_not_below(folder + b"/")
        return range(start, self.next_not_below(folder + _AFTER_SLASH, start, self._count))

    def children(self, folder: bytes) -> Iterator[FolderChild]:
        """Yield what lies directly in a folder, in the order of the rows. Raises as `first_not_below`.

        A folder in it costs the logarithm of its size, however much lies below.
        """
        rows = self.below(folder)
        skip = len(folder) + 1 if folder else 0
        at, window = rows.start, _FEW
        while at < rows.stop:
            key = self.raw(at)
            slash = key.find(b"/", skip)
            if slash < 0:
                stop = self._end_of_files(at, min(at + window, rows.stop), skip)
                window = min(window * 2, _MANY)
                yield FolderChild(b"", range(at, stop))
            else:
                stop = max(self.next_not_below(key[:slash] + _AFTER_SLASH, at, rows.stop), at + 1)
                window = _FEW
                yield FolderChild(key[skip:slash], range(at, stop))
            at = stop

    def _end_of_files(self, start: int, stop: int, skip: int) -> int:
        """Return the first row after `start`, a file, that has a slash behind `skip` bytes; `stop` if none has."""
        bounds = self._bounds_of(start, stop)
        base, end = int(bounds[0]), int(bounds[-1])
        if not 0 <= base <= end <= self._size or end - base > (stop - start) * MOST_KEY_BYTES:
            return start + 1  # one of them is damaged: `raw` finds it
        slashes = np.flatnonzero(np.frombuffer(self._text_of(base, end), np.uint8) == _SLASH) + base
        # The first slash at or behind where each key's own name begins; it is the key's if it lies before its end.
        behind = np.append(slashes, end)[np.searchsorted(slashes, bounds[:-1] + skip)]
        folders = np.flatnonzero(behind < bounds[1:])
        return max(start + int(folders[0]), start + 1) if len(folders) else stop
