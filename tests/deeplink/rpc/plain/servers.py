"""A server with an agent's face to our own clients, and raw clients of it, for the tests of the plain wire."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc

from deeplink.core.clock import SystemClock
from deeplink.rpc.grpc_server import BoundServer, PlainClients, bound_server
from deeplink.rpc.plain import CallRefusedError, PlainConnection, Status, framing
from deeplink.rpc.plain.serving import ServerLimits
from tests.waiting import LIMIT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from deeplink.rpc.plain.outgoing import Piece
    from deeplink.rpc.tokens import Credentials

TOKEN = "secret"  # noqa: S105 - of a server that lives as long as its test
NODE = "n0"
REPEAT, HOLD, SHOW, WHO = "/t.T/Repeat", "/t.T/Hold", "/t.T/Show", "/t.T/Who"
SAY, COUNT, WAIT, STAY = "/echo.Echo/Say", "/echo.Echo/Count", "/echo.Echo/Wait", "/echo.Echo/Stay"
NONCE = bytes(framing.NONCE_BYTES)


@dataclass
class Said:
    """A reply."""

    parts: list[Piece]

    @property
    def size(self) -> int:
        return sum(map(len, self.parts))

    def unreadable(self) -> str:
        return "the disk is gone"


@dataclass
class Served:
    """A server, what its methods wait for, and what they show."""

    bound: BoundServer
    go_on: threading.Event
    refused: list[int]
    shown: list[Piece]
    left: threading.Event  # a caller of STAY has left

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.bound.port}"

    def open_connections(self) -> int:
        return self.bound.server.open_connections()

    def connect(self, shown: Credentials = TOKEN, node: str = "") -> PlainConnection:
        return PlainConnection(self.address, shown, SystemClock(), node=node)

    def repeat(self, request: bytes = b"2 10", token: str = TOKEN) -> list[int]:
        """Make a call on a connection of its own; return the replies' lengths."""
        with self.connect(token) as connection:
            connection.send(REPEAT, request, soon())
            return [len(reply) for reply in connection.replies()]

    def raw(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.bound.port), timeout=20)

    def proven(self) -> socket.socket:
        """Return a raw connection that has shown that it knows the token."""
        peer = self.raw()
        prove(peer)
        return peer


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def received(peer: socket.socket, size: int) -> bytes:
    """Return the next bytes, fewer where it closes."""
    found = b""
    while len(found) < size and (data := peer.recv(size - len(found))):
        found += data
    return found


def next_frame(peer: socket.socket) -> tuple[framing.Head, bytes]:
    """Return a frame of an agent's."""
    head = framing.head_of(received(peer, framing.HEAD.size))
    return head, received(peer, head.size)


def prove(peer: socket.socket, nonce: bytes = NONCE) -> tuple[bytes, bytes]:
    """Show a server that we know the token; return its challenge and our proof, as they were said."""
    said = framing.hello(nonce, TOKEN)
    peer.sendall(said)
    _, payload = next_frame(peer)
    proof, _ = framing.answered(TOKEN, said, payload)
    peer.sendall(proof)
    return payload, proof


def _echo(go_on: threading.Event, left: threading.Event, server: grpc.Server) -> list[str]:
    """Add a service of gRPC's to a server."""

    def say(request: bytes, context: grpc.ServicerContext) -> bytes:
        if request == b"fail":
            context.abort(grpc.StatusCode.DATA_LOSS, "a text: 100 % lost, für immer")
        return request

    def count(request: bytes, _context: grpc.ServicerContext) -> Iterator[bytes]:
        for number in range(int(request)):
            yield b"%d" % number

    def wait(request: bytes, _context: grpc.ServicerContext) -> Iterator[bytes]:
        yield b"at once"
        assert go_on.wait(LIMIT_S)
        yield request

    def stay(_request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield b"at once"
        while context.is_active() and not go_on.wait(0.01):
            pass
        if go_on.is_set():
            yield b"in the end"
        else:
            left.set()

    calls: dict[str, Any] = {"Say": grpc.unary_unary_rpc_method_handler(say, bytes, bytes)}
    for name, call in (("Count", count), ("Wait", wait), ("Stay", stay)):
        calls[name] = grpc.unary_stream_rpc_method_handler(call, bytes, bytes)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("echo.Echo", calls),))
    server.add_registered_method_handlers("echo.Echo", calls)
    return ["echo.Echo"]


@contextmanager
def served(
    limits: ServerLimits | None = None, user_of: Callable[[str], tuple[int, str]] | None = None
) -> Iterator[Served]:
    """Serve until the end of the block."""
    go_on, left, refused, shown = threading.Event(), threading.Event(), list[int](), list[Any]()

    def repeat(message: bytes) -> Iterator[Said]:
        count, _, size = message.partition(b" ")
        if not count.isdigit():
            raise CallRefusedError(Status.INVALID, "no number: 100 %, für immer")
        for number in range(int(count)):
            yield Said([bytes([number % 256]) * (int(size) // 2), memoryview(bytes(int(size) - int(size) // 2))])

    def hold(message: bytes) -> Iterator[Said]:
        assert go_on.wait(LIMIT_S)
        yield Said([message])

    def show(_: bytes) -> Iterator[Said]:
        yield Said([b"head", *shown])

    plain = PlainClients(
        node=NODE,
        token=TOKEN,
        methods={REPEAT: repeat, HOLD: hold, SHOW: show},
        limits=limits or ServerLimits(),
        on_refused=lambda: refused.append(1),
        user_methods={WHO: lambda message, user: iter([Said([message, b"%d" % user])])},
        user_of=user_of,
    )
    bound = bound_server("127.0.0.1:0", TOKEN, partial(_echo, go_on, left), plain=plain)
    bound.server.start()
    try:
        yield Served(bound, go_on, refused, shown, left)
    finally:
        go_on.set()
        bound.server.stop(None).wait()
