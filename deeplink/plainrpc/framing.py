"""HTTP/2's frames (RFC 9113) as gRPC uses them, for both sides. Pure."""

from __future__ import annotations

import struct
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME = struct.Struct(">BHBBI")
PREFIX = struct.Struct(">BI")
"""gRPC: whether a message is compressed, and its length."""
COUNT = struct.Struct(">I")
SETTING = struct.Struct(">HI")

WINDOW = (1 << 31) - 1
DEFAULT_WINDOW = 65_535
"""RFC 9113 6.9.2: what both ends start with."""
LARGEST_FRAME = (1 << 24) - 1
DEFAULT_FRAME = 16_384
"""RFC 9113 4.2: what every endpoint takes."""
LAST_STREAM = (1 << 31) - 1


class FrameType(IntEnum):
    """Kinds of frames (RFC 9113 6)."""

    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RESET = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


END_STREAM = ACK = 1
END_HEADERS, PADDED, PRIORITY = 4, 8, 32


class Setting(IntEnum):
    """Settings of a connection (RFC 9113 6.5.2)."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MOST_STREAMS = 3
    INITIAL_WINDOW = 4
    FRAME_SIZE = 5
    HEADER_LIST_SIZE = 6


class ErrorCode(IntEnum):
    """Why a stream or a connection is ended (RFC 9113 7)."""

    NONE = 0
    PROTOCOL = 1
    FLOW_CONTROL = 3
    STREAM_CLOSED = 5
    FRAME_SIZE = 6
    REFUSED_STREAM = 7
    COMPRESSION = 9
    CALM = 11


class Status(IntEnum):
    """gRPC's statuses, those that we make or tell apart."""

    OK = 0
    CANCELLED = 1
    INVALID = 3
    DEADLINE = 4
    EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a whole frame."""
    return frame_head(kind, flags, stream, len(payload)) + payload


def frame_head(kind: int, flags: int, stream: int, length: int) -> bytes:
    """Return the nine bytes before a frame's payload."""
    return FRAME.pack(length >> 16, length & 0xFFFF, kind, flags, stream)


def unpacked(head: bytes) -> tuple[int, int, int, int]:
    """Return a frame's kind, flags, stream and length, from the nine bytes before its payload."""
    high, low, kind, flags, stream = FRAME.unpack(head)
    return kind, flags, stream & LAST_STREAM, (high << 16) + low


def settings(values: dict[Setting, int]) -> bytes:
    """Return the frame that tells the other side our settings."""
    return frame(FrameType.SETTINGS, 0, 0, b"".join(SETTING.pack(key, value) for key, value in values.items()))


def greeting(window: int) -> bytes:
    """Return what a client says first; the window is that of all calls together and of each."""
    said = {Setting.HEADER_TABLE_SIZE: 0, Setting.ENABLE_PUSH: 0, Setting.INITIAL_WINDOW: window}
    return PREFACE + settings({**said, Setting.FRAME_SIZE: LARGEST_FRAME}) + wider(0, window - DEFAULT_WINDOW)


def call(stream: int, head: bytes, message: bytes) -> bytes:
    """Return the frames of a call with one request: its header block and its message."""
    body = PREFIX.pack(0, len(message)) + message
    frames = [frame(FrameType.HEADERS, END_HEADERS, stream, head)]
    for start in range(0, len(body), DEFAULT_FRAME):
        part = body[start : start + DEFAULT_FRAME]
        frames.append(frame(FrameType.DATA, END_STREAM if start + len(part) == len(body) else 0, stream, part))
    return b"".join(frames)


def wider(stream: int, more: int) -> bytes:
    """Return the frame that lets the other side send so much more in a stream; 0: in all."""
    return frame(FrameType.WINDOW_UPDATE, 0, stream, COUNT.pack(more))


def going_away(last_stream: int, fault: ErrorCode, why: str) -> bytes:
    """Return the frame that says that this connection ends, and why."""
    return frame(FrameType.GOAWAY, 0, 0, COUNT.pack(last_stream) + COUNT.pack(fault) + why.encode()[:1000])


def without_padding(flags: int, payload: bytes) -> bytes:
    """Return what a frame of headers or data holds, without padding and priority.

    Raises:
        ValueError: it is all padding.
    """
    if flags & PADDED:
        if not payload or payload[0] > len(payload) - 1:
            raise ValueError("a frame that is all padding")
        payload = payload[1 : len(payload) - payload[0]]
    return payload
