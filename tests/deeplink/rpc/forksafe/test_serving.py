"""The data path's server: asked by our client and by grpcio's, and by peers that want it no good."""

from __future__ import annotations

import mmap
import os
import resource
import socket
import struct
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deeplink.core.clock import SystemClock
from deeplink.rpc import channel as wire
from deeplink.rpc.forksafe import (
    CallRefusedError,
    PlainBusyError,
    PlainCallError,
    PlainConnection,
    PlainRefusedError,
    PlainSilentError,
    PlainStatusError,
    Status,
)
from deeplink.rpc.forksafe.framing import PREFACE, ErrorCode, FrameType, Setting, frame, request_head
from deeplink.rpc.forksafe.framing import settings as settings_frame
from deeplink.rpc.forksafe.scattered import Scattered
from deeplink.rpc.forksafe.serving import PlainServer, ServerLimits, _send_unpaced
from deeplink.rpc.listeners import PortBusyError
from tests.effort import examples
from tests.waiting import LIMIT_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKEN = "secret"  # noqa: S105 - of a server that lives as long as its test
REPEAT, HOLD, SHOW = "/t.T/Repeat", "/t.T/Hold", "/t.T/Show"
HELLO = PREFACE + settings_frame({})


@dataclass
class Said:
    """A reply."""

    parts: list[bytes | memoryview | Scattered]

    @property
    def size(self) -> int:
        return sum(map(len, self.parts))

    def unreadable(self) -> str:
        return "the disk is gone"


@dataclass
class Served:
    """A server and what its methods wait for."""

    server: PlainServer
    go_on: threading.Event
    refused: list[int]
    shown: list[memoryview | Scattered]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    def connect(self, token: str = TOKEN) -> PlainConnection:
        return PlainConnection(self.address, token, SystemClock())

    def repeat(self, request: bytes = b"2 10", token: str = TOKEN) -> list[int]:
        """Make a call on a connection of its own; return the replies' lengths."""
        with self.connect(token) as connection:
            connection.send(REPEAT, request, soon())
            return [len(reply) for reply in connection.replies()]

    def raw(self) -> socket.socket:
        made = socket.create_connection(("127.0.0.1", self.server.port), timeout=LIMIT_S)
        made.settimeout(20)
        return made


