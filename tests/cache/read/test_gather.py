from __future__ import annotations

import mmap
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.cache.read import batch
from deeplink.rpc.plain.outgoing import IOV_MAX

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not batch.is_available(), reason="this machine has no vmsplice for us")


def address(memory: np.ndarray) -> int:
    return int(memory.ctypes.data)


@given(st.lists(st.tuples(st.integers(0, 900), st.integers(0, 100)), max_size=40))
def test_pieces_come_in_order(places: list[tuple[int, int]]) -> None:
    memory = np.arange(1000, dtype=np.uint16).astype(np.uint8)
    lengths = np.array([length for _, length in places], np.int64)
    sources = np.array([address(memory) + start for start, _ in places], np.uint64)
    arena = np.zeros(int(lengths.sum()), np.uint8)
    targets = address(arena) + (np.cumsum(lengths) - lengths).astype(np.uint64)
    assert batch.gather(sources, lengths, targets) == len(places)
    assert arena.tobytes() == b"".join(memory[start : start + length].tobytes() for start, length in places)


def test_more_pieces_than_one_call_takes() -> None:
    count = 3 * IOV_MAX + 5
    memory = np.arange(count, dtype=np.uint32)
    arena = np.zeros(count, np.uint32)
    steps = np.arange(count, dtype=np.uint64) * np.uint64(4)
    last_first = np.uint64(address(memory)) + steps[::-1]
    assert batch.gather(last_first, np.full(count, 4), np.uint64(address(arena)) + steps) == count
    assert (arena == memory[::-1]).all()


def test_what_a_load_would_die_of_ends_the_copy_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 4 * mmap.PAGESIZE)
    with path.open("rb") as file:
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    base = address(np.frombuffer(view, np.uint8))
    os.truncate(path, 2 * mmap.PAGESIZE)
    arena = np.zeros(40, np.uint8)
    sources = np.array([base + page * mmap.PAGESIZE for page in (0, 1, 3, 0)], np.uint64)
    targets = np.uint64(address(arena)) + np.arange(4, dtype=np.uint64) * np.uint64(10)
    assert batch.gather(sources, np.full(4, 10), targets) == 2
    assert arena.tobytes() == b"x" * 20 + b"\0" * 20


def spread(count: int, size: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return memory, and where in it pieces of that size lie and how long they are; pages are cut through."""
    rng = np.random.default_rng(seed)
    memory = rng.integers(0, 256, 4 << 20, np.uint8)
    starts = rng.integers(0, len(memory) - size, count).astype(np.uint64)
    return memory, starts, rng.integers(0, size, count)


def copied(memory: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> bytes:
    arena = np.zeros(int(lengths.sum()), np.uint8)
    targets = np.uint64(address(arena)) + (np.cumsum(lengths) - lengths).astype(np.uint64)
    assert batch.gather(np.uint64(address(memory)) + starts, lengths, targets) == len(starts)
    return arena.tobytes()


def wanted(memory: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> bytes:
    return b"".join(memory[a : a + n].tobytes() for a, n in zip(starts.tolist(), lengths.tolist(), strict=True))


@pytest.mark.parametrize(("count", "size"), [(3000, 9000), (40, 1 << 20), (5000, 7)])
def test_more_bytes_than_a_pipe_holds(count: int, size: int) -> None:
    case = spread(count, size, size)
    assert copied(*case) == wanted(*case)


def test_what_an_interruption_leaves_in_a_pipe_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    case = spread(300, 4096, 1)
    with monkeypatch.context() as patched:
        patched.setattr(batch, "_readv", interrupted)
        with pytest.raises(KeyboardInterrupt):
            copied(*case)
    assert copied(*case) == wanted(*case)


def test_threads_and_forked_children_do_not_meet_in_a_pipe() -> None:
    def work(seed: int) -> bool:
        case = spread(500, 5000, seed)
        return all(copied(*case) == wanted(*case) for _ in range(20))

    with ThreadPoolExecutor(4) as pool:
        done = pool.map(work, range(2, 6))
        child = os.fork()
        if not child:
            os._exit(0 if not batch._pipes and work(1) else 1)
        assert all(done)
    assert os.waitpid(child, 0)[1] == 0
    assert not batch._pipes


def test_without_descriptors_nothing_is_gathered_this_time() -> None:
    memory, starts, lengths = spread(10, 100, 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = os.dup(0)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (held + 1, hard))
        targets = np.full(10, address(np.zeros(1000, np.uint8)), np.uint64)
        assert batch.gather(np.uint64(address(memory)) + starts, lengths, targets) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(held)
    assert batch.is_available()
    assert copied(memory, starts, lengths) == wanted(memory, starts, lengths)
