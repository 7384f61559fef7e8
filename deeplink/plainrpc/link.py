"""A TCP connection whose every wait ends at one deadline."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deeplink.clock import Clock

_BUFFER = 1 << 17


class Link:
    """A connection to `host:port`, begun when it is made; `establish` waits for it.

    What it raises is OSError: TimeoutError where the deadline has passed, ConnectionResetError where the other end
    has closed. Close it then.

    Attributes:
        deadline: by the clock's monotonic time, until when whatever is waited for must have happened.
        is_established: whether bytes can be sent.
    """

    def __init__(self, address: str, clock: Clock) -> None:
        """Begin to connect.

        Raises:
            OSError, ValueError: the address cannot be used.
        """
        self._clock = clock
        self.deadline = 0.0
        self.is_established = False
        host, _, port = address.rpartition(":")
        self._addresses = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_NUMERICSERV
        )
        self._socket = self._next_socket()
        # Small reads are served from here, so that a frame's header costs no system call.
        self._buffer = memoryview(bytearray(_BUFFER))
        self._start = self._end = 0

    def _next_socket(self) -> socket.socket:
        """Return a socket that connects to the next of the host's addresses (`localhost` has two)."""
        while True:
            family, kind, protocol, _, address = self._addresses.pop(0)
            connection = socket.socket(family, kind, protocol)
            try:
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
        while not self.is_established:
            poll = select.poll()
            poll.register(self._socket, select.POLLOUT)
            if not poll.poll(self._left_s() * 1000):
                raise TimeoutError("no connection in time")
            code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if not code:
                self.is_established = True
            elif self._addresses:
                self._socket.close()
                self._socket = self._next_socket()
            else:
                raise OSError(code, os.strerror(code))

    def is_ready(self, *, to_send: bool) -> bool:
        """Tell whether the connection now stands (to send), or bytes have come, or the end of it."""
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT if to_send else select.POLLIN)
        return bool(poll.poll(0))

    def _left_s(self) -> float:
        left = self.deadline - self._clock.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        return left

    def send(self, data: bytes) -> None:
        """Send all of `data`."""
        self._socket.settimeout(self._left_s())
        self._socket.sendall(data)

    def _receive(self, into: memoryview) -> int:
        # Before each piece: a peer that sends a byte now and then must not keep us beyond the deadline.
        self._socket.settimeout(self._left_s())
        count = self._socket.recv_into(into)
        if not count:
            raise ConnectionResetError(errno.ECONNRESET, "the server closed the connection")
        return count

    def read(self, wanted: int) -> bytes:
        """Return the next `wanted` bytes."""
        if wanted > _BUFFER:
            whole = bytearray(wanted)
            self.read_into(memoryview(whole))
            return bytes(whole)
        if self._end - self._start < wanted:
            self._fill(wanted)
        found = bytes(self._buffer[self._start : self._start + wanted])
        self._start += wanted
        return found

    def _fill(self, least: int) -> None:
        held = self._end - self._start
        self._buffer[:held] = bytes(self._buffer[self._start : self._end])
        self._start, self._end = 0, held
        while self._end < least:
            self._end += self._receive(self._buffer[self._end :])

    def read_into(self, view: memoryview) -> None:
        """Fill `view` with the next bytes; straight from the socket but for what was read ahead."""
        done = min(self._end - self._start, len(view))
        view[:done] = self._buffer[self._start : self._start + done]
        self._start += done
        while done < len(view):
            done += self._receive(view[done:])

    def close(self) -> None:
        """Drop the connection."""
        self._socket.close()
