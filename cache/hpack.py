"""Just enough of HPACK (RFC 7541) to read a gRPC call's status: the literal fields of a header block. Pure.

We tell servers that our dynamic table has no room, so every field that is not in the static table comes as a
literal, and the status is not in the static table. Huffman-coded texts (no gRPC server sends them for these
fields) are left out.
"""

from __future__ import annotations

from deeplink.cache.errors import FrameError


def literal_fields(head: bytes) -> dict[str, str]:
    """Return the fields whose name and value are literals.

    >>> literal_fields(bytes([0x88, 0x00, 3]) + b"abc" + bytes([1]) + b"x")
    {'abc': 'x'}

    Raises:
        FrameError: the block is malformed.
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
    except (IndexError, UnicodeDecodeError) as problem:
        raise FrameError("a malformed header block") from problem
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
        number += (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return number, at
        if shift > 28:  # noqa: PLR2004 - no field of ours is that long
            raise FrameError("a number that does not end")


def _text(head: bytes, at: int) -> tuple[str | None, int]:
    coded = bool(head[at] & 0x80)
    size, at = _number(head, at, 7)
    if at + size > len(head):
        raise FrameError("a header field beyond the block's end")
    return (None if coded else head[at : at + size].decode()), at + size
