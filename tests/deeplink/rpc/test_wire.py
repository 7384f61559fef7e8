"""The token, over real gRPC on loopback."""

from __future__ import annotations

import contextlib
import resource
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from typing_extensions import override

from deeplink.rpc import http2
from deeplink.rpc.channel import dialled, open_channel
from deeplink.rpc.grpc_server import MOST_CONNECTIONS, BoundServer, bound_server, connections_allowed
from deeplink.rpc.http2 import FrameType, HeaderReader
from deeplink.rpc.tokens import new_token
from deeplink.v1 import watch_pb2, watch_pb2_grpc
from tests.deeplink.rpc import http2_frames
from tests.deeplink.rpc.http2_frames import SETTINGS, frame, request_head
from tests.waiting import LIMIT_S

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
    bound.server.stop(0).wait(LIMIT_S)


def test_a_call_with_the_token_is_answered(served: tuple[BoundServer, str]) -> None:
    bound, token = served
    with open_channel(f"127.0.0.1:{bound.port}", token) as channel:
        assert watch_pb2_grpc.WatchStub(channel).Beat(watch_pb2.BeatRequest(), timeout=LIMIT_S).known


@pytest.mark.parametrize("given", ["", "wrong"])
def test_every_service_refuses_a_call_without_it(served: tuple[BoundServer, str], given: str) -> None:
    bound, _ = served
    with open_channel(f"127.0.0.1:{bound.port}", given) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            watch_pb2_grpc.WatchStub(channel).Beat(watch_pb2.BeatRequest(), timeout=LIMIT_S)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.RpcError) as caught:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=LIMIT_S)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        asks = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        with pytest.raises(grpc.RpcError) as caught:
            list(reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(asks, timeout=LIMIT_S))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


HELLO = http2.PREFACE + frame(SETTINGS, 0, 0)
PING = frame(http2_frames.PING, 0, 0, b"are you?")


@pytest.mark.slow
@pytest.mark.parametrize("said", [b"", HELLO, HELLO + PING], ids=["nothing", "a greeting", "a PING"])
def test_who_has_the_token_is_served_while_strangers_take_every_place_they_can(said: bytes) -> None:
    token, held = new_token(), 200
    bound = bound_server("127.0.0.1:0", token, _register, connections=held)
    bound.server.start()
    address = ("127.0.0.1", bound.port)
    try:
        with contextlib.ExitStack() as open_ones:
            before = open_ones.enter_context(open_channel(f"127.0.0.1:{bound.port}", token))
            assert watch_pb2_grpc.WatchStub(before).Beat(watch_pb2.BeatRequest(), timeout=LIMIT_S).known
            for _ in range(2 * held):
                with contextlib.suppress(OSError):  # cut off already
                    open_ones.enter_context(socket.create_connection(address, timeout=LIMIT_S)).sendall(said)
            with open_channel(f"127.0.0.1:{bound.port}", token) as after:
                for channel in (before, after):
                    assert watch_pb2_grpc.WatchStub(channel).Beat(watch_pb2.BeatRequest(), timeout=LIMIT_S).known
            assert bound.server.open_connections() <= 2 + held // 2
    finally:
        bound.server.stop(0).wait(LIMIT_S)


@pytest.mark.parametrize("open_services", [(), (health.SERVICE_NAME, SERVICE)], ids=["refused", "open"])
def test_calls_of_strangers_whose_requests_never_come_hold_no_place(open_services: tuple[str, ...]) -> None:
    """Five connections of 16 calls each are more than a server takes at once."""
    token = new_token()
    bound = bound_server("127.0.0.1:0", token, _register, open_services=open_services)
    bound.server.start()
    heads = (request_head("host:1", f"/{SERVICE}/Beat", (("user-agent", "x"),)) for _ in range(16))
    half = HELLO + b"".join(frame(FrameType.HEADERS, 4, 2 * n + 1, head) for n, head in enumerate(heads))
    try:
        with contextlib.ExitStack() as open_ones:
            for _ in range(5):
                peer = socket.create_connection(("127.0.0.1", bound.port), timeout=LIMIT_S)
                open_ones.enter_context(peer).sendall(half)
            for given in (token, "") if open_services else (token,):
                for _ in range(5):
                    with open_channel(f"127.0.0.1:{bound.port}", given) as channel:
                        assert (
                            watch_pb2_grpc.WatchStub(channel).Beat(watch_pb2.BeatRequest(), timeout=LIMIT_S).known
                        )
    finally:
        bound.server.stop(0).wait(LIMIT_S)


