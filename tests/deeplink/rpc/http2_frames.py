"""Frames and header blocks of HTTP/2 as a client of gRPC writes them, for tests of what reads them."""

from __future__ import annotations

from deeplink.rpc.http2 import FRAME

SETTINGS, PING = 4, 6


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a whole frame."""
    return FRAME.pack(len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream) + payload


def request_head(address: str, method: str, metadata: tuple[tuple[str, str], ...]) -> bytes:
    """Return the header block of a call of `/package.Service/Method`: literals of HPACK (RFC 7541)."""
    fields = (("te", "trailers"), ("content-type", "application/grpc"), *metadata)
    named = b"\x04" + literal(method.encode()) + b"\x01" + literal(address.encode())
    return b"\x83\x86" + named + b"".join(b"\0" + literal(a.encode()) + literal(b.encode()) for a, b in fields)


def literal(value: bytes) -> bytes:
    """Return a text: its length (5.1: under 127 one byte, else spilled in groups of seven bits) and itself."""
    if len(value) < 127:
        return bytes((len(value),)) + value
    rest, spilled = len(value) - 127, bytearray((127,))
    while rest > 127:
        spilled.append(rest & 127 | 128)
        rest >>= 7
    return bytes((*spilled, rest)) + value
