"""Locks between processes."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from deeplink.core.clock import ManualClock, wait_until
from deeplink.core.descriptors import try_lock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def test_one_holds_a_lock_until_it_closes_the_file(tmp_path: Path) -> None:
    with opened(tmp_path / "lock") as second:
        with opened(tmp_path / "lock") as first:
            assert (try_lock(first), try_lock(second)) == (True, False)
        assert try_lock(second)


def test_a_file_that_its_holder_removed_is_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with opened(path) as old:
        path.unlink()
        assert not try_lock(old, path), "nothing lies there"
        with opened(path) as new:
            assert (try_lock(old, path), try_lock(new, path)) == (False, True)


def test_a_lock_is_waited_for_so_long_and_no_longer(tmp_path: Path) -> None:
    clock = ManualClock()
    with opened(tmp_path / "lock") as second:
        with opened(tmp_path / "lock") as first:
            assert wait_until(lambda: try_lock(first), clock, 0.0)
            began = clock.monotonic()
            assert not wait_until(lambda: try_lock(second), clock, 2.0)
            assert 2.0 <= clock.monotonic() - began < 2.1
        assert wait_until(lambda: try_lock(second), clock, 0.0)
