"""Which port of a member batches are read from, and the connections to it that wait to be used again.

A member's answers on the agent's own port name its data port, if it has one. That is connected to without anybody
waiting for it, so that a firewall that swallows it costs nothing; until it stands, the agent's own port serves.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deeplink.plainrpc import PlainCallError, PlainConnection

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deeplink.clock import Clock

log = logging.getLogger(__name__)

PROTOCOL = 1
"""Of the data port; one that speaks another is left alone, the agent's own port serves every release."""
DATA_PORT_HEADER, PROTOCOL_HEADER = "deeplink-data-port", "deeplink-protocol"
_MOST_IDLE = 8
_CONNECT_S = 5.0
_LEFT_ALONE_S = 60.0
_MOST_PORT, _MOST_DIGITS = 65_535, 5


@dataclass(slots=True)
class _Route:
    """What is known of a member's data port.

    Attributes:
        address: of the port; empty where there is none, or it speaks another protocol.
        is_proven: whether a connection to it has stood.
        trying: the first connection to it, on its way since `since`.
        not_before: when to try again.
    """

    address: str = ""
    is_proven: bool = False
    trying: PlainConnection | None = None
    since: float = 0.0
    not_before: float = 0.0
    foreign: set[str] = field(default_factory=set)


class Routes:
    """Connections to members, by the address of the agent's own port. Safe to use from several threads.

    Args:
        token: what each call carries.
        clock: where time comes from.
    """

    def __init__(self, token: str, clock: Clock) -> None:
        self._token, self._clock = token, clock
        self._lock = threading.Lock()
        self._routes: dict[str, _Route] = {}
        self._idle: dict[str, list[PlainConnection]] = {}

    def connection(self, address: str, *, fresh: bool) -> PlainConnection:
        """Return a connection for one call, an idle one unless it is to be fresh.

        Raises:
            PlainSilentError: the address cannot be used.
        """
        self._begin_trying(address)
        with self._lock:
            route = self._routes.get(address)
            if route is not None and route.address:
                if not route.is_proven:
                    self._try(route)
                if route.is_proven:
                    address = route.address
            idle = self._idle.get(address)
            if idle and not fresh:
                return idle.pop()
        return PlainConnection(address, self._token, self._clock)

    def _begin_trying(self, address: str) -> None:
        """Begin to connect to a data port where it is time to; not under the lock, for a name may be looked up."""
        route = self._routes.get(address)
        if route is None or route.is_proven:
            return
        wanted = self._taken_up(route)
        if not wanted:
            return
        made, problem = None, ""
        try:
            made = PlainConnection(wanted, self._token, self._clock)
        except PlainCallError as failed:
            problem = str(failed)
        with self._lock:
            if route.address == wanted and made is not None:
                route.trying, route.since, made = made, self._clock.monotonic(), None
            elif route.address == wanted:
                self._leave_alone(route, problem)
        if made is not None:  # the port has moved meanwhile
            made.close()

    def _taken_up(self, route: _Route) -> str:
        """Return the port that whoever asks is to connect to; empty: it is not time to, or another does it."""
        with self._lock:
            now = self._clock.monotonic()
            if route.is_proven or route.trying is not None or now < route.not_before:
                return ""
            route.not_before = now + _LEFT_ALONE_S
            return route.address

    def _try(self, route: _Route) -> None:
        if route.trying is None:
            return
        now = self._clock.monotonic()
        try:
            stands = route.trying.stands()
        except PlainCallError as problem:
            self._leave_alone(route, str(problem))
            return
        if stands:
            route.is_proven = True
            self._idle.setdefault(route.address, []).append(route.trying)
            route.trying = None
        elif now - route.since > _CONNECT_S:
            self._leave_alone(route, "no connection in time: does a firewall stop it?")

    def _leave_alone(self, route: _Route, problem: str) -> None:
        log.warning("data port %s: %s; the agent's own port serves, more slowly", route.address, problem)
        if route.trying is not None:
            route.trying.close()
        route.trying, route.not_before = None, self._clock.monotonic() + _LEFT_ALONE_S

    def keep(self, connection: PlainConnection) -> None:
        """Take a connection back after a call that went well."""
        with self._lock:
            idle = self._idle.setdefault(connection.address, [])
            if len(idle) < _MOST_IDLE:
                idle.append(connection)
                return
        connection.close()

    def learn(self, address: str, said: Mapping[str, str]) -> None:
        """Take notice of what a member's own port said at the end of a call."""
        port, protocol = said.get(DATA_PORT_HEADER, ""), said.get(PROTOCOL_HEADER, "")
        if not (port.isascii() and port.isdigit() and len(port) <= _MOST_DIGITS and 0 < int(port) <= _MOST_PORT):
            return
        with self._lock:
            route = self._routes.setdefault(address, _Route())
            if protocol != str(PROTOCOL):
                if protocol not in route.foreign:
                    route.foreign.add(protocol)
                    log.warning(
                        "member at %s speaks protocol %s on its data port, this release %d: the agent's own port "
                        "serves, more slowly; run one release on all nodes",
                        *(address, protocol[:20] or "(none)", PROTOCOL),
                    )
                route.address = ""
                return
            found = f"{address.rpartition(':')[0]}:{port}"
            if found != route.address:
                route.address, route.is_proven, route.not_before = found, False, 0.0

    def forget(self, address: str, connection: PlainConnection) -> bool:
        """Take notice that a connection failed; tell whether it was to the data port, which may have moved."""
        with self._lock:
            route = self._routes.get(address)
            if route is None or connection.address != route.address:
                return False
            for idle in self._idle.pop(route.address, ()):
                idle.close()
            route.address, route.is_proven = "", False
            return True

    def close(self) -> None:
        """End all connections that are not in use."""
        with self._lock:
            for idle in self._idle.values():
                for connection in idle:
                    connection.close()
            for route in self._routes.values():
                if route.trying is not None:
                    route.trying.close()
            self._idle.clear()
            self._routes.clear()
