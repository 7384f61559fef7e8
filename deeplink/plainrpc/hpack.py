"""Just enough of HPACK (RFC 7541) for gRPC calls: writing a call's head, reading its status. Pure.

We write plain literals, nothing for either side to remember, and tell servers that our dynamic table has no room:
then every field that is not in the static table comes as a literal too, and the status is not in the static table.
Huffman-coded texts (no gRPC server sends them for these fields) are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_POST, _SCHEME_HTTP = b"\x83", b"\x86"  # appendix A: whole fields of the static table
_AUTHORITY, _PATH, _NEW_NAME = b"\x01", b"\x04", b"\x00"  # literals that are not to be indexed
_SEVEN_BITS = 0x7F


def request_head(address: str, method: str, metadata: Iterable[tuple[str, str]]) -> bytes:
    """Return the header block of a call of `/package.Service/Method`."""
    fields = (("te", "trailers"), ("content-type", "application/grpc"), *metadata)
    return b"".join(
        (
            _POST,
            _SCHEME_HTTP,
            _PATH + _literal(method.encode()),
            _AUTHORITY + _literal(address.encode()),
            *(_NEW_NAME + _literal(name.encode()) + _literal(value.encode()) for name, value in fields),
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


def literal_fields(head: bytes) -> dict[str, str]:
    """Return the fields whose name and value are literals.

    >>> literal_fields(bytes([0x88, 0x00, 3]) + b"abc" + bytes([1]) + b"x")
    {'abc': 'x'}

    Raises:
        ValueError: the block is malformed.
    """
    found: dict[str, str] = {}
    at = 0
    try:
        while at < len(head):
            first = head[at]
            if first & 0x80:  # a whole field of the static table
                _, at = _number(head, at, 7)
            elif first & 0xE0 == 0x20:  # noqa: PLR2004 - the dynamic table's new size
                _, at = _number(head, at, 5)
            else:
                index, at = _number(head, at, 6 if first & 0x40 else 4)
                name, at = (None, at) if index else _text(head, at)
                value, at = _text(head, at)
                if name is not None and value is not None:
                    found[name] = value
    except IndexError as problem:
        raise ValueError("a header block that ends too soon") from problem
    return found


def _number(head: bytes, at: int, bits: int) -> tuple[int, int]:
    most = (1 << bits) - 1
    number = head[at] & most
    at += 1
    if number < most:
        return number, at
    shift = 0
    while True:
        byte = head[at]
        at += 1
        number += (byte & _SEVEN_BITS) << shift
        shift += 7
        if not byte & 0x80:
            return number, at
        if shift > 28:  # noqa: PLR2004 - no field of ours is that long
            raise ValueError("a number that does not end")


def _text(head: bytes, at: int) -> tuple[str | None, int]:
    coded = bool(head[at] & 0x80)
    size, at = _number(head, at, 7)
    if at + size > len(head):
        raise ValueError("a header field beyond the block's end")
    return (None if coded else head[at : at + size].decode()), at + size
