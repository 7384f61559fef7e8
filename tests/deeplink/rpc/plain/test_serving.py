"""What answers our own clients: asked by them, and by peers that want it no good."""

from __future__ import annotations

import mmap
import os
import resource
import select
import socket
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deeplink.core.clock import SystemClock
from deeplink.rpc.plain import PlainBusyError, PlainCallError, PlainSilentError, PlainStatusError, Status, framing
from deeplink.rpc.plain.framing import HEAD, FrameKind
from deeplink.rpc.plain.outgoing import Scattered
from deeplink.rpc.plain.serving import PlainServer, PlainTerms, ServerLimits, _send_unpaced
from tests.deeplink.rpc.plain.servers import (
    HOLD,
    NONCE,
    REPEAT,
    SAY,
    SHOW,
    STAY,
    TOKEN,
    WAIT,
    Said,
    next_frame,
    prove,
    served,
    soon,
)
from tests.effort import examples
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.deeplink.rpc.plain.servers import Served

GREETING = framing.hello(NONCE, TOKEN)
CALL = framing.call(REPEAT, b"2 10")


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    with served() as found:
        yield found


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


def test_a_reply_of_a_method_that_waits_comes_as_soon_as_it_is_there(shared: Served) -> None:
    with shared.connect() as connection:
        connection.send(WAIT, b"in the end", soon())
        replies = connection.incoming()
        first = next(replies)
        assert first.read(first.left) == b"at once"
        assert shared.repeat() == [10, 10]
        shared.go_on.set()
        assert [reply.read(reply.left) for reply in replies] == [b"in the end"]


def test_a_method_that_waits_sees_that_its_caller_left_and_lets_go_of_its_thread() -> None:
    with served(ServerLimits(workers=1)) as found, found.connect() as stays:
        with found.connect() as leaves:
            leaves.send(STAY, b"", soon())
            assert next(leaves.replies()) == b"at once"
        until(found.left.is_set)
        stays.send(STAY, b"", soon())  # by the one thread that may wait
        replies = stays.replies()
        assert next(replies) == b"at once"
        found.go_on.set()
        assert list(replies) == [b"in the end"]


def test_methods_that_wait_hold_up_no_others_and_are_bounded() -> None:
    with served(ServerLimits(threads=1, workers=2)) as found, ExitStack() as stack:
        waiting = [stack.enter_context(found.connect()) for _ in range(8)]  # two work, and six wait for them
        for one in waiting:
            one.send(WAIT, b"x", soon())
            one.flush()
        assert found.repeat() == [10, 10]
        until(lambda: _is_busy(found))
        found.go_on.set()
        for one in waiting:
            assert list(one.replies()) == [b"at once", b"x"]
        until(lambda: not _is_busy(found))


def _is_busy(found: Served) -> bool:
    with found.connect() as connection:
        try:
            return connection.call(SAY, b"x", soon()) != b"x"
        except PlainBusyError as busy:
            return busy.retry_s == 0.2


def test_readers_that_stand_still_hold_up_nobody_and_are_refused_beyond_a_bound() -> None:
    with served(ServerLimits(threads=2, answers=6)) as found, ExitStack() as stack:
        stuck = []
        for _ in range(6):  # three times the threads
            peer = stack.enter_context(socket.socket())
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            peer.settimeout(20)
            peer.connect(("127.0.0.1", found.bound.port))
            prove(peer)
            peer.sendall(framing.call(REPEAT, b"1 60000000"))
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
        while not answered.wait(0.001) and taken < len(memory):
            taken += len(peer.recv(1 << 14))

    with served(ServerLimits(threads=1)) as found, socket.socket() as peer:
        # As over Ethernet: else the server's buffer has room for megabytes, of which a third must first be free.
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1448)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 15)
        peer.settimeout(20)
        peer.connect(("127.0.0.1", found.bound.port))
        prove(peer)
        found.shown[:] = [Scattered(np.array([memory.ctypes.data]), np.array([len(memory)]), [memory])]
        peer.sendall(framing.call(SHOW, b""))
        taken += len(peer.recv(1 << 14))
        slow = threading.Thread(target=read, args=(peer,))
        slow.start()
        assert found.repeat() == [10, 10]
        answered.set()
        slow.join()
    assert taken < len(memory) // 2


