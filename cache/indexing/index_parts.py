"""Taking the file of an index apart without trusting it.

Arrow believes what a damaged file says, and may crash on it. So what Arrow reads when a file is opened is compared
with the file's seal before, and what comes back are views that were seen to lie within the mapped file.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import pyarrow as pa
from typing_extensions import override

from deeplink.cache.errors import IndexFormatError
from deeplink.cache.indexing.first_touch import FirstTouch
from deeplink.cache.indexing.index_format import (
    FORMAT,
    ID_BYTES,
    META,
    OFFSETS_1,
    PLACE,
    READABLE,
    SCHEMA,
    SCHEMA_1,
    SCHEMA_2,
    ShardEntry,
)
from deeplink.cache.indexing.seal import Seal
from deeplink.cache.indexing.slots import PROBES
from deeplink.types import ShardId

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_SCHEMAS = {1: SCHEMA_1, 2: SCHEMA_2, FORMAT: SCHEMA}
_DAMAGE = (pa.ArrowException, ValueError, LookupError, TypeError, ArithmeticError, MemoryError, SystemError)
"""What Arrow and Python make of a file that does not hold together (a negative length is a SystemError)."""


class ShardNumberError(IndexFormatError, IndexError):
    """A number stands for no shard of an index: the row it was taken from is damaged."""

    def __init__(self, path: Path, number: int, shards: int) -> None:
        super().__init__(path, f"a row lies in shard {number} of {shards}")
        self.number, self.shards = number, shards


@dataclass(frozen=True, slots=True, eq=False)
class ShardTable(Sequence[ShardEntry]):
    """The shards of a version; an entry is made when it is asked for.

    Attributes:
        path: of the index.
        ids: their names, 20 bytes each, one after another.
        sizes, samples: uint64, as in ShardEntry.
        first_block: int64, shape (shards + 1,): where each one's offsets begin in `block_offsets`.
        block_offsets: int64, where each block's payload begins in its shard's file, of all shards.
    """

    path: Path
    ids: memoryview
    sizes: np.ndarray
    samples: np.ndarray
    first_block: np.ndarray
    block_offsets: np.ndarray

    def __post_init__(self) -> None:
        first = self.first_block
        if first[0] != 0 or first[-1] != len(self.block_offsets) or (first[1:] < first[:-1]).any():
            raise IndexFormatError(self.path, "the list of block offsets does not fit the list of shards")

    @override
    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, number: int) -> ShardEntry: ...
    @overload
    def __getitem__(self, number: slice) -> list[ShardEntry]: ...
    @override
    def __getitem__(self, number: int | slice) -> ShardEntry | list[ShardEntry]:
        """Return an entry, or a list of some.

        Raises:
            ShardNumberError: there is no such shard.
        """
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        at = number + len(self) if number < 0 else number
        if not 0 <= at < len(self):
            raise ShardNumberError(self.path, number, len(self))
        return ShardEntry(
            id=ShardId(self.ids[at * ID_BYTES : (at + 1) * ID_BYTES].hex()),
            bytes=int(self.sizes[at]),
            samples=int(self.samples[at]),
            blocks=int(self.first_block[at + 1] - self.first_block[at]),
        )

    @override
    def __iter__(self) -> Iterator[ShardEntry]:
        return (self[i] for i in range(len(self)))

    def offsets(self, number: int) -> np.ndarray:
        """Return where each block's payload of a shard begins in its file (int64).

        Raises:
            ShardNumberError: there is no such shard.
        """
        if not 0 <= number < len(self):
            raise ShardNumberError(self.path, number, len(self))
        return self.block_offsets[self.first_block[number] : self.first_block[number + 1]]


class MappedFile:
    """A file mapped into memory, read-only, of which parts can be put right in this process alone.

    Attributes:
        view: the bytes.
        address: of the first of them.
    """

    def __init__(self, path: Path) -> None:
        """Map `path`.

        Raises:
            OSError: it cannot be opened.
            ValueError: it is empty.
        """
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # Private, so that it can be put right; not writable until then: that would count as memory in use.
            self._map = mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        self.view = memoryview(self._map)
        self.address = int(np.frombuffer(self.view, np.uint8).ctypes.data)

    def write(self, at: int, data: bytes) -> None:
        """Change bytes in memory; views see it at once, the file stays as it is.

        Raises:
            OSError: the memory cannot be made writable.
        """
        start = at // mmap.PAGESIZE * mmap.PAGESIZE
        # Not made read-only again: another thread may be about to put the same part right.
        if _mprotect(self.address + start, at + len(data) - start, mmap.PROT_READ | mmap.PROT_WRITE):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        ctypes.memmove(self.address + at, data, len(data))


_mprotect = ctypes.CDLL(None, use_errno=True).mprotect
_mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class IndexParts:
    """What an index file holds, as read-only views of it.

    Attributes:
        format: its format.
        source: where the small files came from.
        home: where all of the shards are kept besides; empty for nowhere.
        shards: the shards.
        ends: int64, shape (rows + 1,): where each key begins in `text`. Not looked at.
        text: the keys, one after another.
        columns: `shard`, `block`, `offset`, `length`, `checksum`, per row. Not looked at.
        slots: uint32, the table by which rows are found (see slots.py); None before format 3. Not looked at.
        file: the file.
        seal: its seal; None in format 1.
    """

    format: int
    source: str
    home: str
    shards: ShardTable
    ends: np.ndarray
    text: memoryview
    columns: dict[str, np.ndarray]
    slots: np.ndarray | None
    file: MappedFile
    seal: Seal | None


def load(path: Path) -> IndexParts:
    """Map an index file and return its parts; reads nothing of its columns.

    A damaged part of what has to be read is put right in memory, where the seal can do it.

    Raises:
        IndexFormatError: it is no index, damaged, or of an unknown format.
        OSError: it cannot be opened.
    """
    try:
        file = MappedFile(path)
        seal = Seal.find(file.view)
        if seal is not None:
            _put_right(path, file, seal)
        return _parts(path, file, seal)
    except _DAMAGE as problem:
        raise IndexFormatError(path, str(problem)) from problem
    except OSError as problem:
        if problem.errno is None:  # Arrow's own word for a file that does not hold together
            raise IndexFormatError(path, str(problem)) from problem
        raise


def _put_right(path: Path, file: MappedFile, seal: Seal) -> None:
    if not seal.is_footer_whole() and not seal.restore_footer(file.write):
        raise IndexFormatError(path, "its footer is damaged")
    FirstTouch(path, file, seal).mend(seal.chunks([(0, seal.checked)]))


def _parts(path: Path, file: MappedFile, seal: Seal | None) -> IndexParts:
    reader = pa.ipc.open_file(pa.py_buffer(file.view))
    # The format first: a newer one may have other columns, and is to be refused by its name.
    meta = reader.schema.metadata or {}
    said: dict[str, Any] = json.loads(meta[META]) if META in meta else {}
    if not isinstance(said.get("format"), int) or not isinstance(said.get("source"), str):
        raise IndexFormatError(path, "it is not an index")
    if said["format"] not in READABLE:
        newer = " was written by a newer release;" if said["format"] > FORMAT else ""
        known = ", ".join(map(str, READABLE))
        raise IndexFormatError(path, f"format {said['format']}{newer} this release reads formats {known}")
    first = said["format"] == 1
    if not first and seal is None:
        raise IndexFormatError(path, "its end is damaged")
    if reader.num_record_batches != 1 or not reader.schema.equals(_SCHEMAS[said["format"]]):
        raise IndexFormatError(path, "it does not have an index's columns")
    batch = reader.get_batch(0)
    count = batch.num_rows
    if said.get("samples", count) != count:
        raise IndexFormatError(path, f"{count:,} rows, not the {said['samples']:,} it was written with")
    shard = batch.column("shard")
    table = _shards_1(path, said, meta[OFFSETS_1]) if first else _shards(path, shard.dictionary)
    _, ends, text = batch.column("key").buffers()
    return IndexParts(
        format=said["format"],
        source=said["source"],
        home=str(said.get("home", "")),
        shards=table,
        ends=_frozen(ends if count else np.zeros(1, np.int64), "<i8", count + 1),
        text=memoryview(text or b"").cast("B").toreadonly(),
        columns={"shard": _flat(shard if first else shard.indices, "<u4", count)}
        | {name: _flat(batch.column(name), f"<u{kind.bit_width // 8}", count) for name, kind in PLACE},
        slots=_slots(file, seal, said["slots"]) if seal is not None and said["format"] == FORMAT else None,
        file=file,
        seal=seal,
    )


def _slots(file: MappedFile, seal: Seal, count: int) -> np.ndarray:
    """Return the last of what the seal covers."""
    start = seal.covered - 4 * count
    if count < PROBES or start < seal.checked:
        raise ValueError(f"a table of {count} slots")
    return _frozen(file.view[start : seal.covered], "<u4", count)


def _flat(array: pa.Array, kind: str, count: int) -> np.ndarray:
    """Return an array's values as a view, after it was seen that they are there: Arrow does not look."""
    validity, data = array.buffers()
    if array.offset or validity is not None or len(array) != count:
        raise ValueError(f"a column of {len(array)} values where {count} were expected")
    return _frozen(data if data is not None else b"", kind, count)


