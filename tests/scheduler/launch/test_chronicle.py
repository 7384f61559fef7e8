"""What a run leaves behind, and that nobody who does not listen can hold it up."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from deeplink.clock import ManualClock
from deeplink.scheduler.launch.chronicle import Chronicle, Courier, to_journal
from deeplink.scheduler.watch.journal import Journal
from deeplink.scheduler.watch.records import Beat, Incident, Phase, ProgressPoint
from deeplink.types import Attempt

ATTEMPT = Attempt(7, 0, 0)
BEAT = Beat(attempt=ATTEMPT, phase=Phase.RUNNING, user="ann", job_name="train")


def point(step: int) -> ProgressPoint:
    return ProgressPoint(attempt=ATTEMPT, step=step, unix=float(step))


def test_events_are_lines_of_json_with_both_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clock = ManualClock()
    chronicle = Chronicle(tmp_path, clock, [])
    chronicle.event("began", "it begins", nodes=("n0",))
    chronicle.event("silent-one")
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert lines[0] == {"event": "began", "unix": clock.unix(), "monotonic": 1000.0, "nodes": ["n0"]}
    assert capsys.readouterr().err == "deeplink: it begins\n"


def test_people_can_have_json_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Chronicle(tmp_path, ManualClock(), [], as_json=True).event("silent-one", code=3)
    assert json.loads(capsys.readouterr().err)["code"] == 3


def test_a_folder_that_is_gone_does_not_stop_a_run(tmp_path: Path) -> None:
    Chronicle(tmp_path / "gone", ManualClock(), []).event("began")


def test_what_cannot_be_delivered_is_kept_for_the_next_time() -> None:
    seen: list[Beat] = []
    delivered = threading.Event()
    refuse = [True]

    def deliver(beat: Beat) -> None:
        if refuse[0]:
            refuse[0] = False
            raise ConnectionError("the watchdog is away")
        seen.append(beat)
        delivered.set()

    courier = Courier(deliver, "test")
    incident = Incident(id="7.0.0-node-silent-n1", kind="node-silent", began_unix=1.0, detected_unix=2.0)
    courier.give(BEAT, [point(1), point(2)], [incident], now=True)
    assert delivered.wait(20)
    courier.give(BEAT, [point(3)], [], now=True)
    courier.close()
    assert [one.step for beat in seen for one in beat.progress] == [1, 2, 3]
    assert [one.id for beat in seen for one in beat.incidents] == [incident.id]


def test_a_far_end_that_hangs_holds_nobody_up() -> None:
    hung, end = threading.Event(), threading.Event()

    def hang(_beat: Beat) -> None:
        hung.set()
        end.wait(30)

    courier = Courier(hang, "test")
    courier.give(BEAT, [], [], now=True)
    assert hung.wait(20)
    for step in range(5_000):
        courier.give(BEAT, [point(step)], [], now=True)
    assert not end.is_set(), "all of it was taken over while the far end hung"
    end.set()
    courier.close()


def test_the_journal_of_a_job_holds_its_beats(tmp_path: Path) -> None:
    courier = Courier(to_journal(tmp_path / "journal.sqlite", ManualClock()), "journal")
    courier.give(BEAT, [point(1), point(2)], [], now=True)
    courier.close()
    with Journal(tmp_path / "journal.sqlite", read_only=True) as journal:
        (job,) = journal.jobs()
        assert (job.job, job.user, job.newest.last_step) == (7, "ann", 2)
