"""The index of a dataset's version: one Arrow file, memory-mapped, a row per sample in the order of the keys."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from deeplink.cache.errors import IndexFormatError, IndexMendedError, KeyMissingError
from deeplink.cache.format import block
from deeplink.cache.format.index_format import SlotTable, file_version
from deeplink.cache.format.index_parts import FirstTouch, load
from deeplink.cache.format.names import MOST_KEY_BYTES
from deeplink.core.types import SampleKey, Version

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_SLASH = ord("/")
_AFTER_SLASH = b"0"
"""What follows "/" in ASCII: the keys below a folder are those from `folder/` to before `folder0`."""
_AFTER_TEXT = b"\xff"
"""Follows every key that begins with a text: no byte of UTF-8 is as large."""
_FEW, _MANY = 16, 1 << 16


class FolderListing(NamedTuple):
    """Contents of a folder itself: names of folders, sorted, and rows of its samples."""

    folders: list[str]
    rows: np.ndarray  # int64


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """The classes below a root, and their rows: those of a class follow one another."""

    classes: list[str]  # names of the folders directly below the root, sorted
    starts: list[int]  # where each run of rows of one class begins, counted from the root's first row; ascending
    labels: list[int]  # per run, the position of its class in `classes`; -1 for samples directly in the root
    count: int  # rows below the root

    def __getitem__(self, position: int) -> int:
        """Return the label of one row, counted from the root's first."""
        if not 0 <= position < self.count:
            raise IndexError(position)
        return self.labels[bisect_right(self.starts, position) - 1]

    def of(self, positions: np.ndarray) -> np.ndarray:
        """Return the labels of some rows, int64, in the shape of `positions`."""
        runs = np.searchsorted(np.array(self.starts, np.int64), positions, side="right") - 1
        found: np.ndarray = np.array(self.labels, np.int64)[runs]
        return found

    def every(self) -> np.ndarray:
        """Return the label of each row below the root, int64, shape (count,)."""
        ends, starts = np.array([*self.starts[1:], self.count], np.int64), np.array(self.starts, np.int64)
        return np.repeat(np.array(self.labels, np.int64), ends - starts)


@dataclass(frozen=True, slots=True)
class FolderChild:
    """A folder directly in another one and the rows below it, or a run of files there."""

    name: bytes  # empty for files
    rows: range


