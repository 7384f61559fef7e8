"""HTTP/2's frames (RFC 9113) as gRPC uses them, for both sides. Pure."""

from __future__ import annotations

import functools
import struct
from collections import deque
from enum import IntEnum
from typing import TYPE_CHECKING
from urllib.parse import quote

if TYPE_CHECKING:
    from collections.abc import Iterable

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
    """Return what a frame of headers or data holds, without padding and priority."""
    if flags & PADDED:
        if not payload or payload[0] > len(payload) - 1:
            raise ValueError("a frame that is all padding")
        payload = payload[1 : len(payload) - payload[0]]
    return payload


# Writes header blocks (HPACK, RFC 7541) of gRPC calls: literals, nothing for the peer to remember. Pure.


_POST, _SCHEME_HTTP, _STATUS_200 = b"\x83", b"\x86", b"\x88"  # appendix A: whole fields of the static table
_AUTHORITY, _PATH, _NEW_NAME = b"\x01", b"\x04", b"\x00"  # literals that are not to be indexed
_SEVEN_BITS = 0x7F
_LONGEST_WHY = 500


@functools.lru_cache(256)  # calls of one member by one method are all alike
def request_head(address: str, method: str, metadata: tuple[tuple[str, str], ...]) -> bytes:
    """Return the header block of a call of `/package.Service/Method`."""
    fields = (("te", "trailers"), ("content-type", "application/grpc"), *metadata)
    return b"".join(
        (
            _POST,
            _SCHEME_HTTP,
            _PATH + _literal(method.encode()),
            _AUTHORITY + _literal(address.encode()),
            _literals(fields),
        )
    )


def _literal(value: bytes) -> bytes:
    # 5.1: a length under 127 is one byte, a longer one spills over in groups of seven bits.
    if len(value) < _SEVEN_BITS:
        return bytes((len(value),)) + value
    rest, spilled = len(value) - _SEVEN_BITS, bytearray((_SEVEN_BITS,))
    while rest > _SEVEN_BITS:
        spilled.append(rest & _SEVEN_BITS | 0x80)
        rest >>= 7
    return bytes((*spilled, rest)) + value


def trailers(status: int, why: str, *, is_alone: bool, retry_ms: int = 0) -> bytes:
    """Return the header block that ends a call."""
    fields = [("grpc-status", str(status))]
    if why:
        fields.append(("grpc-message", quote(why[:_LONGEST_WHY], safe=" ,;:()'/")))
    if retry_ms:
        fields.append(("grpc-retry-pushback-ms", str(retry_ms)))
    return (ANSWER if is_alone else b"") + _literals(fields)


def _literals(fields: Iterable[tuple[str, str]]) -> bytes:
    return b"".join(_NEW_NAME + _literal(name.encode()) + _literal(value.encode()) for name, value in fields)


ANSWER = _STATUS_200 + _literals([("content-type", "application/grpc")])
"""The header block that begins an answer."""


# Reads header blocks (HPACK, RFC 7541) of any HTTP/2 peer: both tables, Huffman codes, bounds on all of it.


_TABLE_SIZE = 4096
"""Bytes of the dynamic table; what a peer may use before it has seen our settings (RFC 9113 6.5.2)."""
_ENTRY_BYTES = 32  # 4.1: what an entry counts beyond its texts
_LARGEST_LIST = 32_768
_MOST_ALIKE, _LONGEST_ALIKE = 4, 1024
_LONGEST_SHIFT = 28  # of a number: nothing of ours is that long

# Appendix A: values of the fields that have one, then the names, in order.
_VALUES = {
    2: b"GET", 3: b"POST", 4: b"/", 5: b"/index.html", 6: b"http", 7: b"https", 8: b"200", 9: b"204", 10: b"206",
    11: b"304", 12: b"400", 13: b"404", 14: b"500", 16: b"gzip, deflate",
}  # fmt: skip
_NAMES = """
:authority :method :method :path :path :scheme :scheme :status :status :status :status :status :status :status
accept-charset accept-encoding accept-language accept-ranges accept access-control-allow-origin age allow
authorization cache-control content-disposition content-encoding content-language content-length
content-location content-range content-type cookie date etag expect expires from host if-match
if-modified-since if-none-match if-range if-unmodified-since last-modified link location max-forwards
proxy-authenticate proxy-authorization range referer refresh retry-after server set-cookie
strict-transport-security transfer-encoding user-agent vary via www-authenticate
"""
_STATIC = [(name.encode(), _VALUES.get(number, b"")) for number, name in enumerate(_NAMES.split(), start=1)]

# Appendix B: how many bits each symbol's code has, as letters from "@" on; the codes follow from it, in order.
_CODE_LENGTHS = (
    r"MW\\\\\\\X^\\^\\\\\\\\^\\\\\\\\\FJJLMFHKJJHKHFFFEEEFFFFFFFGHOFLJMFGGGGGGGGGGGGGGGGGGGGGGHGHMSMNF"
    r"OEFEFEFFFEGGFFFEFGFEEFGGGGGOKNM\TVTTVVVWVWWWWWXWXXVWXWWWWUVWVWWXVUTVVWWUWVVXUVWWUUVUWVWWTVVVWVVW"
    r"ZZTSVWVYZZZ[[ZXYSUZ[[Z[XUUZZ\[[[TXTUVUUWVVYYXXZWZ[ZZ[[[[[\[[[[[Z^"
)
_END = 256  # the symbol that ends a text, which may not occur


