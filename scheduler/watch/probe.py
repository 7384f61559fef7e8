"""Reaching for slurmd: one TCP connection to each node, all at once, within a deadline.

slurmd logs two error lines for a connection that says nothing (measured), so probes are for moments of suspicion.
"""

from __future__ import annotations

import errno
import ipaddress
import selectors
import socket
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from deeplink.clock import Clock, SystemClock
from deeplink.scheduler.watch.evidence import Answer

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from deeplink.types import NodeName

Address = tuple[str, int]

_REFUSED = frozenset({errno.ECONNREFUSED, errno.ECONNRESET})
# What the network says when nobody is there; every other error is ours, and says nothing about the node.
_NOBODY = frozenset({errno.EHOSTUNREACH, errno.ETIMEDOUT, errno.EHOSTDOWN})
MOST_AT_ONCE = 512
RESOLVE_S = 2.0


class Prober(Protocol):
    """Tries to reach nodes."""

    def probe(self, targets: Mapping[NodeName, Address], deadline_s: float) -> dict[NodeName, Answer]:
        """Return within about `deadline_s` how each target answered."""
        ...


@dataclass(slots=True)
class TcpProber:
    """Connects to each target without waiting for one after another. Not thread-safe."""

    clock: Clock = field(default_factory=SystemClock)
    _resolved: dict[str, str] = field(default_factory=dict)
    _asked: set[str] = field(default_factory=set)

    def probe(self, targets: Mapping[NodeName, Address], deadline_s: float) -> dict[NodeName, Answer]:
        """Return how each target answered; SILENT when it did not within the deadline.

        At most 512 connections are open at once; with more targets each group has the deadline to itself.
        """
        self._resolve({host for host, _ in targets.values() if host not in self._resolved})
        names = list(targets)
        answers: dict[NodeName, Answer] = {}
        for start in range(0, len(names), MOST_AT_ONCE):
            answers |= self._round(
                {name: targets[name] for name in names[start : start + MOST_AT_ONCE]}, deadline_s
            )
        return answers

    def _round(self, targets: Mapping[NodeName, Address], deadline_s: float) -> dict[NodeName, Answer]:
        answers: dict[NodeName, Answer] = {}
        with selectors.DefaultSelector() as selector:
            try:
                for name, (host, port) in targets.items():
                    answers[name] = self._begin(selector, name, host, port)
                end = self.clock.monotonic() + deadline_s
                while selector.get_map() and (left := end - self.clock.monotonic()) > 0:
                    for key, _ in selector.select(left):
                        name, connection = key.data
                        selector.unregister(connection)
                        answers[name] = _answer(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
                        connection.close()
            finally:
                for key in list(selector.get_map().values()):
                    key.data[1].close()
        return answers

    def _begin(self, selector: selectors.BaseSelector, name: NodeName, host: str, port: int) -> Answer:
        address = self._resolved.get(host)
        if address is None:
            return Answer.UNKNOWN
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError:
            return Answer.UNKNOWN  # out of file descriptors: ours, not the node's
        problem = connection.connect_ex((address, port))
        if problem in {errno.EINPROGRESS, 0}:
            selector.register(connection, selectors.EVENT_WRITE, (name, connection))
            return Answer.SILENT  # until it answers
        connection.close()
        return _answer(problem)

    def _resolve(self, hosts: Iterable[str]) -> None:
        """Look up names once, for at most RESOLVE_S: a name server that hangs must not hold the watchdog."""
        lookups = []
        for host in hosts:
            if _is_address(host):
                self._resolved[host] = host
            elif host not in self._asked:  # one that hangs is not asked again and again
                self._asked.add(host)
                lookup = threading.Thread(target=self._look_up, args=(host,), daemon=True)
                lookup.start()
                lookups.append(lookup)
        end = self.clock.monotonic() + RESOLVE_S
        for lookup in lookups:
            lookup.join(max(0.0, end - self.clock.monotonic()))

    def _look_up(self, host: str) -> None:
        try:
            self._resolved[host] = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        except OSError:
            return  # asked again at the next probe
        finally:
            self._asked.discard(host)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _answer(problem: int) -> Answer:
    if not problem:
        return Answer.ANSWERS
    if problem in _REFUSED:
        return Answer.REFUSES
    return Answer.SILENT if problem in _NOBODY else Answer.UNKNOWN
