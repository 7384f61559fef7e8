"""A connection by TCP, or to a Unix socket, whose every wait ends at one deadline."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
from typing import TYPE_CHECKING, Any

from deeplink.rpc.plain.local_socket import UNIX
from deeplink.rpc.resolving import addresses, split_address

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deeplink.core.clock import Clock

_BUFFER = 1 << 14
_SLACK_S = 0.02  # of a deadline, which saves a system call at most reads
_MOST_PARTS = 1024  # in one call: IOV_MAX
_TIME = struct.Struct("ll")  # struct timeval


class StreamConnection:
    """A connection to `host:port`, or to `unix:PATH`, begun when it is made; `establish` waits for it.

    What it raises is OSError: TimeoutError where the deadline has passed, ConnectionResetError where the other end
    has closed. Close it then.

    Attributes:
        deadline: by the clock's monotonic time, until when whatever is waited for must have happened.
        patience_s: how long the other end may stand still before the deadline; 0: until then.
        is_established: whether bytes can be sent.
    """

    def __init__(self, address: str, clock: Clock) -> None:
        """Begin to connect."""
        self._clock = clock
        self.deadline = self.patience_s = 0.0
        self.is_established = False
        self._addresses: list[tuple[int, int, int, str, Any]] = (
            [(socket.AF_UNIX, socket.SOCK_STREAM, 0, "", address.removeprefix(UNIX))]
            if address.startswith(UNIX)
            else addresses(*split_address(address), clock)
        )
        self._socket = self._next_socket()
        # Small reads are served from here, so that a frame's header costs no system call.
        self._buffer = memoryview(bytearray(_BUFFER))
        self._start = self._end = 0
        self._armed: dict[int, float] = {}

    def _next_socket(self) -> socket.socket:
        """Return a socket that connects to the next of the host's addresses (`localhost` has two)."""
        while True:
            family, kind, protocol, _, address = self._addresses.pop(0)
            connection = socket.socket(family, kind, protocol)
            try:
                if family != socket.AF_UNIX:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.setblocking(False)  # noqa: FBT003 - the standard library's
                with contextlib.suppress(BlockingIOError):
                    connection.connect(address)
            except OSError:
                connection.close()
                if not self._addresses:
                    raise
            else:
                return connection

    def establish(self) -> None:
        """Wait until the connection stands."""
        self._stands(self._left_s())

    def stands(self) -> bool:
        """Tell whether the connection stands, without waiting."""
        return self._stands(0.0)

    def _stands(self, wait_s: float) -> bool:
        while not self.is_established:
            poll = select.poll()
            poll.register(self._socket, select.POLLOUT)
            if not poll.poll(wait_s * 1000):
                if wait_s:
                    raise TimeoutError("no connection in time")
                return False
            code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if not code:
                self._socket.setblocking(True)  # noqa: FBT003 - the standard library's
                self.is_established = True
            elif self._addresses:
                self._socket.close()
                self._socket = self._next_socket()
            else:
                raise OSError(code, os.strerror(code))
        return True

    def fileno(self) -> int:
        """Return the socket's number; another one until the connection stands."""
        return self._socket.fileno()

    def is_ready(self, events: int) -> bool:
        """Tell, without waiting, whether one of poll's events has come, or the connection has failed."""
        if events & select.POLLIN and self._end > self._start:
            return True
        poll = select.poll()
        poll.register(self._socket, events)
        return bool(poll.poll(0))

    def _left_s(self) -> float:
        left = self.deadline - self._clock.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        return left

    def _arm(self, option: int) -> None:
        """Let the kernel end the next call at the deadline: it counts all of a call's waits, not each."""
        left = self._left_s()
        if option == socket.SO_RCVTIMEO and self.patience_s:
            left = min(left, self.patience_s)
        if abs(left - self._armed.get(option, 0.0)) <= _SLACK_S:
            return
        seconds, microseconds = divmod(int(left * 1e6) + 1, 1_000_000)  # EDOM for a whole million
        self._socket.setsockopt(socket.SOL_SOCKET, option, _TIME.pack(seconds, microseconds))
        self._armed[option] = left

    def send(self, data: bytes) -> None:
        """Send all of `data`."""
        left = memoryview(data)
        try:
            while left:
                self._arm(socket.SO_SNDTIMEO)
                left = left[self._socket.send(left) :]
        except BlockingIOError as problem:
            raise TimeoutError("timed out") from problem

    def _receive(self, into: memoryview) -> int:
        # Before each piece: a peer that sends a byte now and then must not keep us beyond the deadline.
        self._arm(socket.SO_RCVTIMEO)
        try:
            count = self._socket.recv_into(into)
        except BlockingIOError as problem:
            raise TimeoutError("timed out") from problem
        return _some(count)

    def _receive_parts(self, parts: Sequence[memoryview]) -> int:
        self._arm(socket.SO_RCVTIMEO)
        try:
            count = self._socket.recvmsg_into(parts, 0, socket.MSG_WAITALL)[0]
        except BlockingIOError as problem:
            raise TimeoutError("timed out") from problem
        return _some(count)

    def read(self, wanted: int) -> bytes:
        """Return the next `wanted` bytes."""
        if wanted > _BUFFER:
            whole = bytearray(wanted)
            self.read_into([memoryview(whole)])
            return bytes(whole)
        if self._end - self._start < wanted:
            self._fill(wanted)
        found = bytes(self._buffer[self._start : self._start + wanted])
        self._start += wanted
        return found

    def _move_up(self) -> None:
        held = self._end - self._start
        self._buffer[:held] = bytes(self._buffer[self._start : self._end])
        self._start, self._end = 0, held

    def _fill(self, least: int) -> None:
        self._move_up()
        while self._end < least:
            self._end += self._receive(self._buffer[self._end :])

    def has(self, wanted: int) -> bool:
        """Tell, without waiting, whether so many bytes have come; never of more than are read ahead."""
        if self._end - self._start < wanted <= _BUFFER:
            self._move_up()
            try:
                self._end += _some(self._socket.recv_into(self._buffer[self._end :], 0, socket.MSG_DONTWAIT))
            except BlockingIOError:
                return False
        return self._end - self._start >= wanted

    def ahead(self, wanted: int) -> bytes:
        """Return the next bytes, which `has` found, and leave them to be read."""
        return bytes(self._buffer[self._start : self._start + wanted])

    def read_into(self, parts: Sequence[memoryview], *, then: int = 0) -> None:
        """Fill `parts`, in order, with the next bytes; straight from the socket but for what was read ahead.

        `then` more bytes, which must follow, are read ahead in the same call.
        """
        at = 0
        left = [part for part in parts if len(part)]
        while at < len(left) and self._start < self._end:
            done = min(self._end - self._start, len(left[at]))
            left[at][:done] = self._buffer[self._start : self._start + done]
            self._start += done
            left[at] = left[at][done:]
            at += not left[at]
        if at == len(left):
            return
        self._start = self._end = 0  # nothing is read ahead
        if then:
            left.append(self._buffer[:then])
        while at < len(left):
            count = self._receive_parts(left[at : at + _MOST_PARTS])
            while at < len(left) and count >= len(left[at]):
                count -= len(left[at])
                at += 1
            if count:
                left[at] = left[at][count:]
        self._end = then

    def close(self) -> None:
        """Drop the connection."""
        self._socket.close()


def _some(count: int) -> int:
    if not count:
        raise ConnectionResetError(errno.ECONNRESET, "the server closed the connection")
    return count
