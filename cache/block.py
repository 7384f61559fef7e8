"""The layout of a block, the value of one LMDB record: a header of 4,080 bytes, then the payload. Pure.

docs/format.md is the reference; this format is frozen. All numbers are little endian, checksums are xxh3-64.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from deeplink.cache.errors import ShardCorruptError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from deeplink.cache.names import Names

FORMAT = 1
PAGE = 4096
VALUE_START = 16
"""Bytes from the start of an LMDB overflow page to the value it holds (LMDB 0.9's page header)."""
HEADER = 4080
"""So that the payload starts on a page: 16 + 4,080 = 4,096."""
BLOCK_PAYLOAD = 255 * PAGE
"""Samples are packed into a block up to here: with its header a block fills 256 pages, 1 MiB."""
SPAN = 32 << 20
"""A longer sample is cut into pieces of this many bytes, each in a block of its own, one after another."""
TABLE_SAMPLES = 4_096
"""Samples listed by one table record."""

_MAGIC = b"DLBLOCK\n"
_FIELDS = struct.Struct("<8sHHIIIQQ")
_CHECKSUM = struct.Struct("<Q")
_COUNT = struct.Struct("<II")
_ENTRY_BYTES = 8 + 8 + 4 + 4 + 2


class RecordKind(enum.IntEnum):
    """What a record's payload is."""

    DATA = 1
    TABLE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a block says of itself.

    Attributes:
        kind: what the payload is.
        number: position of the record in its shard, from 0, over all kinds.
        samples: samples that begin in this block (DATA), or that are listed (TABLE).
        first: position in the shard of the first of them.
        payload: bytes of the payload.
        checksum: xxh3-64 of the payload.
    """

    kind: RecordKind
    number: int
    samples: int
    first: int
    payload: int
    checksum: int


checksum: Callable[[bytes | bytearray | memoryview], int] = xxhash.xxh3_64_intdigest
"""The xxh3-64 of some bytes. The library's own function: a wrapper would cost a sixth of hashing 4 KiB."""


def encode_header(header: Header) -> bytes:
    """Return the 4,080 bytes in front of the payload."""
    fields = _FIELDS.pack(
        _MAGIC,
        FORMAT,
        header.kind,
        header.number,
        header.samples,
        header.first,
        header.payload,
        header.checksum,
    )
    body = fields.ljust(HEADER - _CHECKSUM.size, b"\0")
    return body + _CHECKSUM.pack(checksum(body))


def is_header(data: bytes | memoryview) -> bool:
    """Tell whether `data` begins as a block does."""
    return bytes(data[: len(_MAGIC)]) == _MAGIC


def decode_header(data: bytes | memoryview, shard: str = "?") -> Header:
    """Return what the 4,080 bytes in `data` say.

    Raises:
        ShardCorruptError: they are not a header, damaged, or of another format version.
    """
    if len(data) != HEADER or not is_header(data):
        raise ShardCorruptError(shard, "no block where one should begin")
    body = data[: HEADER - _CHECKSUM.size]
    if checksum(bytes(body)) != _CHECKSUM.unpack(data[HEADER - _CHECKSUM.size :])[0]:
        raise ShardCorruptError(shard, "a block's header is damaged")
    _, version, kind, number, samples, first, payload, payload_checksum = _FIELDS.unpack(data[: _FIELDS.size])
    if version != FORMAT:
        raise ShardCorruptError(shard, f"blocks of format {version}, this release reads format {FORMAT}")
    try:
        known = RecordKind(kind)
    except ValueError:
        raise ShardCorruptError(shard, f"a block of unknown kind {kind}") from None
    return Header(
        kind=known, number=number, samples=samples, first=first, payload=payload, checksum=payload_checksum
    )


def value_pages(payload: int) -> int:
    """Return how many pages of an LMDB file a block with so long a payload takes.

    >>> value_pages(BLOCK_PAYLOAD)
    256
    """
    return -(-(VALUE_START + HEADER + payload) // PAGE)


@dataclass(frozen=True, slots=True, eq=False)
class BlockTable:
    """Where a shard's samples lie: one entry each, in the shard's order.

    Attributes:
        keys: their names.
        blocks: uint32, number of the block where each begins.
        offsets: uint32, bytes from the start of that block's payload.
        lengths: uint64, bytes.
        checksums: uint64, xxh3-64 of the bytes.
    """

    keys: Names
    blocks: np.ndarray
    offsets: np.ndarray
    lengths: np.ndarray
    checksums: np.ndarray

    def __len__(self) -> int:
        return len(self.keys)


def arrange(lengths: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Return where samples of these lengths go: block numbers, offsets (uint32 each), payload bytes per block.

    Samples are packed one after another; a block is closed when the next sample would not fit whole. A sample
    longer than a block has a block of its own, one longer than SPAN several.

    >>> arrange([10, 20, BLOCK_PAYLOAD])[2] == [30, BLOCK_PAYLOAD]
    True
    """
    sizes = np.asarray(lengths, np.int64)
    ends = np.cumsum(sizes)
    blocks, offsets = np.empty(len(sizes), np.uint32), np.empty(len(sizes), np.uint32)
    payloads: list[int] = []
    row = 0
    # By block, not by sample: there are hundreds of times fewer.
    while row < len(sizes):
        size, end = int(sizes[row]), int(ends[row])
        # The end of a sample cut into pieces shares its block with nothing, not even with an empty sample: a
        # piece's block holds one piece.
        room = max(BLOCK_PAYLOAD - size, 0)
        stop = int(np.searchsorted(ends, end + room, side="right")) if size <= SPAN else row + 1
        blocks[row], offsets[row] = len(payloads), 0
        while size > SPAN:
            payloads.append(SPAN)
            size -= SPAN
        blocks[row + 1 : stop] = len(payloads)
        offsets[row + 1 : stop] = ends[row : stop - 1] - end + size
        payloads.append(size + int(ends[stop - 1]) - end)
        row = stop
    return blocks, offsets, payloads


def table_payload(key_sizes: np.ndarray) -> int:
    """Return the bytes of the payload of a table record that lists keys of these sizes."""
    return _COUNT.size + len(key_sizes) * _ENTRY_BYTES + int(key_sizes.sum())


def encode_table(table: BlockTable, start: int, stop: int) -> bytes:
    """Return the payload of a table record that lists samples `start` to `stop` (at most TABLE_SAMPLES)."""
    names = table.keys[start:stop]
    text = names.joined()
    parts = [
        _COUNT.pack(len(names), len(text)),
        table.lengths[start:stop].astype("<u8").tobytes(),
        table.checksums[start:stop].astype("<u8").tobytes(),
        table.blocks[start:stop].astype("<u4").tobytes(),
        table.offsets[start:stop].astype("<u4").tobytes(),
        names.lengths.astype("<u2").tobytes(),
        text,
    ]
    return b"".join(parts)


def decode_table(payload: bytes | memoryview, shard: str = "?") -> tuple[list[bytes], dict[str, np.ndarray]]:
    """Return the keys (UTF-8) and the columns `lengths`, `checksums`, `blocks`, `offsets` of a table record.

    Raises:
        ShardCorruptError: the payload's size does not fit what it says.
    """
    if len(payload) < _COUNT.size:
        raise ShardCorruptError(shard, "a table record is cut short")
    count, text = _COUNT.unpack(payload[: _COUNT.size])
    if len(payload) != _COUNT.size + count * _ENTRY_BYTES + text:
        raise ShardCorruptError(shard, "a table record has the wrong size")
    columns: dict[str, np.ndarray] = {}
    at = _COUNT.size
    for name, kind in (("lengths", "<u8"), ("checksums", "<u8"), ("blocks", "<u4"), ("offsets", "<u4")):
        columns[name] = np.frombuffer(payload, kind, count, at)
        at += count * np.dtype(kind).itemsize
    sizes = np.frombuffer(payload, "<u2", count, at)
    at += count * 2
    if int(sizes.sum()) != text:
        raise ShardCorruptError(shard, "a table record's keys do not fit their lengths")
    ends = at + np.cumsum(sizes, dtype=np.int64)
    keys = [bytes(payload[end - size : end]) for end, size in zip(ends.tolist(), sizes.tolist(), strict=True)]
    return keys, columns


def pieces(block: int, offset: int, length: int) -> Iterator[tuple[int, int, int]]:
    """Yield the (block, offset, length) of the pieces of one sample: one, or several for one longer than SPAN.

    >>> list(pieces(3, 0, SPAN + 5)) == [(3, 0, SPAN), (4, 0, 5)]
    True
    """
    if length <= SPAN:
        yield block, offset, length
        return
    for i, start in enumerate(range(0, length, SPAN)):
        yield block + i, 0, min(SPAN, length - start)
