"""What stands in front of a server passes bytes on whole, and gives strangers a moment."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from deeplink.core.admission import ConnectionBounds
from deeplink.core.clock import SystemClock
from deeplink.rpc.acceptor import Acceptor
from deeplink.rpc.http2 import PREFACE, FrameType
from deeplink.rpc.listeners import listening_socket
from tests.deeplink.rpc.http2_frames import PING as PING_KIND
from tests.deeplink.rpc.http2_frames import SETTINGS, frame, request_head
from tests.waiting import LIMIT_S, until

TOKEN = "secret"  # noqa: S105 - of a server that lives as long as its test
HELLO = PREFACE + frame(SETTINGS, 0, 0)
PING = frame(PING_KIND, 0, 0, b"are you?")


def call(token: str = TOKEN, stream: int = 1) -> bytes:
    return frame(FrameType.HEADERS, 5, stream, request_head("host:1", "/t.T/Call", (("deeplink-token", token),)))


@contextmanager
def accepted(path: Path, serve: Callable[[socket.socket], None], bounds: ConnectionBounds) -> Iterator[Acceptor]:
    """Have one thread for each connection serve it."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(64)

        def run() -> None:
            while True:
                try:
                    peer = server.accept()[0]
                except OSError:
                    return
                threading.Thread(target=serve, args=(peer,), daemon=True).start()

        threading.Thread(target=run, daemon=True).start()
        acceptor = Acceptor(
            listening_socket("127.0.0.1:0"), os.open(path, os.O_PATH), TOKEN.__eq__, bounds, SystemClock()
        )
        acceptor.start()
        try:
            yield acceptor
        finally:
            acceptor.close()
            server.shutdown(socket.SHUT_RDWR)


def connected(acceptor: Acceptor) -> socket.socket:
    return socket.create_connection(acceptor._listener.getsockname(), timeout=LIMIT_S)


def echo(peer: socket.socket) -> None:
    with peer, suppress(OSError):  # cut off
        while data := peer.recv(1 << 16):
            peer.sendall(data)


def is_closed(peer: socket.socket) -> bool:
    peer.settimeout(0.01)
    try:
        return not peer.recv(1 << 16)
    except TimeoutError:
        return False
    except OSError:
        return True


def received(peer: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size and (data := peer.recv(1 << 20)):
        found += data
    return bytes(found)


@pytest.mark.parametrize("size", [0, 100, 20_000_000])
def test_all_of_it_comes_through_in_both_directions(tmp_path: Path, size: int) -> None:
    said = HELLO + call() + os.urandom(size)
    with accepted(tmp_path / "s", echo, ConnectionBounds()) as acceptor, connected(acceptor) as peer:
        sender = threading.Thread(target=peer.sendall, args=(said,))
        sender.start()
        assert received(peer, len(said)) == said
        sender.join()


def test_what_a_server_said_before_it_closed_comes_whole_to_a_slow_reader(tmp_path: Path) -> None:
    size = 8_000_000

    def serve(peer: socket.socket) -> None:
        with peer:
            peer.sendall(bytes(size))

    with accepted(tmp_path / "s", serve, ConnectionBounds()) as acceptor, socket.socket() as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.settimeout(60)
        peer.connect(acceptor._listener.getsockname())
        peer.sendall(HELLO + call())
        found = 0
        while data := peer.recv(1 << 14):
            found += len(data)
    assert found == size


@pytest.mark.parametrize(
    "said",
    [b"", HELLO[:7], HELLO, HELLO + PING, HELLO + call("another"), HELLO + call()[:-1]],
    ids=["nothing", "half a greeting", "a greeting", "a PING", "another token", "half a head"],
)
def test_a_stranger_has_a_moment_and_who_has_the_token_stays(tmp_path: Path, said: bytes) -> None:
    with (
        accepted(tmp_path / "s", echo, ConnectionBounds(proof_s=0.5)) as acceptor,
        connected(acceptor) as proven,
    ):
        proven.sendall(HELLO + call())  # at once: its moment has begun, too
        assert received(proven, len(HELLO + call())) == HELLO + call()
        with connected(acceptor) as stranger:
            stranger.sendall(said)
            until(lambda: is_closed(stranger))
        proven.sendall(b"still here")
        assert received(proven, 10) == b"still here"
        until(lambda: acceptor.open_connections() == 1)


def test_pings_do_not_lengthen_a_strangers_time(tmp_path: Path) -> None:
    with (
        accepted(tmp_path / "s", echo, ConnectionBounds(proof_s=0.5)) as acceptor,
        connected(acceptor) as stranger,
    ):
        stranger.sendall(HELLO)

        def is_over() -> bool:
            try:
                stranger.sendall(PING)
            except OSError:
                return True
            return is_closed(stranger)

        until(is_over)


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 2,
        HELLO + b"".join(call("no", n) for n in range(1, 41, 2)),
        HELLO + bytes(1 << 19),
        HELLO + frame(FrameType.HEADERS, 0, 1, b"") + frame(FrameType.CONTINUATION, 0, 1, bytes(16_000)) * 2,
        HELLO + frame(FrameType.HEADERS, 0, 1, b"") + frame(FrameType.CONTINUATION, 0, 1, b"") * 17,
        HELLO + b"".join(call("no" * 1024, n) for n in range(1, 21, 2)),
    ],
    ids=[
        "HTTP/1",
        "call after call without the token",
        "too much",
        "a long head",
        "a head in many pieces",
        "long heads",
    ],
)
def test_what_no_client_of_ours_says_ends_a_connection_at_once(tmp_path: Path, said: bytes) -> None:
    with (
        accepted(tmp_path / "s", echo, ConnectionBounds(proof_s=600.0)) as acceptor,
        connected(acceptor) as stranger,
    ):
        threading.Thread(target=_send, args=(stranger, said), daemon=True).start()
        until(lambda: is_closed(stranger) and not acceptor.open_connections())


def _send(peer: socket.socket, said: bytes) -> None:
    try:
        peer.sendall(said)
    except OSError:
        return


def test_one_that_ends_before_it_is_woken_is_closed_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wake = os.eventfd_write
    with accepted(tmp_path / "s", echo, ConnectionBounds()) as acceptor:

        def late(descriptor: int, value: int) -> None:
            acceptor._thread.join(LIMIT_S)
            wake(descriptor, value)

        monkeypatch.setattr(os, "eventfd_write", late)
