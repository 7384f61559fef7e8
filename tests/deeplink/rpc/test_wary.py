"""What is no agent is shown the token once."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import grpc
import pytest

from deeplink.cache.errors import MemberError, MemberSilentError
from deeplink.cache.transfer.client import MemberClient
from deeplink.core.admission import STRANGERS
from deeplink.core.types import Member, NodeName
from deeplink.rpc import http2
from deeplink.rpc.channel import StrangerError, agent_channel
from deeplink.rpc.grpc_server import bound_server
from deeplink.rpc.http2 import FrameType
from deeplink.rpc.tokens import new_token
from deeplink.v1 import node_pb2, node_pb2_grpc
from tests.deeplink.rpc.http2_frames import SETTINGS, frame
from tests.waiting import LIMIT_S


@pytest.fixture(autouse=True)
def nobody_is_known() -> None:
    STRANGERS.forget()  # ports come again


def head(*fields: tuple[bytes, bytes], ends: bool = False) -> bytes:
    """A header block of literals (RFC 7541)."""
    block = b"".join(b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in fields)
    return frame(FrameType.HEADERS, http2.END_HEADERS | (http2.END_STREAM if ends else 0), 1, block)


GRPC = ((b":status", b"200"), (b"content-type", b"application/grpc"))
ANSWERS = {
    "UNAUTHENTICATED": head(*GRPC, (b"grpc-status", b"16"), ends=True),
    "UNIMPLEMENTED": head(*GRPC, (b"grpc-status", b"12"), ends=True),
    "404": head((b":status", b"404"), ends=True),
    "503": head((b":status", b"503"), ends=True),
    "a page": head((b":status", b"200"), (b"content-type", b"text/html")) + frame(FrameType.DATA, 1, 1, b"<html>"),
    "no status": head(*GRPC) + head((b"x", b"y"), ends=True),
    "another reply": head(*GRPC)
    + frame(FrameType.DATA, 0, 1, b"\0\0\0\0\x05" + b"\xff" * 5)
    + head((b"grpc-status", b"0"), ends=True),
    "noise": b"\xff" * 200,
}
AGENTS = {
    "an error of its own": head(
        *GRPC, (b"grpc-status", b"2"), (b"grpc-message", b"Exception calling application: x"), ends=True
    ),
    "a question that it does not know": head(
        *GRPC, (b"grpc-status", b"12"), (b"grpc-message", b"Method not found!"), ends=True
    ),
    "not found": head(*GRPC, (b"grpc-status", b"5"), ends=True),
    "its end": b"",
}


@contextlib.contextmanager
def answering(answer: bytes) -> Iterator[tuple[str, list[str]]]:
    """Give the address of an HTTP/2 server that answers each call so, and the tokens that it was shown."""
    shown: list[str] = []

    def serve(peer: socket.socket) -> None:
        with peer, contextlib.suppress(OSError):
            peer.settimeout(LIMIT_S)
            peer.sendall(frame(SETTINGS, 0, 0))
            came = b""
            while b"token-" not in came and (more := peer.recv(4096)):
                came += more
            shown.extend(word for word in ("token-one", "token-two") if word.encode() in came)
            peer.sendall(answer)
            if answer:
                while peer.recv(4096):
                    pass

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}", shown
        listener.shutdown(socket.SHUT_RDWR)


def ask(channel: grpc.Channel) -> node_pb2.StatusReply:
    reply: node_pb2.StatusReply = node_pb2_grpc.NodeStub(channel).Status(node_pb2.StatusRequest(), timeout=LIMIT_S)
    return reply


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_after_an_answer_that_no_agent_gives_the_token_is_shown_no_more(answer: bytes) -> None:
    with answering(answer) as (address, shown):
        for _ in range(2):  # nor by another channel of this process
            with agent_channel(address, "token-one") as channel:
                for _ in range(2):
                    with pytest.raises(grpc.RpcError):
                        ask(channel)
        with agent_channel(address, "token-one") as channel, pytest.raises(StrangerError, match=address) as why:
            ask(channel)
        assert "not shown the token for 10 minutes" in why.value.details()
        was_refused = answer == ANSWERS["UNAUTHENTICATED"]
        assert (why.value.code() is grpc.StatusCode.UNAUTHENTICATED) == was_refused
        assert shown == ["token-one"]
        with agent_channel(address, "token-two") as channel, pytest.raises(grpc.RpcError):  # the next attempt's
            ask(channel)
        assert shown == ["token-one", "token-two"]


@pytest.mark.parametrize("answer", AGENTS.values(), ids=AGENTS)
def test_what_an_agent_may_answer_does_not_silence_us(answer: bytes) -> None:
    with answering(answer) as (address, shown):
        for _ in range(2):
            with agent_channel(address, "token-one") as channel, pytest.raises(grpc.RpcError):
                ask(channel)
        assert shown[:2] == ["token-one", "token-one"]


def future(channel: grpc.Channel) -> object:
    return node_pb2_grpc.NodeStub(channel).Status.future(node_pb2.StatusRequest(), timeout=LIMIT_S).result()


@pytest.mark.parametrize("call", [ask, future])
def test_an_agent_with_another_token_is_a_stranger_too(call: Callable[[grpc.Channel], object]) -> None:
    bound = bound_server("127.0.0.1:0", new_token(), lambda _server: [])
    bound.server.start()
    address = f"127.0.0.1:{bound.port}"
    try:
        with agent_channel(address, "token-one") as channel:
            with pytest.raises(grpc.RpcError):
                ask(channel)
            with pytest.raises(StrangerError, match="UNAUTHENTICATED") as why:
                call(channel)
            assert why.value.code() is grpc.StatusCode.UNAUTHENTICATED  # its remedy is that of the first answer
    finally:
        bound.server.stop(0).wait(LIMIT_S)


def test_a_member_that_is_none_is_told_as_one_that_is_not_there() -> None:
    with answering(ANSWERS["404"]) as (address, shown):
        member = Member(NodeName("n1"), address)
        with MemberClient(member, "token-one") as client, pytest.raises(MemberError):
            client.held()
        with MemberClient(member, "token-one") as client, pytest.raises(MemberSilentError, match="404"):
            client.held()
        assert shown == ["token-one"]
