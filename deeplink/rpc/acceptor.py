"""Accepts an agent's connections: those of our own clients are handed over, those of gRPC clients passed on.

A grpcio server holds every peer for as long as the peer likes: its core has bounds for idle connections and for
the number of all, none for the time from accepting to the first call with the token, none for one address, and no
reserve for peers with the token (measured, 1.85.1). Bytes are passed on in both directions, to a socket that only
this process reaches.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from typing_extensions import override

from deeplink.core.admission import Admission, ConnectionBounds
from deeplink.rpc import http2
from deeplink.rpc.http2 import FrameType, HeaderReader
from deeplink.rpc.plain.framing import MAGIC, SessionError
from deeplink.rpc.tokens import TOKEN_HEADER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from deeplink.core.clock import Clock

log = logging.getLogger(__name__)

_AT_ONCE = 32
_BUFFER = 1 << 18
_LOOK_ROUND_S = 0.25
_FULL_S = 0.1
"""Nothing is accepted for so long where no descriptor is left."""
_GONE_MS = 20_000
"""A peer whose machine acknowledges nothing for so long is gone."""
_END_S = 1.0
_MOST_BYTES = 1 << 18
"""Before a call with the token; a client of ours needs some hundred."""
_MOST_CALLS = 16
"""Without the token. Then the connection ends."""
_HEAD_BYTES = 16_384
"""Of a stranger's header blocks in all; our clients need some hundred."""
_MOST_CONTINUED = 16
"""Frames of one header block."""
_READ, _WRITE, _CLOSED = select.EPOLLIN, select.EPOLLOUT, select.EPOLLHUP | select.EPOLLERR