def _frozen(data: Any, kind: str, count: int) -> np.ndarray:
    found: np.ndarray = np.frombuffer(data, kind, count) if count else np.empty(0, kind)
    found.flags.writeable = False
    return found


def _shards(path: Path, dictionary: pa.StructArray) -> ShardTable:
    count = len(dictionary)
    lists = dictionary.field("block_offsets")
    ids = _flat(dictionary.field("id"), "u1", 0) if not count else _ids(dictionary.field("id"), count)
    _, ends, *_ = lists.buffers()
    values = lists.values
    return ShardTable(
        path=path,
        ids=ids.data.cast("B") if count else memoryview(b""),
        sizes=_flat(dictionary.field("bytes"), "<u8", count),
        samples=_flat(dictionary.field("samples"), "<u8", count),
        first_block=_frozen(ends if count else np.zeros(1, np.int64), "<i8", count + 1),
        block_offsets=_flat(values, "<i8", len(values)),
    )


def _ids(array: pa.FixedSizeBinaryArray, count: int) -> np.ndarray:
    validity, data = array.buffers()
    if array.offset or validity is not None or len(array) != count:
        raise ValueError("the list of shards is damaged")
    return _frozen(data, "u1", count * ID_BYTES)


def _shards_1(path: Path, said: dict[str, Any], offsets: bytes) -> ShardTable:
    entries = [ShardEntry(**entry) for entry in said["shards"]]
    return ShardTable(
        path=path,
        ids=memoryview(b"".join(bytes.fromhex(entry.id) for entry in entries)),
        sizes=np.array([entry.bytes for entry in entries], np.uint64),
        samples=np.array([entry.samples for entry in entries], np.uint64),
        first_block=np.cumsum([0, *(entry.blocks for entry in entries)], dtype=np.int64),
        block_offsets=_frozen(offsets, "<i8", len(offsets) // 8),
    )
