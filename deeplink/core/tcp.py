"""TCP connection attempts to many addresses at once, each with a bound."""

from __future__ import annotations

import errno
import select
import socket
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

AT_ONCE = 256
"""Each attempt is an open file, of which most shells allow 1,024."""


class Connecting:
    """A TCP connection attempt to a numeric address that no one waits for; ends with `close` or its result."""

    def __init__(self, address: tuple[Any, ...]) -> None:  # (host, port), or a whole sockaddr of IPv6
        self._result: int | None = None
        self._socket: socket.socket | None = None
        try:
            self._socket = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
            self._socket.settimeout(0.0)
            outcome = self._socket.connect_ex(address)
        except OSError as problem:  # no more files may be opened, or the host is no address
            outcome = problem.errno or errno.EIO
        if outcome != errno.EINPROGRESS:
            self._end(outcome)

    def fileno(self) -> int:
        """Return the descriptor to poll for POLLOUT; -1 once there is a result."""
        return self._socket.fileno() if self._socket else -1

    def result(self) -> int | None:
        """Return 0 where it was connected, else the errno; None while it is under way. Does not wait."""
        if self._socket is not None:
            # Not select(), which fails beyond 1,024 open files.
            poll = select.poll()
            poll.register(self._socket, select.POLLOUT)
            if poll.poll(0):
                self._end(self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
        return self._result

    def close(self) -> None:
        """Give up; safe at any time."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _end(self, outcome: int) -> None:
        self._result = outcome
        self.close()


def connect_all(
    addresses: Sequence[tuple[Any, ...]],
    within_s: float,
    monotonic: Callable[[], float] = time.monotonic,
    *,
    at_once: int = AT_ONCE,
) -> Iterator[int | None]:
    """Connect to all numeric addresses, `at_once` at a time, each group within `within_s` seconds."""
    for start in range(0, len(addresses), at_once):
        yield from _connect_group(addresses[start : start + at_once], monotonic() + within_s, monotonic)


def _connect_group(
    addresses: Sequence[tuple[Any, ...]], deadline: float, monotonic: Callable[[], float]
) -> list[int | None]:
    attempts: list[Connecting] = []
    try:
        attempts.extend(map(Connecting, addresses))
        poll = select.poll()
        waiting = {attempt.fileno(): attempt for attempt in attempts if attempt.fileno() >= 0}
        for descriptor in waiting:
            poll.register(descriptor, select.POLLOUT)
        while waiting and (left := deadline - monotonic()) > 0:
            for descriptor, _ in poll.poll(left * 1000):
                poll.unregister(descriptor)
                waiting.pop(descriptor).result()
        return [attempt.result() for attempt in attempts]
    finally:
        for attempt in attempts:
            attempt.close()
