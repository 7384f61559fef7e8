"""Accepts connections in front of grpcio's server, which holds whoever connects for as long as they like.

grpcio's core has bounds for idle connections and for the number of all. It has none for the time from accepting to
the first call with the token, none for one address, and no reserve for peers with the token (measured, 1.85.1).
Bytes are passed on in both directions, to a socket that only this process reaches.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
from typing import TYPE_CHECKING

from deeplink.admission import Admission, ConnectionBounds
from deeplink.plainrpc.errors import SessionError
from deeplink.plainrpc.proof import Proof

if TYPE_CHECKING:
    from collections.abc import Callable

    from deeplink.clock import Clock

log = logging.getLogger(__name__)

_AT_ONCE = 32
_BUFFER = 1 << 18
_LOOK_ROUND_S = 0.25
_FULL_S = 0.1
"""Nobody is accepted for so long where no descriptor is left."""
_GONE_MS = 20_000
"""A peer whose machine acknowledges nothing for so long is gone."""
_END_S = 1.0
_READ, _WRITE, _CLOSED = select.EPOLLIN, select.EPOLLOUT, select.EPOLLHUP | select.EPOLLERR


class _Side:
    """One end of a connection that is passed on.

    Attributes:
        unsent: what came from the other end and is not yet taken; the other end is not read meanwhile.
        mask: what is waited for; None where it was closed from outside while the other end has not taken all.
    """

    __slots__ = ("mask", "other", "relay", "socket", "unsent")

    def __init__(self, end: socket.socket, relay: _Relay) -> None:
        self.socket, self.relay = end, relay
        self.unsent = memoryview(b"")
        self.mask: int | None = _READ
        self.other = self


class _Relay:
    """A connection of a client and the one to the server that belongs to it."""

    __slots__ = ("client", "proof", "server")

    def __init__(self, client: socket.socket, server: socket.socket, proof: Proof) -> None:
        self.client, self.server = _Side(client, self), _Side(server, self)
        self.client.other, self.server.other = self.server, self.client
        self.proof: Proof | None = proof


class Acceptor:
    """Passes connections on to a server from `start` to `close`; one thread.

    Args:
        listener: where clients connect; it must not block.
        target: descriptor of the server's Unix socket (O_PATH); closed at the end.
        is_valid: whether a token proves a peer.
        bounds: of the connections held.
        clock: where time comes from.
        open_to_all: how the methods begin that need no token.
    """

    def __init__(
        self,
        listener: socket.socket,
        target: int,
        is_valid: Callable[[str], bool],
        bounds: ConnectionBounds,
        clock: Clock,
        *,
        open_to_all: tuple[str, ...] = (),
    ) -> None:
        self._listener, self._target = listener, target
        self._is_valid, self._open_to_all = is_valid, open_to_all
        self._admission, self._clock = Admission[_Relay](bounds, clock), clock
        self._sides: dict[int, _Side] = {}
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, _READ)
        self._buffer = memoryview(bytearray(_BUFFER))
        self._again_at = 0.0
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="deeplink-accept", daemon=True)

    def start(self) -> None:
        """Accept from now on; who connected before waits in the socket's queue."""
        self._epoll.register(self._listener, _READ)
        self._thread.start()

    def close(self) -> None:
        """Return once nobody is accepted and every connection has ended."""
        if self._is_ending:
            return
        self._is_ending = True
        os.eventfd_write(self._wake, 1)
        if self._thread.ident is not None:
            self._thread.join(_END_S)
        else:
            self._release()
        os.close(self._wake)  # not the thread's: it may end before it is woken

    def open_connections(self) -> int:
        """Return how many connections are held."""
        return len(self._sides) // 2

    def _run(self) -> None:
        looked = self._clock.monotonic()
        while not self._is_ending:
            for descriptor, event in self._epoll.poll(_LOOK_ROUND_S):
                side = self._sides.get(descriptor)
                if side is not None:
                    self._work(side, event)
                elif descriptor == self._listener.fileno():
                    self._accept()
            now = self._clock.monotonic()
            if now - looked >= _LOOK_ROUND_S:
                looked = now
                self._look_round(now)
        for side in list(self._sides.values()):
            self._end(side.relay)
        self._release()

    def _release(self) -> None:
        self._listener.close()
        self._epoll.close()
        os.close(self._target)

    def _look_round(self, now: float) -> None:
        for relay in self._admission.overdue():
            self._end(relay)
        if self._again_at and now >= self._again_at:
            self._again_at = 0.0
            self._epoll.register(self._listener, _READ)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):  # others are worked on in between
            try:
                client, peer = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as problem:
                log.warning("a connection cannot be taken: %s", problem)
                self._epoll.unregister(self._listener)
                self._again_at = self._clock.monotonic() + _FULL_S
                return
            self._take_in(client, str(peer[0]))

    def _take_in(self, client: socket.socket, address: str) -> None:
        server = None
        try:
            client.setblocking(False)  # noqa: FBT003 - the standard library's
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _GONE_MS)
            server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            server.connect(f"/proc/self/fd/{self._target}")
        except OSError as problem:
            log.warning("a connection cannot be passed on: %s", problem)
            client.close()
            if server is not None:
                server.close()
            return
        relay = _Relay(client, server, Proof(self._is_valid, self._open_to_all))
        leaves = self._admission.admit(relay, address)
        if leaves is relay:
            client.close()
            server.close()
            return
        if leaves is not None:
            self._end(leaves)
        for side in (relay.client, relay.server):
            self._sides[side.socket.fileno()] = side
            self._epoll.register(side.socket, _READ)

    def _work(self, side: _Side, event: int) -> None:
        try:
            if event & _WRITE and side.unsent:
                side.unsent = side.unsent[side.socket.send(side.unsent) :]
            if event & ~_WRITE and not side.other.unsent:
                self._pass_on(side)
            elif event & _CLOSED:  # said again and again: it is looked at once the other end has taken all
                self._epoll.unregister(side.socket)
                side.mask = None
        except BlockingIOError:
            pass
        except SessionError as problem:
            log.warning("a peer is cut off: %s", problem)
            self._end(side.relay)
        except OSError as problem:
            log.debug("a connection ended: %s", problem)
            self._end(side.relay)
        except Exception:
            log.exception("a connection is given up")
            self._end(side.relay)
        for each in (side, side.other):
            if each.socket.fileno() >= 0:
                self._arm(each)

    def _pass_on(self, side: _Side) -> None:
        """Read once, and hand over what came."""
        count = side.socket.recv_into(self._buffer)
        if not count:
            raise ConnectionResetError("the peer closed it")
        data, relay = self._buffer[:count], side.relay
        if relay.proof is not None and side is relay.client:
            data = memoryview(relay.proof.passed(bytes(data)))
            if relay.proof.is_proven:
                relay.proof = None
                self._admission.prove(relay)
        try:
            sent = side.other.socket.send(data)
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            side.other.unsent = memoryview(bytes(data[sent:]))

    def _arm(self, side: _Side) -> None:
        mask = (0 if side.other.unsent else _READ) | (_WRITE if side.unsent else 0)
        if side.mask is None:
            if side.other.unsent:
                return
            self._epoll.register(side.socket, mask)
        elif mask != side.mask:
            self._epoll.modify(side.socket, mask)
        side.mask = mask

    def _end(self, relay: _Relay) -> None:
        self._admission.leave(relay)
        for side in (relay.client, relay.server):
            if self._sides.pop(side.socket.fileno(), None) is not None:
                with contextlib.suppress(OSError):  # one whose mask is None is not registered
                    self._epoll.unregister(side.socket)
            side.socket.close()
