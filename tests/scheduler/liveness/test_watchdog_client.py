"""The way to the watchdog: kept while calls are late, made again where the address or the token has changed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from typing_extensions import override

from deeplink.rpc.grpc_server import BoundServer, bound_server
from deeplink.rpc.tokens import write_token
from deeplink.scheduler.liveness.watchdog_client import WatchdogClient
from deeplink.v1 import watch_pb2, watch_pb2_grpc
from tests.waiting import LIMIT_S


class Slow(watch_pb2_grpc.WatchServicer):
    """Answers once it may; notes from where each call came."""

    def __init__(self) -> None:
        self.go_on, self.peers = threading.Event(), list[str]()

    @override
    def Beat(self, request: watch_pb2.BeatRequest, context: grpc.ServicerContext) -> watch_pb2.BeatReply:
        self.peers.append(context.peer())
        assert self.go_on.wait(LIMIT_S)
        return watch_pb2.BeatReply(known=True)

    @override
    def Attend(self, request: watch_pb2.AttendRequest, context: grpc.ServicerContext) -> watch_pb2.AttendReply:
        return watch_pb2.AttendReply()


@pytest.fixture
def slow() -> Iterator[Slow]:
    servicer = Slow()
    yield servicer
    servicer.go_on.set()


@pytest.fixture
def served(slow: Slow) -> Iterator[BoundServer]:
    def register(server: grpc.Server) -> list[str]:
        watch_pb2_grpc.add_WatchServicer_to_server(slow, server)
        return ["deeplink.v1.Watch"]

    bound = bound_server("127.0.0.1:0", "secret", register)
    bound.server.start()
    yield bound
    slow.go_on.set()
    bound.server.stop(0).wait(LIMIT_S)


def beat(line: WatchdogClient, timeout_s: float) -> bool:
    reply = line.call(lambda stub: stub.Beat(watch_pb2.BeatRequest(), timeout=timeout_s))
    return bool(reply.known)


def test_a_call_that_is_late_does_not_end_the_connection(slow: Slow, served: BoundServer, tmp_path: Path) -> None:
    write_token(tmp_path / "token", "secret")
    line = WatchdogClient(f"127.0.0.1:{served.port}", tmp_path / "token", "n1")
    with pytest.raises(grpc.RpcError) as late:
        beat(line, 0.5)
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    slow.go_on.set()
    assert beat(line, 60.0)
    line.close()
    assert len(slow.peers) == 2
    assert len(set(slow.peers)) == 1


def test_another_token_in_the_file_is_taken_up_after_a_refusal(
    slow: Slow, served: BoundServer, tmp_path: Path
) -> None:
    slow.go_on.set()
    write_token(tmp_path / "token", "of yesterday")
    line = WatchdogClient(f"127.0.0.1:{served.port}", tmp_path / "token", "n1")
    with pytest.raises(grpc.RpcError) as refused:
        beat(line, 60.0)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    write_token(tmp_path / "token", "secret")
    assert beat(line, 60.0)
    line.close()
