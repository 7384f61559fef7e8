"""Channels to agents that stop showing their token once something else than an agent has answered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
from typing_extensions import override

from deeplink.strangers import SILENT_S, STRANGERS
from deeplink.wire import open_channel

if TYPE_CHECKING:
    from collections.abc import Callable

NEVER_OURS = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED})
"""An agent knows its token, and the question."""
_OLDER = "Method not found!"
"""How a grpcio server, an agent of an older release too, answers a question that it does not know."""
_NO_STATUS = ("Received http2 header with status", "Exception deserializing response")
"""How grpcio begins to say that an answer was none of gRPC's, or not what was asked for."""
_OF_A_SERVER = "Exception "
"""How a grpcio server begins to say what it met: the one thing that it calls UNKNOWN."""


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


class _Wary(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    def __init__(self, address: str, token: str | Callable[[], str]) -> None:
        self._address, self._token = address, token

    def _call(self, continuation: Any, details: Any, request: Any) -> Any:
        token = self._token if isinstance(self._token, str) else self._token()
        answered = STRANGERS.answered(self._address, token)
        if answered:
            raise StrangerError(self._address, answered)

        def look(call: Any) -> None:
            if not call.cancelled() and (said := no_agents(call.code(), call.details() or "")):
                STRANGERS.note(self._address, token, said)

        call = continuation(details, request)
        call.add_done_callback(look)
        return call

    @override
    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return self._call(continuation, client_call_details, request)

    @override
    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return self._call(continuation, client_call_details, request)

    @override
    def intercept_stream_unary(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return self._call(continuation, client_call_details, request_iterator)

    @override
    def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return self._call(continuation, client_call_details, request_iterator)


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

    Raises:
        ForkedError, UnresolvedError: see there.
    """
    return grpc.intercept_channel(open_channel(address, token), _Wary(address, token))