@contextmanager
def served(limits: ServerLimits | None = None) -> Iterator[Served]:
    go_on, refused, shown = threading.Event(), [], list[memoryview | Scattered]()

    def repeat(message: bytes) -> Iterator[Said]:
        count, _, size = message.partition(b" ")
        if not count.isdigit():
            raise CallRefusedError(Status.INVALID, "no number: 100 %")
        for number in range(int(count)):
            yield Said([bytes([number % 256]) * (int(size) // 2), memoryview(bytes(int(size) - int(size) // 2))])

    def hold(message: bytes) -> Iterator[Said]:
        assert go_on.wait(LIMIT_S)
        yield Said([message])

    def show(_: bytes) -> Iterator[Said]:
        yield Said([b"head", *shown])

    server = PlainServer(
        "127.0.0.1:0",
        TOKEN,
        {REPEAT: repeat, HOLD: hold, SHOW: show},
        SystemClock(),
        limits=limits,
        on_refused=lambda: refused.append(1),
    )
    server.start()
    try:
        yield Served(server, go_on, refused, shown)
    finally:
        go_on.set()
        server.stop()


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    with served() as found:
        yield found


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def call(stream: int = 1, request: bytes = b"2 10", token: str = TOKEN, method: str = REPEAT) -> bytes:
    """Return the frames of a call."""
    head = request_head("host:1", method, (("deeplink-token", token),))
    body = struct.pack(">BI", 0, len(request)) + request
    return frame(FrameType.HEADERS, 4, stream, head) + frame(FrameType.DATA, 1, stream, body)


def everything(peer: socket.socket) -> bytes:
    """Read until the server closes."""
    found = b""
    try:
        while data := peer.recv(65_536):
            found += data
    except ConnectionResetError:
        pass
    return found


@pytest.mark.parametrize(
    ("count", "size"), [(0, 0), (1, 0), (3, 1), (300, 1000), (5, 3_000_000), (1, 40_000_000), (1, 16_777_210)]
)
def test_replies_of_all_sizes_come_whole_and_in_order(shared: Served, count: int, size: int) -> None:
    with shared.connect() as connection:
        for _ in range(2):
            connection.send(REPEAT, b"%d %d" % (count, size), soon(30))
            found = [bytes(reply) for reply in connection.replies()]
            half = size // 2
            assert found == [bytes([n % 256]) * half + bytes(size - half) for n in range(count)]


def test_grpcio_is_served_too_several_calls_at_once_with_windows_of_its_own(shared: Served) -> None:
    with wire.open_channel(shared.address, TOKEN) as channel:
        ask: Any = channel.stream_stream(REPEAT)
        nothing: Any = channel.stream_stream("/t.T/Nothing")
        calls = [ask(iter([b"%d 100000" % count, b"2 50"]), timeout=LIMIT_S) for count in (40, 1, 0, 7)]
        assert [[len(reply) for reply in found] for found in calls] == [
            [100_000] * count + [50, 50] for count in (40, 1, 0, 7)
        ]
        assert list(ask(iter([]), timeout=LIMIT_S)) == []
        with pytest.raises(grpc.RpcError) as refused:
            list(ask(iter([b"x"]), timeout=LIMIT_S))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert refused.value.details() == "no number: 100 %"
        with pytest.raises(grpc.RpcError) as unknown:
            list(nothing(iter([]), timeout=LIMIT_S))
        assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED
        cancelled = ask(iter([b"1000 1000000"]), timeout=LIMIT_S)
        next(cancelled)
        cancelled.cancel()
        assert [len(reply) for reply in ask(iter([b"1 9"]), timeout=LIMIT_S)] == [9]
    with wire.open_channel(shared.address, "wrong") as channel:
        ask = channel.stream_stream(REPEAT)
        with pytest.raises(grpc.RpcError) as denied:
            list(ask(iter([b"1 1"]), timeout=LIMIT_S))
    assert denied.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_wrong_token_is_told_apart(shared: Served) -> None:
    with pytest.raises(PlainRefusedError):
        shared.repeat(token="wrong")  # noqa: S106 - see above


def test_a_port_in_use_is_said(shared: Served) -> None:
    with pytest.raises(PortBusyError):
        PlainServer(shared.address, TOKEN, {}, SystemClock())


@pytest.mark.parametrize("where", ["nothing of it is there", "its end is missing"])
def test_memory_that_cannot_be_read_is_a_status_and_the_server_lives(
    shared: Served, tmp_path: Path, where: str
) -> None:
    size = 64 * mmap.PAGESIZE
    path = tmp_path / "file"
    path.write_bytes(b"x" * size)
    with path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), size)
        view = memoryview(mapped)
        shared.shown[:] = [view[at : at + 1000] for at in range(0, size - 1000, 1000)]
        os.truncate(file.fileno(), 0 if where.startswith("nothing") else size // 2)
        with shared.connect() as connection:
            for _ in range(3):
                connection.send(SHOW, b"", soon())
                with pytest.raises(PlainStatusError, match="the disk is gone") as lost:
                    list(connection.replies())
                assert lost.value.code == Status.DATA_LOSS
            connection.send(REPEAT, b"1 5", soon())  # the connection goes on, too
            assert [len(reply) for reply in connection.replies()] == [5]
        shared.shown.clear()
        view.release()


def test_readers_that_stand_still_hold_up_nobody_and_are_refused_beyond_a_bound() -> None:
    with served(ServerLimits(threads=2, answers=6)) as found, ExitStack() as stack:
        stuck = []
        for _ in range(6):  # three times the threads
            peer = stack.enter_context(found.raw())
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            wide = settings_frame({Setting.INITIAL_WINDOW: (1 << 31) - 1, Setting.FRAME_SIZE: (1 << 24) - 1})
            peer.sendall(
                PREFACE + wide + frame(FrameType.WINDOW_UPDATE, 0, 0, b"\x7f\0\0\0") + call(request=b"1 60000000")
            )
            stuck.append(peer)
        until(lambda: _refusal(found) is not None)
        busy = _refusal(found)
        assert busy is not None
        assert busy.retry_s == 0.2
        stuck.pop().close()
        until(lambda: _refusal(found) is None)
        assert found.repeat(b"3 7") == [7, 7, 7]


def test_a_reader_that_reads_slowly_holds_up_nobody() -> None:
    """It takes something all the time, frame by frame, so no call of the server's waits for long."""
    memory = np.zeros(48 << 20, np.uint8)
    taken, answered = 0, threading.Event()

    def read(peer: socket.socket) -> None:
        nonlocal taken
        while not answered.wait(0.005) and taken < len(memory):
            taken += len(peer.recv(1 << 14))

    with served(ServerLimits(threads=1)) as found, socket.socket() as peer:
        # As over Ethernet: else the server's buffer has room for megabytes, of which a third must first be free.
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1448)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 15)
        peer.settimeout(LIMIT_S)
        peer.connect(("127.0.0.1", found.server.port))
        found.shown[:] = [Scattered(np.array([memory.ctypes.data]), np.array([len(memory)]), [memory])]
        wide = settings_frame({Setting.INITIAL_WINDOW: (1 << 31) - 1})
        peer.sendall(PREFACE + wide + frame(FrameType.WINDOW_UPDATE, 0, 0, b"\x7f\0\0\0") + call(method=SHOW))
        taken += len(peer.recv(1 << 14))
        slow = threading.Thread(target=read, args=(peer,))
        slow.start()
        assert found.repeat() == [10, 10]
        answered.set()
        slow.join()
    assert taken < len(memory), "the other was answered before it had all"