class Proof:
    """Reads what one peer sends, until it has proved itself. Not thread-safe.

    A server gives a call a place at its head, and keeps the place until the request has come. So a stranger's call
    to a service that is open to all is kept here until it is whole.

    Attributes:
        is_proven: whether a call carried the token.
    """

    def __init__(self, is_valid: Callable[[str], bool], open_to_all: tuple[str, ...] = ()) -> None:
        self._is_valid, self._open_to_all = is_valid, open_to_all
        self.is_proven = False
        self._kept, self._read = bytearray(), 0  # so many bytes of what is kept are read
        self._is_greeted = False
        self._came = self._calls = self._came_of_heads = 0
        self._half: set[int] = set()
        self._block: tuple[int, list[bytes]] | None = None
        self._headers = HeaderReader()

    def passed(self, data: bytes) -> bytes:
        """Take in what came; return what the server may have by now."""
        self._came += len(data)
        if self._came > _MOST_BYTES:
            raise SessionError("too much without a token")
        self._kept += data
        kept, size, at, whole = self._kept, http2.FRAME.size, self._read, 0
        if not self._is_greeted:
            at = whole = len(http2.PREFACE)
            if not http2.PREFACE.startswith(bytes(kept[:at])):
                raise SessionError("this is an agent of DeepLink")
            if len(kept) < at:
                return b""
            self._is_greeted = True
        while len(kept) - at >= size and not self.is_proven:
            high, low, kind, flags, stream = http2.FRAME.unpack_from(kept, at)
            end = at + size + (high << 16) + low
            if end > len(kept):
                break
            self._take(kind, flags, stream & http2.LAST_STREAM, bytes(kept[at + size : end]))
            at = end
            whole = whole if self._half else at
        if self.is_proven:
            whole = at = len(kept)
        self._read = at - whole
        passed = bytes(kept[:whole])
        del kept[:whole]
        return passed

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind in {FrameType.HEADERS, FrameType.CONTINUATION}:
            self._take_head(kind, flags, stream, payload)
        elif kind == FrameType.RESET or (kind == FrameType.DATA and flags & http2.END_STREAM):
            self._half.discard(stream)

    def _take_head(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        self._came_of_heads += len(payload)
        if self._came_of_heads > _HEAD_BYTES or (self._block and len(self._block[1]) >= _MOST_CONTINUED):
            raise SessionError("header blocks too long")  # to decode them takes time
        try:
            if kind == FrameType.HEADERS:
                payload = http2.without_padding(flags, payload)
                self._block = flags, [payload[5:] if flags & http2.PRIORITY else payload]
            elif self._block is not None:
                self._block[1].append(payload)
            if not flags & http2.END_HEADERS or self._block is None:
                return
            (first, pieces), self._block = self._block, None
            fields = self._headers.read(b"".join(pieces))
        except ValueError as problem:
            raise SessionError(str(problem)) from problem
        if self._is_valid(fields.get(TOKEN_HEADER, "")):
            self.is_proven = True
            return
        self._calls += 1
        if self._calls > _MOST_CALLS:
            raise SessionError("too many calls without a token")
        if first & http2.END_STREAM:
            self._half.discard(stream)
        elif fields.get(":path", "").startswith(self._open_to_all):
            self._half.add(stream)


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
    """A client's connection and, once the client has begun to speak, the one to the server that belongs to it."""

    __slots__ = ("address", "client", "proof", "server")

    def __init__(self, client: socket.socket, address: str, proof: Proof) -> None:
        self.client, self.address = _Side(client, self), address
        self.server: _Side | None = None
        self.proof: Proof | None = proof

    def connect(self, server: socket.socket) -> _Side:
        self.server = _Side(server, self)
        self.client.other, self.server.other = self.server, self.client
        return self.server

    def sides(self) -> tuple[_Side, ...]:
        return (self.client,) if self.server is None else (self.client, self.server)


class Acceptor:
    """Passes connections on from `start` to `close`; one thread.

    `plain` takes those of our own clients, with their address, before anything of them is read; None: there are
    none.
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
        plain: Callable[[socket.socket, str], None] | None = None,
    ) -> None:
        self._plain = plain
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
        """Return once nothing is accepted and every connection has ended."""
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
        return sum(side is side.relay.client for side in list(self._sides.values()))

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
        try:
            client.setblocking(False)  # noqa: FBT003 - the standard library's
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _GONE_MS)
        except OSError as problem:
            log.debug("a connection ended: %s", problem)
            client.close()
            return
        relay = _Relay(client, address, Proof(self._is_valid, self._open_to_all))
        leaves = self._admission.admit(relay, address)
        if leaves is relay:
            client.close()
            return
        if leaves is not None:
            self._end(leaves)
        self._take_side(relay.client)

    def _take_side(self, side: _Side) -> None:
        self._sides[side.socket.fileno()] = side
        self._epoll.register(side.socket, _READ)

    def _meet(self, relay: _Relay) -> bool:
        """Look at a client's first byte; tell whether it is passed on, and not handed over."""
        client = relay.client.socket
        first = client.recv(1, socket.MSG_PEEK)
        if not first:
            raise ConnectionResetError("the peer closed it")
        if self._plain is not None and first == MAGIC[:1]:
            self._epoll.unregister(client)
            del self._sides[client.fileno()]
            self._admission.leave(relay)
            self._plain(client, relay.address)
            return False
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            server.connect(f"/proc/self/fd/{self._target}")
        except OSError as problem:
            log.warning("a connection cannot be passed on: %s", problem)
            server.close()
            raise
        self._take_side(relay.connect(server))
        return True

    def _work(self, side: _Side, event: int) -> None:
        try:
            if side.relay.server is None and not self._meet(side.relay):
                return
            self._go_on(side, event)
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

    def _go_on(self, side: _Side, event: int) -> None:
        if event & _WRITE and side.unsent:
            side.unsent = side.unsent[side.socket.send(side.unsent) :]
        if event & ~_WRITE and not side.other.unsent:
            self._pass_on(side)
        elif event & _CLOSED:  # said again and again: it is looked at once the other end has taken all
            self._epoll.unregister(side.socket)
            side.mask = None

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
        for side in relay.sides():
            if self._sides.pop(side.socket.fileno(), None) is not None:
                with contextlib.suppress(OSError):  # one whose mask is None is not registered
                    self._epoll.unregister(side.socket)
            side.socket.close()


@dataclass(frozen=True, slots=True)
class Farewell:
    """The answers for a token that was valid once.

    Attributes:
        replies: per method, what makes the one reply to all its calls; the request is not looked at.
    """

    has_ended: Callable[[str], bool] = lambda _token: False  # whether a token is such a one
    replies: Mapping[str, Callable[[], bytes]] = field(default_factory=dict)


class RequireToken(grpc.ServerInterceptor):
    """Refuses every call without a valid token, but one without any to a service that is open to all."""

    def __init__(
        self, is_valid: Callable[[str], bool], open_to_all: tuple[str, ...], refusal: str, farewell: Farewell
    ) -> None:
        self._is_valid, self._open_to_all, self._farewell = is_valid, open_to_all, farewell

        def refuse(_request: object, context: grpc.ServicerContext) -> NoReturn:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, refusal)

        # grpcio calls it before a request has come; that of a unary call would hold a thread until one comes.
        self._refuse: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(refuse)

    @override
    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        given = dict(handler_call_details.invocation_metadata or ()).get(TOKEN_HEADER, "")
        if not given and handler_call_details.method.startswith(self._open_to_all):
            return continuation(handler_call_details)
        if isinstance(given, str) and self._is_valid(given):
            return continuation(handler_call_details)
        reply = self._farewell.replies.get(handler_call_details.method)
        if reply is not None and isinstance(given, str) and self._farewell.has_ended(given):
            return grpc.unary_unary_rpc_method_handler(lambda _request, _context: reply())
        return self._refuse
