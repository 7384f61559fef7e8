"""One watchdog leads with a journal, and the next one knows whether it ended, or was ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from deeplink.scheduler.watch.lead import LeaderError, leading


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "state" / "watch.sqlite"


def test_one_leads_and_its_place_is_free_when_it_ends(journal: Path) -> None:
    with leading(journal), pytest.raises(LeaderError, match="another watchdog holds"), leading(journal):
        pass
    with leading(journal) as lead:
        assert lead.last_unix is None


def test_a_leader_that_was_ended_left_its_newest_round(journal: Path) -> None:
    with pytest.raises(KeyboardInterrupt), leading(journal) as lead:
        lead.watch(1000.0)
        lead.watch(1007.25)
        raise KeyboardInterrupt
    with leading(journal) as lead:
        assert lead.last_unix == 1007.25
        lead.watch(1010.0)
    with leading(journal) as lead:
        assert lead.last_unix is None, "the second one ended by itself"


def test_one_that_never_watched_leaves_nothing(journal: Path) -> None:
    with pytest.raises(OSError, match="cannot listen"), leading(journal):
        raise OSError("cannot listen")
    with leading(journal) as lead:
        assert lead.last_unix is None


def test_whoever_finds_the_place_taken_changes_nothing(journal: Path) -> None:
    with pytest.raises(KeyboardInterrupt), leading(journal) as lead:
        lead.watch(1000.0)
        with pytest.raises(LeaderError), leading(journal):
            pass
        raise KeyboardInterrupt
    with leading(journal) as lead:
        assert lead.last_unix == 1000.0


def test_of_one_that_began_and_never_watched_the_leader_before_is_still_told(journal: Path) -> None:
    with pytest.raises(KeyboardInterrupt), leading(journal) as lead:
        lead.watch(1000.0)
        raise KeyboardInterrupt
    with pytest.raises(OSError, match="cannot listen"), leading(journal):
        raise OSError("cannot listen")
    with leading(journal) as lead:
        assert lead.last_unix == 1000.0
