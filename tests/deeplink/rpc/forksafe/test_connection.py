"""Plain calls against the real gRPC server, and against servers that misbehave."""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deeplink.core.admission import STRANGERS
from deeplink.core.clock import SystemClock
from deeplink.rpc.channel import BoundServer, bound_server
from deeplink.rpc.forksafe import (
    LARGEST_REQUEST,
    PlainCallError,
    PlainConnection,
    PlainRefusedError,
    PlainSilentError,
    PlainStatusError,
)
from tests.effort import examples

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKEN = "secret"  # noqa: S105 - of a server that lives as long as its test
METHOD = "/echo.Echo/"
SETTINGS = struct.pack(">BHBBI", 0, 0, 4, 0, 0)


def say(request: bytes, context: grpc.ServicerContext) -> bytes:
    if request == b"fail":
        context.abort(grpc.StatusCode.DATA_LOSS, "a text: 100 % lost, für immer")
    return request


def repeat(request: bytes, _context: grpc.ServicerContext) -> Iterator[bytes]:
    """Reply as often and as long as the request says."""
    for number in range(int(request.split()[0])):
        yield bytes([number % 256]) * int(request.split()[1])


def serve(token: str, bind: str = "127.0.0.1:0") -> BoundServer:
    def register(server: grpc.Server) -> list[str]:
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Say": grpc.unary_unary_rpc_method_handler(say),
            "Repeat": grpc.unary_stream_rpc_method_handler(repeat),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("echo.Echo", handlers),))
        return ["echo.Echo"]

    bound = bound_server(bind, token, register)
    bound.server.start()
    return bound


@pytest.fixture
def address() -> Iterator[str]:
    bound = serve(TOKEN)
    yield f"127.0.0.1:{bound.port}"
    bound.server.stop(None).wait()


def connect(address: str, token: str = TOKEN) -> PlainConnection:
    return PlainConnection(address, token, SystemClock())


def address_of(server: socket.socket) -> str:
    return f"127.0.0.1:{server.getsockname()[1]}"


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


