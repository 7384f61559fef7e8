"""gRPC calls with one request and many replies over a plain socket: for training processes, which fork.

A process that uses grpcio and forks has children that hang in it (docs/decisions/0002), and
DataLoader workers are such children. So what reads samples is no user of grpcio but this: HTTP/2 (RFC 9113) to
the same server, with the same token, one call at a time on a connection, no threads, nothing to inherit but a
socket. Replies are received straight into the memory they are read from.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import socket
import struct
from typing import TYPE_CHECKING
from urllib.parse import unquote

from deeplink.cache.errors import FrameError, MemberError, MemberRefusedError, MemberSilentError
from deeplink.cache.hpack import literal_fields
from deeplink.plainrpc import request_head

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deeplink.clock import Clock
    from deeplink.types import Member

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
_END_STREAM, _ACK, _END_HEADERS, _PADDED, _PRIORITY = 1, 1, 4, 8, 32
_HEADER_TABLE_SIZE, _ENABLE_PUSH, _INITIAL_WINDOW, _FRAME_SIZE = 1, 2, 4, 5
_FRAME = struct.Struct(">BHBBI")
_PREFIX = struct.Struct(">BI")  # gRPC: compressed or not, length of the message
_WINDOW = (1 << 31) - 1
_DEFAULT_WINDOW = 65_535  # RFC 9113 6.9.2: what both ends start with
_LARGEST_FRAME = (1 << 24) - 1
_SENT_FRAME = 16_384  # RFC 9113 4.2: what every endpoint takes
_LARGEST_REPLY = 64 << 20
_LARGEST_HEAD = 1 << 20
_BUFFER = 1 << 17
_LAST_STREAM = (1 << 31) - 1

LARGEST_REQUEST = 60_000
"""Bytes of a request: within what a server takes before it has said anything, so sending never waits for it."""

_OK, _CANCELLED, _DEADLINE, _UNAVAILABLE, _UNAUTHENTICATED = 0, 1, 4, 14, 16


class PlainConnection:
    """A connection to one member, for one call at a time. Not thread-safe.

    Connecting begins at once and does not wait; the first call does, until its deadline.

    Args:
        member: whom to connect to.
        token: what each call carries.
        clock: where time comes from.

    Raises:
        MemberSilentError: the address cannot be used.
    """

    def __init__(self, member: Member, token: str, clock: Clock) -> None:
        self._member, self._clock = member, clock
        self._metadata = (("deeplink-token", token),)
        self._stream = -1
        self._send_window = _DEFAULT_WINDOW
        self._unsent = b""
        self._deadline = 0.0
        self._received = 0
        self.is_used = False
        """Whether a call has succeeded on it: then a failure may just mean that the server has closed it since."""
        try:
            self._socket = self._begin_connect()
        except (OSError, ValueError) as problem:
            raise MemberSilentError(member.name, f"{member.address}: {problem}") from problem
        self._input = io.BufferedReader(socket.SocketIO(self._socket, "r"), _BUFFER)
        self._connecting = True

    def _begin_connect(self) -> socket.socket:
        host, _, port = self._member.address.rpartition(":")
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_NUMERICSERV
        )[0]
        connection = socket.socket(family, kind, protocol)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setblocking(False)  # noqa: FBT003 - the standard library's
            with contextlib.suppress(BlockingIOError):
                connection.connect(address)
        except OSError:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        """Drop the connection."""
        # Both: the reader keeps the socket open until it is closed too.
        with contextlib.suppress(OSError):
            self._input.close()
        self._socket.close()

    def send(self, method: str, message: bytes, deadline: float) -> None:
        """Begin a call of `/package.Service/Method`; sends at once where the connection stands, else in `replies`.

        Args:
            method: what to call.
            message: the request, at most LARGEST_REQUEST bytes.
            deadline: by the clock's monotonic time, until when the last reply must have come.

        Raises:
            FrameError: the request is too long.
            MemberSilentError: the connection is broken.
        """
        if len(message) > LARGEST_REQUEST:
            raise FrameError(f"a request of {len(message)} bytes, at most {LARGEST_REQUEST} can be sent")
        self._stream += 2
        self._deadline = deadline
        head = request_head(self._member.address, method, self._metadata)
        body = _PREFIX.pack(0, len(message)) + message
        frames = [_frame(_HEADERS, _END_HEADERS, self._stream, head)]
        for start in range(0, len(body), _SENT_FRAME):
            part = body[start : start + _SENT_FRAME]
            last = _END_STREAM if start + len(part) == len(body) else 0
            frames.append(_frame(_DATA, last, self._stream, part))
        self._unsent, self._cost = b"".join(frames), len(body)
        if not self._connecting and self._send_window >= self._cost:
            self._flush()

    def _flush(self) -> None:
        try:
            self._await_connected()
            self._wait_s()
            while self._send_window < self._cost:
                self._skip_frame()
            self._send_window -= self._cost
            self._socket.settimeout(self._wait_s())
            unsent, self._unsent = self._unsent, b""
            self._socket.sendall(unsent)
        except OSError as problem:
            raise self._silent(problem) from problem

    def _await_connected(self) -> None:
        if not self._connecting:
            return
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        if not poll.poll(self._wait_s() * 1000):
            raise TimeoutError("no connection in time")
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        self._connecting = False
        self._socket.settimeout(self._wait_s())
        settings = struct.pack(
            ">HIHIHIHI",
            *(_HEADER_TABLE_SIZE, 0, _ENABLE_PUSH, 0, _INITIAL_WINDOW, _WINDOW, _FRAME_SIZE, _LARGEST_FRAME),
        )
        window = struct.pack(">I", _WINDOW - _DEFAULT_WINDOW)
        self._socket.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW_UPDATE, 0, 0, window))

    def _wait_s(self) -> float:
        left = self._deadline - self._clock.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        return left

    def _silent(self, problem: OSError) -> MemberSilentError:
        return MemberSilentError(self._member.name, f"{self._member.address}: {problem}")

    def replies(self) -> Iterator[memoryview]:
        """Yield the replies of the call begun by `send`, each in memory of its own.

        The connection can be used again once all were taken, and must be closed after an error.

        Raises:
            MemberSilentError: not all came before the deadline, or the connection broke.
            MemberRefusedError: the token was refused.
            MemberError: the call ended with another status.
            FrameError: what came is not gRPC over HTTP/2.
        """
        if self._unsent:
            self._flush()
        try:
            yield from self._replies()
            # What was received is given back to the connection's window, for the next call.
            self._send(_WINDOW_UPDATE, struct.pack(">I", self._received)) if self._received else None
        except OSError as problem:
            raise self._silent(problem) from problem
        self._received = 0
        self.is_used = True

    def _replies(self) -> Iterator[memoryview]:
        prefix = bytearray()
        message, filled = memoryview(b""), 0
        while True:
            kind, flags, stream, length = self._next_frame()
            if kind != _DATA or stream != self._stream:
                if self._control(kind, flags, stream, length):
                    break
                continue
            self._received += length
            length -= self._skip_padding(flags)
            while length:
                if len(prefix) < _PREFIX.size:
                    part = self._read(min(length, _PREFIX.size - len(prefix)))
                    prefix += part
                    length -= len(part)
                    if len(prefix) == _PREFIX.size:
                        message, filled = memoryview(bytearray(_message_size(prefix))), 0
                else:
                    count = min(length, len(message) - filled)
                    self._read_into(message[filled : filled + count])
                    filled += count
                    length -= count
                if len(prefix) == _PREFIX.size and filled == len(message):
                    yield message
                    prefix.clear()
            self._skip(self._padding)
            if flags & _END_STREAM:
                raise FrameError("a call without a status")
        if prefix:
            raise FrameError("a reply that does not end")

    def _skip_padding(self, flags: int) -> int:
        self._padding = self._read(1)[0] if flags & _PADDED else 0
        return self._padding + 1 if flags & _PADDED else 0

    def _control(self, kind: int, flags: int, stream: int, length: int) -> bool:
        """Act on a frame that is no data of ours; tell whether it ends the call well."""
        if length > _LARGEST_HEAD:
            raise FrameError(f"a frame of {length} bytes: not a gRPC server?")
        payload = self._read(length)
        if kind == _WINDOW_UPDATE and stream == 0:
            self._send_window += struct.unpack(">I", payload)[0] & _LAST_STREAM
        elif kind == _SETTINGS and not flags & _ACK:
            self._send(_SETTINGS, b"", _ACK)
        elif kind == _PING and not flags & _ACK:
            self._send(_PING, payload, _ACK)
        elif kind == _GOAWAY:
            raise MemberSilentError(self._member.name, f"{self._member.address}: the server is going away")
        elif kind == _RESET and stream == self._stream:
            raise MemberSilentError(self._member.name, f"{self._member.address}: the server ended the call")
        elif kind == _HEADERS and stream == self._stream:
            head = self._whole_head(flags, payload)
            if flags & _END_STREAM:
                self._check_status(literal_fields(head))
                return True
        return False

    def _whole_head(self, flags: int, payload: bytes) -> bytes:
        if flags & _PADDED:
            payload = payload[1 : len(payload) - payload[0]]
        if flags & _PRIORITY:
            payload = payload[5:]
        while not flags & _END_HEADERS:
            kind, flags, stream, length = self._next_frame()
            if kind != _CONTINUATION or stream != self._stream or len(payload) + length > _LARGEST_HEAD:
                raise FrameError("a header block that does not end")
            payload += self._read(length)
        return payload

    def _check_status(self, fields: dict[str, str]) -> None:
        status = fields.get("grpc-status", "")
        if not status.isdigit():
            raise FrameError("a call without a status")
        code, details = int(status), unquote(fields.get("grpc-message", ""))
        if code == _UNAUTHENTICATED:
            raise MemberRefusedError(self._member.name)
        if code in {_CANCELLED, _DEADLINE, _UNAVAILABLE}:
            raise MemberSilentError(self._member.name, f"{self._member.address}: {details}")
        if code != _OK:
            raise MemberError(self._member.name, f"status {code}: {details}")

    def _skip_frame(self) -> None:
        kind, flags, stream, length = self._next_frame()
        self._control(kind, flags, stream, length)

    def _next_frame(self) -> tuple[int, int, int, int]:
        self._socket.settimeout(self._wait_s())
        high, low, kind, flags, stream = _FRAME.unpack(self._read(_FRAME.size))
        return kind, flags, stream & _LAST_STREAM, (high << 16) + low

    def _read(self, wanted: int) -> bytes:
        data = self._input.read(wanted) if wanted else b""
        if len(data) < wanted:
            raise ConnectionResetError(errno.ECONNRESET, "the server closed the connection")
        return data

    def _read_into(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            count = self._input.readinto(view[done:])
            if not count:
                raise ConnectionResetError(errno.ECONNRESET, "the server closed the connection")
            done += count

    def _skip(self, count: int) -> None:
        if count:
            self._read(count)

    def _send(self, kind: int, payload: bytes, flags: int = 0) -> None:
        self._socket.sendall(_frame(kind, flags, 0, payload))


def _message_size(prefix: bytearray) -> int:
    compressed, size = _PREFIX.unpack(prefix)
    if compressed or size > _LARGEST_REPLY:
        raise FrameError(f"a reply that is compressed or too long ({size} bytes)")
    return int(size)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return _FRAME.pack(len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream) + payload
