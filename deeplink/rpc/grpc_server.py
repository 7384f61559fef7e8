"""A gRPC server of ours: behind an acceptor, with health and reflection, and our own clients at the same port.

Every call needs a token, also those of the health and reflection services: without it a call is refused with
UNAUTHENTICATED (`deeplink.rpc.tokens`).
"""

from __future__ import annotations

import os
import resource
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from deeplink.core.admission import ConnectionBounds
from deeplink.core.clock import SystemClock
from deeplink.core.private import NODE_LOCAL, runtime_base
from deeplink.rpc.acceptor import Acceptor, Farewell, RequireToken
from deeplink.rpc.channel import MAX_MESSAGE, GrpcUse
from deeplink.rpc.listeners import ListenError, listening_socket
from deeplink.rpc.plain import CallRefusedError, Status
from deeplink.rpc.plain.serving import PlainServer, PlainTerms, ServerLimits
from deeplink.rpc.tokens import accepted, named, only

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from deeplink.rpc.plain.serving import Method, UserMethod
    from deeplink.rpc.tokens import RunTokens

WORKERS = 16  # threads of one server: the bound on calls served at once
IDLE_S = 900.0  # a connection without a call is kept so long, as one of our own clients
MOST_CONNECTIONS = 4096  # held at once, and as many of our own clients; or a quarter of the descriptors


@dataclass(frozen=True, slots=True)
class WholeReply:
    """A reply in memory."""

    parts: Sequence[bytes]
    size: int

    @classmethod
    def of(cls, message: bytes) -> WholeReply:
        """Return the reply that is this message."""
        return cls((message,), len(message))

    def unreadable(self) -> str:
        """Return what cannot happen: it is memory of this process."""
        return "a message could not be read"


class PlainContext:
    """What a servicer may ask of a call over a plain connection: of `grpc.ServicerContext` what ours use."""

    def __init__(self, is_active: Callable[[], bool]) -> None:
        self._is_active = is_active

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        """End the call with a status."""
        raise CallRefusedError(int(code.value[0]), details)

    def is_active(self) -> bool:
        """Return whether the caller still waits."""
        return self._is_active()