@contextmanager
def impostor(answer: bytes, *, is_over: bool = True) -> Iterator[PlainConnection]:
    """Give a connection to a server that says `answer`, whatever it is asked, and then no more."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        STRANGERS.forget()  # ports come again, of other tests and of this one's other examples
        with connect(address_of(server)) as connection, server.accept()[0] as accepted:
            accepted.sendall(answer)
            if is_over:
                accepted.shutdown(socket.SHUT_WR)
            yield connection


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">BHBBI", len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream) + payload


def test_a_grpc_server_answers_calls_one_after_another(address: str) -> None:
    with connect(address) as connection:
        for number in range(300):
            assert connection.call(METHOD + "Say", b"%d" % number, soon()) == b"%d" % number
        assert connection.is_used


@pytest.mark.parametrize("size", [0, 1, 16_379, 16_380, 40_000, LARGEST_REQUEST])
def test_requests_of_all_sizes_arrive_whole(address: str, size: int) -> None:
    message = bytes(range(256)) * (size // 256 + 1)
    with connect(address) as connection:
        for _ in range(5):  # more than the server takes unasked, together
            assert connection.call(METHOD + "Say", message[:size], soon()) == message[:size]


def test_many_and_long_replies_come_in_order(address: str) -> None:
    with connect(address) as connection:
        for count, size in ((0, 0), (3, 0), (300, 1000), (5, 3_000_000), (1, 1)):
            connection.send(METHOD + "Repeat", b"%d %d" % (count, size), soon(30))
            found = [bytes(reply) for reply in connection.replies()]
            assert found == [bytes([number % 256]) * size for number in range(count)]


def test_more_than_a_window_comes_whole(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deeplink.rpc.forksafe.connection._WINDOW", 300_000)
    with connect(address) as connection:
        connection.send(METHOD + "Repeat", b"30 100000", soon(30))
        assert sum(len(reply) for reply in connection.replies()) == 3_000_000


def test_a_long_token_arrives_whole() -> None:
    bound = serve("y" * 3000)
    with connect(f"127.0.0.1:{bound.port}", "y" * 3000) as connection:
        assert connection.call(METHOD + "Say", b"x", soon()) == b"x"
    bound.server.stop(None).wait()


def test_a_host_whose_first_address_does_not_answer_is_tried_at_its_next(address: str) -> None:
    # Where localhost is ::1 too, the server does not listen there.
    with connect(f"localhost:{address.rpartition(':')[2]}") as connection:
        assert connection.call(METHOD + "Say", b"x", soon()) == b"x"


def test_a_refused_token_is_told_apart(address: str) -> None:
    with connect(address, "wrong") as connection, pytest.raises(PlainRefusedError, match="token"):
        connection.call(METHOD + "Say", b"x", soon())


def test_a_status_comes_with_its_text(address: str) -> None:
    with connect(address) as connection, pytest.raises(PlainStatusError, match="für immer") as failed:
        connection.call(METHOD + "Say", b"fail", soon())
    assert failed.value.code == grpc.StatusCode.DATA_LOSS.value[0]
    with connect(address) as connection, pytest.raises(PlainStatusError):
        connection.call(METHOD + "Nothing", b"", soon())


def test_a_call_of_several_replies_is_not_one_of_one(address: str) -> None:
    with connect(address) as connection, pytest.raises(PlainCallError, match="2 replies"):
        connection.call(METHOD + "Repeat", b"2 10", soon())


def test_a_request_too_long_is_refused_before_it_is_sent(address: str) -> None:
    with connect(address) as connection:
        with pytest.raises(PlainCallError, match="too long"):
            connection.call(METHOD + "Say", bytes(LARGEST_REQUEST + 1), soon())
        assert connection.call(METHOD + "Say", b"x", soon()) == b"x"


def test_nobody_there_is_silence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with connect(f"127.0.0.1:{port}") as connection, pytest.raises(PlainSilentError, match="refused"):
        connection.call(METHOD + "Say", b"", soon())
    with pytest.raises(PlainSilentError, match="nonsense"):
        connect("127.0.0.1:nonsense")


def test_a_server_that_says_nothing_is_given_up_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with (
            connect(address_of(server)) as connection,
            pytest.raises(PlainSilentError, match=r"in time|timed out"),
        ):
            connection.call(METHOD + "Say", b"", soon(0.1))
        with connect(address_of(server)) as connection, pytest.raises(PlainSilentError, match="in time"):
            connection.call(METHOD + "Say", b"", soon(-1))


def test_a_server_that_dribbles_does_not_keep_us_beyond_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, connect(address_of(server)) as connection:
        accepted, _ = server.accept()
        # A frame of 16 MiB, a byte at a time: each comes well before the deadline, the last does not.
        accepted.sendall(SETTINGS + struct.pack(">BHBBI", 0xFF, 0xFFFF, 0, 0, 1))
        enough = threading.Event()

        def dribble() -> None:
            while not enough.wait(0.01):
                accepted.send(b"\0")

        thread = threading.Thread(target=dribble)
        thread.start()
        try:
            with pytest.raises(PlainSilentError, match=r"in time|timed out"):
                connection.call(METHOD + "Say", b"", soon(0.3))
        finally:
            enough.set()
            thread.join()
            accepted.close()


def test_a_server_that_stands_still_in_a_reply_is_given_up_before_the_deadline() -> None:
    with impostor(frame(0, 0, 1, b"\x00\0\0\0\x05hel"), is_over=False) as connection:
        connection.send(METHOD + "Say", b"x", soon(50))
        with pytest.raises(PlainSilentError, match="timed out"):
            for reply in connection.incoming(patience_s=0.05):
                reply.read_into([memoryview(bytearray(5))])


@pytest.mark.parametrize(
    ("answer", "begun"),
    [
        (
            SETTINGS + frame(8, 0, 0, bytes([0, 1, 0, 0])) + frame(6, 0, 0, bytes(8)) + frame(3, 0, 5, bytes(4)),
            False,
        ),
        (SETTINGS + frame(0, 0, 1, bytes(30))[:8], False),
        (SETTINGS + frame(4, 0, 0, bytes(6))[:12], False),
        (SETTINGS + frame(0, 0, 1, bytes(30))[:9], True),
        (SETTINGS + frame(1, 4, 1, b"\x88"), True),
        (frame(3, 0, 1, bytes(4)), True),
        (frame(7, 0, 0, bytes(8)), True),
    ],
    ids=["control", "half a head", "half a SETTINGS", "data", "headers", "reset", "going away"],
)
def test_only_an_answer_counts_as_one_that_has_begun(answer: bytes, begun: bool) -> None:
    with impostor(answer, is_over=False) as connection:
        connection.send(METHOD + "Say", b"x", soon())
        connection.flush()
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLIN)
        assert poll.poll(20_000)
        assert connection.has_begun() == begun


def test_a_closed_connection_counts_as_begun_and_what_has_begun_is_read_whole(address: str) -> None:
    with impostor(SETTINGS) as connection:
        connection.send(METHOD + "Say", b"x", soon())
        connection.flush()
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLIN)
        while not connection.has_begun():
            assert poll.poll(20_000)
        with pytest.raises(PlainSilentError, match="closed the connection"):
            list(connection.replies())
    with connect(address) as connection:
        connection.send(METHOD + "Repeat", b"3 100000", soon())
        connection.flush()
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLIN)
        while not connection.has_begun():
            assert poll.poll(20_000)
        assert [len(reply) for reply in connection.replies()] == [100_000] * 3


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "not a gRPC server"),
        (SETTINGS, "closed the connection"),
        (frame(7, 0, 0, bytes(8)), "going away"),
        (frame(3, 0, 1, bytes(4)), "ended the call"),
        (frame(0, 8, 1, b"\xff" + bytes(10)), "padding"),
        (frame(0, 8, 1, b""), "padding"),
        (frame(0, 0, 1, b"\x01\0\0\0\x05hello"), "compressed"),
        (frame(0, 0, 1, b"\x00\xff\xff\xff\xff"), "too long"),
        (frame(0, 1, 1, b"\x00\0\0\0\x05hello"), "without a status"),
        (frame(1, 5, 1, b"\x88"), "without a status"),
        (frame(1, 5, 1, b"\x00\x0bgrpc-status\x02\xc2\xb2"), "without a status"),
        (frame(1, 5, 1, b"\x00\x0bgrpc-status\x7f"), "beyond the block's end|too soon"),
        (frame(1, 1, 1, b"\x88") + frame(0, 0, 1, b""), "does not end"),
        (frame(0, 0, 1, b"\x00\0\0\0\x05hel") + frame(1, 5, 1, b"\x00\x0bgrpc-status\x010"), "does not end"),
    ],
)
def test_a_server_that_is_none_of_ours_is_an_error(answer: bytes, problem: str) -> None:
    with impostor(answer) as connection, pytest.raises(PlainCallError, match=problem):
        connection.call(METHOD + "Say", b"x", soon())


def test_what_is_no_server_of_ours_is_shown_the_token_no_more() -> None:
    with impostor(b"HTTP/1.1 400 Bad Request\r\n\r\n") as connection:
        with pytest.raises(PlainCallError):
            connection.call(METHOD + "Say", b"x", soon())
        with pytest.raises(PlainSilentError, match="what answered before is none"):
            connect(connection.address)
        connect(connection.address, "of the next attempt").close()


FRAMES = st.builds(
    frame, st.integers(0, 10), st.integers(0, 63), st.sampled_from([0, 1, 3]), st.binary(max_size=30)
)


@settings(max_examples=examples(200))
@given(st.lists(FRAMES, max_size=6), st.binary(max_size=20))
def test_whatever_a_server_says_is_replies_or_an_error(frames: list[bytes], rest: bytes) -> None:
    with impostor(b"".join(frames) + rest) as connection:
        connection.send(METHOD + "Say", b"x", soon())
        try:
            for reply in connection.replies():
                assert len(reply) <= 30 * 6
        except PlainCallError:
            pass