def _codes() -> dict[tuple[int, int], int]:
    """Return (bits, code) -> symbol."""
    lengths = [ord(letter) - ord("@") for letter in _CODE_LENGTHS]
    codes: dict[tuple[int, int], int] = {}
    code = before = 0
    for length, symbol in sorted((length, symbol) for symbol, length in enumerate(lengths)):
        code <<= length - before
        codes[length, code] = symbol
        code, before = code + 1, length
    return codes


_CODES = _codes()
_LONGEST_CODE = max(length for length, _ in _CODES)
_MOST_PADDING = 7


class HeaderReader:
    """Reads the header blocks of one connection, in the order in which they came. Not thread-safe."""

    def __init__(self) -> None:
        self._table: deque[tuple[bytes, bytes]] = deque()
        self._size, self._most = 0, _TABLE_SIZE
        self._alike: dict[bytes, dict[str, str]] = {}

    def read(self, block: bytes) -> dict[str, str]:
        """Return the block's fields; of several with one name the last."""
        if not self._table and block in self._alike:
            return self._alike[block]
        fields = self._read(block)
        # A block that neither finds nor leaves anything in the table always says the same: most calls' heads do.
        if not self._table and len(self._alike) < _MOST_ALIKE and len(block) <= _LONGEST_ALIKE:
            self._alike[block] = fields
        return fields

    def _read(self, block: bytes) -> dict[str, str]:
        found: dict[bytes, bytes] = {}
        at = size = 0
        try:
            while at < len(block):
                first = block[at]
                if first & 0xE0 == 0x20:  # noqa: PLR2004 - 6.3: the table's new size
                    most, at = number(block, at, 5)
                    self._resize(most)
                    continue
                (name, value), at = self._field(block, at, first)
                size += len(name) + len(value) + _ENTRY_BYTES
                if size > _LARGEST_LIST:
                    raise ValueError("more header fields than a call needs")
                found[name] = value
        except IndexError as problem:
            raise ValueError("a header block that ends too soon") from problem
        return {name.decode(): value.decode() for name, value in found.items()}

    def _field(self, block: bytes, at: int, first: int) -> tuple[tuple[bytes, bytes], int]:
        if first & 0x80:
            place, at = number(block, at, 7)
            return self._known(place), at
        place, at = number(block, at, 6 if first & 0x40 else 4)
        name, at = (self._known(place)[0], at) if place else text(block, at)
        value, at = text(block, at)
        if first & 0x40:
            self._remember(name, value)
        return (name, value), at

    def _known(self, place: int) -> tuple[bytes, bytes]:
        if not place:
            raise ValueError("field 0 of the table")
        return _STATIC[place - 1] if place <= len(_STATIC) else self._table[place - len(_STATIC) - 1]

    def _remember(self, name: bytes, value: bytes) -> None:
        self._table.appendleft((name, value))
        self._size += len(name) + len(value) + _ENTRY_BYTES
        self._shrink()

    def _resize(self, most: int) -> None:
        if most > _TABLE_SIZE:
            raise ValueError(f"a table of {most} bytes, more than the {_TABLE_SIZE} allowed")
        self._most = most
        self._shrink()

    def _shrink(self) -> None:
        while self._size > self._most:
            name, value = self._table.pop()
            self._size -= len(name) + len(value) + _ENTRY_BYTES


def number(block: bytes, at: int, bits: int) -> tuple[int, int]:
    """Return the number whose first byte has it in its last `bits`, and where it ends (5.1)."""
    most = (1 << bits) - 1
    found = block[at] & most
    at += 1
    if found < most:
        return found, at
    shift = 0
    while True:
        byte = block[at]
        at += 1
        found += (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return found, at
        if shift > _LONGEST_SHIFT:
            raise ValueError("a number that does not end")


def text(block: bytes, at: int) -> tuple[bytes, int]:
    """Return the text at `at`, and where it ends (5.2)."""
    coded = block[at] & 0x80
    size, at = number(block, at, 7)
    if at + size > len(block):
        raise ValueError("a header field beyond the block's end")
    found = block[at : at + size]
    return (_decoded(found) if coded else found), at + size


def _decoded(coded: bytes) -> bytes:
    found = bytearray()
    code = bits = 0
    for byte in coded:
        for shift in range(7, -1, -1):
            code, bits = code << 1 | byte >> shift & 1, bits + 1
            symbol = _CODES.get((bits, code))
            if symbol is not None:
                if symbol == _END:
                    raise ValueError("a text that goes on after its end")
                found.append(symbol)
                code = bits = 0
            elif bits > _LONGEST_CODE:
                raise ValueError("a code that stands for nothing")
    if bits > _MOST_PADDING or code != (1 << bits) - 1:
        raise ValueError("a text that ends in the middle of a code")
    return bytes(found)
