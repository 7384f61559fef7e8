"""The parts of an index file (docs/format.md): its columns, the slots that find a key's row, and its seal."""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from deeplink.cache.format import block
from deeplink.cache.format.block import DIGEST_DIGITS
from deeplink.core.types import Version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from deeplink.core.types import SampleKey, ShardId

FORMAT = 3
READABLE = (1, 2, 3)
META = b"deeplink"
ID_BYTES = DIGEST_DIGITS // 2


def _field(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


_SHARD = pa.struct(
    [
        _field("id", pa.binary(ID_BYTES)),
        _field("bytes", pa.uint64()),
        _field("samples", pa.uint64()),
        _field("block_offsets", pa.large_list(_field("item", pa.uint64()))),
    ]
)
PLACE = [("block", pa.uint32()), ("offset", pa.uint32()), ("length", pa.uint64()), ("checksum", pa.uint64())]
SCHEMA = pa.schema(
    [
        _field("key", pa.large_string()),
        _field("shard", pa.dictionary(pa.uint32(), _SHARD)),
        *(_field(name, kind) for name, kind in PLACE),
    ]
)
SCHEMA_2 = SCHEMA.append(_field("hash", pa.uint64())).append(_field("hash_row", pa.uint32()))
"""Its hashes, sorted, and the row of each are of no use any more: keys are found by halving."""
OFFSETS_1 = b"deeplink.block_offsets"
SCHEMA_1 = pa.schema(
    [
        _field("key", pa.large_string()),
        _field("shard", pa.uint32()),
        *(_field(name, kind) for name, kind in PLACE),
    ]
)

MOST_ROWS = (1 << 32) - 1
"""Rows are numbered in 32 bits."""
PROBES = 128
"""Slots looked at for a key, and slots behind the last home. One key in 10^11 or so would need more."""
_EMPTY = (1 << 32) - 1
_HASHED_AT_ONCE = 1 << 16

_SMALLEST, _LARGEST = 1 << 12, 1 << 18
_IN_A_PARITY = 128
_MAGIC, _MAGIC_1 = b"DLSEAL2\n", b"DLSEAL1\n"
_FIELDS, _FIELDS_1 = struct.Struct("<QQQQQQ"), struct.Struct("<QQQQQ")
_CHECKSUM = struct.Struct("<Q")
_ARROW_END = struct.Struct("<i6s")
"""An Arrow file's last bytes: how long its footer is, and `ARROW1`."""
_LISTS = 2
_LOOKED_AT = (1 << 16, 1 << 23)
"""Of the file's end, for the lists: the second takes in those of the largest index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """One shard of a version."""

    id: ShardId
    bytes: int  # of its file
    samples: int  # rows of the version that it holds
    blocks: int  # of all kinds


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class IndexContent:
    """What an index is made of; columns in the order of the sorted keys."""

    source: str  # where the small files are
    shards: Sequence[ShardEntry]  # as numbered in `shard`
    block_offsets: Sequence[np.ndarray]  # per shard, uint64: where each block's payload begins in its file
    keys: Sequence[SampleKey] | pa.LargeStringArray  # by their bytes, each once; Arrow's where there are many
    shard: np.ndarray  # uint32, like the next two: where each sample begins
    block: np.ndarray
    offset: np.ndarray
    length: np.ndarray  # uint64, bytes
    checksum: np.ndarray  # uint64, xxh3-64
    home: str = ""  # where all of the shards are kept besides; empty for nowhere
    access: str = ""  # who may read it (`SourceAccess`); empty: that is not known


# Not `pa.array`, which imports pandas where that is installed.


def numbers(values: Iterable[int] | np.ndarray, kind: pa.DataType) -> pa.Array:
    """Return whole numbers as a column of `kind`; an array of that type is shared, not copied."""
    dtype = np.dtype(str(kind))
    held = values if isinstance(values, np.ndarray) else np.fromiter(values, dtype)
    held = np.ascontiguousarray(held).astype(dtype, casting="safe", copy=False)
    return pa.Array.from_buffers(kind, len(held), [None, pa.py_buffer(held)])


def strings(values: Sequence[bytes], kind: pa.DataType) -> pa.Array:
    """Return runs of bytes as a column of `kind`: large_binary, or large_string of what is known to be UTF-8."""
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, values), np.int64, len(values)), out=offsets[1:])
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(values))])


def fixed(values: Sequence[bytes], size: int) -> pa.Array:
    """Return runs of `size` bytes each as a column."""
    if any(len(value) != size for value in values):
        raise ValueError(f"each is to be of {size} bytes")
    return pa.Array.from_buffers(pa.binary(size), len(values), [None, pa.py_buffer(b"".join(values))])


def write_index(path: Path, content: IndexContent) -> Version:
    """Write an index file and return its version; the same content gives the same file.

    Takes about 16 bytes of memory per sample besides the content.
    """
    keys = _key_array(content.keys)
    if len(keys) > MOST_ROWS:
        raise ValueError(f"{len(keys):,} samples; an index holds {MOST_ROWS:,} at most")
    if not is_ascending(keys):
        raise ValueError("the keys are not sorted, or one is there twice")
    slots = make_slots(keys)
    meta = {"format": FORMAT, "samples": len(keys), "slots": len(slots), "source": content.source}
    if content.home:
        meta["home"] = content.home
    if content.access:
        meta["access"] = content.access
    schema = SCHEMA.with_metadata({META: json.dumps(meta, sort_keys=True).encode()})
    columns = [
        keys,
        pa.DictionaryArray.from_arrays(numbers(content.shard, pa.uint32()), _shard_array(content)),
        *(numbers(getattr(content, name), kind) for name, kind in PLACE),
    ]
    batch = pa.record_batch(columns, schema=schema)
    # One record batch, so that each column is one run of memory.
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        writer.write_batch(batch)
    # Behind the columns: in front of them is only what a reader looks at when it opens the file.
    append_seal(path, _columns_start(path), slots.astype("<u4", copy=False).data)
    return file_version(path)


def _columns_start(path: Path) -> int:
    """Return where the columns of a file begin: behind all that says where they are, and the shards."""
    with pa.memory_map(str(path)) as mapped:
        begin = mapped.read_buffer(1).address
        _, ends, _ = pa.ipc.open_file(mapped).get_batch(0).column("key").buffers()
        return int(ends.address - begin) if ends is not None else mapped.size()


def is_ascending(keys: pa.LargeStringArray) -> bool:
    """Tell whether keys are sorted by their bytes, each there once."""
    return len(keys) <= 1 or bool(pc.all(pc.less(keys[:-1], keys[1:])).as_py())


def _key_array(keys: Sequence[SampleKey] | pa.LargeStringArray) -> pa.LargeStringArray:
    if not isinstance(keys, pa.LargeStringArray):
        return strings([key.encode() for key in keys], pa.large_string())
    # A slice would drag along, or worse point into, what it was cut from.
    return pa.concat_arrays([keys]) if keys.offset else keys


def _shard_array(content: IndexContent) -> pa.StructArray:
    ends = np.cumsum([0, *map(len, content.block_offsets)], dtype=np.int64)
    every = np.concatenate([np.asarray(part, np.uint64) for part in content.block_offsets])
    item = _SHARD.field("block_offsets").type.value_field
    blocks = pa.LargeListArray.from_arrays(
        numbers(ends, pa.int64()), numbers(every, pa.uint64()), type=pa.large_list(item)
    )
    columns = [
        fixed([bytes.fromhex(entry.id) for entry in content.shards], ID_BYTES),
        numbers((entry.bytes for entry in content.shards), pa.uint64()),
        numbers((entry.samples for entry in content.shards), pa.uint64()),
        blocks,
    ]
    return pa.StructArray.from_arrays(columns, fields=list(_SHARD))


def file_version(path: Path) -> Version:
    """Return the version that a file's bytes stand for; reads all of it."""
    with path.open("rb") as file:
        return Version(hashlib.file_digest(file, "sha256").hexdigest()[:DIGEST_DIGITS])


def make_slots(keys: pa.LargeStringArray) -> np.ndarray:
    """Return the table of some keys, uint32; takes about 16 bytes of memory per key."""
    return place_slots(_hashes(keys))


def place_slots(hashes: np.ndarray) -> np.ndarray:
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
    """A table as it lies in memory: what it finds is compared, what it misses may be there."""

    def __init__(self, slots: np.ndarray, rows: int) -> None:
        if len(slots) < PROBES:
            raise ValueError(f"a table of {len(slots)} slots, where there are {PROBES} at least")
        self._slots, self._rows = slots.data.cast("B").cast("I"), rows
        self._homes, self._row_bits = len(slots) - PROBES, rows.bit_length()

    def row(self, key: bytes, key_of: Callable[[int], bytes]) -> int | None:
        """Return the row of a key, given each row's; None where the table does not say."""
        hashed = block.checksum(key)
        home = (hashed >> 32) * self._homes >> 32
        mark, rows = hashed << self._row_bits & _EMPTY, self._rows
        for slot in self._slots[home : home + PROBES]:
            if slot == _EMPTY:
                break
            row = slot ^ mark
            # Where the bits of the hash are those of another key, this is beyond all rows.
            if row < rows and key_of(row) == key:
                return row
        return None


def chunk_size(covered: int) -> int:
    """Return how large the chunks of so many bytes are made: so that they and the lists of them are both small.

    Each has 16 bytes in the lists, and two of them at least are parities.

    >>> [chunk_size(covered) for covered in (0, 1 << 20, 1 << 28, 1 << 40)]
    [4096, 4096, 65536, 262144]
    """
    size = _SMALLEST
    while size < _LARGEST and size * size < 8 * covered:
        size *= 2
    return size


def parities_of(count: int) -> int:
    """Return how many parities so many chunks have: at least two, so that damage across a border is restored.

    >>> [parities_of(count) for count in (1, 2, 200, 5000)]
    [1, 2, 2, 40]
    """
    return min(count, max(2, -(-count // _IN_A_PARITY)))


def append_seal(path: Path, checked: int, behind: bytes | memoryview = b"") -> None:
    """Put a seal into an Arrow file that has just been written."""
    with path.open("r+b") as file:
        file.seek(-_ARROW_END.size, 2)
        length, _ = _ARROW_END.unpack(file.read(_ARROW_END.size))
        start = file.seek(-_ARROW_END.size - length, 2)
        footer = file.read()
        file.seek(start)
        file.write(behind)
        covered = file.tell()
        file.seek(0)
        size = chunk_size(covered)
        count = -(-covered // size)
        checksums, parities = [], np.zeros((parities_of(count), min(size, covered)), np.uint8)
        for number in range(count):
            chunk = file.read(min(size, covered - number * size))
            checksums.append(block.checksum(chunk))
            parities[number % len(parities), : len(chunk)] ^= np.frombuffer(chunk, np.uint8)
        fields = (block.checksum(footer), covered, checked, len(footer), size, len(parities))
        listed = np.array(checksums, "<u8").tobytes() + _FIELDS.pack(*fields)
        listed += _CHECKSUM.pack(block.checksum(listed)) + _MAGIC
        file.seek(covered)
        file.write(parities.tobytes() + footer + listed * _LISTS + footer)


@dataclass(frozen=True, slots=True, eq=False)
class Seal:
    """What the seal of a mapped file says; numbers are bytes."""

    data: memoryview  # the whole file
    checksums: np.ndarray  # uint64, of each chunk
    footer_checksum: int
    covered: int  # before the seal
    checked: int  # so many of them are to be checked when the file is opened
    footer: int
    chunk: int
    parities: int  # how many there are
    listed: int  # of a list

    @classmethod
    def find(cls, data: memoryview) -> Seal | None:
        """Return the seal of a file; None where there is none, or no whole one."""
        for size in _LOOKED_AT:
            tail = bytes(data[-size:])
            # With its line feed: what an index says of itself, in JSON behind the lists, may hold the word.
            for magic in (_MAGIC, _MAGIC_1):
                at = len(tail)
                for _ in range(_LISTS):
                    at = tail.rfind(magic, 0, at)
                    if at < 0:
                        break
                    found = cls._parsed(data, len(data) - len(tail) + at)
                    if found is not None:
                        return found
        return None

    @classmethod
    def _parsed(cls, data: memoryview, magic: int) -> Seal | None:
        stop = magic + len(_MAGIC)
        fields = {_MAGIC: _FIELDS, _MAGIC_1: _FIELDS_1}.get(bytes(data[magic:stop]))
        end = magic - _CHECKSUM.size
        if fields is None or end < fields.size:
            return None
        at = end - fields.size
        footer, covered, checked, footer_bytes, *rest = fields.unpack(data[at:end])
        chunk, parities = rest if fields is _FIELDS else (_LARGEST, 1)
        if not chunk or not parities:
            return None
        start = at - 8 * -(-covered // chunk)
        if start < 0 or block.checksum(data[start:end]) != _CHECKSUM.unpack(data[end:magic])[0]:
            return None
        checksums = np.frombuffer(data[start:at], "<u8")
        seal = cls(data, checksums, footer, covered, checked, footer_bytes, chunk, parities, stop - start)
        return seal if len(data) == seal.file_bytes else None

    @property
    def file_bytes(self) -> int:
        """How many bytes the file has to have."""
        return self._parity(self.parities) + 2 * self.footer + _LISTS * self.listed

    def _parity(self, number: int) -> int:
        """Return where a parity begins; behind the last one the copy of the footer."""
        return self.covered + number * min(self.chunk, self.covered)

    def _span(self, number: int) -> tuple[int, int]:
        """Return where a chunk begins and ends."""
        return number * self.chunk, min((number + 1) * self.chunk, self.covered)

    def chunks(self, spans: Iterable[tuple[int, int]]) -> list[int]:
        """Return the numbers of the chunks that hold bytes of `spans`, (start, stop) each, sorted."""
        return sorted(
            {
                number
                for start, stop in spans
                for number in range(start // self.chunk, -(-min(stop, self.covered) // self.chunk))
            }
        )

    def is_whole(self, number: int) -> bool:
        """Tell whether a chunk is what was written."""
        start, stop = self._span(number)
        return bool(block.checksum(self.data[start:stop]) == self.checksums[number])

    def is_footer_whole(self) -> bool:
        """Tell whether the file ends with the footer it was written with."""
        return block.checksum(self.data[-self.footer :]) == self.footer_checksum

    def restore(self, number: int, write: Callable[[int, bytes], None]) -> bool:
        """Write what chunk `number` was, unless another of its parity is damaged (False: nothing is written)."""
        start, stop = self._span(number)
        mine = number % self.parities
        whole = np.frombuffer(self.data[self._parity(mine) : self._parity(mine + 1)], np.uint8).copy()
        for other in range(mine, len(self.checksums), self.parities):
            a, b = self._span(other)
            if other != number:
                whole[: b - a] ^= np.frombuffer(self.data[a:b], np.uint8)
        restored = whole[: stop - start].tobytes()
        if block.checksum(restored) != self.checksums[number]:
            return False
        write(start, restored)
        return True

    def restore_footer(self, write: Callable[[int, bytes], None]) -> bool:
        """Write what the footer was, from its copy; False where that is damaged, too."""
        start = self._parity(self.parities)
        copy = bytes(self.data[start : start + self.footer])
        if block.checksum(copy) != self.footer_checksum:
            return False
        write(len(self.data) - self.footer, copy)
        return True
