"""The token, over real gRPC on loopback."""

from __future__ import annotations

import contextlib
import resource
import socket
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from typing_extensions import override

from deeplink import wire
from deeplink.tokens import new_token
from deeplink.v1 import watch_pb2, watch_pb2_grpc
from deeplink.wire import BoundServer, bound_server, open_channel

SERVICE = "deeplink.v1.Watch"


class _Echo(watch_pb2_grpc.WatchServicer):
    @override
    def Beat(self, request: watch_pb2.BeatRequest, context: grpc.ServicerContext) -> watch_pb2.BeatReply:
        return watch_pb2.BeatReply(known=True)

    @override
    def Attend(self, request: watch_pb2.AttendRequest, context: grpc.ServicerContext) -> watch_pb2.AttendReply:
        return watch_pb2.AttendReply()


def _register(server: grpc.Server) -> list[str]:
    watch_pb2_grpc.add_WatchServicer_to_server(_Echo(), server)
    return [SERVICE]


@pytest.fixture
def served() -> Iterator[tuple[BoundServer, str]]:
    token = new_token()
    bound = bound_server("127.0.0.1:0", token, _register)
    bound.server.start()
    yield bound, token
    bound.server.stop(0).wait(5)


def test_a_call_with_the_token_is_answered(served: tuple[BoundServer, str]) -> None:
    bound, token = served
    with open_channel(f"127.0.0.1:{bound.port}", token) as channel:
        assert watch_pb2_grpc.WatchStub(channel).Beat(watch_pb2.BeatRequest(), timeout=5).known


@pytest.mark.parametrize("given", ["", "wrong"])
def test_every_service_refuses_a_call_without_it(served: tuple[BoundServer, str], given: str) -> None:
    bound, _ = served
    with open_channel(f"127.0.0.1:{bound.port}", given) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            watch_pb2_grpc.WatchStub(channel).Beat(watch_pb2.BeatRequest(), timeout=5)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.RpcError) as caught:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        asks = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        with pytest.raises(grpc.RpcError) as caught:
            list(reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(asks, timeout=5))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_more_connections_than_it_holds_are_closed_and_a_client_comes_in_when_there_is_room() -> None:
    token, held = new_token(), 5
    bound = bound_server("127.0.0.1:0", token, _register, connections=held)
    bound.server.start()
    address = ("127.0.0.1", bound.port)
    try:
        with contextlib.ExitStack() as open_ones:
            others = [open_ones.enter_context(socket.create_connection(address, timeout=10)) for _ in range(held)]
            for other in others:
                assert other.recv(9)  # it is greeted: the server's settings
            with socket.create_connection(address, timeout=10) as refused:
                assert refused.recv(9) == b""
            with open_channel(f"127.0.0.1:{bound.port}", token) as channel:
                stub = watch_pb2_grpc.WatchStub(channel)
                with pytest.raises(grpc.RpcError) as caught:
                    stub.Beat(watch_pb2.BeatRequest(), timeout=10)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
                others[0].close()
                assert stub.Beat(watch_pb2.BeatRequest(), timeout=10, wait_for_ready=True).known
    finally:
        bound.server.stop(0).wait(5)


def test_a_server_leaves_descriptors_for_files(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wire.connections_allowed(7) == 7
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    assert wire.connections_allowed(wire.MOST_CONNECTIONS) == 256
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert wire.connections_allowed(wire.MOST_CONNECTIONS) == 4096


def test_health_and_reflection_know_the_services(served: tuple[BoundServer, str]) -> None:
    bound, token = served
    with open_channel(f"127.0.0.1:{bound.port}", token) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        for name in ["", SERVICE]:
            answer = check(health_pb2.HealthCheckRequest(service=name), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        asks = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        (listed,) = list(stub.ServerReflectionInfo(asks, timeout=5))
        assert SERVICE in {service.name for service in listed.list_services_response.service}
