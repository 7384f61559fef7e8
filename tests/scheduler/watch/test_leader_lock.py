"""One watchdog leads with a journal, and the next one knows whether it ended, or was ended."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest

from deeplink.core.descriptors import LockHeldError
from deeplink.scheduler.watch.memory import Carried
from deeplink.scheduler.watch.watchdog import leading


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "state" / "watch.sqlite"


def test_one_leads_and_its_place_is_free_when_it_ends(journal: Path) -> None:
    with leading(journal), pytest.raises(LockHeldError, match="another watchdog holds"), leading(journal):
        pass
    with leading(journal) as lead:
        assert lead.last_unix is None


def seen(unix: float) -> Carried:
    return Carried(unix, unix - 10.0, {"n1": ("silent", unix - 1.5, unix, 3)})


def ended(journal: Path, *rounds: float) -> None:
    """Lead for these rounds, and be killed."""
    with suppress(KeyboardInterrupt), leading(journal) as lead:
        for unix in rounds:
            lead.watch(seen(unix))
        raise KeyboardInterrupt


def test_a_leader_that_did_not_end_in_order_left_its_newest_round(journal: Path) -> None:
    ended(journal, 1000.0, 12345678901.25, 1007.25)
    with leading(journal) as lead:
        assert lead.last_unix == 1007.25
        assert lead.carried is not None
        assert (lead.carried.unix, lead.carried.since_unix) == (1007.25, 997.25)
        assert tuple(lead.carried.away["n1"]) == ("silent", 1005.75, 1007.25, 3)
        lead.watch(seen(1010.0))
        lead.end()
    with leading(journal) as lead:
        assert lead.last_unix is None


def test_one_that_never_watched_leaves_nothing(journal: Path) -> None:
    ended(journal)
    with leading(journal) as lead:
        assert lead.last_unix is None


def test_whoever_finds_the_place_taken_changes_nothing(journal: Path) -> None:
    with leading(journal) as lead:
        lead.watch(seen(1000.0))
        with pytest.raises(LockHeldError, match="another watchdog holds"), leading(journal):
            pass
    with leading(journal) as lead:
        assert lead.last_unix == 1000.0


def test_one_that_began_and_never_watched_leaves_the_word_of_the_one_before(journal: Path) -> None:
    ended(journal, 1000.0)
    ended(journal)
    with leading(journal) as lead:
        assert lead.last_unix == 1000.0


def test_what_somebody_emptied_is_there_again_after_the_next_round(journal: Path) -> None:
    with leading(journal) as lead:
        lead.watch(seen(1000.0))
        lock = journal.with_name("watch.sqlite.lock")
        lock.write_bytes(b"")  # as an older version does that waits for its place
        lead.watch(seen(1001.0))
    with leading(journal) as lead:
        assert lead.last_unix == 1001.0


@pytest.mark.parametrize("left", [b"\0\0\0\0", b"0000000001007.250\n"], ids=["torn", "of an older watchdog"])
def test_of_a_word_that_cannot_be_read_the_time_of_the_file_is_taken(journal: Path, left: bytes) -> None:
    ended(journal)
    lock = journal.with_name("watch.sqlite.lock")
    lock.write_bytes(left)
    os.utime(lock, (2000.0, 2000.0))
    with leading(journal) as lead:
        assert (lead.last_unix, lead.carried) == (2000.0, None)
