"""What the loop remembers of the journal: read again when it may have changed, and not before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from deeplink.core.types import Attempt, NodeName
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.recovery.records import ActionRecord, Beat, Incident, IncidentOutcome, Phase
from deeplink.scheduler.watch.memory import JournalCache

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


def test_what_is_on_record_is_read_again_once_an_incident_or_an_action_was_written(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, reads, read = JournalCache(journal=journal), list[object](), journal.incidents

    def counted(*, job: int, limit: int) -> tuple[Incident, ...]:
        reads.append(job)
        return read(job=job, limit=limit)

    monkeypatch.setattr(journal, "incidents", counted)
    for _ in range(3):
        assert memory.of(FIRST).told == frozenset()
        assert (memory.drained(), memory.open_incidents()) == ({}, 0)
    assert len(reads) == 1
    beat = Beat(attempt=FIRST, phase=Phase.RUNNING, incidents=(hit("node-silent"),))
    journal.record_beat(beat, 1.0)
    assert (memory.of(FIRST).told, memory.open_incidents()) == (frozenset({"node-silent"}), 1)
    journal.begin_action(
        ActionRecord(key="k", incident="i", remedy="drain", attempt=None, node=NodeName("n1"), began_unix=5.0)
    )
    assert memory.drained() == {"n1": 5.0}
    journal.record_beat(replace(beat, incidents=()), 2.0)
    reads.clear()
    memory.of(FIRST)
    assert len(reads) == 1
    memory.of(FIRST)
    assert len(reads) == 1, "a heartbeat that tells of nothing is no reason"


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
    remembered = JournalCache(journal=journal).of(FIRST)
    assert (remembered.suspects == ("n1",), remembered.rescued) == (suspect, rescued)
