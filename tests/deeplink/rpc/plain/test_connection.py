"""Plain calls of real servers, and of servers that misbehave."""

from __future__ import annotations

import os
import select
import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deeplink.core.clock import SystemClock
from deeplink.rpc.grpc_server import bound_server
from deeplink.rpc.plain import (
    LARGEST_REQUEST,
    PlainBusyError,
    PlainCallError,
    PlainConnection,
    PlainRefusedError,
    PlainSilentError,
    PlainStatusError,
    Status,
    framing,
)
from deeplink.rpc.plain.framing import HEAD, HELLO, FrameKind
from tests.deeplink.rpc.plain.servers import COUNT, NODE, NONCE, REPEAT, SAY, TOKEN, served, soon
from tests.effort import examples

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.deeplink.rpc.plain.servers import Served


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    with served() as found:
        yield found


def connect(address: str, token: str = TOKEN) -> PlainConnection:
    return PlainConnection(address, token, SystemClock())


def address_of(server: socket.socket) -> str:
    return f"127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def impostor(answer: bytes, *, knows_us: bool = True, is_over: bool = True) -> Iterator[PlainConnection]:
    """Give a connection to a server that says `answer`, after a proof if it `knows_us`, and then no more."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            accepted, _ = server.accept()
            with accepted:
                accepted.settimeout(20)
                said = accepted.recv(HELLO.size, socket.MSG_WAITALL)
                accepted.sendall((framing.challenge(TOKEN, said, NONCE, NODE) if knows_us else b"") + answer)
                if is_over:
                    accepted.shutdown(socket.SHUT_WR)
                while accepted.recv(1 << 16):
                    pass

        thread = threading.Thread(target=serve)
        with connect(address_of(server)) as connection:
            thread.start()
            yield connection
        thread.join()


def test_calls_are_answered_one_after_another(shared: Served) -> None:
    with shared.connect(node=NODE) as connection:
        for number in range(300):
            assert connection.call(SAY, b"%d" % number, soon()) == b"%d" % number
            assert connection.call(REPEAT, b"1 3", soon()) == bytes(3)
        assert connection.is_used


@pytest.mark.parametrize("size", [0, 1, 16_379, 16_380, 40_000, LARGEST_REQUEST])
def test_requests_of_all_sizes_arrive_whole(shared: Served, size: int) -> None:
    message = bytes(range(256)) * (size // 256 + 1)
    with shared.connect() as connection:
        for _ in range(5):
            assert connection.call(SAY, message[:size], soon()) == message[:size]


def test_many_replies_of_a_servicer_come_in_order(shared: Served) -> None:
    with shared.connect() as connection:
        for count in (0, 1, 300):
            connection.send(COUNT, b"%d" % count, soon())
            assert list(connection.replies()) == [b"%d" % number for number in range(count)]


def test_a_host_whose_first_address_does_not_answer_is_tried_at_its_next(shared: Served) -> None:
    # Where localhost is ::1 too, the server does not listen there.
    with connect(f"localhost:{shared.address.rpartition(':')[2]}") as connection:
        assert connection.call(SAY, b"x", soon()) == b"x"


@pytest.mark.parametrize("token", ["wrong", "", "7.0.1:wrong"])
def test_a_token_that_is_not_the_server_s_is_told_apart(shared: Served, token: str) -> None:
    with shared.connect(token) as connection, pytest.raises(PlainRefusedError, match="token"):
        connection.call(SAY, b"x", soon())
    assert shared.repeat() == [10, 10]


def test_another_node_than_was_meant_is_refused(shared: Served) -> None:
    with shared.connect(node="n7") as connection, pytest.raises(PlainCallError, match="node n0, not of n7"):
        connection.call(SAY, b"x", soon())


def test_a_status_comes_with_its_text(shared: Served) -> None:
    for method, request, code in ((SAY, b"fail", Status.DATA_LOSS), (REPEAT, b"x", Status.INVALID)):
        with shared.connect() as connection:
            for _ in range(2):  # the connection goes on
                with pytest.raises(PlainStatusError, match="für immer") as failed:
                    connection.call(method, request, soon())
                assert failed.value.code == code
    with shared.connect() as connection, pytest.raises(PlainStatusError, match="no such method"):
        connection.call("/t.T/Nothing", b"", soon())


def test_a_call_of_several_replies_is_not_one_of_one(shared: Served) -> None:
    with shared.connect() as connection, pytest.raises(PlainCallError, match="2 replies"):
        connection.call(REPEAT, b"2 10", soon())


def test_a_request_too_long_is_refused_before_it_is_sent(shared: Served) -> None:
    with shared.connect() as connection:
        with pytest.raises(PlainCallError, match="too long"):
            connection.call(SAY, bytes(LARGEST_REQUEST + 1), soon())
        assert connection.call(SAY, b"x", soon()) == b"x"


def test_children_forked_from_a_process_with_an_open_connection_make_their_own(shared: Served) -> None:
    """As the workers of a DataLoader do, while the parent's own connection stays in use."""
    with shared.connect() as ours:
        assert ours.call(SAY, b"before", soon()) == b"before"
        children = []
        for number in range(4):
            child = os.fork()
            if not child:
                code = 1
                try:
                    with shared.connect() as theirs:
                        said = [theirs.call(SAY, b"%d %d" % (number, turn), soon()) for turn in range(20)]
                    code = 0 if said == [b"%d %d" % (number, turn) for turn in range(20)] else 2
                finally:
                    os._exit(code)
            children.append(child)
        for turn in range(50):
            assert ours.call(SAY, b"%d" % turn, soon()) == b"%d" % turn
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4


