"""The common parts of every gRPC server and client of ours: the token, health, reflection, limits and keepalive.

Every call carries a token in its metadata, also those of the health and reflection services: without it a call is
refused with UNAUTHENTICATED (`deeplink.rpc.tokens`).
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
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
from typing_extensions import override

from deeplink.core.admission import SILENT_S, STRANGERS, ConnectionBounds
from deeplink.core.clock import SystemClock
from deeplink.core.errors import DeepLinkError
from deeplink.core.private import NODE_LOCAL, runtime_base
from deeplink.core.types import Attempt
from deeplink.rpc.acceptor import Acceptor, Farewell, RequireToken
from deeplink.rpc.listeners import ListenError, listening_socket
from deeplink.rpc.plain import CallRefusedError, Status
from deeplink.rpc.plain.serving import PlainServer, PlainTerms, ServerLimits
from deeplink.rpc.resolving import UnresolvedError, addresses, split_address
from deeplink.rpc.tokens import TOKEN_HEADER, accepted, named, only
from deeplink.v1 import common_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from deeplink.rpc.plain.serving import Method, UserMethod
    from deeplink.rpc.tokens import RunTokens


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


MAX_MESSAGE = 64 << 20  # bytes; one batch of samples, with room; gRPC's own default is 4 MiB
WORKERS = 16  # threads of one server: the bound on calls served at once
IDLE_S = 900.0  # a connection without a call is kept so long, as one of our own clients
MOST_CONNECTIONS = 4096  # held at once, and as many of our own clients; or a quarter of the descriptors
_DESCRIPTORS = 65_536
"""Open shards and connections are bounded by shares of what is allowed, and reach their own bounds at so many."""
NEVER_OURS = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED})
"""An agent knows its token, and the question."""
_OLDER = "Method not found!"
"""How a grpcio server, an agent of an older release too, answers a question that it does not know."""
_NO_STATUS = ("Received http2 header with status", "Exception deserializing response")
"""How grpcio begins to say that an answer was none of gRPC's, or not what was asked for."""
_OF_A_SERVER = "Exception "
"""How a grpcio server begins to say what it met: the one thing that it calls UNKNOWN."""


def attempt_to_wire(attempt: Attempt) -> common_pb2.Attempt:
    """Return the message that says which attempt."""
    return common_pb2.Attempt(job=attempt.job, restart=attempt.restart, relaunch=attempt.relaunch)


def attempt_from_wire(message: common_pb2.Attempt) -> Attempt:
    """Return what `attempt_to_wire` was given; an absent message reads as attempt 0.0.0."""
    return Attempt(job=message.job, restart=message.restart, relaunch=message.relaunch)


class _GrpcUse:
    """Whether this process, or the one it was forked from, has used gRPC."""

    here = inherited = False

    @classmethod
    def begin(cls) -> None:
        if cls.inherited:
            raise DeepLinkError(
                "this process was forked from one that had used gRPC, and gRPC would hang in it",
                remedy="Give the DataLoader multiprocessing_context='forkserver' (or 'spawn'), or read nothing "
                "from other nodes before its workers start.",
            )
        cls.here = True

    @classmethod
    def forked(cls) -> None:
        cls.inherited = cls.inherited or cls.here


os.register_at_fork(after_in_child=_GrpcUse.forked)


class _CallDetails(NamedTuple):
    method: str
    timeout: float | None
    metadata: Sequence[tuple[str, str | bytes]] | None
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: Any


