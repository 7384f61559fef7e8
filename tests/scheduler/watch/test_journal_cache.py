"""What the loop remembers of the journal: read again when it may have changed, and not before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deeplink.clock import ManualClock
from deeplink.scheduler.watch.heartbeats import HeartbeatTable, LauncherHeartbeat
from deeplink.scheduler.watch.journal import Journal
from deeplink.scheduler.watch.journal_cache import REREAD_S, JournalCache
from deeplink.scheduler.watch.records import Beat, Incident, IncidentOutcome, Phase
from deeplink.types import Attempt, NodeName

FIRST = Attempt(17, 0, 0)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "j.sqlite") as journal:
        yield journal


def hit(kind: str, node: str = "n1", outcome: IncidentOutcome = IncidentOutcome.OPEN) -> Incident:
    return Incident(
        id=f"17.0.0-{kind}-{node}",
        kind=kind,
        node=NodeName(node),
        attempt=FIRST,
        began_unix=1.0,
        detected_unix=1.0,
        outcome=outcome,
    )


def heard(book: HeartbeatTable, *incidents: Incident) -> LauncherHeartbeat:
    book.hear(Beat(attempt=FIRST, phase=Phase.RUNNING, incidents=incidents), 1.0)
    (newest,) = book.all()
    return newest


def test_a_beat_that_tells_of_an_incident_is_a_reason_to_read_again_and_so_is_a_word(journal: Journal) -> None:
    recall, book = JournalCache(journal=journal, clock=(clock := ManualClock())), HeartbeatTable()
    assert recall.of(heard(book)).told == frozenset()
    journal.record_incident(hit("node-silent"))
    assert recall.of(heard(book)).told == frozenset(), "nobody said so"
    assert recall.of(heard(book, hit("node-silent"))).told == {"node-silent"}
    journal.record_incident(hit("ranks-hung"))
    recall.changed(17)
    assert recall.of(heard(book)).told == {"node-silent", "ranks-hung"}
    journal.record_incident(hit("straggler"))
    clock.sleep(REREAD_S)
    assert "straggler" in recall.of(heard(book)).told


@pytest.mark.parametrize(
    ("kind", "outcome", "suspect", "rescued"),
    [
        ("node-silent", IncidentOutcome.OPEN, True, True),
        ("node-silent", IncidentOutcome.FAILED, True, True),
        ("node-silent", IncidentOutcome.RECOVERED, False, False),
        ("rank-failed", IncidentOutcome.FAILED, False, False),
        ("out-of-memory", IncidentOutcome.FAILED, False, True),
        ("time-limit", IncidentOutcome.OPEN, False, True),
        ("straggler", IncidentOutcome.OPEN, True, False),
        ("storage-frozen", IncidentOutcome.OPEN, True, False),
    ],
)
def test_what_blames_a_node_and_what_asks_for_a_restart(
    journal: Journal, kind: str, outcome: IncidentOutcome, suspect: bool, rescued: bool
) -> None:
    journal.record_incident(hit(kind, outcome=outcome))
    recalled = JournalCache(journal=journal, clock=ManualClock()).of(heard(HeartbeatTable()))
    assert (recalled.suspects == ("n1",), recalled.rescued) == (suspect, rescued)


def test_of_jobs_that_are_gone_nothing_is_remembered(journal: Journal) -> None:
    recall, book = JournalCache(journal=journal, clock=ManualClock()), HeartbeatTable()
    recall.of(heard(book))
    journal.record_incident(hit("node-silent"))
    recall.forget(set())
    assert recall.of(heard(book)).told == {"node-silent"}
    assert recall.open_incidents() == 1
