"""The messages of the Read call as raw bytes: the body is copied once when made, and not at all when read.

The bytes are protobuf's encoding of ReadRequest and ReadReply (proto/deeplink/v1/cache.proto): tests hold them
against the generated classes. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from google.protobuf.message import DecodeError

from deeplink.cache import block
from deeplink.cache.errors import FrameError
from deeplink.types import ShardId
from deeplink.v1 import cache_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

EXTENT = np.dtype([("shard", "<u4"), ("block", "<u4"), ("offset", "<u4"), ("length", "<u4")])
ITEM = np.dtype([("status", "<u4"), ("length", "<u4")])
MOST_EXTENTS = 65_536
MOST_SHARDS = 4096
ASKED_EXTENTS = 1024
"""Asked for at once by our client: with a shard's name each they stay below `plainrpc.LARGEST_REQUEST`."""
MOST_EXTENT_BYTES = block.SPAN

_VARINT, _BYTES = 0, 2
_FIXED = {1: 8, 5: 4}
"""Kinds of fields of one size -> bytes."""
_ID, _HEAD, _BODY = 1, 2, 3
_MOST_VARINT_BYTES = 10


@dataclass(frozen=True, slots=True, eq=False)
class ExtentsRequest:
    """A batch of extents: `extents` is an array of EXTENT whose `shard` is a position in `shards`.

    `doubted` names shards of which the member has sent other bytes than were packed.
    """

    id: int
    shards: Sequence[ShardId]
    extents: np.ndarray
    doubted: Sequence[ShardId] = ()


def encode_request(request: ExtentsRequest) -> bytes:
    """Return the message of a request."""
    message = cache_pb2.ReadRequest(
        id=request.id, shards=request.shards, extents=request.extents.tobytes(), doubted=request.doubted
    )
    return message.SerializeToString()


def decode_request(message: bytes) -> ExtentsRequest:
    """Return the request in a message. Whether its extents exist is not looked at.

    Raises:
        FrameError: it is not such a message, or holds too many extents.
    """
    try:
        said = cache_pb2.ReadRequest.FromString(message)
    except DecodeError as problem:
        raise FrameError(str(problem)) from problem
    if len(said.extents) % EXTENT.itemsize:
        raise FrameError(f"{len(said.extents)} bytes of extents, not a multiple of {EXTENT.itemsize}")
    extents = np.frombuffer(said.extents, EXTENT)
    if len(extents) > MOST_EXTENTS:
        raise FrameError(f"{len(extents)} extents, more than {MOST_EXTENTS}")
    if max(len(said.shards), len(said.doubted)) > MOST_SHARDS:
        raise FrameError(f"more than {MOST_SHARDS} shards")
    doubted = [ShardId(name) for name in said.doubted]
    return ExtentsRequest(said.id, [ShardId(name) for name in said.shards], extents, doubted)


def encode_reply(number: int, head: np.ndarray, body: Sequence[bytes | memoryview]) -> bytes:
    """Return the message of a reply; `body` is copied once."""
    return b"".join([reply_start(number, head, sum(map(len, body))), *body])


def reply_start(number: int, head: np.ndarray, size: int) -> bytes:
    """Return the message of a reply with a body of `size` bytes, up to where these begin."""
    items = head.tobytes()
    parts = (
        _tag(_ID, _VARINT),
        _varint(number),
        _tag(_HEAD, _BYTES),
        _varint(len(items)),
        items,
        _tag(_BODY, _BYTES),
        _varint(size),
    )
    return b"".join(parts)


class Bytes(Protocol):
    """A message that is read from its beginning; `left` bytes of it are to come."""

    @property
    def left(self) -> int:
        """Bytes that are not read yet."""
        ...

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes."""
        ...


def read_reply_head(message: Bytes) -> tuple[int, np.ndarray]:
    """Return a reply's id and items (of ITEM), and leave its body, and no more, to be read from the message.

    Raises:
        FrameError: it is not such a message, its body is not its last field, or does not fit.
    """
    number, items = 0, np.empty(0, ITEM)
    while message.left:
        field, kind = divmod(_next_varint(message), 8)
        if kind == _VARINT:
            value = _next_varint(message)
            number = value if field == _ID else number
            continue
        size = _field_size(message, kind)
        if (field, kind) == (_BODY, _BYTES):
            break
        data = message.read(size)  # of a field that a newer release may have, too
        if (field, kind) == (_HEAD, _BYTES):
            if size % ITEM.itemsize:
                raise FrameError(f"a head of {size} bytes, not a multiple of {ITEM.itemsize}")
            items = np.frombuffer(data, ITEM)
    if int(items["length"].sum(dtype=np.uint64)) != message.left:
        raise FrameError(f"a body of {message.left} bytes that does not fit its head")
    return number, items


def _next_varint(message: Bytes) -> int:
    number = 0
    for shift in range(0, 7 * _MOST_VARINT_BYTES, 7):
        if not message.left:
            raise FrameError("a field reaches beyond the message's end")
        byte = message.read(1)[0]
        number |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return number & (1 << 64) - 1
    raise FrameError("a number does not end")


def _field_size(message: Bytes, kind: int) -> int:
    if kind == _BYTES:
        size = _next_varint(message)
    elif kind in _FIXED:
        size = _FIXED[kind]
    else:
        raise FrameError(f"a field of kind {kind}")
    if size > message.left:
        raise FrameError("a field reaches beyond the message's end")
    return size


def _tag(field: int, kind: int) -> bytes:
    return bytes([field << 3 | kind])


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:  # noqa: PLR2004 - seven bits to a byte
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
