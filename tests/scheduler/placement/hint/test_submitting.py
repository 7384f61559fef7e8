"""One submission of a user decides at a time."""

from __future__ import annotations

import fcntl
from pathlib import Path

from deeplink.core.clock import ManualClock
from deeplink.scheduler.placement.hint.making import LOCK_WAIT_S, alone


def test_a_folder_that_takes_no_writes_gives_no_place(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with alone(tmp_path / "file", ManualClock()) as had:
        assert not had


def test_the_place_is_waited_for_and_given_up(tmp_path: Path) -> None:
    clock = ManualClock()
    with alone(tmp_path, clock) as had:
        assert had
        began = clock.now
        with alone(tmp_path, clock) as second:
            assert not second
        assert LOCK_WAIT_S <= clock.now - began < LOCK_WAIT_S + 1
    with alone(tmp_path, clock) as again:
        assert again
    with (tmp_path / "wishes.lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
