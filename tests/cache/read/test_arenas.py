from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import torch

from deeplink.cache.read.batch import Arenas

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

SIZE = 3 << 20


def place(arena: np.ndarray) -> int:
    return int(arena.ctypes.data)


def test_memory_is_used_again_once_nobody_refers_to_it() -> None:
    arenas = Arenas()
    first = arenas.room(SIZE)
    at = place(first)
    assert first.dtype == np.uint8
    assert first.shape == (SIZE,)
    del first
    assert place(arenas.room(SIZE - 1000)) == at


def test_whatever_refers_to_memory_keeps_it() -> None:
    arenas = Arenas()
    holders: list[Callable[[np.ndarray], object]] = [
        lambda arena: arena.data[10:20],
        lambda arena: arena[5:].view(np.int8),
        torch.from_numpy,
        lambda arena: torch.from_numpy(arena[64:])[3:9],
    ]
    held, places = [], set()
    for holder in holders:
        arena = arenas.room(SIZE)
        places.add(place(arena))
        held.append(holder(arena))
        del arena
    assert len(places) == len(holders)
    held.clear()
    assert place(arenas.room(SIZE)) in places


def test_memory_of_another_length_is_not_wasted() -> None:
    arenas = Arenas()
    large = arenas.room(40 << 20)
    at = place(large)
    del large
    assert place(arenas.room(SIZE)) != at
    assert place(arenas.room(38 << 20)) == at


def test_what_is_kept_is_bounded() -> None:
    arenas = Arenas()
    batches = [arenas.room(20 << 20) for _ in range(40)]
    for number, batch in enumerate(batches):
        batch[:] = number
    assert [int(batch[-1]) for batch in batches] == list(range(40))
    batches.clear()
    arenas.room(SIZE)
    assert sum(map(len, arenas._free)) <= 64 << 20
    assert len(arenas._lent) <= 16


def test_threads_never_get_the_same_memory() -> None:
    arenas = Arenas()

    def work(number: int) -> bool:
        for _ in range(200):
            arena = arenas.room(1 << 18)
            arena[:] = number
            if not (arena == number).all():
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_a_forked_child_writes_into_memory_of_its_own() -> None:
    arenas = Arenas()
    arena = arenas.room(SIZE)
    arena[:] = 1
    child = os.fork()
    if not child:
        arena[:] = 2
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (arena == 1).all()


class _Interruption:
    """Raises before the `left`-th line of a function, as a signal's handler may (a DataLoader's does)."""

    def __init__(self, where: CodeType, left: int) -> None:
        self._where, self.left = where, left

    def __call__(self, frame: FrameType, event: str, _argument: object) -> _Interruption | None:
        if frame.f_code is not self._where:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def test_an_interruption_anywhere_never_lends_memory_twice() -> None:
    before, lines = sys.gettrace(), 0
    interruption = None
    while interruption is None or interruption.left <= 0:
        lines += 1
        arenas = Arenas()
        for arena in [arenas.room(SIZE) for _ in range(3)]:
            del arena
        interruption = _Interruption(Arenas._take_back.__code__, lines)
        sys.settrace(interruption)
        try:
            arenas.room(SIZE)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        lent = [arenas.room(SIZE) for _ in range(6)]
        assert len({place(arena) for arena in lent}) == len(lent)
    assert lines > 10
