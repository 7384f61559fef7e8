"""As much of HTTP/2 (RFC 9113) and HPACK (RFC 7541) as shows whether a gRPC client has the token. Pure.

Frames' heads, and header blocks of any peer: both tables, Huffman codes, bounds on all of it.
"""

from __future__ import annotations

import struct
from collections import deque
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME = struct.Struct(">BHBBI")
LAST_STREAM = (1 << 31) - 1


class FrameType(IntEnum):
    """Kinds of frames (RFC 9113 6) that are told apart."""

    DATA = 0
    HEADERS = 1
    RESET = 3
    CONTINUATION = 9


END_STREAM = 1
END_HEADERS, PADDED, PRIORITY = 4, 8, 32


def without_padding(flags: int, payload: bytes) -> bytes:
    """Return what a frame of headers or data holds, without its padding. ValueError: it is all padding."""
    if flags & PADDED:
        if not payload or payload[0] > len(payload) - 1:
            raise ValueError("a frame that is all padding")
        payload = payload[1 : len(payload) - payload[0]]
    return payload


_TABLE_SIZE = 4096
"""Bytes of the dynamic table; what a peer may use before it has seen our settings (RFC 9113 6.5.2)."""
_ENTRY_BYTES = 32  # 4.1: what an entry counts beyond its texts
_LARGEST_LIST = 32_768
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

    def read(self, block: bytes) -> dict[str, str]:
        """Return the block's fields; of several with one name the last."""
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
