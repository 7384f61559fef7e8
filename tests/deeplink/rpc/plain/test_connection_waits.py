from __future__ import annotations

import random
import socket

import pytest

from deeplink.core.clock import ManualClock
from deeplink.rpc.plain.connection import StreamConnection


@pytest.mark.parametrize("left_s", [1.9999999, 2.0, 0.9999995, 0.0000001, 59.9999999])
def test_however_little_is_missing_to_a_whole_second_the_kernel_takes_the_time_left(left_s: float) -> None:
    """It refuses a million microseconds, which is what rounding makes of 1.9999999 s."""
    clock = ManualClock(now=0.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = StreamConnection(f"127.0.0.1:{server.getsockname()[1]}", clock)
        link.deadline = left_s
        link.establish()
        link.send(b"word")
        peer, _ = server.accept()
        with peer:
            assert peer.recv(4) == b"word"
            peer.sendall(b"back")
            assert link.read(4) == b"back"
        link.close()


def test_what_was_read_ahead_comes_first_and_more_is_read_ahead_when_it_is_asked_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = StreamConnection(f"127.0.0.1:{server.getsockname()[1]}", ManualClock(now=0.0))
        link.deadline = 20.0
        link.establish()
        peer, _ = server.accept()
        data = random.Random(0).randbytes(100_000)  # noqa: S311 - test data
        with peer:
            peer.sendall(data + b"headMORE")
            assert link.read(10) == data[:10]
            arena = bytearray(len(data) - 10)
            parts = [memoryview(arena)[:30_000], memoryview(arena)[30_000:30_000], memoryview(arena)[30_000:]]
            link.read_into(parts, then=4)
            assert bytes(arena) == data[10:]
            assert link.ahead(4) == b"head"
            assert link.read(8) == b"headMORE"
        link.close()
