"""Where a sealed shard's blocks lie in its file, and whether they are what its name promises.

Reads the file alone, page by page: LMDB puts every block on pages of its own, so each begins 16 bytes into a page
and says its own number and length. Nothing here trusts the file: a hostile one is an error, never a crash, which
is why members check what they are sent with this and not with LMDB.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from deeplink.cache import block
from deeplink.cache.errors import ShardCorruptError, ShardIdError
from deeplink.types import ShardId

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

DIGEST_DIGITS = 40
_CHUNK = 1 << 20
_SHARD_ID = re.compile(rf"[0-9a-f]{{{DIGEST_DIGITS}}}")


def checked_shard_id(text: str) -> ShardId:
    """Return `text` as a shard's name.

    Raises:
        ShardIdError: it is not 40 hexadecimal digits.
    """
    if not is_shard_id(text):
        raise ShardIdError(text)
    return ShardId(text)


def is_shard_id(text: str) -> bool:
    """Tell whether `text` can be a shard's name."""
    return _SHARD_ID.fullmatch(text) is not None


@dataclass(frozen=True, slots=True, eq=False)
class FileLayout:
    """Where the blocks of one file lie.

    Attributes:
        headers: what each block says, in order.
        offsets: uint64, where each block's payload begins in the file; a multiple of 4,096.
        payloads: uint64, bytes of each payload.
    """

    headers: tuple[block.Header, ...]
    offsets: np.ndarray
    payloads: np.ndarray


def _headers(descriptor: int, size: int, shard: str) -> Iterator[tuple[int, block.Header]]:
    page = 0
    while (page + 1) * block.PAGE <= size:
        at = page * block.PAGE
        head = os.pread(descriptor, block.HEADER, at + block.VALUE_START)
        if not block.is_header(head):
            page += 1
            continue
        header = block.decode_header(head, shard)
        start = at + block.PAGE
        if header.payload > block.SPAN + block.PAGE or start + header.payload > size:
            raise ShardCorruptError(shard, f"block {header.number} reaches beyond the file's end")
        yield start, header
        page += block.value_pages(header.payload)


def scan(descriptor: int, shard: str = "?") -> FileLayout:
    """Return where the blocks of an open file lie; a few page reads per MiB.

    Raises:
        ShardCorruptError: a block is damaged, missing, out of order or reaches beyond the end.
        OSError: the file cannot be read.
    """
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


def name_of(values: Iterable[bytes]) -> ShardId:
    """Return the name of a shard whose records have values of these SHA-256 digests, in order."""
    whole = hashlib.sha256(f"deeplink shard {block.FORMAT}\n".encode())
    for value in values:
        whole.update(value)
    return ShardId(whole.hexdigest()[:DIGEST_DIGITS])


def _value_digest(descriptor: int, start: int, length: int, shard: str) -> bytes:
    digest = hashlib.sha256()
    at, end = start - block.HEADER, start + length
    while at < end:
        chunk = os.pread(descriptor, min(_CHUNK, end - at), at)
        if not chunk:
            raise ShardCorruptError(shard, "the file ends too soon")
        digest.update(chunk)
        at += len(chunk)
    return digest.digest()


def digest(descriptor: int, layout: FileLayout, shard: str = "?") -> ShardId:
    """Return the name that an open file's content deserves; reads all of it.

    Raises:
        ShardCorruptError: the file ends too soon.
        OSError: it cannot be read.
    """
    places = zip(layout.offsets.tolist(), layout.payloads.tolist(), strict=True)
    return name_of(_value_digest(descriptor, start, length, shard) for start, length in places)


def verify(descriptor: int, shard: ShardId) -> FileLayout:
    """Return the layout of an open file after all of it was read and found to be `shard`.

    Raises:
        ShardCorruptError: it is not.
        OSError: it cannot be read.
    """
    layout = scan(descriptor, shard)
    found = digest(descriptor, layout, shard)
    if found != shard:
        raise ShardCorruptError(shard, f"its content is that of {found}")
    return layout