def test_nobody_there_is_silence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with connect(f"127.0.0.1:{port}") as connection, pytest.raises(PlainSilentError, match="refused"):
        connection.call(SAY, b"", soon())
    with pytest.raises(PlainSilentError, match="nonsense"):
        connect("127.0.0.1:nonsense")


def test_a_server_that_says_nothing_is_given_up_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with connect(address_of(server)) as connection, pytest.raises(PlainSilentError, match="timed out"):
            connection.call(SAY, b"", soon(0.1))
        with connect(address_of(server)) as connection, pytest.raises(PlainSilentError, match="in time"):
            connection.call(SAY, b"", soon(-1))


def test_a_server_that_dribbles_does_not_keep_us_beyond_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, connect(address_of(server)) as connection:
        accepted, _ = server.accept()
        enough = threading.Event()

        def dribble() -> None:
            said = accepted.recv(HELLO.size, socket.MSG_WAITALL)
            # A part of 16 MiB, a byte at a time: each comes well before the deadline, the last does not.
            accepted.sendall(framing.challenge(TOKEN, said, NONCE, NODE) + framing.part(1 << 24))
            while not enough.wait(0.01):
                accepted.send(b"\0")

        thread = threading.Thread(target=dribble)
        thread.start()
        try:
            with pytest.raises(PlainSilentError, match=r"in time|timed out"):
                connection.call(SAY, b"", soon(0.5))
        finally:
            enough.set()
            thread.join()
            accepted.close()


def test_a_server_that_stands_still_in_a_reply_is_given_up_before_the_deadline() -> None:
    with impostor(framing.part(5) + b"hel", is_over=False) as connection:
        connection.send(SAY, b"x", soon(50))
        with pytest.raises(PlainSilentError, match="timed out"):
            for reply in connection.incoming(patience_s=0.05):
                reply.read_into([memoryview(bytearray(5))])


@pytest.mark.parametrize(
    ("answer", "begun"),
    [(b"", False), (framing.part(30)[:8], False), (framing.part(30), True), (framing.end(14), True)],
    ids=["a proof alone", "half a head", "a part", "an end"],
)
def test_only_an_answer_counts_as_one_that_has_begun(answer: bytes, begun: bool) -> None:
    with impostor(answer, is_over=False) as connection:
        connection.send(SAY, b"x", soon())
        poll = select.poll()
        while not connection.advance():
            poll.register(*connection.awaits)
            assert poll.poll(20_000)
        for _ in range(200 if begun else 3):
            poll.register(*connection.awaits)
            poll.poll(100)
            if connection.has_begun():
                break
        assert connection.has_begun() == begun


