"""Who may hold a connection to a server of ours: a few strangers for a moment, and those who proved themselves.

A peer is a stranger until one of its calls has carried the token. Pure but for the clock; touches no socket.
"""

from __future__ import annotations

import ipaddress
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable

    from deeplink.clock import Clock

Guest = TypeVar("Guest", bound="Hashable")

_SITE_BITS = 64  # of an IPv6 address, which one host has to itself


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionBounds:
    """How many connections a server holds, and for how long without a proof.

    Attributes:
        connections: in all; those that strangers do not have are a reserve for who is proven.
        proof_s: from the moment of accepting to the first proven call.
    """

    connections: int = 4096
    proof_s: float = 10.0

    @property
    def strangers(self) -> int:
        """Those of strangers."""
        return max(1, self.connections // 2)

    @property
    def of_one_address(self) -> int:
        """Those of strangers from one address."""
        return max(1, self.strangers // 2)


class Admission(Generic[Guest]):
    """The connections of one server. Safe to use from several threads."""

    def __init__(self, bounds: ConnectionBounds, clock: Clock) -> None:
        self._bounds, self._clock = bounds, clock
        self._lock = threading.Lock()
        self._strangers: dict[Guest, tuple[str, float]] = {}  # the oldest first
        self._by_origin: dict[str, dict[Guest, None]] = {}
        self._proven: set[Guest] = set()

    def admit(self, guest: Guest, address: str) -> Guest | None:
        """Take a new connection in; return the one that must be closed for it, or itself where there is no room.

        The stranger that has been there for longest makes room: an honest peer proves itself within a moment.
        """
        origin = origin_of(address)
        with self._lock:
            held, strangers = len(self._proven) + len(self._strangers), len(self._strangers)
            same = self._by_origin.get(origin, {})
            leaves = None
            if len(same) >= self._bounds.of_one_address:
                leaves = next(iter(same))
            elif strangers >= self._bounds.strangers or (strangers and held >= self._bounds.connections):
                fullest = max(self._by_origin, key=lambda one: len(self._by_origin[one]))
                leaves = next(iter(self._by_origin[fullest]))
            elif held >= self._bounds.connections:
                return guest
            if leaves is not None:
                self._forget(leaves)
            self._strangers[guest] = origin, self._clock.monotonic()
            self._by_origin.setdefault(origin, {})[guest] = None
            return leaves

    def prove(self, guest: Guest) -> None:
        """Take note that a call of this connection's carried the token."""
        with self._lock:
            if self._forget(guest):
                self._proven.add(guest)

    def leave(self, guest: Guest) -> None:
        """Take note that a connection is closed."""
        with self._lock:
            self._forget(guest)
            self._proven.discard(guest)

    def overdue(self) -> list[Guest]:
        """Return the strangers whose time to prove themselves is over."""
        since = self._clock.monotonic() - self._bounds.proof_s
        found = []
        with self._lock:
            for guest, (_, at) in self._strangers.items():
                if at > since:
                    break
                found.append(guest)
        return found

    def _forget(self, guest: Guest) -> bool:
        origin, _ = self._strangers.pop(guest, ("", 0.0))
        same = self._by_origin.get(origin)
        if same is None:
            return False
        same.pop(guest, None)
        if not same:
            del self._by_origin[origin]
        return True


def origin_of(address: str) -> str:
    """Return what connections of one host have in common: its address; of an IPv6 address its network.

    >>> origin_of("10.0.0.7"), origin_of("::ffff:10.0.0.7"), origin_of("2001:db8::1:2:3:4%eth0")
    ('10.0.0.7', '10.0.0.7', '2001:db8::')
    """
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Address(int(found) >> _SITE_BITS << _SITE_BITS))
