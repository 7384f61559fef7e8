"""Decides which peers may hold a connection to a server of ours: proven ones, and for a moment a few strangers.

A peer is a stranger until one of its calls has carried the token. Pure but for the clock; touches no socket.
"""

from __future__ import annotations

import ipaddress
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from deeplink.core.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Hashable

    from deeplink.core.clock import Clock

Guest = TypeVar("Guest", bound="Hashable")

SILENT_S = 600.0
"""So long a token is not shown again: an agent that was given another token meanwhile is met without a restart."""
_MOST = 4096
_SITE_BITS = 64  # of an IPv6 address, which one host has to itself


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionBounds:
    """How many connections a server holds, and for how long without a proof."""

    connections: int = 4096  # in all; those that strangers do not have are a reserve for who is proven
    proof_s: float = 10.0  # from the moment of accepting to the first proven call

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


class Strangers:
    """The addresses that answered as no server of ours does, so that they are not shown the token again.

    By address and token; bounded. Thread-safe.
    """

    def __init__(self, clock: Clock) -> None:
        self._lock, self._clock = threading.Lock(), clock
        self._known: dict[tuple[str, str], tuple[float, str]] = {}

    def note(self, address: str, token: str, answered: str) -> None:
        """Remember that what listens at an address was shown this token, and answered so."""
        with self._lock:
            self._known.pop((address, token), None)
            while len(self._known) >= _MOST:
                del self._known[next(iter(self._known))]
            self._known[address, token] = self._clock.monotonic() + SILENT_S, answered

    def answered(self, address: str, token: str) -> str:
        """Return what was answered there within `SILENT_S`; empty where the token may be shown."""
        until, answered = self._known.get((address, token), (0.0, ""))
        return answered if self._clock.monotonic() < until else ""

    def forget(self, address: str | None = None) -> None:
        """Forget what was answered at an address, where a server of ours is announced now; without one, all."""
        with self._lock:
            self._known = {key: one for key, one in self._known.items() if address not in {None, key[0]}}


STRANGERS = Strangers(SystemClock())
"""Those that this process met."""
