"""Writes header blocks (HPACK, RFC 7541) of gRPC calls: literals, nothing for the peer to remember. Pure."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING
from urllib.parse import quote

if TYPE_CHECKING:
    from collections.abc import Iterable

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
    """Return the header block that ends a call.

    Args:
        status: gRPC's.
        why: a text to go with it.
        is_alone: whether no answer began before, so that the block begins one too.
        retry_ms: when to try again, as gRPC's clients understand it; 0 says nothing.
    """
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
