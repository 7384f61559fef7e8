"""What every gRPC server and client of ours has in common: the token, health, reflection, limits and keepalive.

Every call carries a token in its metadata, also those of the health and reflection services: without it a call is
refused with UNAUTHENTICATED (`deeplink.tokens`).
"""

from __future__ import annotations

import contextlib
import hmac
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from typing_extensions import override

from deeplink.errors import DeepLinkError
from deeplink.listening import ListenError, try_to_bind
from deeplink.plainrpc import TOKEN_HEADER
from deeplink.types import Attempt
from deeplink.v1 import common_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MAX_MESSAGE = 64 << 20  # bytes; one batch of samples, with room; gRPC's own default is 4 MiB
WORKERS = 16  # threads of one server: the bound on calls served at once
MOST_CONNECTIONS = 4096  # held at once, as at an agent's data port; a quarter of the descriptors if that is less
_DESCRIPTORS = 65_536
"""Open shards and connections are bounded by shares of what is allowed, and reach their own bounds at so many."""

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


def attempt_to_wire(attempt: Attempt) -> common_pb2.Attempt:
    """Return the message that says which attempt."""
    return common_pb2.Attempt(job=attempt.job, restart=attempt.restart, relaunch=attempt.relaunch)


def attempt_from_wire(message: common_pb2.Attempt) -> Attempt:
    """Return what `attempt_to_wire` was given; an absent message reads as attempt 0.0.0."""
    return Attempt(job=message.job, restart=message.restart, relaunch=message.relaunch)


class ForkedError(DeepLinkError):
    """gRPC was used by the process this one was forked from; a call from here would hang."""

    def __init__(self) -> None:
        super().__init__(
            "this process was forked from one that had used gRPC, and gRPC would hang in it",
            remedy="Give the DataLoader multiprocessing_context='forkserver' (or 'spawn'), or read nothing from "
            "other nodes before its workers start.",
        )


class _GrpcUse:
    """Whether this process, or the one it was forked from, has used gRPC."""

    here = inherited = False

    @classmethod
    def begin(cls) -> None:
        if cls.inherited:
            raise ForkedError
        cls.here = True

    @classmethod
    def forked(cls) -> None:
        cls.inherited = cls.inherited or cls.here


os.register_at_fork(after_in_child=_GrpcUse.forked)


class _RequireToken(grpc.ServerInterceptor):
    """Refuses every call that does not carry the token."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

        def refuse(_request: object, context: grpc.ServicerContext) -> NoReturn:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the call carries no valid token")

        self._refuse_unary: grpc.RpcMethodHandler[Any, Any] = grpc.unary_unary_rpc_method_handler(refuse)
        self._refuse_stream: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(refuse)

    @override
    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        given = dict(handler_call_details.invocation_metadata or ()).get(TOKEN_HEADER, b"")
        if hmac.compare_digest(given.encode() if isinstance(given, str) else given, self._token):
            return continuation(handler_call_details)
        handler = continuation(handler_call_details)
        streams = handler is not None and (handler.request_streaming or handler.response_streaming)
        return self._refuse_stream if streams else self._refuse_unary


class _CallDetails(NamedTuple):
    method: str
    timeout: float | None
    metadata: Sequence[tuple[str, str | bytes]] | None
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: Any


class _CarryToken(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
    Generic[_Request, _Response],
):
    """Puts the token into the metadata of every call."""

    def __init__(self, token: str) -> None:
        self._item = (TOKEN_HEADER, token)

    def _carry(self, continuation: Any, details: Any, request: Any) -> Any:
        metadata = [*(details.metadata or ()), self._item]
        carried = _CallDetails(
            details.method,
            details.timeout,
            metadata,
            details.credentials,
            getattr(details, "wait_for_ready", None),
            getattr(details, "compression", None),
        )
        return continuation(carried, request)

    @override
    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return self._carry(continuation, client_call_details, request)

    @override
    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return self._carry(continuation, client_call_details, request)

    @override
    def intercept_stream_unary(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return self._carry(continuation, client_call_details, request_iterator)

    @override
    def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return self._carry(continuation, client_call_details, request_iterator)


class BoundServer(NamedTuple):
    """A server that listens but does not serve yet: call `server.start()`, and `server.stop(grace)` at the end."""

    server: grpc.Server
    port: int
    health: health.HealthServicer


def bound_server(
    bind: str,
    token: str,
    register: Callable[[grpc.Server], Sequence[str]],
    *,
    workers: int = WORKERS,
    connections: int = MOST_CONNECTIONS,
) -> BoundServer:
    """Return a server bound to `bind` (`host:port`, port 0 for a free one) whose every call needs `token`.

    Args:
        bind: the address to listen on.
        token: what each call must carry.
        register: adds the servicers and returns the full names of their services, which health and reflection
            then know.
        workers: calls served at once; more than four times as many waiting are refused (RESOURCE_EXHAUSTED).
        connections: held at once; beyond, one is closed when it is made. To a client of `open_channel` that is a
            server which is not there yet: it connects again within a second.

    Raises:
        ForkedError: see there.
        ListenError: the address cannot be bound; PortBusyError where it is in use.
    """
    _GrpcUse.begin()
    try_to_bind(bind)
    server = grpc.server(
        ThreadPoolExecutor(workers, thread_name_prefix="deeplink-rpc"),
        interceptors=[_RequireToken(token)],
        options=[
            ("grpc.max_receive_message_length", MAX_MESSAGE),
            ("grpc.max_send_message_length", MAX_MESSAGE),
            ("grpc.so_reuseport", 0),
            ("grpc.max_allowed_incoming_connections", connections_allowed(connections)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", 1000),
        ],
        maximum_concurrent_rpcs=workers * 4,
    )
    answers = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(answers, server)
    services = [*register(server), health.SERVICE_NAME]
    for name in ["", *services]:
        answers.set(name, health_pb2.HealthCheckResponse.SERVING)
    reflection.enable_server_reflection([*services, reflection.SERVICE_NAME], server)
    try:
        return BoundServer(server, server.add_insecure_port(bind), answers)
    except RuntimeError as problem:
        raise ListenError(bind, str(problem)) from problem


def allow_descriptors() -> None:
    """Let this process open more files than the 1,024 that most shells hand on, where the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # then the bounds are smaller
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connections_allowed(connections: int) -> int:
    """Return how many connections a server may hold: so many, or a quarter of its descriptors if less."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return connections if soft == resource.RLIM_INFINITY else min(connections, soft // 4)


def open_channel(address: str, token: str) -> grpc.Channel:
    """Return a channel to `address` whose every call carries `token`. Make it after fork, close it when done.

    A silent peer is noticed by keepalive pings (2 s apart, 2 s to answer) also while a call waits; each call has
    its own deadline besides. Reconnects wait 0.1 to 1 s, so that a peer that came back is used again soon.

    Raises:
        ForkedError: this process was forked from one that had used gRPC; a call from here would hang.
    """
    _GrpcUse.begin()
    channel = grpc.insecure_channel(
        address,
        options=[
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
