"""What the loop remembers of the journal: read again when it may have changed, and not before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deeplink.core.clock import ManualClock
from deeplink.core.types import Attempt, NodeName
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.liveness.heartbeats import HeartbeatTable, LauncherHeartbeat
from deeplink.scheduler.recovery.records import Beat, Incident, IncidentOutcome, Phase
from deeplink.scheduler.watch.memory import REREAD_S, JournalCache

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


def heard(heartbeats: HeartbeatTable, *incidents: Incident) -> LauncherHeartbeat:
    heartbeats.hear(Beat(attempt=FIRST, phase=Phase.RUNNING, incidents=incidents), 1.0)
    (newest,) = heartbeats.all()
    return newest


def test_a_beat_that_tells_of_an_incident_is_a_reason_to_read_again_and_so_is_a_word(journal: Journal) -> None:
    memory, heartbeats = JournalCache(journal=journal, clock=(clock := ManualClock())), HeartbeatTable()
    assert memory.of(heard(heartbeats)).told == frozenset()
    journal.record_incident(hit("node-silent"))
    assert memory.of(heard(heartbeats)).told == frozenset(), "nobody said so"
    assert memory.of(heard(heartbeats, hit("node-silent"))).told == {"node-silent"}
    journal.record_incident(hit("ranks-hung"))
    memory.changed(17)
    assert memory.of(heard(heartbeats)).told == {"node-silent", "ranks-hung"}
    journal.record_incident(hit("straggler"))
    clock.sleep(REREAD_S)
    assert "straggler" in memory.of(heard(heartbeats)).told


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
    remembered = JournalCache(journal=journal, clock=ManualClock()).of(heard(HeartbeatTable()))
    assert (remembered.suspects == ("n1",), remembered.rescued) == (suspect, rescued)


def test_of_jobs_that_are_gone_nothing_is_remembered(journal: Journal) -> None:
    memory, heartbeats = JournalCache(journal=journal, clock=ManualClock()), HeartbeatTable()
    memory.of(heard(heartbeats))
    journal.record_incident(hit("node-silent"))
    memory.forget(set())
    assert memory.of(heard(heartbeats)).told == {"node-silent"}
    assert memory.open_incidents() == 1
