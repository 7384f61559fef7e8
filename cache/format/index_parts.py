"""Opens the file of an index without trusting it: Arrow believes what a damaged file says, and may crash on it.

So what Arrow reads is compared with the seal before, and what comes back was seen to lie within the mapped file.
"""

from __future__ import annotations

import ctypes
import json
import logging
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import pyarrow as pa
from typing_extensions import override

from deeplink.cache.errors import IndexFormatError
from deeplink.cache.format.index_format import (
    FORMAT,
    ID_BYTES,
    META,
    OFFSETS_1,
    PLACE,
    PROBES,
    READABLE,
    SCHEMA,
    SCHEMA_1,
    SCHEMA_2,
    Seal,
    ShardEntry,
)
from deeplink.core.descriptors import opened
from deeplink.core.types import ShardId

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

log = logging.getLogger(__name__)

_SCHEMAS = {1: SCHEMA_1, 2: SCHEMA_2, FORMAT: SCHEMA}
_DAMAGE = (pa.ArrowException, ValueError, LookupError, TypeError, ArithmeticError, MemoryError, SystemError)
"""What Arrow and Python make of a file that does not hold together (a negative length is a SystemError)."""
_mprotect = ctypes.CDLL(None, use_errno=True).mprotect
_mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class FirstTouch:
    """Compares chunks of a mapped file with its seal when they are first read. Safe across threads and fork.

    A wrong byte in a key is no error by itself: it hides a sample, or makes a class that there is not.
    """

    def __init__(self, path: Path, file: MappedFile, seal: Seal) -> None:
        self._path, self._file, self._seal = path, file, seal
        self.unseen = bytearray(b"\1") * len(seal.checksums)  # per chunk, 1 until it was compared
        self.chunk = seal.chunk

    def see(self, start: int, stop: int) -> None:
        """Return when the bytes from `start` to before `stop` of the file are what was written."""
        if not any(self.unseen[start // self.chunk : -(-stop // self.chunk)]):
            return
        numbers = [number for number in self._seal.chunks([(start, stop)]) if self.unseen[number]]
        self.mend(numbers)
        for number in numbers:
            self.unseen[number] = 0

    def mend(self, numbers: Iterable[int]) -> bool:
        """Restore, in memory, those of some chunks that are damaged; tell whether any was."""
        damaged = [number for number in numbers if not self._seal.is_whole(number)]
        for number in damaged:
            start = number * self.chunk
            if not self._seal.restore(number, self._file.write):
                here = f"the {self.chunk:,} bytes from {start:,} on, and others"
                raise IndexFormatError(self._path, f"more is damaged than can be restored: {here}")
            log.warning("index %s: bytes from %d on were damaged and are restored in memory", self._path, start)
        return bool(damaged)


@dataclass(frozen=True, slots=True, eq=False)
class ShardTable(Sequence[ShardEntry]):
    """The shards of a version; an entry is made when it is asked for."""

    path: Path  # of the index
    ids: memoryview  # their names, 20 bytes each, one after another
    sizes: np.ndarray  # uint64, as in ShardEntry
    samples: np.ndarray
    first_block: np.ndarray  # int64, shape (shards + 1,): where each one's offsets begin in `block_offsets`
    block_offsets: np.ndarray  # int64, where each block's payload begins in its shard's file, of all shards

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
        """Return an entry, or a list of some."""
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        at = number + len(self) if number < 0 else number
        self._check(at)
        return ShardEntry(
            id=ShardId(self.ids[at * ID_BYTES : (at + 1) * ID_BYTES].hex()),
            bytes=int(self.sizes[at]),
            samples=int(self.samples[at]),
            blocks=int(self.first_block[at + 1] - self.first_block[at]),
        )

    def _check(self, number: int) -> None:
        if not 0 <= number < len(self):
            raise IndexFormatError(self.path, f"a row lies in shard {number} of {len(self)}")

    @override
    def __iter__(self) -> Iterator[ShardEntry]:
        return (self[i] for i in range(len(self)))

    def offsets(self, number: int) -> np.ndarray:
        """Return where each block's payload of a shard begins in its file (int64)."""
        self._check(number)
        return self.block_offsets[self.first_block[number] : self.first_block[number + 1]]


class MappedFile:
    """A file mapped into memory, read-only; parts can be put right in memory, for this process alone."""

    def __init__(self, path: Path) -> None:
        with opened(path) as descriptor:
            # Private, so that it can be put right; not writable until then: that would count as memory in use.
            self._map = mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        self.view = memoryview(self._map)
        self.address = int(np.frombuffer(self.view, np.uint8).ctypes.data)

    def write(self, at: int, data: bytes) -> None:
        """Change bytes in memory; views see it at once, the file stays as it is."""
        start = at // mmap.PAGESIZE * mmap.PAGESIZE
        # Not made read-only again: another thread may be about to put the same part right.
        if _mprotect(self.address + start, at + len(data) - start, mmap.PROT_READ | mmap.PROT_WRITE):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        ctypes.memmove(self.address + at, data, len(data))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class IndexParts:
    """What an index file holds, as read-only views of it."""

    format: int
    source: str  # where the small files came from
    home: str  # where all of the shards are kept besides; empty for nowhere
    access: str  # who may read it; empty where that was not recorded
    shards: ShardTable
    ends: np.ndarray  # int64, shape (rows + 1,): where each key begins in `text`. Not looked at
    text: memoryview  # the keys, one after another
    columns: dict[str, np.ndarray]  # `shard`, `block`, `offset`, `length`, `checksum`, per row. Not looked at
    slots: np.ndarray | None  # uint32, see SlotTable; None before format 3. Not looked at
    file: MappedFile
    seal: Seal | None  # None in format 1


def load(path: Path) -> IndexParts:
    """Map an index file and return its parts; reads nothing of its columns.

    A damaged part of what has to be read is put right in memory, where the seal can do it.
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
        access=str(said.get("access", "")),
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


def _flat(array: pa.Array, kind: str, count: int, each: int = 1) -> np.ndarray:
    """Return an array's values as a view, after it was seen that they are there: Arrow does not look."""
    validity, data = array.buffers()
    if array.offset or validity is not None or len(array) != count:
        raise ValueError(f"a column of {len(array)} values where {count} were expected")
    return _frozen(data if data is not None else b"", kind, count * each)


def _frozen(data: Any, kind: str, count: int) -> np.ndarray:
    found: np.ndarray = np.frombuffer(data, kind, count) if count else np.empty(0, kind)
    found.flags.writeable = False
    return found


def _shards(path: Path, dictionary: pa.StructArray) -> ShardTable:
    count = len(dictionary)
    lists = dictionary.field("block_offsets")
    ids = _flat(dictionary.field("id"), "u1", count, ID_BYTES)
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