class RecordedServices:
    """Stands in for a grpcio server while services are added to it, and notes their methods."""

    def __init__(self, server: grpc.Server) -> None:
        self._server = server
        self.handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Add them to the server."""
        self._server.add_generic_rpc_handlers(generic_rpc_handlers)

    def add_registered_method_handlers(
        self, service_name: str, method_handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        """Add them to the server, and note them."""
        self.handlers.update({f"/{service_name}/{name}": one for name, one in method_handlers.items()})
        self._server.add_registered_method_handlers(service_name, method_handlers)

    def plain_methods(self) -> dict[str, Callable[[bytes, Callable[[], bool]], Iterator[WholeReply]]]:
        """Return what answers plain calls of the noted methods, those with one request."""
        return {name: _plain(one) for name, one in self.handlers.items() if not one.request_streaming}


def _plain(handler: Any) -> Callable[[bytes, Callable[[], bool]], Iterator[WholeReply]]:
    def answer(message: bytes, is_active: Callable[[], bool]) -> Iterator[WholeReply]:
        try:
            request = handler.request_deserializer(message)
        except DecodeError as problem:
            raise CallRefusedError(Status.INVALID, str(problem)) from problem
        context = PlainContext(is_active)
        if handler.response_streaming:
            replies = handler.unary_stream(request, context)
        else:
            replies = iter((handler.unary_unary(request, context),))
        for reply in replies:
            yield WholeReply.of(handler.response_serializer(reply))

    return answer


class FrontedServer:
    """A grpcio server that is reached through an acceptor of ours alone, and one of our own clients beside it."""

    def __init__(self, server: grpc.Server, acceptor: Acceptor, plain: PlainServer | None = None) -> None:
        self._server, self._acceptor, self._plain = server, acceptor, plain

    def start(self) -> None:
        """Serve from now on."""
        self._server.start()
        if self._plain is not None:
            self._plain.start()
        self._acceptor.start()

    def stop(self, grace: float | None) -> threading.Event:
        """Take no more calls; those under way have `grace` seconds. Return an event that is set at the end."""
        done, ended = self._server.stop(grace), threading.Event()

        def end() -> None:
            done.wait()
            self._acceptor.close()
            if self._plain is not None:
                self._plain.stop()
            ended.set()

        threading.Thread(target=end, name="deeplink-server-end", daemon=True).start()
        return ended

    def open_connections(self) -> int:
        """Return how many connections are held."""
        plain = self._plain.open_connections() if self._plain is not None else 0
        return self._acceptor.open_connections() + plain


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainClients:
    """What a server is to our own clients, whom it answers at the same port, in frames (`deeplink.rpc.plain`)."""

    node: str  # the name of the server's node, which it proves to have
    token: str | RunTokens  # what both ends must know
    methods: Mapping[str, Method] = field(default_factory=dict)  # those that never wait; others are gRPC's own
    limits: ServerLimits = field(default_factory=ServerLimits)
    on_refused: Callable[[], None] = lambda: None
    user_methods: Mapping[str, UserMethod] = field(default_factory=dict)  # for users who show no token
    user_of: Callable[[str], tuple[int, str]] | None = None  # as `PlainTerms` has it


class BoundServer(NamedTuple):
    """A server that listens but does not serve yet: call `server.start()`, and `server.stop(grace)` at the end."""

    server: FrontedServer
    port: int
    health: health.HealthServicer


def bound_server(
    bind: str | socket.socket,
    token: str | Callable[[str], bool],
    register: Callable[[grpc.Server], Sequence[str]],
    *,
    workers: int = WORKERS,
    connections: int = MOST_CONNECTIONS,
    open_services: Sequence[str] = (),
    refusal: str = "the call carries no valid token",
    farewell: Farewell | None = None,
    plain: PlainClients | None = None,
) -> BoundServer:
    """Return a server bound to `bind` (`host:port`, port 0 for a free one) whose every call needs `token`."""
    GrpcUse.begin()
    is_valid = only(token) if isinstance(token, str) else token
    open_to_all = tuple(f"/{name}/" for name in open_services)
    farewell = farewell or Farewell()
    listener = listening_socket(bind) if isinstance(bind, str) else bind
    server = grpc.server(
        ThreadPoolExecutor(workers, thread_name_prefix="deeplink-rpc"),
        interceptors=[RequireToken(is_valid, open_to_all, refusal, farewell)],
        options=[
            ("grpc.max_receive_message_length", MAX_MESSAGE),
            ("grpc.max_send_message_length", MAX_MESSAGE),
            ("grpc.max_connection_idle_ms", int(IDLE_S * 1000)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", 1000),
        ],
        maximum_concurrent_rpcs=workers * 4,
    )
    answers = health.HealthServicer()
    recorded = RecordedServices(server)
    health_pb2_grpc.add_HealthServicer_to_server(answers, recorded)
    services = [*register(cast("grpc.Server", recorded)), health.SERVICE_NAME]
    for name in ["", *services]:
        answers.set(name, health_pb2.HealthCheckResponse.SERVING)
    reflection.enable_server_reflection([*services, reflection.SERVICE_NAME], server)
    bounds = ConnectionBounds(connections=connections_allowed(connections, each=3))
    without = (*open_to_all, *farewell.replies)
    ours = _plain_server(plain, recorded, farewell) if plain is not None else None
    take_in = ours.take_in if ours is not None else None
    target, clock = _private_port(server), SystemClock()
    acceptor = Acceptor(listener, target, is_valid, bounds, clock, open_to_all=without, plain=take_in)
    return BoundServer(FrontedServer(server, acceptor, ours), listener.getsockname()[1], answers)


def _plain_server(plain: PlainClients, recorded: RecordedServices, farewell: Farewell) -> PlainServer:
    def replied(token: str, method: str) -> WholeReply | None:
        reply = farewell.replies.get(method)
        return WholeReply.of(reply()) if reply is not None and farewell.has_ended(token) else None

    is_valid = accepted(plain.token)
    terms = PlainTerms(
        node=plain.node,
        find_token=named(plain.token),
        is_valid=only(is_valid) if isinstance(is_valid, str) else is_valid,
        methods=plain.methods,
        waiting_methods=recorded.plain_methods(),
        user_methods=plain.user_methods,
        user_of=plain.user_of,
        farewell=replied,
    )
    return PlainServer(terms, SystemClock(), limits=plain.limits, on_refused=plain.on_refused)


def _private_port(server: grpc.Server) -> int:
    """Let a server listen on a Unix socket that has no name any more; return a descriptor to connect to it by."""
    base = runtime_base(os.environ)
    try:
        return _private_port_in(base, server)
    except ListenError:  # the path may be too long for a socket (unix(7)), or the disk have none
        if base == NODE_LOCAL:
            raise
        return _private_port_in(NODE_LOCAL, server)


def _private_port_in(base: Path, server: grpc.Server) -> int:
    path = base
    try:
        with tempfile.TemporaryDirectory(prefix="deeplink-", dir=base, ignore_cleanup_errors=True) as folder:
            path = Path(folder) / "rpc"
            server.add_insecure_port(f"unix:{path}")
            return os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (RuntimeError, OSError) as problem:
        raise ListenError(str(path), str(problem)) from problem


def connections_allowed(connections: int, *, each: int = 1) -> int:
    """Return how many connections a server may hold: at most a quarter of its descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return connections if soft == resource.RLIM_INFINITY else min(connections, soft // (4 * each))