def _refusal(found: Served) -> PlainBusyError | None:
    try:
        assert found.repeat() == [10, 10]
    except PlainBusyError as busy:
        return busy
    return None


def test_more_callers_than_may_wait_are_told_to_come_again() -> None:
    with served(ServerLimits(threads=1, waiting=3)) as found, ExitStack() as stack:
        callers = [stack.enter_context(found.connect()) for _ in range(12)]
        for caller in callers:
            assert caller.call(REPEAT, b"1 1", soon()) == b"\0"
        for number, caller in enumerate(callers):
            caller.send(HOLD, b"%d" % number, soon())
        until(lambda: len(found.refused) >= 3)
        found.go_on.set()
        answered = 0
        for number, caller in enumerate(callers):
            try:
                answered += list(caller.replies()) == [b"%d" % number]
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
        until(lambda: found.open_connections() < 3)
        assert found.repeat() == [10, 10]


@pytest.mark.parametrize("said", [b"", GREETING[:20], GREETING], ids=["nothing", "half a greeting", "no proof"])
def test_a_stranger_that_stands_still_is_cut_off(said: bytes) -> None:
    with served(ServerLimits(stall_s=0.2)) as found, found.connect() as idle, found.raw() as slow:
        assert idle.call(REPEAT, b"1 1", soon()) == b"\0"
        slow.sendall(said or framing.MAGIC[:1])
        everything(slow)
        until(lambda: found.open_connections() == 1)
        assert (
            idle.call(REPEAT, b"1 1", soon()) == b"\0"
        )  # who rests between calls is not in the middle of anything


def test_half_a_request_that_does_not_go_on_is_cut_off_however_it_dribbles() -> None:
    with served(ServerLimits(stall_s=0.5)) as found, found.proven() as slow:
        slow.sendall(CALL[:-3])
        until(lambda: _is_gone_after(slow, b"") or not found.open_connections())
        assert not found.open_connections()


def test_idle_connections_end_after_a_while() -> None:
    with served(ServerLimits(stall_s=0.2, idle_s=0.1)) as found, found.connect() as idle:
        assert idle.call(REPEAT, b"1 1", soon()) == b"\0"
        until(lambda: not found.open_connections())


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
@pytest.mark.parametrize("said", [b"", framing.MAGIC, GREETING])
def test_who_has_the_token_is_served_while_strangers_take_every_place_they_can(said: bytes) -> None:
    limits = ServerLimits(connections=400)
    with served(limits) as found, ExitStack() as stack, found.connect() as proven:
        assert proven.call(REPEAT, b"1 1", soon()) == b"\0"
        for _ in range(2 * limits.connections):
            stack.enter_context(found.raw()).sendall(said)
        assert found.repeat() == [10, 10], "one that comes now proves itself"
        assert proven.call(REPEAT, b"1 1", soon()) == b"\0"


@pytest.mark.parametrize(
    ("hostile", "status"),
    [
        (b"DELETE / HTTP/1.1\r\nHost: x\r\n\r\n", None),
        (framing.MAGIC[:7] + bytes(90), Status.INVALID),
        (framing.MAGIC + b"\x63\0" + GREETING[10:], Status.FAILED_PRECONDITION),
        (GREETING + CALL, Status.INVALID),
        (GREETING + HEAD.pack(FrameKind.PROOF, 0, 0, 32, 0) + bytes(32), Status.UNAUTHENTICATED),
    ],
    ids=["HTTP/1", "half a name", "another version", "a call without a proof", "a wrong proof"],
)
def test_a_stranger_that_breaks_the_rules_is_cut_off_and_told_why(
    shared: Served, hostile: bytes, status: Status | None
) -> None:
    with shared.raw() as peer:
        peer.sendall(hostile)
        said = everything(peer)
    if status is not None and said:  # a reset may overtake it
        challenged = framing.head_of(said[: HEAD.size]).kind == FrameKind.CHALLENGE
        if challenged:
            said = said[HEAD.size + framing.head_of(said[: HEAD.size]).size :]
        assert framing.head_of(said[: HEAD.size])[:2] == (FrameKind.END, status)
    assert shared.repeat() == [10, 10]