def _refusal(found: Served) -> PlainBusyError | None:
    try:
        assert found.repeat() == [10, 10]
    except PlainBusyError as busy:
        return busy
    return None


def test_more_callers_than_may_wait_are_told_to_come_again() -> None:
    with served(ServerLimits(threads=1, waiting=3)) as found, ExitStack() as stack:
        callers = [stack.enter_context(found.connect()) for _ in range(12)]
        for number, caller in enumerate(callers):
            caller.send(HOLD, b"%d" % number, soon())
            caller.flush()
        until(lambda: len(found.refused) >= 5)
        found.go_on.set()
        answered = 0
        for number, caller in enumerate(callers):
            try:
                answered += [bytes(reply) for reply in caller.replies()] == [b"%d" % number]
            except PlainBusyError as busy:
                assert busy.retry_s == 0.2  # noqa: PT017 - some are refused, some are not
        assert 1 <= answered <= 7
        assert found.repeat() == [10, 10]


def test_more_connections_than_it_holds_are_told_so() -> None:
    with served(ServerLimits(connections=3)) as found, ExitStack() as stack:
        kept = []
        for _ in range(3):
            kept.append(stack.enter_context(found.connect()))
            kept[-1].send(REPEAT, b"1 1", soon())
            list(kept[-1].replies())
        with pytest.raises((PlainBusyError, PlainSilentError)):  # by a frame, or the close overtakes it
            found.repeat()
        assert found.refused
        kept[0].close()
        until(lambda: found.server.open_connections() < 3)
        assert found.repeat() == [10, 10]


@pytest.mark.parametrize(
    "start",
    [
        *(
            b"",
            PREFACE[:10],
            HELLO + frame(FrameType.HEADERS, 4, 1, b"")[:5],
            HELLO + call()[:-1],
            HELLO + call()[:30],
        ),
        *(HELLO, HELLO + call(token=TOKEN[:-1])),
    ],
    ids=[
        *("nothing", "half a preface", "half a frame", "a request but for a byte", "half a head"),
        *("no call", "another token"),
    ],
)
def test_who_stands_still_in_the_middle_is_cut_off(start: bytes) -> None:
    with served(ServerLimits(stall_s=0.2)) as found, found.connect() as idle, found.raw() as slow:
        idle.send(REPEAT, b"1 1", soon())
        list(idle.replies())
        slow.sendall(start)
        everything(slow)
        until(lambda: found.server.open_connections() == 1)
        idle.send(REPEAT, b"1 2", soon())  # who rests between calls is not in the middle of anything
        assert [len(reply) for reply in idle.replies()] == [2]


def test_idle_connections_end_after_a_while() -> None:
    with served(ServerLimits(stall_s=0.2, idle_s=0.1)) as found, found.connect() as idle:
        idle.send(REPEAT, b"1 1", soon())
        list(idle.replies())
        until(lambda: not found.server.open_connections())


PING = frame(FrameType.PING, 0, 0, b"are you?")


@pytest.mark.parametrize("start", [HELLO, HELLO + call()[:-18]], ids=["no call", "a call without a request"])
def test_pings_do_not_lengthen_the_time_that_a_peer_has(start: bytes) -> None:
    with served(ServerLimits(stall_s=0.5)) as found, found.raw() as peer:
        peer.sendall(start)
        until(lambda: _is_gone_after(peer, PING))
        assert not found.server.open_connections()


