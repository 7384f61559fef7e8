"""Reads what a peer sends up to its first call with the token; says what the server may have before. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.plainrpc import framing
from deeplink.plainrpc.errors import SessionError
from deeplink.plainrpc.framing import ErrorCode, FrameType
from deeplink.plainrpc.headers import HeaderReader
from deeplink.plainrpc.terms import HEAD_BYTES, MOST_CONTINUED, TOKEN_HEADER

if TYPE_CHECKING:
    from collections.abc import Callable

_MOST_BYTES = 1 << 18
"""Before the proof; a client of ours needs some hundred."""
_MOST_CALLS = 16
"""Without the token. Then the connection ends."""


class Proof:
    """What one peer sends, until it has proved itself. Not thread-safe.

    A server gives a call a place at its head, and keeps the place until the request has come. So a stranger's call
    to a service that is open to all is kept here until it is whole.

    Args:
        is_valid: whether a token proves a peer.
        open_to_all: how the methods begin that need no token.

    Attributes:
        is_proven: whether a call carried the token.
    """

    def __init__(self, is_valid: Callable[[str], bool], open_to_all: tuple[str, ...] = ()) -> None:
        self._is_valid, self._open_to_all = is_valid, open_to_all
        self.is_proven = False
        self._kept, self._read = bytearray(), 0  # so many bytes of what is kept are read
        self._is_greeted = False
        self._came = self._calls = self._came_of_heads = 0
        self._half: set[int] = set()
        self._block: tuple[int, list[bytes]] | None = None
        self._headers = HeaderReader()

    def passed(self, data: bytes) -> bytes:
        """Take in what came; return what the server may have by now.

        Raises:
            SessionError: it does not speak HTTP/2, or too much came without a proof.
        """
        self._came += len(data)
        if self._came > _MOST_BYTES:
            raise SessionError(ErrorCode.CALM, "too much without a token")
        self._kept += data
        kept, size, at, whole = self._kept, framing.FRAME.size, self._read, 0
        if not self._is_greeted:
            at = whole = len(framing.PREFACE)
            if not framing.PREFACE.startswith(bytes(kept[:at])):
                raise SessionError(ErrorCode.PROTOCOL, "this is a gRPC server")
            if len(kept) < at:
                return b""
            self._is_greeted = True
        while len(kept) - at >= size and not self.is_proven:
            high, low, kind, flags, stream = framing.FRAME.unpack_from(kept, at)
            end = at + size + (high << 16) + low
            if end > len(kept):
                break
            self._take(kind, flags, stream & framing.LAST_STREAM, bytes(kept[at + size : end]))
            at = end
            whole = whole if self._half else at
        if self.is_proven:
            whole = at = len(kept)
        self._read = at - whole
        passed = bytes(kept[:whole])
        del kept[:whole]
        return passed

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind in {FrameType.HEADERS, FrameType.CONTINUATION}:
            self._take_head(kind, flags, stream, payload)
        elif kind == FrameType.RESET or (kind == FrameType.DATA and flags & framing.END_STREAM):
            self._half.discard(stream)

    def _take_head(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        self._came_of_heads += len(payload)
        if self._came_of_heads > HEAD_BYTES or (self._block and len(self._block[1]) >= MOST_CONTINUED):
            raise SessionError(ErrorCode.CALM, "header blocks too long")  # to decode them takes time
        try:
            if kind == FrameType.HEADERS:
                payload = framing.without_padding(flags, payload)
                self._block = flags, [payload[5:] if flags & framing.PRIORITY else payload]
            elif self._block is not None:
                self._block[1].append(payload)
            if not flags & framing.END_HEADERS or self._block is None:
                return
            (first, pieces), self._block = self._block, None
            fields = self._headers.read(b"".join(pieces))
        except ValueError as problem:
            raise SessionError(ErrorCode.COMPRESSION, str(problem)) from problem
        if self._is_valid(fields.get(TOKEN_HEADER, "")):
            self.is_proven = True
            return
        self._calls += 1
        if self._calls > _MOST_CALLS:
            raise SessionError(ErrorCode.CALM, "too many calls without a token")
        if first & framing.END_STREAM:
            self._half.discard(stream)
        elif fields.get(":path", "").startswith(self._open_to_all):
            self._half.add(stream)
