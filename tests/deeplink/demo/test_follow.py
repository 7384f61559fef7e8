from __future__ import annotations

from pathlib import Path

from deeplink.core.types import Attempt
from deeplink.demo.story import JobFolderReader, share_of
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.recovery.records import Beat, Phase, ProgressPoint


def test_events_are_read_as_they_are_written_and_half_a_line_waits(tmp_path: Path) -> None:
    follower = JobFolderReader(tmp_path)
    assert follower.poll() == []
    file = tmp_path / "events.jsonl"
    file.write_text('{"event":"a","unix":1}\n{"event":"b","unix":2')
    assert [event["event"] for event in follower.poll()] == ["a"]
    with file.open("a") as more:
        more.write("}\n")
    assert [event["event"] for event in follower.poll()] == ["b"]
    assert follower.poll() == []
    assert len(follower.named("a")) == 1


def test_the_newest_point_is_that_of_the_newest_attempt(tmp_path: Path) -> None:
    folder = tmp_path / "7"
    folder.mkdir()
    follower = JobFolderReader(folder)
    assert follower.newest_point() is None
    old, new = Attempt(7, 0, 0), Attempt(7, 0, 1)
    points = (ProgressPoint(attempt=old, step=40, unix=1.0), ProgressPoint(attempt=new, step=31, unix=2.0))
    with Journal(folder / "journal.sqlite") as journal:
        journal.record_beat(Beat(attempt=new, phase=Phase.RUNNING, progress=points), 3.0)
    newest = follower.newest_point()
    assert newest is not None
    assert (newest.attempt, newest.step) == (new, 31)


def test_shares_count_every_copy() -> None:
    assert share_of({"a": ("n1", "n0"), "b": ("n1",)}) == {"n0": 1, "n1": 2}
