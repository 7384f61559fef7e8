"""Methods of gRPC services for a `PlainServer`: the same servicers answer both kinds of clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from google.protobuf.message import DecodeError

from deeplink.rpc.plain import CallRefusedError, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import grpc


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