class _EachCall(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Does the same with calls of all four kinds."""

    def __init__(self, token: str | Callable[[], str]) -> None:
        self._token: Callable[[], str] = (lambda: token) if isinstance(token, str) else token

    def _call(self, continuation: Any, details: Any, request: Any) -> Any:
        raise NotImplementedError

    @override
    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return self._call(continuation, client_call_details, request)

    intercept_unary_stream: Any = intercept_unary_unary
    intercept_stream_unary: Any = intercept_unary_unary
    intercept_stream_stream: Any = intercept_unary_unary


class _CarryToken(_EachCall):
    """Puts the token into the metadata of every call."""

    @override
    def _call(self, continuation: Any, details: Any, request: Any) -> Any:
        metadata = [*(details.metadata or ()), (TOKEN_HEADER, self._token())]
        carried = _CallDetails(
            details.method,
            details.timeout,
            metadata,
            details.credentials,
            getattr(details, "wait_for_ready", None),
            getattr(details, "compression", None),
        )
        return continuation(carried, request)


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
    _GrpcUse.begin()
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


def allow_descriptors() -> None:
    """Let this process open more files than the 1,024 that most shells hand on, where the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # then the bounds are smaller
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connections_allowed(connections: int, *, each: int = 1) -> int:
    """Return how many connections a server may hold: at most a quarter of its descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return connections if soft == resource.RLIM_INFINITY else min(connections, soft // (4 * each))


def dialled(address: str) -> str:
    """Return the target by which gRPC reaches `host:port`: the addresses that the system has for the host."""
    try:
        found = addresses(*split_address(address), SystemClock())
    except ValueError as problem:
        raise UnresolvedError(address, str(problem)) from problem
    hosts = [(family == socket.AF_INET6, str(where[0]), where[1]) for family, _, _, _, where in found]
    if not any(is_v6 for is_v6, _, _ in hosts):
        return "ipv4:" + ",".join(f"{host}:{port}" for _, host, port in hosts)
    # A target is of one family; an IPv4 address can be written as one of IPv6 (RFC 4291 2.5.5.2).
    written = [(host.replace("%", "%25") if is_v6 else f"::ffff:{host}", port) for is_v6, host, port in hosts]
    return "ipv6:" + ",".join(f"[{host}]:{port}" for host, port in written)


def open_channel(address: str, token: str | Callable[[], str]) -> grpc.Channel:
    """Return a channel to `address` whose every call carries `token`, or what that returns then.

    Make it after fork, close it when done.

    The host is resolved here, within a second; the channel keeps to the addresses it had then.

    A silent peer is noticed by keepalive pings (2 s apart, 2 s to answer) also while a call waits; each call has
    its own deadline besides. Reconnects wait 0.1 to 1 s, so that a peer that came back is used again soon.
    """
    _GrpcUse.begin()
    channel = grpc.insecure_channel(
        dialled(address),
        options=[
            # What a call names as its server, and what a certificate must be for: the name, not where it lies.
            ("grpc.default_authority", address),
            ("grpc.max_receive_message_length", MAX_MESSAGE),
            ("grpc.max_send_message_length", MAX_MESSAGE),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.keepalive_time_ms", 2000),
            ("grpc.keepalive_timeout_ms", 2000),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 1000),
            ("grpc.max_reconnect_backoff_ms", 1000),
            ("grpc.enable_http_proxy", 0),
        ],
    )
    return grpc.intercept_channel(channel, _CarryToken(token))


class StrangerError(grpc.RpcError):
    """Something else than an agent of ours answered at this address before: it is not shown the token."""

    def __init__(self, address: str, answered: str) -> None:
        self._said = (
            f"no agent of this run or token listens at {address}: it answered {answered} before, and is not "
            f"shown the token for {SILENT_S / 60:.0f} minutes"
        )
        super().__init__(self._said)
        self._was_refused = answered.startswith(grpc.StatusCode.UNAUTHENTICATED.name)

    @override
    def code(self) -> grpc.StatusCode:
        """Return how callers of gRPC are to take it: a token that was refused stays so, all else is not there."""
        return grpc.StatusCode.UNAUTHENTICATED if self._was_refused else grpc.StatusCode.UNAVAILABLE

    @override
    def details(self) -> str:
        """Return what happened, and why nothing was sent."""
        return self._said


class _Wary(_EachCall):
    def __init__(self, address: str, token: str | Callable[[], str]) -> None:
        super().__init__(token)
        self._address = address

    @override
    def _call(self, continuation: Any, details: Any, request: Any) -> Any:
        token = self._token()
        answered = STRANGERS.answered(self._address, token)
        if answered:
            raise StrangerError(self._address, answered)

        def look(call: Any) -> None:
            if not call.cancelled() and (said := no_agents(call.code(), call.details() or "")):
                STRANGERS.note(self._address, token, said)

        call = continuation(details, request)
        call.add_done_callback(look)
        return call


def no_agents(code: grpc.StatusCode, details: str) -> str:
    """Return what of an answer shows that no agent gave it; empty where nothing does.

    >>> no_agents(grpc.StatusCode.UNIMPLEMENTED, "Received http2 header with status: 404")
    'UNIMPLEMENTED (Received http2 header with status: 404)'
    >>> no_agents(grpc.StatusCode.UNAVAILABLE, "Stream removed (Socket closed)")
    ''
    """
    is_unknown = code is grpc.StatusCode.UNKNOWN and not details.startswith(_OF_A_SERVER)
    is_never_ours = code in NEVER_OURS and details != _OLDER
    if not (is_never_ours or is_unknown or details.startswith(_NO_STATUS)):
        return ""
    return f"{code.name} ({details[:200]})" if details else code.name


def agent_channel(address: str, token: str | Callable[[], str]) -> grpc.Channel:
    """Return a channel to an agent; see `open_channel`.

    After an answer that no agent gives, calls of this process to that address fail with `StrangerError` for
    `SILENT_S`, and do not carry that token there; another token, as of the next attempt, is carried.
    """
    return grpc.intercept_channel(open_channel(address, token), _Wary(address, token))
