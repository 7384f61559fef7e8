"""Addresses of hosts, without waiting long: a name server that is silent must not hold up whoever reads."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deeplink.clock import Clock

    Address = tuple[int, int, int, str, tuple[Any, ...]]

_WAIT_S = 1.0
_KNOWN_S = 60.0
"""How long what was found is not looked up anew."""
_known: dict[str, tuple[float, list[Address]]] = {}
"""Host -> until when, and its addresses; used beyond that where no answer comes in time."""


def addresses(host: str, port: int, clock: Clock) -> list[Address]:
    """Return what `getaddrinfo` says of a host; for a number at once, for a name within a second.

    Raises:
        TimeoutError: the name server did not answer, and never has.
        OSError: there is no such host.
    """
    try:
        return _looked_up(host, port, socket.AI_NUMERICHOST)
    except socket.gaierror as problem:
        if problem.errno != socket.EAI_NONAME:
            raise
    until, found = _known.get(host, (0.0, []))
    if not found or until < clock.monotonic():
        found = _by_name(host) or found
        if not found:
            raise TimeoutError(f"the name {host} is not resolved in time: does the name server answer?")
        _known[host] = clock.monotonic() + _KNOWN_S, found
    return [
        (family, kind, protocol, name, (address[0], port, *address[2:]))
        for family, kind, protocol, name, address in found
    ]


def _looked_up(host: str, port: int, flags: int) -> list[Address]:
    flags |= socket.AI_NUMERICSERV
    return list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags))


def _by_name(host: str) -> list[Address]:
    """Return a host's addresses; none where no answer comes in time."""
    found: list[Address] = []
    problems: list[OSError] = []

    def look_up() -> None:
        try:
            found.extend(_looked_up(host, 0, 0))
        except OSError as problem:
            problems.append(problem)

    # A thread of its own, for there is no other way to end the wait.
    thread = threading.Thread(target=look_up, name="deeplink-names", daemon=True)
    thread.start()
    thread.join(_WAIT_S)
    if problems:
        raise problems[0]
    return found if not thread.is_alive() else []
