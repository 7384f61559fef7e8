"""Sockets that servers listen on, and the error where they cannot: the reason and the remedy."""

from __future__ import annotations

import errno
import socket

from deeplink.core.clock import Clock, SystemClock
from deeplink.core.errors import DeepLinkError


class ListenError(DeepLinkError):
    """The system does not let a server listen there."""

    def __init__(
        self,
        bind: str,
        problem: str,
        remedy: str = "Give HOST:PORT with an address of this machine's own; port 0 picks a free one.",
    ) -> None:
        super().__init__(f"cannot listen on {bind}: {problem}", remedy=remedy)
        self.bind, self.problem = bind, problem


class PortBusyError(ListenError):
    """Something listens there already."""

    def __init__(self, bind: str) -> None:
        super().__init__(
            bind,
            "it is in use",
            "Perhaps the same runs there already: `ss -ltnp` shows it. Or --bind 127.0.0.1:0: any free port.",
        )


FREE_WAIT_S = 3.0
"""Time for a process that listened there to end."""


def refused(bind: str, problem: OSError) -> ListenError:
    """Return the error for a socket that could not be bound."""
    if problem.errno == errno.EADDRINUSE:
        return PortBusyError(bind)
    return ListenError(bind, problem.strerror or str(problem))


def listening_socket(bind: str, backlog: int = 1024) -> socket.socket:
    """Return a socket that listens at `host:port`; it does not block."""
    host, _, port = bind.rpartition(":")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, protocol)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
            made.listen(backlog)
            made.setblocking(False)  # noqa: FBT003 - the standard library's
        except BaseException:
            made.close()
            raise
    except OSError as problem:
        raise refused(bind, problem) from problem
    return made


def free_again(bind: str, port: int, clock: Clock | None = None) -> str:
    """Return `bind` with this port once it is free; with port 0, any, where it is not within `FREE_WAIT_S`."""
    clock = clock or SystemClock()
    host = bind.rpartition(":")[0]
    deadline = clock.monotonic() + FREE_WAIT_S
    while True:
        try:
            listening_socket(f"{host}:{port}").close()
        except ListenError:
            if clock.monotonic() >= deadline:
                return f"{host}:0"
            clock.sleep(0.05)
        else:
            return f"{host}:{port}"
