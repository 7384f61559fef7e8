"""The blocks of a shard (docs/format.md; frozen): their bytes, their places, whether they are what it is named by.

Files are read page by page, without LMDB. Nothing here trusts them: a hostile one is an error, never a crash.
"""

from __future__ import annotations

import enum
import hashlib
import os
import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from deeplink.cache.errors import ShardCorruptError, ShardIdError
from deeplink.core.types import ShardId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from deeplink.cache.format.names import Names

FORMAT = 1
DIGEST_DIGITS = 40
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
_COLUMNS = (("lengths", "<u8"), ("checksums", "<u8"), ("blocks", "<u4"), ("offsets", "<u4"))
_ENTRY_BYTES = 8 + 8 + 4 + 4 + 2
_CHUNK = 1 << 20
_SHARD_ID = re.compile(rf"[0-9a-f]{{{DIGEST_DIGITS}}}")

checksum: Callable[[bytes | bytearray | memoryview], int] = xxhash.xxh3_64_intdigest
"""The xxh3-64 of some bytes. The library's own function: a wrapper would cost a sixth of hashing 4 KiB."""


class RecordKind(enum.IntEnum):
    """Kind of a record's payload."""

    DATA = 1
    TABLE = 2


@dataclass(frozen=True, slots=True)
class Header:
    """What a block says of itself."""

    kind: RecordKind
    number: int  # position of the record in its shard, from 0, over all kinds
    samples: int  # that begin in this block (DATA), or that are listed (TABLE)
    first: int  # position in the shard of the first of them
    payload: int  # bytes
    checksum: int  # of the payload


@dataclass(frozen=True, slots=True, eq=False)
class FileLayout:
    """Where the blocks of one file lie."""

    headers: tuple[Header, ...]
    offsets: np.ndarray  # uint64, where each block's payload begins in the file; a multiple of 4,096
    payloads: np.ndarray  # uint64, bytes


def checked_shard_id(text: str) -> ShardId:
    """Return `text` as a shard's name."""
    if not is_shard_id(text):
        raise ShardIdError(text)
    return ShardId(text)


def is_shard_id(text: str) -> bool:
    """Tell whether `text` can be a shard's name."""
    return _SHARD_ID.fullmatch(text) is not None


def encode_header(header: Header) -> bytes:
    """Return the 4,080 bytes in front of the payload."""
    at = (header.number, header.samples, header.first, header.payload, header.checksum)
    fields = _FIELDS.pack(_MAGIC, FORMAT, header.kind, *at)
    body = fields.ljust(HEADER - _CHECKSUM.size, b"\0")
    return body + _CHECKSUM.pack(checksum(body))


def is_header(data: bytes | memoryview) -> bool:
    """Tell whether `data` begins as a block does."""
    return bytes(data[: len(_MAGIC)]) == _MAGIC


def decode_header(data: bytes | memoryview, shard: str = "?") -> Header:
    """Return what the 4,080 bytes in `data` say."""
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
    return Header(known, number, samples, first, payload, payload_checksum)


def value_pages(payload: int) -> int:
    """Return how many pages of an LMDB file a block with so long a payload takes.

    >>> value_pages(BLOCK_PAYLOAD)
    256
    """
    return -(-(VALUE_START + HEADER + payload) // PAGE)


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


def encode_table(names: Names, columns: Mapping[str, np.ndarray]) -> bytes:
    """Return the payload of a table record of at most TABLE_SAMPLES names, with columns as in `decode_table`."""
    text = names.joined()
    parts = [columns[name].astype(kind).tobytes() for name, kind in _COLUMNS]
    return b"".join([_COUNT.pack(len(names), len(text)), *parts, names.lengths.astype("<u2").tobytes(), text])


def decode_table(payload: bytes | memoryview, shard: str = "?") -> tuple[list[bytes], dict[str, np.ndarray]]:
    """Return the keys (UTF-8) and the columns of a table record.

    `blocks` and `offsets` are uint32, the number of the block where each sample begins and bytes from the start of
    its payload; `lengths` (bytes) and `checksums` are uint64.
    """
    if len(payload) < _COUNT.size:
        raise ShardCorruptError(shard, "a table record is cut short")
    count, text = _COUNT.unpack(payload[: _COUNT.size])
    if len(payload) != _COUNT.size + count * _ENTRY_BYTES + text:
        raise ShardCorruptError(shard, "a table record has the wrong size")
    columns: dict[str, np.ndarray] = {}
    at = _COUNT.size
    for name, kind in _COLUMNS:
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


def _headers(descriptor: int, size: int, shard: str) -> Iterator[tuple[int, Header]]:
    page = 0
    while (page + 1) * PAGE <= size:
        at = page * PAGE
        head = os.pread(descriptor, HEADER, at + VALUE_START)
        if not is_header(head):
            page += 1
            continue
        header = decode_header(head, shard)
        start = at + PAGE
        if header.payload > SPAN + PAGE or start + header.payload > size:
            raise ShardCorruptError(shard, f"block {header.number} reaches beyond the file's end")
        yield start, header
        page += value_pages(header.payload)


def scan_shard(descriptor: int, shard: str = "?") -> FileLayout:
    """Return where the blocks of an open file lie; a few page reads per MiB."""
    found = list(_headers(descriptor, os.fstat(descriptor).st_size, shard))
    if not found:
        raise ShardCorruptError(shard, "the file holds no block")
    for number, (_, header) in enumerate(found):
        if header.number != number:
            raise ShardCorruptError(shard, f"block {header.number} where block {number} should be")
    return FileLayout(
        tuple(header for _, header in found),
        np.array([start for start, _ in found], np.uint64),
        np.array([header.payload for _, header in found], np.uint64),
    )


def name_of(digests: Iterable[bytes]) -> ShardId:
    """Return the name of a shard whose records have values of these SHA-256 digests, in order."""
    whole = hashlib.sha256(f"deeplink shard {FORMAT}\n".encode())
    for digest in digests:
        whole.update(digest)
    return ShardId(whole.hexdigest()[:DIGEST_DIGITS])


def _value_digest(descriptor: int, start: int, length: int, shard: str) -> bytes:
    digest = hashlib.sha256()
    at, end = start - HEADER, start + length
    while at < end:
        chunk = os.pread(descriptor, min(_CHUNK, end - at), at)
        if not chunk:
            raise ShardCorruptError(shard, "the file ends too soon")
        digest.update(chunk)
        at += len(chunk)
    return digest.digest()


def verify_shard(descriptor: int, shard: ShardId) -> FileLayout:
    """Return the layout of an open file after all of it was read and found to be `shard`."""
    layout = scan_shard(descriptor, shard)
    places = zip(layout.offsets.tolist(), layout.payloads.tolist(), strict=True)
    found = name_of(_value_digest(descriptor, start, length, shard) for start, length in places)
    if found != shard:
        raise ShardCorruptError(shard, f"its content is that of {found}")
    return layout
