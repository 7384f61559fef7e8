"""One gRPC call at a time over a plain socket, for processes that fork.

A process that has used grpcio cannot fork children that use it: they hang (measured, docs/decisions). A training
loop does both: it reports its progress, and its DataLoader forks workers, which read from other nodes. So what
reports is no user of grpcio but this: unary calls without threads, over HTTP/2 (RFC 9113, RFC 7541, gRPC over
HTTP/2), with nothing kept that a child could inherit but a socket.
"""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING, NamedTuple

from deeplink.errors import DeepLinkError

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS, _PADDED = 1, 1, 4, 8
_HEADER_TABLE_SIZE, _ENABLE_PUSH = 1, 2
_POST, _SCHEME_HTTP = b"\x83", b"\x86"  # RFC 7541 appendix A: whole fields of the static table
_AUTHORITY, _PATH, _NEW_NAME = b"\x01", b"\x04", b"\x00"  # literals that are not to be indexed
_LONGEST_FRAME = 16384  # RFC 9113 4.2: what every endpoint takes without being asked
_LONGEST_REPLY = 1 << 20
_LAST_STREAM = (1 << 31) - 1
_PREFIX = struct.Struct(">BI")  # gRPC: compressed or not, length of the message


class PlainCallError(DeepLinkError):
    """A call got no reply: the peer cannot be reached, refused, or answered something else than a reply."""

    def __init__(self, address: str, problem: str) -> None:
        super().__init__(f"{address}: {problem}")
        self.address, self.problem = address, problem


class _Frame(NamedTuple):
    kind: int
    flags: int
    stream: int
    payload: bytes


def _text(value: bytes) -> bytes:
    # RFC 7541 5.1: a length under 127 is one byte, a longer one spills over in groups of seven bits.
    if len(value) < 127:  # noqa: PLR2004
        return bytes((len(value),)) + value
    rest, spilled = len(value) - 127, bytearray((127,))
    while rest >= 128:  # noqa: PLR2004
        spilled.append(rest % 128 + 128)
        rest //= 128
    return bytes((*spilled, rest)) + value


def request_head(address: str, method: str, metadata: tuple[tuple[str, str], ...]) -> bytes:
    """Return a call's header block: plain literals, nothing for either side to remember."""
    fields = (("te", "trailers"), ("content-type", "application/grpc"), *metadata)
    return b"".join(
        (
            _POST,
            _SCHEME_HTTP,
            _PATH + _text(method.encode()),
            _AUTHORITY + _text(address.encode()),
            *(_NEW_NAME + _text(name.encode()) + _text(value.encode()) for name, value in fields),
        )
    )


class PlainChannel:
    """A connection to one server, for one call at a time. Not thread-safe. Close it when done.

    Args:
        address: `host:port`.
        metadata: what each call carries, such as the token.
        timeout_s: bound on connecting, and on each wait for the peer.

    Raises:
        PlainCallError: the server cannot be reached.
    """

    def __init__(self, address: str, metadata: tuple[tuple[str, str], ...], timeout_s: float) -> None:
        self._address, self._metadata, self._timeout_s = address, metadata, timeout_s
        self._stream = -1
        host, _, port = address.rpartition(":")
        try:
            self._socket = socket.create_connection((host.strip("[]"), int(port)), timeout_s)
        except (OSError, ValueError) as problem:
            raise PlainCallError(address, str(problem)) from problem
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            settings = struct.pack(">HIHI", _HEADER_TABLE_SIZE, 0, _ENABLE_PUSH, 0)
            self._socket.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, settings))
        except OSError as problem:
            self.close()
            raise PlainCallError(address, str(problem)) from problem

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drop the connection."""
        self._socket.close()

    def call(self, method: str, message: bytes) -> bytes:
        """Send one message (under 16 KiB) to `/package.Service/Method` and return the reply's bytes.

        Raises:
            PlainCallError: there was no reply; the channel is closed then.
        """
        if len(message) + _PREFIX.size > _LONGEST_FRAME:
            raise PlainCallError(self._address, f"a message of {len(message)} bytes is too long for one frame")
        self._stream += 2
        if self._stream > _LAST_STREAM:
            raise PlainCallError(self._address, "the connection has no streams left")
        try:
            head = request_head(self._address, method, self._metadata)
            body = _PREFIX.pack(0, len(message)) + message
            self._socket.sendall(
                _frame(_HEADERS, _END_HEADERS, self._stream, head) + _frame(_DATA, _END_STREAM, self._stream, body)
            )
            return self._reply()
        except OSError as problem:
            self.close()
            raise PlainCallError(self._address, str(problem)) from problem
        except PlainCallError:
            self.close()
            raise

    def _reply(self) -> bytes:
        """Read frames until our stream ends; return the one message it carried."""
        body = b""
        while True:
            frame = self._read_frame()
            if frame.kind == _DATA:
                # Give back the window at once; a reply is small, and the connection's window is shared by all.
                if frame.payload:
                    self._socket.sendall(_frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", len(frame.payload))))
                body += _unpadded(frame)
                if len(body) > _LONGEST_REPLY:
                    raise PlainCallError(self._address, "the reply is too long")
            elif frame.kind == _SETTINGS and not frame.flags & _ACK:
                self._socket.sendall(_frame(_SETTINGS, _ACK, 0, b""))
            elif frame.kind == _PING and not frame.flags & _ACK:
                self._socket.sendall(_frame(_PING, _ACK, 0, frame.payload))
            elif frame.kind == _GOAWAY:
                raise PlainCallError(self._address, "the server is going away")
            elif frame.kind == _RESET and frame.stream == self._stream:
                raise PlainCallError(self._address, "the server ended the call")
            if frame.stream == self._stream and frame.kind in {_DATA, _HEADERS} and frame.flags & _END_STREAM:
                return self._message(body)

    def _message(self, body: bytes) -> bytes:
        if len(body) < _PREFIX.size:
            # Trailers alone. Why is in their grpc-status, Huffman-coded perhaps; nobody acts on it differently.
            raise PlainCallError(self._address, "the server refused the call (token? service?)")
        compressed, length = _PREFIX.unpack_from(body)
        if compressed or length != len(body) - _PREFIX.size:
            raise PlainCallError(self._address, "the reply is compressed or cut off")
        return body[_PREFIX.size :]

    def _read_frame(self) -> _Frame:
        length_high, length_low, kind, flags, stream = struct.unpack(">BHBBI", self._read_exactly(9))
        length = (length_high << 16) + length_low
        if length > _LONGEST_FRAME:
            raise PlainCallError(self._address, f"a frame of {length} bytes: not an HTTP/2 server?")
        return _Frame(kind, flags, stream & _LAST_STREAM, self._read_exactly(length))

    def _read_exactly(self, wanted: int) -> bytes:
        got = bytearray()
        while len(got) < wanted:
            piece = self._socket.recv(wanted - len(got))
            if not piece:
                raise PlainCallError(self._address, "the server closed the connection")
            got += piece
        return bytes(got)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">BHBBI", len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream) + payload


def _unpadded(frame: _Frame) -> bytes:
    if not frame.flags & _PADDED:
        return frame.payload
    return frame.payload[1 : len(frame.payload) - frame.payload[0]]
