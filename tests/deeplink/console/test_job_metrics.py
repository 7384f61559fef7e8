"""The console's metrics of jobs: what is known of each, of a bounded number, those that need a hand first."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from deeplink.console import job_metrics
from deeplink.console.collect import Collector
from deeplink.console.jobs import JobView
from deeplink.console.snapshot import build
from deeplink.core.metrics import CONSOLE
from deeplink.core.types import Attempt
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.recovery.records import Beat, Phase, ProgressPoint


def value(metric: str, **labels: str) -> float | None:
    return CONSOLE.registry.get_sample_value(f"deeplink_{metric}", labels)


def test_reads_by_place_and_waits_are_those_of_the_newest_report(journal: Journal, collector: Collector) -> None:
    now = time.time()
    counted = {"deeplink_local_samples": 90.0, "deeplink_source_samples": 10.0, "deeplink_waited_s": 2.5}
    points = tuple(
        ProgressPoint(attempt=Attempt(21, 0, 0), step=step, unix=now - 10 + step, metrics=metrics)
        for step, metrics in ((1, {"loss": 2.0}), (5, {"loss": 1.0, **counted}))
    )
    beat = Beat(attempt=Attempt(21, 0, 0), phase=Phase.RUNNING, user="eve", job_name="x", world_size=4)
    journal.record_beat(replace(beat, progress=points), now)
    readings = collector.readings()
    job_metrics.measure(build(readings), readings)
    assert value("job_samples_total", job_id="21", place="local") == 90
    assert value("job_samples_total", job_id="21", place="source") == 10
    assert value("job_read_wait_seconds_total", job_id="21") == 2.5
    assert value("job_report_time_seconds", job_id="21") == pytest.approx(now - 5)
    assert value("job_ranks", job_id="21") == 4
    assert value("job_state", job_id="21", state="running") == 1
    assert value("job_checkpoint_time_seconds", job_id="21") is None, "what nobody measured is not exported"


def test_more_jobs_than_may_have_series_are_counted(
    filled: Journal, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = collector.readings()
    snapshot = build(readings)
    told = [job for job in snapshot.jobs if job.watched and not job.over]
    assert len(told) > 1
    monkeypatch.setattr(job_metrics, "MOST_SERIES", 1)
    job_metrics.measure(snapshot, readings)
    assert value("console_jobs_left_out") == len(told) - 1
    shown = [job for job in told if value("job_state", job_id=str(job.id), state=job.word)]
    assert shown == told[:1]


def test_a_job_held_by_its_user_alone_has_no_series(filled: Journal, collector: Collector) -> None:
    def held(number: int, reason: str) -> JobView:
        return JobView(
            id=number,
            label=str(number),
            name="a\nb",
            user="u" * 100,
            remedy=f"held: `scontrol release {number}` lets it start",
            watched=False,
            slurm_state="PENDING",
            pending_reason=reason,
            nodes=(),
            hue=0,
        )

    readings = collector.readings()
    snapshot = replace(build(readings), jobs=(held(1, "JobHeldUser"), held(2, "job requeued in held state")))
    job_metrics.measure(snapshot, readings)
    assert value("job_state", job_id="1", state="held") is None
    assert value("job_state", job_id="2", state="held") == 1
    info = {"job_id": "2", "label": "2", "name": "a\\nb", "user": "u" * 64}
    assert value("job_info", **info) == 1


def test_a_scrape_at_any_moment_sees_the_series_of_one_look(
    filled: Journal, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = collector.readings()
    snapshot = build(readings)
    job_metrics.measure(snapshot, readings)
    running = value("console_jobs", state="running")
    assert running
    seen: list[float | None] = []
    real = job_metrics.samples

    def samples(*facts: Any) -> Any:
        seen.append(value("console_jobs", state="running"))  # in the middle of the next look
        return real(*facts)

    monkeypatch.setattr(job_metrics, "samples", samples)
    job_metrics.measure(replace(snapshot, jobs=snapshot.jobs[:1]), readings)
    job_metrics.measure(snapshot, readings)
    assert seen
    assert None not in seen
    assert value("console_jobs", state="running") == running
