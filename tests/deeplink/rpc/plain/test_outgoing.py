"""What a server keeps of what it sends."""

from __future__ import annotations

import random
import socket
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from deeplink.rpc.plain.outgoing import Outbox

if TYPE_CHECKING:
    from collections.abc import Iterator


class Piece(bytearray):
    """Memory that can be watched."""


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_what_was_sent_is_let_go_of_although_the_peer_never_takes_all(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = ends
    box, watched = Outbox(), list[weakref.ref[Piece]]()
    for _ in range(100):
        while box.left < 1 << 20:
            piece = Piece(1 << 16)
            watched.append(weakref.ref(piece))
            box.put([memoryview(piece)], len(piece))
            del piece
        with suppress(BlockingIOError):
            box.send(ours, socket.MSG_DONTWAIT)
        theirs.recv(1 << 17)
    assert len(watched) > 30
    assert sum(found() is not None for found in watched) <= (1 << 20 >> 16) + 1


def test_many_pieces_sent_a_little_at_a_time_arrive_in_order(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    rng = random.Random(0)  # noqa: S311 - test data
    box, wanted, came = Outbox(), b"", b""
    for _ in range(20):
        pieces = [rng.randbytes(rng.randrange(400)) for _ in range(300)]
        box.put(pieces, sum(map(len, pieces)))
        wanted += b"".join(pieces)
        with suppress(BlockingIOError):
            box.send(ours, socket.MSG_DONTWAIT)
        came += theirs.recv(rng.randrange(1, 50_000))
    box.end_with(b"the end")
    while box.left:
        with suppress(BlockingIOError):
            box.send(ours, socket.MSG_DONTWAIT)
        came += theirs.recv(1 << 20)
    theirs.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            came += theirs.recv(1 << 20)
    assert came == wanted + b"the end"