def test_a_replayed_proof_is_refused(shared: Served) -> None:
    with shared.raw() as first:
        _, proof = prove(first)
    with shared.raw() as second:
        second.sendall(GREETING)
        next_frame(second)
        second.sendall(proof + CALL)
        head, why = next_frame(second)
    assert (head.status, why) == (Status.UNAUTHENTICATED, b"its proof of the token is wrong")


def test_calls_that_come_together_are_answered_in_order(shared: Served) -> None:
    said = framing.call(REPEAT, b"1 3") + framing.call(SAY, b"second") + framing.call("/t.T/Nothing", b"") + CALL
    with shared.proven() as peer:
        for at in range(0, len(said), 7):  # however they are torn
            peer.sendall(said[at : at + 7])
        found = [next_frame(peer) for _ in range(8)]
    assert [(head.kind, head.status) for head, _ in found] == [
        *((4, 0), (5, 0)),
        *((4, 0), (5, 0)),
        (5, Status.UNIMPLEMENTED),
        *((4, 0), (4, 0), (5, 0)),
    ]
    assert found[2][1] == b"second"


MEANT = st.sampled_from([CALL, framing.call(SAY, b"x"), GREETING, framing.part(3), framing.call("/t.T/No", b"")])


@settings(max_examples=examples(100))
@given(st.lists(st.one_of(MEANT, st.binary(max_size=30)), max_size=6), st.booleans())
def test_whatever_comes_the_server_lives(shared: Served, said: list[bytes], is_proven: bool) -> None:
    with shared.proven() if is_proven else shared.raw() as peer:
        try:
            peer.sendall((b"" if is_proven else framing.MAGIC[:1]) + b"".join(said))
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
            assert found.open_connections() == 1000
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
        found.bound.server.stop(None).wait()
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


@pytest.mark.parametrize("late", [select.EPOLLHUP, select.EPOLLERR, select.EPOLLRDHUP, select.EPOLLIN])
def test_a_late_event_of_a_descriptor_that_was_used_again_ends_no_connection(late: int) -> None:
    def echo(message: bytes, _user: int) -> Iterator[Said]:
        yield Said([message])

    terms = PlainTerms(
        node="n0", find_token=lambda _: TOKEN, is_valid=lambda _: True, methods={}, user_methods={REPEAT: echo}
    )
    server = PlainServer(terms, SystemClock(), limits=ServerLimits(threads=1, workers=1))
    poll, stale = server._epoll.poll, list[tuple[int, int]]()
    ours, theirs = socket.socketpair()
    server._epoll = Mock(wraps=server._epoll)
    server._epoll.poll = lambda *args, **kwargs: [stale.pop()] if stale else poll(*args, **kwargs)
    try:
        # Another connection had this number: its end was seen, but is told only now.
        stale.append((theirs.fileno(), late))
        server.take_in(theirs, "unix:")
        server.start()
        with ours:
            prove(ours)
            ours.sendall(framing.call(REPEAT, b"still here"))
            assert next_frame(ours)[1].endswith(b"still here")
            until(lambda: not stale)
            assert server.open_connections() == 1
            ours.shutdown(socket.SHUT_RDWR)
            until(lambda: server.open_connections() == 0)  # its own end is seen
    finally:
        server.stop()