@pytest.mark.parametrize("knows_us", [True, False])
def test_a_closed_connection_counts_as_begun(knows_us: bool) -> None:
    closed = pytest.raises(PlainSilentError, match="closed the connection")
    with impostor(b"", knows_us=knows_us) as connection, closed:  # at once, where it is closed by then
        connection.send(SAY, b"x", soon())
        poll = select.poll()
        while not connection.has_begun():
            poll.register(*connection.awaits)
            assert poll.poll(20_000)
        list(connection.replies())


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "frame of kind 72"),
        (HEAD.pack(FrameKind.CHALLENGE, 0, 0, 10, 0) + bytes(10), "no challenge|none"),
        (HEAD.pack(FrameKind.PART, 0, 0, 64 << 20, 0), "who has not proved to know the token"),
        (HEAD.pack(FrameKind.CHALLENGE, 0, 0, 1 << 20, 0), "a frame of 1048576 bytes"),
        (framing.challenge("another", bytes(HELLO.size), NONCE, NODE), "refuses our token"),
        (framing.end(Status.UNAUTHENTICATED), "refuses our token"),
        (framing.end(Status.FAILED_PRECONDITION, "run one release"), "run one release"),
        (b"", "closed the connection"),
    ],
)
def test_what_is_no_agent_of_ours_is_an_error_and_learns_nothing(answer: bytes, problem: str) -> None:
    with impostor(answer, knows_us=False) as connection, pytest.raises(PlainCallError, match=problem):
        connection.call(SAY, b"x", soon())


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (framing.part((1 << 26) + 1), "a frame of"),
        (framing.call("/t.T/Call", b""), "frame of kind 3"),
        (HEAD.pack(FrameKind.CHALLENGE, 0, 0, 0, 0), "middle of a call"),
        (framing.part(5) + b"hel", "closed the connection"),
        (framing.end(Status.UNAVAILABLE, "going away"), "going away"),
        (framing.end(200, "new"), "status 200: new"),
    ],
)
def test_an_answer_that_is_none_is_an_error(answer: bytes, problem: str) -> None:
    with impostor(answer) as connection, pytest.raises(PlainCallError, match=problem):
        connection.call(SAY, b"x", soon())


def test_however_long_a_busy_server_says_to_wait_is_bounded() -> None:
    for said, retry_s in ((4_000_000_000, 60.0), (250, 0.25)):
        with (
            impostor(framing.end(Status.EXHAUSTED, retry_ms=said)) as connection,
            pytest.raises(PlainBusyError) as busy,
        ):
            connection.call(SAY, b"x", soon())
        assert busy.value.retry_s == retry_s


def test_a_server_of_grpc_alone_is_told_from_an_agent() -> None:
    bound = bound_server("127.0.0.1:0", TOKEN, lambda _server: [])
    bound.server.start()
    with connect(f"127.0.0.1:{bound.port}") as connection, pytest.raises(PlainCallError):
        connection.call(SAY, b"x", soon())
    bound.server.stop(None).wait()


FRAMES = st.builds(
    lambda kind, size, rest: HEAD.pack(kind, 0, 0, size, 0) + rest,
    st.integers(0, 7),
    st.integers(0, 40),
    st.binary(max_size=30),
)


@settings(max_examples=examples(100))
@given(st.lists(FRAMES, max_size=6), st.binary(max_size=20), st.booleans())
def test_whatever_a_server_says_is_replies_or_an_error(frames: list[bytes], rest: bytes, knows_us: bool) -> None:
    with impostor(b"".join(frames) + rest, knows_us=knows_us) as connection:
        try:
            connection.send(SAY, b"x", soon())
            for reply in connection.replies():
                assert len(reply) <= 40
        except PlainCallError:
            pass
