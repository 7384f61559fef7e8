"""Reaching for slurmd: one TCP connection to each node, all at once, within a deadline.

slurmd logs two error lines for a connection that says nothing (measured), so probes are for moments of suspicion.
"""

from __future__ import annotations

import errno
import selectors
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

from deeplink.clock import Clock, SystemClock
from deeplink.resolving import addresses_of_all
from deeplink.scheduler.watch.evidence import ProbeResult

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from deeplink.resolving import Address as AddressInfo
    from deeplink.types import NodeName

Address = tuple[str, int]

_REFUSED = frozenset({errno.ECONNREFUSED, errno.ECONNRESET})
# What the network says when nobody is there; every other error is ours, and says nothing about the node.
_NOBODY = frozenset({errno.EHOSTUNREACH, errno.ETIMEDOUT, errno.EHOSTDOWN})
MOST_AT_ONCE = 512
_BY_WEIGHT = (ProbeResult.ANSWERS, ProbeResult.REFUSES, ProbeResult.SILENT, ProbeResult.UNKNOWN)
"""Of the addresses of one node the first of these is the node's answer."""
T = TypeVar("T")


class Prober(Protocol):
    """Tries to reach nodes."""

    def probe(self, targets: Mapping[NodeName, Address], deadline_s: float) -> dict[NodeName, ProbeResult]:
        """Return within about `deadline_s` how each target answered."""
        ...


@dataclass(frozen=True, slots=True)
class TcpProber:
    """Connects to each target without waiting for one after another."""

    clock: Clock = field(default_factory=SystemClock)

    def probe(self, targets: Mapping[NodeName, Address], deadline_s: float) -> dict[NodeName, ProbeResult]:
        """Return how each target answered; SILENT when none of its addresses did within the deadline.

        At most 512 connections are open at once; with more of them each group has the deadline to itself.
        """
        answers = dict.fromkeys(targets, ProbeResult.UNKNOWN)
        names = list(targets)
        for group in _groups(names):
            found = addresses_of_all({targets[name] for name in group}, self.clock)
            for doors in _groups([(name, door) for name in group for door in found.get(targets[name], ())]):
                for name, answer in self._round(doors, deadline_s):
                    answers[name] = min(answers[name], answer, key=_BY_WEIGHT.index)
        return answers

    def _round(
        self, doors: Sequence[tuple[NodeName, AddressInfo]], deadline_s: float
    ) -> list[tuple[NodeName, ProbeResult]]:
        answers: dict[int, ProbeResult] = {}
        with selectors.DefaultSelector() as selector:
            try:
                for number, (_, door) in enumerate(doors):
                    answers[number] = _begin(selector, number, door)
                end = self.clock.monotonic() + deadline_s
                while selector.get_map() and (left := end - self.clock.monotonic()) > 0:
                    for key, _ in selector.select(left):
                        number, connection = key.data
                        selector.unregister(connection)
                        answers[number] = _answer(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
                        connection.close()
            finally:
                for key in list(selector.get_map().values()):
                    key.data[1].close()
        return [(name, answers[number]) for number, (name, _) in enumerate(doors)]


def _groups(all_of_them: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(all_of_them), MOST_AT_ONCE):
        yield all_of_them[start : start + MOST_AT_ONCE]


def _begin(selector: selectors.BaseSelector, number: int, door: AddressInfo) -> ProbeResult:
    family, kind, protocol, _, where = door
    try:
        connection = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
    except OSError:
        return ProbeResult.UNKNOWN  # out of file descriptors: ours, not the node's
    problem = connection.connect_ex(where)
    if problem in {errno.EINPROGRESS, 0}:
        selector.register(connection, selectors.EVENT_WRITE, (number, connection))
        return ProbeResult.SILENT  # until it answers
    connection.close()
    return _answer(problem)


def _answer(problem: int) -> ProbeResult:
    if not problem:
        return ProbeResult.ANSWERS
    if problem in _REFUSED:
        return ProbeResult.REFUSES
    return ProbeResult.SILENT if problem in _NOBODY else ProbeResult.UNKNOWN
