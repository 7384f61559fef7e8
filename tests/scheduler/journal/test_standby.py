"""A journal whose disk is full, or whose file is gone or damaged, goes on in another one and comes back whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from deeplink.core.types import Attempt, NodeName
from deeplink.scheduler.journal.journal import Journal, JournalError
from deeplink.scheduler.journal.operations import OperationLog, OperationRecord
from deeplink.scheduler.journal.standby import TRY_S, emergency_of
from deeplink.scheduler.recovery.records import ActionRecord, Beat, Incident, Phase, ProgressPoint

ATTEMPT = Attempt(17, 0, 0)


def incident(name: str) -> Incident:
    node = NodeName(name)
    return Incident(id=name, kind="node-dead", node=node, began_unix=1.0, detected_unix=2.0)


def beat(*steps: int) -> Beat:
    points = tuple(ProgressPoint(attempt=ATTEMPT, step=step, unix=1.0, metrics={"loss": 1.0}) for step in steps)
    return Beat(attempt=ATTEMPT, phase=Phase.RUNNING, user="ada", nodes=(NodeName("n0"),), progress=points)


def names(journal: Journal) -> list[str]:
    return sorted(one.id for one in journal.incidents())


@pytest.fixture
def emergency(tmp_path: Path) -> Path:
    return tmp_path / "elsewhere" / "e.sqlite"


@pytest.fixture
def journal(tmp_path: Path, emergency: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "j.sqlite", emergency=emergency) as journal:
        journal.record_beat(beat(1), 1.0)
        journal.record_incident(incident("before"))
        yield journal


def fill(journal: Journal) -> None:
    """Leave no room in the journal's file, and write until that is found."""
    journal._db.execute(f"PRAGMA max_page_count = {journal._pragma('page_count')}")
    with pytest.raises(JournalError, match="full"):
        for first in range(0, 100_000, 1_000):
            journal.record_beat(beat(*range(first, first + 1_000)), 2.0)


def test_a_full_disk_costs_one_write_and_what_was_kept_elsewhere_is_put_back(
    journal: Journal, emergency: Path
) -> None:
    paused = OperationRecord(request="request-1", verb="pause-watchdog", target="watchdog", person="ada")
    OperationLog(journal).begin(paused)
    fill(journal)
    assert [text for text in journal.look_after(100.0) if f"going on in {emergency}" in text]
    journal.record_incident(incident("meanwhile"))
    log = OperationLog(journal)
    assert [one.verb for one in log.unfinished()] == ["pause-watchdog"], "an operator's word counts there, too"
    log.end("request-1", "done", "paused", 2.0)
    begun = ActionRecord(key="k", incident="meanwhile", remedy="drain", attempt=None, node=None)
    assert journal.begin_action(begun)
    journal.record_beat(beat(200_000), 3.0)
    assert names(journal) == ["before", "meanwhile"], "decisions need what was on record"
    own = journal._standby._own if journal._standby else None
    assert own is not None
    assert journal.look_after(0.0) == (), "not tried all the time"
    own.execute("PRAGMA max_page_count = 1000000")
    unix = 2e9
    (told,) = journal.look_after(unix + TRY_S)
    assert "written again" in told
    assert not emergency.exists()
    with Journal(journal.path, read_only=True) as reader:
        assert names(reader) == ["before", "meanwhile"]
        assert [one.key for one in reader.actions(only_open=True)] == ["k"]
        assert [one.outcome for one in OperationLog(reader).newest()] == ["done"]
        assert 200_000 in [point.step for point in reader.points(17)]
    journal.record_incident(incident("after"))
    assert sorted(one.number for one in journal.incidents()) == [1, 2, 3]


def test_a_disk_that_stays_full_is_tried_again_and_nothing_is_lost(journal: Journal, emergency: Path) -> None:
    fill(journal)
    journal.look_after(0.0)
    assert journal._standby is not None
    assert journal._standby._own is not None
    journal._standby._own.execute("PRAGMA query_only = ON")
    for number in range(50):
        journal.record_incident(incident(f"i{number:02}"))
        assert journal.look_after(2e9 + number * 20.0) == ()
    assert len(names(journal)) == 51
    assert emergency.exists()


def test_what_was_kept_elsewhere_is_found_by_who_comes_next(tmp_path: Path, emergency: Path) -> None:
    with Journal(tmp_path / "j.sqlite", emergency=emergency) as first:
        first.record_incident(incident("before"))
        fill(first)
        first.record_incident(incident("meanwhile"))
    with Journal(tmp_path / "j.sqlite", emergency=emergency) as second:
        assert names(second) == ["before", "meanwhile"]
        assert "written again" in second.look_after(0.0)[0]
    assert not emergency.exists()


def test_a_file_that_is_removed_is_made_anew_with_all_that_was_in_it(journal: Journal) -> None:
    journal.path.unlink()
    (told,) = journal.look_after(100.0)
    assert "removed or replaced: made anew" in told
    journal.record_incident(incident("after"))
    with Journal(journal.path, read_only=True) as reader:
        assert names(reader) == ["after", "before"]
        assert [point.step for point in reader.points(17)] == [1]
    assert journal.look_after(200.0) == ()


def test_a_file_that_is_damaged_is_made_anew_beside_it(journal: Journal) -> None:
    journal._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    journal._db.execute("PRAGMA cache_size = 1")
    size = journal.path.stat().st_size
    with journal.path.open("r+b") as file:
        file.write(b"no journal" * (size // 10))
    told: list[str] = []
    for number in range(3):
        with suppress(JournalError):
            journal.record_incident(incident(f"i{number}"))
        told += journal.look_after(100.0)
    assert len(told) == 1
    assert "it is damaged" in told[0]
    (aside,) = journal.path.parent.glob("j.sqlite.aside-*[0-9]")
    assert b"no journal" in aside.read_bytes()
    assert "i2" in names(journal)


def test_without_an_emergency_file_nothing_of_this_is_done(tmp_path: Path) -> None:
    with Journal(tmp_path / "j.sqlite") as journal:
        fill(journal)
        with pytest.raises(JournalError, match="full"):
            journal.record_beat(beat(*range(2_000)), 2.0)
        assert journal.look_after(100.0) == ()


def test_each_journal_has_an_emergency_file_of_its_own_that_nobody_else_reads(tmp_path: Path) -> None:
    one, other = emergency_of(tmp_path / "one"), emergency_of(tmp_path / "other")
    assert one != other == emergency_of(tmp_path / "other")
    assert one.parent.stat().st_mode & 0o777 == 0o700
