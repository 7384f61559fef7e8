"""gRPC over HTTP/2 (RFC 9113), the client's side: one call at a time, one request, any number of replies.

Replies are received straight into the memory they are read from.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING
from urllib.parse import unquote

from deeplink.plainrpc import hpack
from deeplink.plainrpc.errors import (
    PlainBusyError,
    PlainCallError,
    PlainFormatError,
    PlainRefusedError,
    PlainSilentError,
    PlainStatusError,
)
from deeplink.plainrpc.link import Link

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType
    from typing import Self

    from deeplink.clock import Clock

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
_END_STREAM, _ACK, _END_HEADERS, _PADDED, _PRIORITY = 1, 1, 4, 8, 32
_HEADER_TABLE_SIZE, _ENABLE_PUSH, _INITIAL_WINDOW, _FRAME_SIZE = 1, 2, 4, 5
_FRAME = struct.Struct(">BHBBI")
_PREFIX = struct.Struct(">BI")  # gRPC: compressed or not, length of the message
_COUNT = struct.Struct(">I")
_WINDOW = (1 << 31) - 1
_DEFAULT_WINDOW = 65_535  # RFC 9113 6.9.2: what both ends start with
_LARGEST_FRAME = (1 << 24) - 1
_SENT_FRAME = 16_384  # RFC 9113 4.2: what every endpoint takes
_LARGEST_REPLY = 64 << 20
_LARGEST_HEAD = 1 << 20
_LAST_STREAM = (1 << 31) - 1

TOKEN_HEADER = "deeplink-token"  # noqa: S105 - the name of the header, not a token

LARGEST_REQUEST = 60_000
"""Bytes of a request: within what a server takes before it has said anything, so sending never waits for it."""

_OK, _CANCELLED, _DEADLINE, _EXHAUSTED, _UNAVAILABLE, _UNAUTHENTICATED = 0, 1, 4, 8, 14, 16


class PlainConnection:
    """A connection to one server, for one call at a time. Not thread-safe. Close it when done, and after an error.

    Connecting begins at once and does not wait; the first call does, until its deadline.

    Args:
        address: `host:port`.
        token: what each call carries.
        clock: where time comes from.

    Attributes:
        is_used: whether a call has succeeded on it; if the next fails, the server may just have closed it since.

    Raises:
        PlainSilentError: the address cannot be used.
    """

    def __init__(self, address: str, token: str, clock: Clock) -> None:
        self._address, self._token = address, token
        self._stream = -1
        self._send_window = _DEFAULT_WINDOW
        self._unsent = b""
        self._cost = self._received = 0
        self.is_used = False
        self._expect_message()
        try:
            self._link = Link(address, clock)
        except (OSError, ValueError) as problem:
            raise PlainSilentError(address, str(problem)) from problem

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drop the connection."""
        self._link.close()

    def call(self, method: str, message: bytes, deadline: float) -> bytes:
        """Make a call that has one reply, and return it. See `send` and `replies`.

        Raises:
            PlainCallError: there was no reply, or more than one.
        """
        self.send(method, message, deadline)
        found = list(self.replies())
        if len(found) != 1:
            raise PlainFormatError(self._address, f"{len(found)} replies instead of one")
        return bytes(found[0])

    def send(self, method: str, message: bytes, deadline: float) -> None:
        """Begin a call of `/package.Service/Method`; sends at once where the connection stands, else in `replies`.

        Args:
            method: what to call.
            message: the request, at most LARGEST_REQUEST bytes.
            deadline: by the clock's monotonic time, until when the last reply must have come.

        Raises:
            PlainFormatError: the request is too long.
            PlainSilentError: the connection is broken, or has no streams left.
        """
        if len(message) > LARGEST_REQUEST:
            raise PlainFormatError(
                self._address,
                f"a request of {len(message)} bytes is too long, at most {LARGEST_REQUEST} can be sent",
            )
        if self._stream + 2 > _LAST_STREAM:
            raise PlainSilentError(self._address, "the connection has no streams left")
        self._stream += 2
        self._link.deadline = deadline
        self._expect_message()
        head = hpack.request_head(self._address, method, ((TOKEN_HEADER, self._token),))
        body = _PREFIX.pack(0, len(message)) + message
        frames = [_frame(_HEADERS, _END_HEADERS, self._stream, head)]
        for start in range(0, len(body), _SENT_FRAME):
            part = body[start : start + _SENT_FRAME]
            last = _END_STREAM if start + len(part) == len(body) else 0
            frames.append(_frame(_DATA, last, self._stream, part))
        self._unsent, self._cost = b"".join(frames), len(body)
        if self._link.is_established and self._send_window >= self._cost:
            self._flush()

    def postpone(self, deadline: float) -> None:
        """Let the call begun by `send` go on until `deadline`, if it can go on at all at this moment.

        For who waited for another server meanwhile: what has come from this one in time is not late.
        """
        if deadline > self._link.deadline and self._link.is_ready(to_send=bool(self._unsent)):
            self._link.deadline = deadline

    def _flush(self) -> None:
        try:
            if not self._link.is_established:
                self._link.establish()
                self._greet()
            while self._send_window < self._cost:
                self._control(*self._next_frame())
            self._send_window -= self._cost
            unsent, self._unsent = self._unsent, b""
            self._link.send(unsent)
        except OSError as problem:
            raise PlainSilentError(self._address, str(problem)) from problem

    def _greet(self) -> None:
        settings = struct.pack(
            ">HIHIHIHI",
            *(_HEADER_TABLE_SIZE, 0, _ENABLE_PUSH, 0, _INITIAL_WINDOW, _WINDOW, _FRAME_SIZE, _LARGEST_FRAME),
        )
        window = _COUNT.pack(_WINDOW - _DEFAULT_WINDOW)
        self._link.send(_PREFACE + _frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW_UPDATE, 0, 0, window))

    def replies(self) -> Iterator[memoryview]:
        """Yield the replies of the call begun by `send`, each in memory of its own.

        The connection can be used again once all were taken, and must be closed after an error.

        Raises:
            PlainSilentError: not all came before the deadline, or the connection broke.
            PlainRefusedError: the token was refused.
            PlainBusyError: the server has too much to do.
            PlainStatusError: the call ended with another status.
            PlainFormatError: what came is not gRPC over HTTP/2.
        """
        if self._unsent:
            self._flush()
        try:
            yield from self._replies()
            # What was received is given back to the connection's window, for the next call.
            if self._received:
                self._link.send(_frame(_WINDOW_UPDATE, 0, 0, _COUNT.pack(self._received)))
        except OSError as problem:
            raise PlainSilentError(self._address, str(problem)) from problem
        self._received = 0
        self.is_used = True

    def _replies(self) -> Iterator[memoryview]:
        while True:
            kind, flags, stream, length = self._next_frame()
            if kind != _DATA or stream != self._stream:
                if self._control(kind, flags, stream, length):
                    break
                continue
            self._received += length
            padding = self._link.read(1)[0] if flags & _PADDED and length else 0
            yield from self._messages(self._unpadded_length(flags, length, padding))
            self._link.read(padding)
            if flags & _END_STREAM:
                raise self._odd("a call without a status")
            if self._received > _WINDOW // 2:
                self._give_back()
        if self._filled or not self._in_prefix:
            raise self._odd("a reply that does not end")

    def _unpadded_length(self, flags: int, length: int, padding: int) -> int:
        rest = length - padding - 1 if flags & _PADDED else length
        if rest < 0:
            raise self._odd("a frame that is all padding")
        return rest

    def _give_back(self) -> None:
        """Let the server send on, in a call whose replies are more than the window."""
        count = _COUNT.pack(self._received)
        self._link.send(_frame(_WINDOW_UPDATE, 0, 0, count) + _frame(_WINDOW_UPDATE, 0, self._stream, count))
        self._received = 0

    def _expect_message(self) -> None:
        self._in_prefix, self._filled = True, 0
        self._target = memoryview(bytearray(_PREFIX.size))

    def _messages(self, length: int) -> Iterator[memoryview]:
        """Take in `length` bytes of messages; yield those that are whole."""
        while length:
            room = self._target[self._filled : self._filled + length]
            self._link.read_into(room)
            self._filled += len(room)
            length -= len(room)
            if self._in_prefix and self._filled == _PREFIX.size:
                compressed, size = _PREFIX.unpack(self._target)
                if compressed or size > _LARGEST_REPLY:
                    raise self._odd(f"a reply that is compressed or too long ({size} bytes)")
                self._in_prefix, self._filled = False, 0
                self._target = memoryview(bytearray(size))
            if not self._in_prefix and self._filled == len(self._target):
                whole = self._target
                self._expect_message()
                yield whole

    def _control(self, kind: int, flags: int, stream: int, length: int) -> bool:
        """Act on a frame that is no data of ours; tell whether it ends the call well."""
        if length > _LARGEST_HEAD:
            raise self._odd(f"a frame of {length} bytes: not a gRPC server?")
        payload = self._link.read(length)
        if kind == _WINDOW_UPDATE and stream == 0 and length == _COUNT.size:
            self._send_window += _COUNT.unpack(payload)[0] & _LAST_STREAM
        elif kind == _SETTINGS and not flags & _ACK:
            self._link.send(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING and not flags & _ACK:
            self._link.send(_frame(_PING, _ACK, 0, payload))
        elif kind == _GOAWAY:
            raise PlainSilentError(self._address, "the server is going away")
        elif kind == _RESET and stream == self._stream:
            raise PlainSilentError(self._address, "the server ended the call")
        elif kind == _HEADERS and stream == self._stream:
            head = self._whole_head(flags, payload)
            if flags & _END_STREAM:
                self._check_status(head)
                return True
        return False

    def _whole_head(self, flags: int, payload: bytes) -> bytes:
        if flags & _PADDED and payload:
            payload = payload[1 : max(len(payload) - payload[0], 1)]
        if flags & _PRIORITY:
            payload = payload[5:]
        while not flags & _END_HEADERS:
            kind, flags, stream, length = self._next_frame()
            if kind != _CONTINUATION or stream != self._stream or len(payload) + length > _LARGEST_HEAD:
                raise self._odd("a header block that does not end")
            payload += self._link.read(length)
        return payload

    def _check_status(self, head: bytes) -> None:
        try:
            fields = hpack.literal_fields(head)
            code = int(fields.get("grpc-status", "none"))
        except ValueError as problem:
            raise self._odd(f"a call without a status ({problem})") from problem
        details = unquote(fields.get("grpc-message", ""))
        if code == _UNAUTHENTICATED:
            raise PlainRefusedError(self._address)
        if code in {_CANCELLED, _DEADLINE, _UNAVAILABLE}:
            raise PlainSilentError(self._address, details)
        if code == _EXHAUSTED:
            raise PlainBusyError(self._address)
        if code != _OK:
            raise PlainStatusError(self._address, code, details)

    def _odd(self, problem: str) -> PlainCallError:
        return PlainFormatError(self._address, problem)

    def _next_frame(self) -> tuple[int, int, int, int]:
        high, low, kind, flags, stream = _FRAME.unpack(self._link.read(_FRAME.size))
        return kind, flags, stream & _LAST_STREAM, (high << 16) + low


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return _FRAME.pack(len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream) + payload
