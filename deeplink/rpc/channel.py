"""Channels to gRPC servers of ours: every call carries a token, and keepalive notices who is silent."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
from typing_extensions import override

from deeplink.core.admission import SILENT_S, STRANGERS
from deeplink.core.clock import SystemClock
from deeplink.core.errors import DeepLinkError
from deeplink.core.types import Attempt
from deeplink.rpc.resolving import UnresolvedError, addresses, split_address
from deeplink.rpc.tokens import TOKEN_HEADER
from deeplink.v1 import common_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


MAX_MESSAGE = 64 << 20  # bytes; one batch of samples, with room; gRPC's own default is 4 MiB
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


class GrpcUse:
    """Whether this process, or the one it was forked from, has used gRPC."""

    here = inherited = False

    @classmethod
    def begin(cls) -> None:
        """Note the use; raise where this process was forked from one that had used it."""
        if cls.inherited:
            raise DeepLinkError(
                "this process was forked from one that had used gRPC, and gRPC would hang in it",
                remedy="Give the DataLoader multiprocessing_context='forkserver' (or 'spawn'), or read nothing "
                "from other nodes before its workers start.",
            )
        cls.here = True

    @classmethod
    def forked(cls) -> None:
        """Note that this process is a fork."""
        cls.inherited = cls.inherited or cls.here


os.register_at_fork(after_in_child=GrpcUse.forked)


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


def allow_descriptors() -> None:
    """Let this process open more files than the 1,024 that most shells hand on, where the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # then the bounds are smaller
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


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
    GrpcUse.begin()
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
