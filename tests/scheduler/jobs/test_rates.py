"""What reports of training say."""

from __future__ import annotations

import math
from dataclasses import replace

from deeplink.core import process_metrics
from deeplink.core.types import Attempt
from deeplink.scheduler.jobs.picture import ReadRate, Saved, TrainingRate, pace
from deeplink.scheduler.recovery.records import ProgressPoint

FIRST, SECOND = Attempt(7, 0, 0), Attempt(7, 0, 1)


def point(step: int, unix: float, **metrics: float) -> ProgressPoint:
    return ProgressPoint(attempt=FIRST, step=step, unix=unix, metrics=metrics)


def test_without_reports_nothing_is_known() -> None:
    assert pace([]) == TrainingRate()


def test_one_report_is_a_step_and_no_rate() -> None:
    found = pace([point(5, 10.0, loss=0.5)])
    assert (found.step, found.unix, found.value, found.steps_per_s, found.samples_per_s) == (
        5,
        10.0,
        0.5,
        None,
        None,
    )


def test_the_rate_is_that_of_the_newest_attempt() -> None:
    later = [replace(each, attempt=SECOND) for each in (point(150, 50.0), point(160, 55.0))]
    points = [point(100, 0.0), point(200, 1.0), *later]
    assert pace(points).steps_per_s == 2.0


def test_samples_are_counted_or_told() -> None:
    counted = [point(1, 0.0, samples=100.0), point(2, 2.0, samples=500.0)]
    assert pace(counted).samples_per_s == 200.0
    assert pace([*counted, point(3, 3.0, samples_per_s=77.0)]).samples_per_s == 77.0


def test_what_is_left_follows_from_the_number_of_steps() -> None:
    points = [point(10, 0.0, total_steps=100.0), point(20, 10.0, total_steps=100.0)]
    assert (pace(points).total_steps, pace(points).left_s) == (100, 80.0)
    for nonsense in (math.nan, math.inf, 5.0):
        found = pace([point(10, 0.0), point(20, 10.0, total_steps=nonsense)])
        assert (found.total_steps, found.left_s) == (None, None)


def test_reads_and_checkpoints_are_those_that_reports_carry() -> None:
    numbers = {
        process_metrics.LOCAL_SAMPLES: 90.0,
        process_metrics.PEER_SAMPLES: 10.0,
        process_metrics.SOURCE_SAMPLES: 0.0,
    }
    saved = {
        process_metrics.CHECKPOINT_STEP: 40.0,
        process_metrics.CHECKPOINT_UNIX: 9.0,
        process_metrics.CHECKPOINT_EVERY: 20.0,
    }
    found = pace([point(50, 10.0, **numbers, **saved)])
    assert found.reads == ReadRate(local=90, peer=10, source=0)
    assert found.reads is not None
    assert found.reads.total == 100
    assert found.saved == Saved(step=40, unix=9.0, every=20)
    later = {**numbers, process_metrics.LOCAL_SAMPLES: 290.0, process_metrics.WAITED_S: 1.5}
    found = pace([point(50, 10.0, **numbers), point(51, 14.0, **later)])
    assert found.reads == ReadRate(local=290, peer=10, source=0, per_s=50.0, waited_s=1.5)
    assert found.standing.reads == ReadRate(local=290, peer=10, source=0, waited_s=1.5)
    assert pace([point(1, 1.0, **dict.fromkeys(numbers, 0.0))]).reads is None


def test_the_number_shown_is_the_loss_or_the_first_of_the_users_own() -> None:
    ours = {process_metrics.LOCAL_SAMPLES: 1.0, "samples": 3.0}
    assert (pace([point(1, 1.0, zeta=4.0, **ours)]).metric, pace([point(1, 1.0, zeta=4.0, **ours)]).value) == (
        "zeta",
        4,
    )
    assert pace([point(1, 1.0, accuracy=1.0, loss=math.nan)]).metric == "loss"
    assert pace([point(1, 1.0, **ours)]).value is None


def test_a_job_that_stands_has_no_rate() -> None:
    found = pace([point(1, 0.0, samples=1.0), point(2, 1.0, samples=9.0)]).standing
    assert (found.step, found.steps_per_s, found.samples_per_s) == (2, None, None)
