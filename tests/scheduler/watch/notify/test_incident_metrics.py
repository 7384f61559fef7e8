"""Incidents in the metrics: each state once, also over a restart; detection and recovery with their attempt."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest

from deeplink.core.clock import ManualClock
from deeplink.core.metrics import WatchMetrics
from deeplink.scheduler.journal.incident_json import cost
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.recovery.records import IncidentKind, IncidentOutcome
from deeplink.scheduler.watch.notify.notifier import COUNTED, NODES_S, IncidentCounter
from tests.scheduler.watch.notify.things import dead, recovered


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "j.sqlite") as opened:
        opened.open_channel(COUNTED)
        yield opened


def counter(journal: Journal) -> IncidentCounter:
    clock = ManualClock(epoch=dead(1).detected_unix + 60)
    return IncidentCounter(journal=journal, clock=clock, metrics=WatchMetrics(CollectorRegistry()))


def value(ours: IncidentCounter, name: str, **labels: str) -> float | None:
    return ours.metrics.registry.get_sample_value(f"deeplink_watch_{name}", labels)


def test_an_incident_is_counted_once_in_each_state(journal: Journal) -> None:
    ours = counter(journal)
    journal.record_incident(dead(1))
    for _ in range(3):
        ours.tell()
    assert value(ours, "detect_seconds_count", kind="node-dead") == 1
    assert value(ours, "incidents_open_by_kind", kind="node-dead") == 1
    assert value(ours, "resume_seconds_count", kind="node-dead") is None
    again = counter(journal)  # another watchdog goes on
    journal.record_incident(recovered(dead(1)))
    for _ in range(3):
        again.tell()
    took = recovered(dead(1)).recovered_unix - dead(1).began_unix
    assert value(again, "resume_seconds_sum", kind="node-dead") == pytest.approx(took)
    assert value(again, "detect_seconds_count", kind="node-dead") is None, "it was counted before"
    assert value(again, "incidents_ended_total", kind="node-dead", outcome="recovered") == 1
    assert value(again, "incidents_open_by_kind", kind="node-dead") is None


def test_an_exemplar_names_the_attempt_to_who_asks_in_openmetrics(journal: Journal) -> None:
    ours = counter(journal)
    journal.record_incident(recovered(dead(17)))
    ours.tell()
    text = generate_latest(ours.metrics.registry).decode()  # type: ignore[no-untyped-call]
    buckets = [line for line in text.splitlines() if line.startswith("deeplink_watch_resume_seconds_bucket")]
    assert any('# {attempt="17.0.0"}' in line for line in buckets)


def test_what_an_attempt_cost_is_counted_once(journal: Journal) -> None:
    ours = counter(journal)
    one = recovered(dead(1))
    other = replace(one, ranks=8, kind=IncidentKind.RANK_FAILED, id="1.0.0-rank-failed-3", node=None)
    for incident in (other, one):
        journal.record_incident(incident)
        ours.tell()
    assert len(journal.incidents()) == 2
    counted = [value(ours, "lost_rank_seconds_total", kind=kind) or 0.0 for kind in ("node-dead", "rank-failed")]
    assert all(counted)
    assert sum(counted) == pytest.approx((cost(one).total_h or 0.0) * 3600)


def test_nodes_are_blamed_for_what_they_did_and_not_for_what_ran_on_them(journal: Journal) -> None:
    ours = counter(journal)
    for job, ago_s in ((1, 9_000.0), (2, 6_000.0), (3, 0.0)):
        one = dead(job, "n7")
        began, detected = one.began_unix - ago_s, one.detected_unix - ago_s
        journal.record_incident(recovered(replace(one, began_unix=began, detected_unix=detected)))
    blameless = replace(
        dead(4, "n8"), kind=IncidentKind.OUT_OF_MEMORY, id="4.0.0-oom", outcome=IncidentOutcome.FAILED
    )
    journal.record_incident(blameless)
    ours.tell()
    assert value(ours, "node_incidents", node="n7") == 3
    assert value(ours, "node_incidents", node="n8") is None
    ours.clock.now += NODES_S  # type: ignore[attr-defined]
    ours.clock.epoch += 8 * 86_400  # type: ignore[attr-defined]
    ours.tell()
    assert value(ours, "node_incidents", node="n7") is None, "that is long ago"


def test_every_incident_is_a_line_and_a_newer_kind_is_no_series_of_its_own(
    journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    ours = counter(journal)
    journal.record_incident(replace(dead(1), kind="of-tomorrow", id="1.0.0-of-tomorrow-n1"))
    with caplog.at_level(logging.INFO):
        ours.tell()
    assert "of-tomorrow on n1 job 1: open" in caplog.text
    assert value(ours, "incidents_open_by_kind", kind="other") == 1
