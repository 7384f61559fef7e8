"""Whom a gRPC server of ours answers: calls with a valid token, and a few others where it was told so."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from typing_extensions import override

from deeplink.plainrpc import TOKEN_HEADER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True, slots=True)
class Farewell:
    """What a token still gets that was valid once.

    Attributes:
        has_ended: whether a token is such a one.
        replies: per method, what makes the one reply to all its calls; the request is not looked at.
    """

    has_ended: Callable[[str], bool] = lambda _token: False
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
