from __future__ import annotations

import errno
import mmap
import os
import signal
import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.rpc.plain.outgoing import IOV_MAX, Outbox, Scattered, send_places

if TYPE_CHECKING:
    from pathlib import Path

MEMORY = np.arange(4096, dtype=np.uint32).view(np.uint8)
PLACES = st.lists(st.tuples(st.integers(0, 16_000), st.integers(0, 300)), max_size=30)


def scattered(places: list[tuple[int, int]]) -> tuple[Scattered, bytes]:
    """Return places of MEMORY, (start, length) each, and the bytes that lie there."""
    starts = np.array([start for start, _ in places], np.int64)
    lengths = np.array([length for _, length in places], np.int64)
    found = Scattered(starts + MEMORY.ctypes.data, lengths, [MEMORY])
    return found, b"".join(MEMORY[start : start + length].tobytes() for start, length in places)


def sent(pieces: list[bytes | memoryview | Scattered], step: int = 1 << 20) -> bytes:
    """Return what comes of pieces that are sent while the other end takes `step` bytes at a time."""
    box = Outbox()
    box.put(pieces, sum(map(len, pieces)))
    ours, theirs = socket.socketpair()
    came = b""
    with ours, theirs:
        theirs.setblocking(False)
        while box.left:
            with suppress(BlockingIOError):
                box.send(ours, socket.MSG_DONTWAIT)
            with suppress(BlockingIOError):
                came += theirs.recv(step)
        with suppress(BlockingIOError):
            while True:
                came += theirs.recv(1 << 20)
    return came


@given(PLACES, st.integers(0, 9000), st.integers(0, 9000))
def test_a_slice_is_that_of_the_bytes(places: list[tuple[int, int]], start: int, stop: int) -> None:
    found, wanted = scattered(places)
    assert len(found) == len(wanted)
    part = found[start:stop]
    assert len(part) == len(wanted[start:stop])
    assert sent([part]) == wanted[start:stop]


@given(st.lists(st.one_of(st.binary(max_size=50), PLACES), max_size=6), st.integers(1, 5000))
def test_pieces_of_both_kinds_come_whole(parts: list[bytes | list[tuple[int, int]]], step: int) -> None:
    pieces: list[bytes | memoryview | Scattered] = []
    wanted = b""
    for part in parts:
        piece, data = (part, part) if isinstance(part, bytes) else scattered(part)
        pieces.append(piece)
        wanted += data
    assert sent(pieces, step) == wanted


def test_more_places_than_one_call_takes_and_a_slow_reader() -> None:
    places, wanted = scattered([(3 * at % 16_000, 200) for at in range(3 * IOV_MAX + 7)])
    assert sent([b"before", places, b"after"], step=30_001) == b"before" + wanted + b"after"


def test_one_call_is_made_at_a_time() -> None:
    places, _ = scattered([(0, 300)])
    ours, theirs = socket.socketpair()
    box = Outbox()
    box.put([b"before", places, b"after"], 311)
    box.end_with(b"the end")
    with ours, theirs:
        lefts = []
        while box.left:
            assert box.send(ours, 0)
            lefts.append(box.left)
    assert lefts == [0]  # what stands before and behind goes in the same call


def test_memory_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 2 * mmap.PAGESIZE)
    with path.open("rb") as file:
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    base = int(np.frombuffer(view, np.uint8).ctypes.data)
    os.truncate(path, 0)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        lost = Scattered(np.array([base]), np.array([10]), [view])
        with pytest.raises(OSError) as problem:  # noqa: PT011 - the code is looked at
            send_places(ours.fileno(), lost.pairs, 0)
        assert problem.value.errno == errno.EFAULT
        theirs.close()
        with pytest.raises(BrokenPipeError):
            send_places(ours.fileno(), scattered([(0, 10)])[0].pairs, 0)


def test_a_signal_does_not_end_the_sending() -> None:
    """Nor does a stop: what is sent with a timeout ends with EINTR on Linux when the process goes on."""
    ours, theirs = socket.socketpair()
    came: list[bytes] = []

    def drain(*_: object) -> None:
        came.append(theirs.recv(1 << 20))

    with ours, theirs:
        ours.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                ours.send(bytes(1 << 16))
        ours.setblocking(True)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 20, 0))
        before = signal.signal(signal.SIGALRM, drain)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
            assert send_places(ours.fileno(), scattered([(0, 300)])[0].pairs, 0) == 300
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    assert came
