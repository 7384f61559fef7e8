"""Numbers that go with reports: added up over those who count, gone with them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from deeplink.cache.reader import ReadTotals
from deeplink.checkpoints import Checkpoints
from deeplink.core import process_metrics
from deeplink.core.clock import ManualClock
from deeplink.core.types import Attempt
from deeplink.training.progress import Destination, Reporter, _Report
from deeplink.v1 import node_pb2


class Counter:
    def __init__(self, **numbers: float) -> None:
        self.numbers = numbers

    def vitals(self) -> Mapping[str, float]:
        return self.numbers


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> process_metrics.Vitals:
    monkeypatch.setattr(process_metrics, "of_process", process_metrics.Vitals())
    return process_metrics.of_process


def test_what_several_count_is_added_up_for_as_long_as_they_live(own: process_metrics.Vitals) -> None:
    one, other = Counter(a=1.0), Counter(a=2.0, b=5.0)
    own.count_in(one)
    own.count_in(other)
    own.note(c=7.0)
    own.note(c=8.0)
    assert own.numbers() == {"a": 3.0, "b": 5.0, "c": 8.0}
    del other
    assert own.numbers() == {"a": 1.0, "c": 8.0}


def test_reads_are_told_once_there_are_any(own: process_metrics.Vitals) -> None:
    tally = ReadTotals()
    assert own.numbers() == {}
    tally.count(local_samples=3, source_samples=1, local_bytes=90, source_bytes=7)
    assert own.numbers() == {
        process_metrics.LOCAL_SAMPLES: 3.0,
        process_metrics.PEER_SAMPLES: 0.0,
        process_metrics.LOCAL_BYTES: 90.0,
        process_metrics.PEER_BYTES: 0.0,
        process_metrics.HOME_BYTES: 0.0,
        process_metrics.SOURCE_BYTES: 7.0,
        process_metrics.HOME_SAMPLES: 0.0,
        process_metrics.SOURCE_SAMPLES: 1.0,
        process_metrics.COMPARED_SAMPLES: 0.0,
        process_metrics.WAITED_S: 0.0,
    }


def test_checkpoints_tell_their_step_and_their_stride(own: process_metrics.Vitals, tmp_path: Path) -> None:
    clock = ManualClock()
    checkpoints = Checkpoints(tmp_path, clock=clock)
    for step in (10, 35):
        with checkpoints.save(step=step) as folder:
            (folder / "state").write_text("s")
    told = {
        process_metrics.CHECKPOINT_STEP: 35.0,
        process_metrics.CHECKPOINT_UNIX: clock.unix(),
        process_metrics.CHECKPOINT_EVERY: 25.0,
    }
    assert own.numbers() == told


def test_checkpoints_saved_in_the_background_are_told_once_they_are_whole(
    own: process_metrics.Vitals, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (10, 35):
        checkpoints.save_state({"counts": {"seen": step}}, step=step)
        checkpoints.wait()
    checkpoints.close()
    assert (own.numbers()[process_metrics.CHECKPOINT_STEP], own.numbers()[process_metrics.CHECKPOINT_EVERY]) == (
        35.0,
        25.0,
    )


def reported(metrics: dict[str, float]) -> dict[str, float]:
    reporter = Reporter(Destination(agent="a:1", token_file=Path("t"), attempt=Attempt(1, 0, 0), rank=0))
    message = reporter._message(_Report(5, 1.0, metrics))
    return dict(node_pb2.ReportRequest.FromString(message).progress.metrics)


def test_a_report_carries_them_and_no_more_than_an_agent_takes(own: process_metrics.Vitals) -> None:
    own.note(deeplink_x=1.0)
    assert reported({"loss": 0.5}) == {"loss": 0.5, "deeplink_x": 1.0}
    many = {f"m{number}": 0.0 for number in range(96)}
    assert reported(many) == many
