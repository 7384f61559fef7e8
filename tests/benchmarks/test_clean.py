"""Clean hours are those in which a job trained, and not those in which nobody noticed that it did not."""

from __future__ import annotations

from benchmarks.watchdog.clean import LATELY_S, trained_s


def test_a_job_that_stopped_counts_to_its_newest_step() -> None:
    assert trained_s([1000.0 - LATELY_S / 2] * 2, began=0.0, over=1000.0) == 2000.0
    assert trained_s([300.0], began=0.0, over=1000.0) == 300.0
    assert trained_s([0.0], began=500.0, over=1000.0) == 0.0, "it never made a step"
