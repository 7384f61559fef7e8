"""The index of a dataset's version: one Arrow file, memory-mapped, a row per sample in the order of the keys.

Nothing is made per sample when it is opened: columns are views of the mapped file. A version is the SHA-256 of
that file, 40 digits of it, so `sha256sum` checks it.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from deeplink.cache import block
from deeplink.cache.errors import IndexFormatError, IndexMendedError, KeyMissingError, RowError
from deeplink.cache.indexing.first_touch import FirstTouch
from deeplink.cache.indexing.index_format import IndexContent, ShardEntry, file_version, write_index
from deeplink.cache.indexing.index_parts import load
from deeplink.cache.indexing.key_column import KeyColumn
from deeplink.cache.indexing.slots import SlotTable
from deeplink.types import SampleKey, Version

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["FolderListing", "Index", "IndexContent", "Labels", "ShardEntry", "file_version", "write_index"]


class FolderListing(NamedTuple):
    """What lies directly in a folder: names of folders, sorted, and int64 rows of its samples."""

    folders: list[str]
    rows: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """The classes below a root, and which rows are of which: a class's rows follow one another.

    Attributes:
        classes: names of the folders directly below the root, sorted.
        starts: where each run of rows of one class begins, counted from the root's first row; ascending.
        labels: per run, the position of its class in `classes`; -1 for samples directly in the root.
        count: rows below the root.
    """

    classes: list[str]
    starts: list[int]
    labels: list[int]
    count: int

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
        shards: the shards, numbered as in `shard`; an entry is made when it is asked for.
        shard, block, offset: uint32 arrays, one entry per row; read-only views of the file.
        lengths: uint64, bytes of each sample.
        checksums: uint64, xxh3-64 of each sample.
    """

    def __init__(self, path: Path, version: Version) -> None:
        """Open `path`.

        Raises:
            IndexFormatError: it is no index, damaged, or of an unknown format.
            OSError: it cannot be opened.
        """
        self.path, self.version = path, version
        parts = load(path)
        self.format, self.source, self.home, self.shards = parts.format, parts.source, parts.home, parts.shards
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
        """Return the key of a row.

        Raises:
            RowError: there is no such row.
            IndexFormatError: it is damaged.
        """
        if not 0 <= row < len(self):
            raise RowError(row, len(self))
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
            raise RowError(chosen.stop - 1 if chosen.stop > len(self) else chosen.start, len(self))
        return self._keys.texts(chosen)

    def key_text(self, rows: range) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes of the keys of a run of rows (uint8), and where each begins in them (int64, one more).

        For work on many keys at once, without a text of each.

        Raises:
            IndexFormatError: they are damaged.
        """
        return self._keys.run(rows)

    def row(self, key: str) -> int:
        """Return the row of a key.

        Raises:
            KeyMissingError: the dataset has no such sample.
            IndexFormatError: the index is damaged.
        """
        raw = _encoded(key)
        found = self._slots.row(raw, self._keys) if self._slots is not None else None
        if found is not None:
            return found
        # Formats 1 and 2 have no table, and a damaged one shall not hide a sample that is there.
        row = self._keys.first_not_below(raw)
        if row == len(self) or self._keys.raw(row) != raw:
            raise KeyMissingError(key)
        return row

    def rows_below(self, folder: str) -> range:
        """Return the rows of all samples below a folder, `""` for all of them; empty where there is none.

        Raises:
            IndexFormatError: the index is damaged.
        """
        return self._keys.below(_encoded(folder.strip("/")))

    def listing(self, folder: str = "") -> FolderListing:
        """Return what lies directly in a folder, `""` for the top; costs nothing for what lies below its folders.

        Raises:
            KeyMissingError: there is no such folder.
            IndexFormatError: the index is damaged.
        """
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
        """Return the classes below `root` as ImageFolder has them, without touching each sample.

        Raises:
            KeyMissingError: there are no samples below `root`.
            IndexFormatError: the index is damaged.
        """
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
        """Return the sorted names of the folders directly below `root` that hold samples (ImageFolder's classes).

        Raises:
            KeyMissingError: there are no samples below `root`.
        """
        return self.classed(root).classes

    def labels(self, root: str = "") -> np.ndarray:
        """Return, for each of `rows_below(root)`, the position of its class in `classes(root)`.

        int64, shape (rows,); -1 for a sample that lies directly in `root` and so has no class.

        Raises:
            KeyMissingError: there are no samples below `root`.
        """
        return self.classed(root).every()

    def column(self, name: str, rows: range) -> np.ndarray:
        """Return a run of rows of `shard`, `block`, `lengths` or `checksums`, as a view.

        The first time it is compared with the seal: for what is worked out from many rows at once, where nothing
        else tells that one is wrong.

        Raises:
            IndexFormatError: it is damaged, and cannot be restored.
        """
        column: np.ndarray = getattr(self, name)
        if self._first is not None and rows:
            at = self._starts[name]
            self._first.see(at + rows.start * column.itemsize, at + rows.stop * column.itemsize)
        return column[rows.start : rows.stop]

    def block_offsets(self, shard: int) -> np.ndarray:
        """Return where each block's payload of a shard begins in its file (int64).

        Raises:
            IndexFormatError: there is no such shard: the row it was taken from is damaged.
        """
        return self.shards.offsets(shard)

    def file_offsets(self, rows: np.ndarray) -> np.ndarray:
        """Return where in their shards' files samples begin (int64); for one longer than SPAN, its first piece.

        Raises:
            IndexMendedError: it was damaged, and is restored: ask again.
            IndexFormatError: a row is damaged: it names a shard or a block that there is not.
        """
        try:
            blocks = self.shards.first_block[self.shard[rows]] + self.block[rows]
            found: np.ndarray = self.shards.block_offsets[blocks] + self.offset[rows]
        except IndexError as problem:
            self._mend_or_say(rows)
            raise IndexFormatError(self.path, f"a row is damaged: {problem}") from None
        return found

    def sizes(self, rows: np.ndarray) -> np.ndarray:
        """Return the bytes of samples (int64), none of more bytes than any shard has.

        Raises:
            IndexMendedError: it was damaged, and is restored: ask again.
            IndexFormatError: a row is damaged.
        """
        found: np.ndarray = self.lengths[rows]
        if len(found) and int(found.max()) > self._largest:
            self._mend_or_say(rows)
            raise IndexFormatError(self.path, "a row is damaged: a sample of more bytes than its shard")
        return found.view(np.int64)

    def _mend_or_say(self, rows: np.ndarray) -> None:
        if self.mend(rows):
            raise IndexMendedError(self.path)

    def pieces(self, row: int) -> list[tuple[int, int, int]]:
        """Return the (block, offset, length) of a sample's pieces: one, unless it is longer than SPAN."""
        return list(block.pieces(int(self.block[row]), int(self.offset[row]), int(self.lengths[row])))

    def mend(self, rows: np.ndarray | None = None) -> bool:
        """Compare what the file says of some rows, or all of it, with its seal, and restore what was damaged.

        In memory, for this process and what it forks from now on; all views of the file see it. Takes 0.1 ms for a
        row that is whole, a millisecond more to restore one.

        Args:
            rows: which; None for all of the file.

        Returns:
            Whether something was restored: what was read before may have been wrong.

        Raises:
            IndexFormatError: more is damaged than can be restored.
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
        """Return if the file is, byte for byte, the version it is named by; reads all of it.

        Raises:
            IndexFormatError: it is not.
            OSError: it cannot be read.
        """
        found = file_version(self.path)
        if found != self.version:
            raise IndexFormatError(self.path, f"its content is that of version {found}")


def _encoded(key: str) -> bytes:
    # Half a surrogate has no UTF-8: what this makes of it is nobody's key.
    return key.encode(errors="surrogatepass")
