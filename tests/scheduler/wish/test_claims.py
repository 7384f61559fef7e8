"""Nodes that the submissions of the last seconds will get."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from deeplink.clock import ManualClock
from deeplink.scheduler.wish.claims import KEPT_S, LOCK_WAIT_S, Claims, locked
from tests.scheduler.wish.clusters import nodes


def test_what_is_claimed_is_taken_for_others_for_some_seconds(tmp_path: Path) -> None:
    clock = ManualClock()
    mine, others = Claims(tmp_path, clock, "a"), Claims(tmp_path, clock, "a")
    mine.add(nodes("n1 n2"))
    assert not mine.taken()
    assert others.taken() == {"n1", "n2"}
    assert Claims(tmp_path, clock, "b").taken() == frozenset()
    clock.now += KEPT_S
    assert others.taken() == frozenset()


def test_what_is_released_is_free_again(tmp_path: Path) -> None:
    clock = ManualClock()
    first, second = Claims(tmp_path, clock, "a"), Claims(tmp_path, clock, "a")
    first.add(nodes("n1"))
    second.add(nodes("n2"))
    first.release()
    first.release()
    assert Claims(tmp_path, clock, "a").taken() == {"n2"}


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '[{"unix": 1}]', '[{"unix": "x", "cluster": "a", "nodes": []}]', "\x00"]
)
def test_damaged_claims_are_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "wishes.json").write_text(text)
    claims = Claims(tmp_path, ManualClock(), "a")
    assert claims.taken() == frozenset()
    claims.add(nodes("n1"))
    assert Claims(tmp_path, ManualClock(), "a").taken() == {"n1"}


def test_a_folder_that_takes_no_writes_claims_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    claims = Claims(tmp_path / "file", ManualClock(), "a")
    claims.add(nodes("n1"))
    claims.release()
    assert claims.taken() == frozenset()
    with locked(tmp_path / "file", ManualClock()) as had:
        assert not had


def test_the_lock_is_waited_for_and_given_up(tmp_path: Path) -> None:
    clock = ManualClock()
    with locked(tmp_path, clock) as had:
        assert had
        began = clock.now
        with locked(tmp_path, clock) as second:
            assert not second
        assert LOCK_WAIT_S <= clock.now - began < LOCK_WAIT_S + 1
    with locked(tmp_path, clock) as again:
        assert again
    with (tmp_path / "wishes.lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