def test_a_stranger_is_refused_before_it_sends_its_request(served: tuple[BoundServer, str]) -> None:
    bound, _ = served
    method = f"/{SERVICE}/Beat"
    with open_channel(f"127.0.0.1:{bound.port}", "") as channel:
        call: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(method)
        never = threading.Event()

        def asks() -> Iterator[bytes]:
            never.wait(2 * LIMIT_S)
            yield b""

        try:
            with pytest.raises(grpc.RpcError) as caught:
                list(call(asks(), timeout=LIMIT_S))
        finally:
            never.set()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_one_more_than_it_holds_comes_in_when_there_is_room() -> None:
    token, held = new_token(), 3
    bound = bound_server("127.0.0.1:0", token, _register, connections=held)
    bound.server.start()
    try:
        with contextlib.ExitStack() as open_ones:
            channels = [
                open_ones.enter_context(open_channel(f"127.0.0.1:{bound.port}", token)) for _ in range(held + 1)
            ]
            *stubs, last = map(watch_pb2_grpc.WatchStub, channels)
            for stub in stubs:
                assert stub.Beat(watch_pb2.BeatRequest(), timeout=LIMIT_S).known
            with pytest.raises(grpc.RpcError) as caught:
                last.Beat(watch_pb2.BeatRequest(), timeout=LIMIT_S)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            channels[0].close()
            assert last.Beat(watch_pb2.BeatRequest(), timeout=LIMIT_S, wait_for_ready=True).known
    finally:
        bound.server.stop(0).wait(LIMIT_S)


def test_a_server_leaves_descriptors_for_files(monkeypatch: pytest.MonkeyPatch) -> None:
    assert connections_allowed(7) == 7
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    assert connections_allowed(MOST_CONNECTIONS) == 256
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert connections_allowed(MOST_CONNECTIONS) == 4096


def test_health_and_reflection_know_the_services(served: tuple[BoundServer, str]) -> None:
    bound, token = served
    with open_channel(f"127.0.0.1:{bound.port}", token) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        for name in ["", SERVICE]:
            answer = check(health_pb2.HealthCheckRequest(service=name), timeout=LIMIT_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        asks = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        (listed,) = list(stub.ServerReflectionInfo(asks, timeout=LIMIT_S))
        assert SERVICE in {service.name for service in listed.list_services_response.service}


@pytest.mark.parametrize("variable", ["TMPDIR", "XDG_RUNTIME_DIR"])
def test_a_server_starts_where_a_folder_named_for_files_is_too_long_for_a_socket(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir(mode=0o700)
    monkeypatch.setenv(variable, str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)  # a process looks at TMPDIR once
    bound = bound_server("127.0.0.1:0", "secret", _register)
    bound.server.start()
    try:
        with open_channel(f"127.0.0.1:{bound.port}", "secret") as channel:
            assert watch_pb2_grpc.WatchStub(channel).Beat(watch_pb2.BeatRequest(), timeout=LIMIT_S).known
    finally:
        bound.server.stop(0).wait(LIMIT_S)
    assert not list(folder.iterdir())


def test_a_call_names_the_host_and_not_the_address_it_was_dialled_at() -> None:
    """With TLS the certificate is held against this name."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert dialled(f"localhost:{port}") != f"localhost:{port}"
        with open_channel(f"localhost:{port}", "secret") as channel:
            call = watch_pb2_grpc.WatchStub(channel).Beat.future(watch_pb2.BeatRequest(), timeout=LIMIT_S)
            peer = listener.accept()[0]
            peer.settimeout(60)
            with peer:
                peer.sendall(frame(SETTINGS, 0, 0))
                said, heads = b"", HeaderReader()
                while (fields := _first_head(said, heads)) is None:
                    said += peer.recv(65536)
            call.cancel()
    assert fields[":authority"] == f"localhost:{port}"


def _first_head(said: bytes, heads: HeaderReader) -> dict[str, str] | None:
    at = len(http2.PREFACE)
    while len(said) >= at + http2.FRAME.size:
        high, low, kind, _, _ = http2.FRAME.unpack_from(said, at)
        end = at + http2.FRAME.size + (high << 16) + low
        if kind == FrameType.HEADERS and len(said) >= end:
            return dict(heads.read(said[at + http2.FRAME.size : end]))
        at = end
    return None
