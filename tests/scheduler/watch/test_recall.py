"""What the loop remembers of the journal: read again when it may have changed, and not before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deeplink.clock import ManualClock
from deeplink.scheduler.watch.book import BeatBook, Heard
from deeplink.scheduler.watch.journal import Journal
from deeplink.scheduler.watch.recall import REREAD_S, Recall
from deeplink.scheduler.watch.records import Beat, Incident, Outcome, Phase
from deeplink.types import Attempt, NodeName

FIRST = Attempt(17, 0, 0)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "j.sqlite") as journal:
        yield journal


def hit(kind: str, node: str = "n1", outcome: Outcome = Outcome.OPEN) -> Incident:
    return Incident(
        id=f"17.0.0-{kind}-{node}",
        kind=kind,
        node=NodeName(node),
        attempt=FIRST,
        began_unix=1.0,
        detected_unix=1.0,
        outcome=outcome,
    )


def heard(book: BeatBook, *incidents: Incident) -> Heard:
    book.hear(Beat(attempt=FIRST, phase=Phase.RUNNING, incidents=incidents), 1.0)
    (newest,) = book.all()
    return newest


def test_a_beat_that_tells_of_an_incident_is_a_reason_to_read_again_and_so_is_a_word(journal: Journal) -> None:
    recall, book = Recall(journal=journal, clock=(clock := ManualClock())), BeatBook()
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
        ("node-silent", Outcome.OPEN, True, True),
        ("node-silent", Outcome.FAILED, True, True),
        ("node-silent", Outcome.RECOVERED, False, False),
        ("rank-failed", Outcome.FAILED, False, False),
        ("out-of-memory", Outcome.FAILED, False, True),
        ("time-limit", Outcome.OPEN, False, True),
        ("straggler", Outcome.OPEN, True, False),
        ("storage-frozen", Outcome.OPEN, True, False),
    ],
)
def test_what_blames_a_node_and_what_asks_for_a_restart(
    journal: Journal, kind: str, outcome: Outcome, suspect: bool, rescued: bool
) -> None:
    journal.record_incident(hit(kind, outcome=outcome))
    recalled = Recall(journal=journal, clock=ManualClock()).of(heard(BeatBook()))
    assert (recalled.suspects == ("n1",), recalled.rescued) == (suspect, rescued)


def test_of_jobs_that_are_gone_nothing_is_remembered(journal: Journal) -> None:
    recall, book = Recall(journal=journal, clock=ManualClock()), BeatBook()
    recall.of(heard(book))
    journal.record_incident(hit("node-silent"))
    recall.forget(set())
    assert recall.of(heard(book)).told == {"node-silent"}
    assert recall.open_incidents() == 1