def test_pings_between_calls_do_not_keep_a_connection() -> None:
    with served(ServerLimits(idle_s=0.5)) as found, found.raw() as peer:
        peer.sendall(HELLO + call())
        until(lambda: _is_gone_after(peer, PING))


def _is_gone_after(peer: socket.socket, said: bytes) -> bool:
    """Say something, and tell whether the other end has closed the connection."""
    try:
        peer.sendall(said)
        peer.settimeout(0.05)
        while peer.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


@pytest.mark.slow
@pytest.mark.parametrize("said", [b"", HELLO, HELLO + PING, HELLO + call(token=TOKEN[:-1])])
def test_who_has_the_token_is_served_while_strangers_take_every_place_they_can(said: bytes) -> None:
    limits = ServerLimits(connections=400)
    with served(limits) as found, ExitStack() as stack, found.connect() as proven:
        proven.send(REPEAT, b"1 1", soon())
        list(proven.replies())
        for _ in range(2 * limits.connections):
            stack.enter_context(found.raw()).sendall(said)
        assert found.repeat() == [10, 10], "one that comes now proves itself"
        proven.send(REPEAT, b"1 2", soon())
        assert [len(reply) for reply in proven.replies()] == [2]
        until(lambda: found.server.open_connections() <= 1 + limits.connections // 2)


HEADERS_AND_ON = frame(FrameType.HEADERS, 0, 1, b"\x83")


@pytest.mark.parametrize(
    ("hostile", "fault"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", ErrorCode.PROTOCOL),
        (HELLO + frame(FrameType.DATA, 0, 1, b"")[:-9] + b"\xff\xff\xff\0\0\0\0\0\1", ErrorCode.FRAME_SIZE),
        (HELLO + frame(FrameType.DATA, 0, 1, b"x"), ErrorCode.PROTOCOL),
        (HELLO + frame(FrameType.HEADERS, 5, 2, b"\x83"), ErrorCode.STREAM_CLOSED),
        (HELLO + call(7) + call(5), ErrorCode.STREAM_CLOSED),
        (HELLO + HEADERS_AND_ON + frame(FrameType.PING, 0, 0, bytes(8)), ErrorCode.PROTOCOL),
        (HELLO + HEADERS_AND_ON + frame(FrameType.CONTINUATION, 0, 3, b"\x83"), ErrorCode.PROTOCOL),
        (HELLO + HEADERS_AND_ON + frame(FrameType.CONTINUATION, 0, 1, b"") * 50, ErrorCode.CALM),
        (HELLO + HEADERS_AND_ON + frame(FrameType.CONTINUATION, 0, 1, bytes(16_000)) * 2, ErrorCode.CALM),
        (HELLO + frame(FrameType.HEADERS, 4, 1, b"\x00\x7f\xff\xff\xff\xff\xff"), ErrorCode.COMPRESSION),
        (HELLO + frame(FrameType.HEADERS, 12, 1, b"\xff"), ErrorCode.PROTOCOL),
        (HELLO + frame(FrameType.WINDOW_UPDATE, 0, 0, bytes(4)), ErrorCode.FLOW_CONTROL),
        (HELLO + frame(FrameType.WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff"), ErrorCode.FLOW_CONTROL),
        (HELLO + frame(FrameType.WINDOW_UPDATE, 0, 0, b"\1"), ErrorCode.FRAME_SIZE),
        (HELLO + settings_frame({Setting.INITIAL_WINDOW: 1 << 31}), ErrorCode.FLOW_CONTROL),
        (HELLO + settings_frame({Setting.FRAME_SIZE: 1}), ErrorCode.PROTOCOL),
        (HELLO + frame(FrameType.SETTINGS, 0, 0, b"12345"), ErrorCode.FRAME_SIZE),
        (HELLO + frame(FrameType.PING, 0, 0, b"1"), ErrorCode.FRAME_SIZE),
        (HELLO + frame(FrameType.PUSH_PROMISE, 4, 1, b""), ErrorCode.PROTOCOL),
        (HELLO + frame(FrameType.PING, 0, 0, bytes(8)) * 1100, ErrorCode.CALM),
        (HELLO + settings_frame({}) * 1100, ErrorCode.CALM),
        (HELLO + b"".join(call(n, token="x") for n in range(1, 2300, 2)), ErrorCode.CALM),  # noqa: S106 - see above
        (HELLO + call()[:-1] + b"0" + frame(FrameType.DATA, 0, 1, b"") * 1100, ErrorCode.CALM),
        # empty requests whose answers fill our window, however they are cut into packets
        (HELLO + frame(FrameType.HEADERS, 4, 1, request_head("h", SHOW, (("deeplink-token", TOKEN),)))
         + frame(FrameType.DATA, 0, 1, bytes(16_380)) * 10, ErrorCode.CALM),
    ],
)  # fmt: skip
def test_who_breaks_the_rules_is_cut_off_and_told_why(shared: Served, hostile: bytes, fault: ErrorCode) -> None:
    with shared.raw() as peer:
        try:
            peer.sendall(hostile)
        except (BrokenPipeError, ConnectionResetError):  # cut off before all was said
            fault = ErrorCode.NONE
        said = everything(peer)
    goodbye = struct.pack(">II", 0, fault)
    assert fault is ErrorCode.NONE or not said or goodbye in said
    assert shared.repeat() == [10, 10]


@pytest.mark.parametrize(
    ("message", "status"),
    [
        (struct.pack(">BI", 1, 3) + b"abc", Status.UNIMPLEMENTED),
        (struct.pack(">BI", 0, (1 << 32) - 1), Status.INVALID),
        (struct.pack(">BI", 0, 10) + b"abc", Status.INVALID),
        (b"\0\0", Status.INVALID),
    ],
    ids=["compressed", "of 4 GiB", "cut short", "no length"],
)
def test_a_request_that_cannot_be_taken_ends_its_call_alone(
    shared: Served, message: bytes, status: Status
) -> None:
    head = frame(FrameType.HEADERS, 4, 1, request_head("host:1", REPEAT, (("deeplink-token", TOKEN),)))
    with shared.raw() as peer:
        peer.sendall(HELLO + head + frame(FrameType.DATA, 1, 1, message) + call(3))
        found = b""
        while found.count(b"grpc-status") < 2:
            found += peer.recv(65_536)
    assert b"grpc-status" + bytes([len(str(int(status)))]) + str(int(status)).encode() in found
    assert b"grpc-status\x010" in found


FRAMES = st.builds(
    frame, st.integers(0, 10), st.integers(0, 63), st.sampled_from([0, 1, 3]), st.binary(max_size=30)
)


@settings(max_examples=examples(150))
@given(st.lists(st.one_of(FRAMES, st.just(call()), st.just(call(3))), max_size=6), st.binary(max_size=20))
def test_whatever_comes_the_server_lives(shared: Served, frames: list[bytes], rest: bytes) -> None:
    with shared.raw() as peer:
        try:
            peer.sendall(HELLO + b"".join(frames) + rest)
            peer.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        everything(peer)
    assert shared.repeat() == [10, 10]


@pytest.mark.slow
def test_a_thousand_clients_are_held_and_served_within_bounds() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.fail(f"this machine allows {hard} descriptors, 4096 are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    with served() as found, ExitStack() as stack:
        try:
            before = _resident()
            clients = []
            for _ in range(1000):
                clients.append(stack.enter_context(found.connect()))
                clients[-1].send(REPEAT, b"1 4096", soon(40))
                clients[-1].flush()
            for client in clients:
                try:
                    assert [len(reply) for reply in client.replies()] == [4096]
                except PlainBusyError as busy:
                    assert busy.retry_s == 0.2  # noqa: PT017 - politely
            assert found.server.open_connections() == 1000
            # Both ends live in this process; the client's has a buffer of 16 KiB.
            assert _resident() - before < 64 << 20
        finally:
            stack.close()
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_a_stopped_server_answers_nobody_and_waits_for_nobody() -> None:
    with served() as found, found.connect() as connection:
        connection.send(HOLD, b"", soon())
        connection.flush()
        found.go_on.set()
        list(connection.replies())
        found.server.stop()
        with pytest.raises(PlainCallError):
            connection.call(REPEAT, b"1 1", soon())
        with pytest.raises(PlainSilentError):
            found.repeat()


def test_only_bbr_gives_way_to_linux_own_congestion_control() -> None:
    available = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text(encoding="ascii").split()
    for name in {"reno", "cubic", "bbr"}.intersection(available):
        with socket.socket() as peer:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
            _send_unpaced(peer)
            found = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
            assert found == ("cubic" if name == "bbr" else name)