class KeyColumn:
    """Keys one after another, and where each begins. Nothing is believed: damage is an error when it is met.

    Plain memory and not Arrow's scalars, which cost ten times as much.
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
        """Return the key of a row, 0 to len - 1."""
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
        """Return the key bytes of a run of rows (uint8), and where each begins (int64, one more)."""
        bounds = self._bounds_of(rows.start, rows.stop)
        base, end = (int(bounds[0]), int(bounds[-1])) if len(bounds) else (0, 0)
        if not 0 <= base <= end <= self._size or (bounds[1:] < bounds[:-1]).any():
            raise self._damaged(rows.start)
        return np.frombuffer(self._text_of(base, end), np.uint8), bounds - base

    def first_not_below(self, key: bytes, low: int = 0, high: int | None = None) -> int:
        """Return the first row from `low` on whose key is not below `key`; `high` if there is none."""
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


class Index:
    """A version of a dataset, mapped into memory. Safe to read from any thread, and across fork.

    Keys, and what `column` gives, are compared with the file's seal when they are first read. Other damage is an
    IndexFormatError when it is met, or gives bytes that do not have the checksum they should. Format 1 has no
    seal: `verify` tells.

    Attributes:
        path: the file.
        version: the dataset version (the file's name says it; `verify` checks it).
        format: of the file.
        source: where the small files came from.
        home: where all of the shards are kept besides (folder or URL); empty for nowhere.
        access: who may read it, as text of `SourceAccess`; empty where that was not recorded.
        shards: the shards, numbered as in `shard`; an entry is made when it is asked for.
        shard, block, offset: uint32 arrays, one entry per row; read-only views of the file.
        lengths: uint64, bytes of each sample.
        checksums: uint64, xxh3-64 of each sample.
    """

    def __init__(self, path: Path, version: Version) -> None:
        """Open `path`."""
        self.path, self.version = path, version
        parts = load(path)
        self.format, self.source, self.home, self.shards = parts.format, parts.source, parts.home, parts.shards
        self.access = parts.access
        self._file, self._seal = parts.file, parts.seal
        self._first = FirstTouch(path, parts.file, parts.seal) if parts.seal is not None else None
        self._largest = int(self.shards.sizes.max()) if len(self.shards) else 0
        self._keys = KeyColumn(path, parts.ends, parts.text, self._first, parts.file.address)
        self.shard, self.block, self.offset = (parts.columns[name] for name in ("shard", "block", "offset"))
        self.lengths, self.checksums = parts.columns["length"], parts.columns["checksum"]
        named = {"shard": self.shard, "block": self.block, "lengths": self.lengths, "checksums": self.checksums}
        self._starts = {name: column.ctypes.data - parts.file.address for name, column in named.items()}
        self._slots = SlotTable(parts.slots, len(self)) if parts.slots is not None else None

    def __len__(self) -> int:
        return len(self._keys)

    def key(self, row: int) -> SampleKey:
        """Return the key of a row."""
        if not 0 <= row < len(self):
            raise KeyMissingError(row, len(self))
        try:
            return SampleKey(self._keys.text(row))
        except IndexFormatError:
            if not self.mend():
                raise
            return SampleKey(self._keys.text(row))

    def keys(self, rows: range | None = None) -> list[str]:
        """Return the keys of all rows, or of a run of them; makes a text of each. Raises as `key`."""
        chosen = range(len(self)) if rows is None else rows
        if chosen and not 0 <= chosen.start <= chosen.stop <= len(self):
            raise KeyMissingError(chosen.stop - 1 if chosen.stop > len(self) else chosen.start, len(self))
        return self._keys.texts(chosen)

    def key_text(self, rows: range) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes of the keys of a run of rows (uint8), and where each begins in them (int64, one more).

        For work on many keys at once, without a text of each.
        """
        return self._keys.run(rows)

    def row(self, key: str) -> int:
        """Return the row of a key."""
        raw = _encoded(key)
        found = self._slots.row(raw, self._keys.raw) if self._slots is not None else None
        if found is not None:
            return found
        # Formats 1 and 2 have no table, and a damaged one shall not hide a sample that is there.
        row = self._keys.first_not_below(raw)
        if row == len(self) or self._keys.raw(row) != raw:
            raise KeyMissingError(key)
        return row

    def rows_below(self, folder: str) -> range:
        """Return the rows of all samples below a folder, `""` for all of them; empty where there is none."""
        return self._keys.below(_encoded(folder.strip("/")))

    def rows_beginning(self, text: str) -> range:
        """Return the rows of all samples whose keys begin with a text."""
        raw = _encoded(text)
        start = self._keys.first_not_below(raw)
        return range(start, self._keys.next_not_below(raw + _AFTER_TEXT, start, len(self)))

    def listing(self, folder: str = "") -> FolderListing:
        """Return what lies directly in a folder (`""`: the top), whatever lies below its folders."""
        folders: list[bytes] = []
        runs: list[np.ndarray] = []
        for child in self._keys.children(_encoded(folder.strip("/"))):
            if child.name:
                folders.append(child.name)
            else:
                runs.append(np.arange(child.rows.start, child.rows.stop, dtype=np.int64))
        if not (folders or runs) and folder.strip("/"):
            raise KeyMissingError(folder)
        return FolderListing(self._texts(folders), np.concatenate(runs) if runs else np.empty(0, np.int64))

    def _texts(self, names: Sequence[bytes]) -> list[str]:
        try:
            # UTF-8 sorts as its code points do.
            return [name.decode() for name in sorted(names)]
        except UnicodeDecodeError as problem:
            raise IndexFormatError(self.path, f"a key is damaged: {problem}") from None

    def classed(self, root: str = "") -> Labels:
        """Return the classes below `root` as ImageFolder has them, without touching each sample."""
        found = list(self._keys.children(_encoded(root.strip("/"))))
        if not found:
            raise KeyMissingError(root)
        names = sorted(child.name for child in found if child.name)
        rank = {name: number for number, name in enumerate(names)} | {b"": -1}
        first = found[0].rows.start
        return Labels(
            classes=self._texts(names),
            starts=[child.rows.start - first for child in found],
            labels=[rank[child.name] for child in found],
            count=found[-1].rows.stop - first,
        )

    def classes(self, root: str = "") -> list[str]:
        """Return the sorted names of folders directly below `root` that hold samples (ImageFolder's classes)."""
        return self.classed(root).classes

    def column(self, name: str, rows: range) -> np.ndarray:
        """Return a run of rows of `shard`, `block`, `lengths` or `checksums`, as a view.

        The first time it is compared with the seal: for what is worked out from many rows at once, where nothing
        else tells that one is wrong.
        """
        column: np.ndarray = getattr(self, name)
        if self._first is not None and rows:
            at = self._starts[name]
            self._first.see(at + rows.start * column.itemsize, at + rows.stop * column.itemsize)
        return column[rows.start : rows.stop]

    def block_offsets(self, shard: int) -> np.ndarray:
        """Return where each block's payload of a shard begins in its file (int64)."""
        return self.shards.offsets(shard)

    def file_offsets(self, rows: np.ndarray) -> np.ndarray:
        """Return where in their shards' files samples begin (int64); for one longer than SPAN, its first piece."""
        try:
            blocks = self.shards.first_block[self.shard[rows]] + self.block[rows]
            found: np.ndarray = self.shards.block_offsets[blocks] + self.offset[rows]
        except IndexError as problem:
            self.raise_if_mended(rows)
            raise IndexFormatError(self.path, f"a row is damaged: {problem}") from None
        return found

    def sizes(self, rows: np.ndarray) -> np.ndarray:
        """Return the bytes of samples (int64), none of more bytes than any shard has."""
        found: np.ndarray = self.lengths[rows]
        if len(found) and int(found.max()) > self._largest:
            self.raise_if_mended(rows)
            raise IndexFormatError(self.path, "a row is damaged: a sample of more bytes than its shard")
        return found.view(np.int64)

    def raise_if_mended(self, rows: np.ndarray) -> None:
        """Return if the file says of rows what was written."""
        if self.mend(rows):
            raise IndexMendedError(self.path)

    def pieces(self, row: int) -> list[tuple[int, int, int]]:
        """Return the (block, offset, length) of a sample's pieces: one, unless it is longer than SPAN."""
        return list(block.pieces(int(self.block[row]), int(self.offset[row]), int(self.lengths[row])))

    def mend(self, rows: np.ndarray | None = None) -> bool:
        """Compare what the file says of some rows, or all of it, with its seal, and restore what was damaged.

        In memory, for this process and what it forks from now on; all views of the file see it. Takes 0.1 ms for a
        row that is whole, a millisecond more to restore one.
        """
        seal = self._seal
        if seal is None or self._first is None:
            return False
        # What all rows need, the table of the shards among it, lies at the beginning.
        spans = [(0, seal.covered)] if rows is None else [(0, seal.checked), *self._cells(rows)]
        return self._first.mend(seal.chunks(spans))

    def _cells(self, rows: np.ndarray) -> list[tuple[int, int]]:
        """Return where in the file the rows' cells begin and end."""
        columns = (self.shard, self.block, self.offset, self.lengths, self.checksums)
        return [
            (start, start + column.itemsize)
            for column in columns
            for start in (rows * column.itemsize + (column.ctypes.data - self._file.address)).tolist()
        ]

    def verify(self) -> None:
        """Return if the file is, byte for byte, the version it is named by; reads all of it."""
        found = file_version(self.path)
        if found != self.version:
            raise IndexFormatError(self.path, f"its content is that of version {found}")


def _encoded(key: str) -> bytes:
    # Half a surrogate has no UTF-8: no key is what this makes of it.
    return key.encode(errors="surrogatepass")
