from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.cache.reads import gather

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not gather.is_available(), reason="this machine has no process_vm_readv for us")


def address(memory: np.ndarray) -> int:
    return int(memory.ctypes.data)


@given(st.lists(st.tuples(st.integers(0, 900), st.integers(0, 100)), max_size=40))
def test_pieces_come_in_order(places: list[tuple[int, int]]) -> None:
    memory = np.arange(1000, dtype=np.uint16).astype(np.uint8)
    lengths = np.array([length for _, length in places], np.int64)
    sources = np.array([address(memory) + start for start, _ in places], np.uint64)
    arena = np.zeros(int(lengths.sum()), np.uint8)
    targets = address(arena) + (np.cumsum(lengths) - lengths).astype(np.uint64)
    assert gather.gather(sources, lengths, targets) == len(places)
    assert arena.tobytes() == b"".join(memory[start : start + length].tobytes() for start, length in places)


def test_more_pieces_than_one_call_takes() -> None:
    count = 3 * gather.IOV_MAX + 5
    memory = np.arange(count, dtype=np.uint32)
    arena = np.zeros(count, np.uint32)
    steps = np.arange(count, dtype=np.uint64) * np.uint64(4)
    last_first = np.uint64(address(memory)) + steps[::-1]
    assert gather.gather(last_first, np.full(count, 4), np.uint64(address(arena)) + steps) == count
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
    assert gather.gather(sources, np.full(4, 10), targets) == 2
    assert arena.tobytes() == b"x" * 20 + b"\0" * 20
