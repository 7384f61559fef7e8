"""What jobs leave behind is read, as far as it can be."""

from __future__ import annotations

from pathlib import Path

from deeplink.scheduler.jobs.job_folder import (
    EVENTS,
    JOURNAL,
    NOTES,
    TAIL_BYTES,
    folders,
    note,
    ranks_of,
    read_events,
    read_folder,
)
from deeplink.scheduler.placement.hint.decision import Ask, Decision, HintKind, Recorded, Why, append
from tests.scheduler.jobs.left import event, launched

NOW = 1_700_000_000.0


def decision(words: str) -> Recorded:
    made = Decision(kind=HintKind.NOTHING, why=Why.AS_GOOD, words=words)
    return Recorded(unix=NOW, by="sbatch", ask=Ask(nodes=2), decision=made)


def test_a_job_without_a_folder_left_nothing(tmp_path: Path) -> None:
    assert read_folder(tmp_path / "jobs" / "7", 7).empty
    assert folders(tmp_path) == {}


def test_what_a_launcher_left_is_read(tmp_path: Path) -> None:
    left = read_folder(launched(tmp_path, 7, NOW), 7)
    assert left.record is not None
    assert left.record.newest.last_step == 5
    assert [point.step for point in left.points] == [1, 2, 3, 4, 5]
    assert [one["event"] for one in left.events] == ["job-started", "attempt-started"]
    assert (left.problems, left.decision) == ((), None)
    assert list(folders(tmp_path)) == [7]


def test_the_newest_decision_is_the_tasks_own_or_its_arrays(tmp_path: Path) -> None:
    append(tmp_path / "jobs" / "12", decision("of the array"))
    found = read_folder(tmp_path / "jobs" / "13", 13, of_array=tmp_path / "jobs" / "12")
    assert found.decision is not None
    assert found.decision.decision.words == "of the array"
    for words in ("first", "own"):
        append(tmp_path / "jobs" / "13", decision(words))
    own = read_folder(tmp_path / "jobs" / "13", 13, of_array=tmp_path / "jobs" / "12").decision
    assert own is not None
    assert own.decision.words == "own"


def test_damage_is_said_and_the_rest_is_read(tmp_path: Path) -> None:
    folder = launched(tmp_path, 7, NOW)
    (folder / JOURNAL).write_bytes(b"no database at all, and long enough to be looked at as one" * 20)
    left = read_folder(folder, 7)
    assert left.record is None
    assert len(left.events) == 2
    assert any(JOURNAL in problem for problem in left.problems)


def test_half_lines_and_other_things_are_no_events(tmp_path: Path) -> None:
    folder = tmp_path / "7"
    folder.mkdir()
    (folder / EVENTS).write_bytes(
        b'{"event": "a", "unix": 1}\n[1]\n{"event": 3, "unix": 1}\n\xff\xfe\n{"event": "b"\n{"ev'
    )
    assert [one["event"] for one in read_events(folder)] == ["a"]


def test_only_the_end_of_long_events_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "7"
    folder.mkdir()
    (folder / EVENTS).write_bytes(b"x" * (3 * TAIL_BYTES) + b"\n")
    event(folder, "newest", NOW)
    assert [one["event"] for one in read_events(folder)] == ["newest"]


def test_what_the_user_did_stands_in_its_place_among_the_events(tmp_path: Path) -> None:
    folder = launched(tmp_path, 7, NOW)
    event(folder, "ended", NOW + 9, code=143)
    note(folder, "cancelled", NOW + 5, by="eve")
    assert [one["event"] for one in read_events(folder)][-2:] == ["cancelled", "ended"]
    note(tmp_path / "jobs" / "8", "cancelled", NOW, by="eve")  # a job of which DeepLink knows nothing
    assert not (tmp_path / "jobs" / "8").exists()
    assert (folder / NOTES).read_text().count("\n") == 1


def test_the_ranks_of_nodes_that_differ_are_those_of_the_start() -> None:
    started = {"event": "attempt-started", "nodes": ["n1", "n0"], "ranks": [3, 1], "world_size": 4}
    assert ranks_of(started) == {"n1": range(3), "n0": range(3, 4)}
    for other in ({}, {"ranks": [3]}, {"ranks": "31"}, {"ranks": [3, 0]}, {"ranks": [3, "1"]}):
        assert ranks_of({**started, "ranks": None, **other}) == {}, "older launchers do not tell, others may write"
    assert ranks_of(None) == {}
