"""Addresses of hosts as the system resolves them, for every connection of ours, without waiting long.

gRPC's own resolver asks name servers alone: where those are silent it finds what /etc/hosts says late.
"""

from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from deeplink.errors import DeepLinkError

if TYPE_CHECKING:
    from collections.abc import Collection

    from deeplink.clock import Clock

    Address = tuple[int, int, int, str, tuple[Any, ...]]

_WAIT_S = 1.0
_KNOWN_S = 60.0
"""How long an answer is used without another question."""
_MOST_KNOWN = 65_536
"""Hosts whose answers are kept: those of the largest clusters, several times."""


class UnresolvedError(DeepLinkError):
    """A host's address is not known."""

    def __init__(self, host: str, problem: str) -> None:
        super().__init__(
            f"the address of {host!r} is not known: {problem}",
            remedy=f"`getent hosts {host}` shows what is known.",
        )
        self.host, self.problem = host, problem


class _Names:
    """The known answers, and who is asked now; one question for each host, however many callers wait."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.known: dict[str, tuple[float, list[Address]]] = {}
        self.asked: dict[str, Future[list[Address]]] = {}

    def forked(self) -> None:
        """Forget the questions: their threads are not in this process."""
        self.lock, self.asked = threading.Lock(), {}

    def begin(self, host: str, clock: Clock) -> tuple[Future[list[Address]], bool]:
        """Return the question under way and whether it began now."""
        with self.lock:
            question = self.asked.get(host)
            if question is not None:
                return question, False
            question = self.asked[host] = Future()
        # A thread of its own, for there is no other way to end the wait. What comes late is kept all the same.
        threading.Thread(
            target=self._ask, args=(host, question, clock), name="deeplink-names", daemon=True
        ).start()
        return question, True

    def _ask(self, host: str, question: Future[list[Address]], clock: Clock) -> None:
        try:
            found = _looked_up(host, 0)
        except BaseException as problem:  # noqa: BLE001 - raised again where it is waited for
            with self.lock:
                self.asked.pop(host, None)
            question.set_exception(problem)
            return
        with self.lock:
            while len(self.known) >= _MOST_KNOWN and host not in self.known:
                del self.known[next(iter(self.known))]
            self.known[host] = clock.monotonic() + _KNOWN_S, found
            self.asked.pop(host, None)
        question.set_result(found)


_names = _Names()
os.register_at_fork(after_in_child=_names.forked)


def addresses(host: str, port: int, clock: Clock) -> list[Address]:
    """Return what `getaddrinfo` says of a host; for a number at once, for a name within a second.

    An answer is kept: for a minute it is used as it is, and beyond that where no other comes.

    Raises:
        UnresolvedError: there is no such host, or no answer came and none ever has.
    """
    return _at(port, _ended(host, _begun(host, clock), _WAIT_S))


def addresses_of_all(targets: Collection[tuple[str, int]], clock: Clock) -> dict[tuple[str, int], list[Address]]:
    """Return what `addresses` does of many hosts and ports, within a second in all; without those not known.

    A question that was under way before is not waited for: who asks often would wait each time.
    """
    with _names.lock:
        before = set(_names.asked)
    begun: dict[str, list[Address] | Future[list[Address]]] = {}
    for host in {host for host, _ in targets}:
        with suppress(UnresolvedError):
            begun[host] = _begun(host, clock)
    wait([one for host, one in begun.items() if isinstance(one, Future) and host not in before], _WAIT_S)
    found: dict[str, list[Address]] = {}
    for host, question in begun.items():
        with suppress(UnresolvedError):
            found[host] = _ended(host, question, 0)
    return {(host, port): _at(port, found[host]) for host, port in targets if host in found}


def _looked_up(host: str, flags: int) -> list[Address]:
    return list(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=flags | socket.AI_NUMERICSERV))


def _at(port: int, found: list[Address]) -> list[Address]:
    return [
        (family, kind, protocol, name, (address[0], port, *address[2:]))
        for family, kind, protocol, name, address in found
    ]


def _begun(host: str, clock: Clock) -> list[Address] | Future[list[Address]]:
    """Return a host's addresses where they are at hand, else the question for them."""
    try:
        return _looked_up(host, socket.AI_NUMERICHOST)
    except socket.gaierror as problem:
        if problem.errno != socket.EAI_NONAME:
            raise UnresolvedError(host, str(problem)) from problem
    except (OSError, UnicodeError) as problem:
        raise UnresolvedError(host, str(problem)) from problem
    until, known = _names.known.get(host, (0.0, []))
    if known and until >= clock.monotonic():
        return known
    question, is_new = _names.begin(host, clock)
    return question if is_new or not known else known  # one caller waits for the answer; that is enough


def _ended(host: str, begun: list[Address] | Future[list[Address]], wait_s: float) -> list[Address]:
    """Return the answer to a question; what was known before where none comes in time."""
    if isinstance(begun, list):
        return begun
    _, known = _names.known.get(host, (0.0, []))
    try:
        return begun.result(wait_s)
    except TimeoutError:
        if known:
            return known
        raise UnresolvedError(host, "no answer in time: does the name server answer?") from None
    except (OSError, UnicodeError) as problem:
        if known and isinstance(problem, socket.gaierror) and problem.errno == socket.EAI_AGAIN:
            return known
        raise UnresolvedError(host, str(problem)) from problem


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of `host:port` (`[v6]:port` for IPv6).

    >>> split_address("10.0.0.7:7411"), split_address("[fe80::1]:7411")
    (('10.0.0.7', 7411), ('fe80::1', 7411))

    Raises:
        ValueError: it has no port.
    """
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
