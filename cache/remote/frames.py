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
    from collections.abc import Iterable, Iterator, Sequence

EXTENT = np.dtype([("shard", "<u4"), ("block", "<u4"), ("offset", "<u4"), ("length", "<u4")])
ITEM = np.dtype([("status", "<u4"), ("length", "<u4")])
MOST_EXTENTS = 65_536
MOST_SHARDS = 4096
ASKED_EXTENTS = 1024
"""Asked for at once by our client: with a shard's name each they stay below `plainrpc.LARGEST_REQUEST`."""
MOST_EXTENT_BYTES = block.SPAN

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_ID, _HEAD, _BODY = 1, 2, 3
_MOST_VARINT_BYTES = 10


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A batch of extents: `extents` is an array of EXTENT whose `shard` is a position in `shards`.

    `doubted` names shards of which the member has sent other bytes than were packed.
    """

    id: int
    shards: Sequence[ShardId]
    extents: np.ndarray
    doubted: Sequence[ShardId] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """Items in order: `head` is an array of ITEM, `body` their bytes; a view of the message, not a copy."""

    id: int
    head: np.ndarray
    body: memoryview


def encode_request(request: Request) -> bytes:
    """Return the message of a request."""
    message = cache_pb2.ReadRequest(
        id=request.id, shards=request.shards, extents=request.extents.tobytes(), doubted=request.doubted
    )
    return message.SerializeToString()


def decode_request(message: bytes) -> Request:
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
    return Request(said.id, [ShardId(name) for name in said.shards], extents, doubted)


def encode_reply(number: int, head: np.ndarray, body: Sequence[bytes | memoryview]) -> bytes:
    """Return the message of a reply; `body` is copied once."""
    return b"".join(reply_parts(number, head, body))


def reply_parts(number: int, head: np.ndarray, body: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """Return the message of a reply in pieces: all that is before the body, and the pieces of the body."""
    items = head.tobytes()
    size = int(head["length"].sum(dtype=np.uint64))
    before = (
        _tag(_ID, _VARINT),
        _varint(number),
        _tag(_HEAD, _BYTES),
        _varint(len(items)),
        items,
        _tag(_BODY, _BYTES),
        _varint(size),
    )
    return [b"".join(before), *body]


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
        FrameError: it is not such a message, its fields are in another order than ours, or do not fit.
    """
    number, items = 0, np.empty(0, ITEM)
    while message.left:
        tag = _next_varint(message)
        if tag == _ID << 3 | _VARINT:
            number = _next_varint(message)
        elif tag in {_HEAD << 3 | _BYTES, _BODY << 3 | _BYTES}:
            size = _next_varint(message)
            if size > message.left:
                raise FrameError("a field reaches beyond the message's end")
            if tag == _BODY << 3 | _BYTES:
                break
            if size % ITEM.itemsize:
                raise FrameError(f"a head of {size} bytes, not a multiple of {ITEM.itemsize}")
            items = np.frombuffer(message.read(size), ITEM)
        else:
            raise FrameError(f"an unknown field before the body (tag {tag})")
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


def decode_reply(message: bytes | memoryview) -> Reply:
    """Return the reply in a message, as views of it.

    Raises:
        FrameError: it is not such a message, or its items and its body do not fit.
    """
    number, head, body = 0, memoryview(b""), memoryview(b"")
    for field, value in _fields(memoryview(message)):
        if field == _ID and isinstance(value, int):
            number = value
        elif field == _HEAD and isinstance(value, memoryview):
            head = value
        elif field == _BODY and isinstance(value, memoryview):
            body = value
    if len(head) % ITEM.itemsize:
        raise FrameError(f"a head of {len(head)} bytes, not a multiple of {ITEM.itemsize}")
    items = np.frombuffer(head, ITEM)
    if int(items["length"].sum(dtype=np.uint64)) != len(body):
        raise FrameError(f"a body of {len(body)} bytes that does not fit its head")
    return Reply(number, items, body)


def split_body(reply: Reply) -> Iterator[memoryview]:
    """Yield each item's bytes, empty where it has none; views of the message."""
    at = 0
    for length in reply.head["length"].tolist():
        yield reply.body[at : at + length]
        at += length


def _tag(field: int, kind: int) -> bytes:
    return bytes([field << 3 | kind])


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:  # noqa: PLR2004 - seven bits to a byte
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    number = 0
    for i, byte in enumerate(data[at : at + _MOST_VARINT_BYTES]):
        number |= (byte & 0x7F) << (7 * i)
        if not byte & 0x80:
            return number & (1 << 64) - 1, at + i + 1
    raise FrameError("a number does not end")


def _fields(data: memoryview) -> Iterable[tuple[int, int | memoryview]]:
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        kind = tag & 7
        if kind == _VARINT:
            value, at = _read_varint(data, at)
            yield tag >> 3, value
            continue
        if kind == _BYTES:
            size, at = _read_varint(data, at)
        elif kind in {_FIXED32, _FIXED64}:
            size = 4 if kind == _FIXED32 else 8
        else:
            raise FrameError(f"a field of kind {kind}")
        if size > len(data) - at:
            raise FrameError("a field reaches beyond the message's end")
        yield tag >> 3, data[at : at + size]
        at += size
