"""What a run leaves for the next run of its job."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from deeplink.core.types import Attempt
from deeplink.scheduler.launch.history import LONG_RUN_S, History, Progress, file_of
from deeplink.scheduler.recovery.rank_failure import Cause, Setback
from deeplink.scheduler.recovery.records import IncidentKind, ProgressPoint
from deeplink.scheduler.recovery.relaunch import AttemptVerdict, NextMove
from tests.waiting import LIMIT_S


def test_setbacks_count_since_the_newest_step(tmp_path: Path) -> None:
    progress = Progress()
    history = History(tmp_path / "history", 0, progress)
    progress.begin(0.0, relaunch=False)
    history.note(Cause.UNKNOWN, 1, 0.0)
    progress.begin(1.0, relaunch=True)
    assert history.tried(1.0).since_progress == (Setback(Cause.UNKNOWN, 1),)
    attempt = Attempt(7, 0, 1)
    progress.take([ProgressPoint(attempt=attempt, step=3, unix=0.0)], attempt, 2.0)
    assert history.tried(2.0).since_progress == ()
    history.note(Cause.NODE_LOST, 0, 2.0)
    progress.begin(3.0, relaunch=True)
    tried = history.tried(3.0)
    assert (tried.since_progress, tried.best) == ((Setback(Cause.NODE_LOST),), 3)


def test_a_job_that_reports_nothing_makes_progress_by_running_long(tmp_path: Path) -> None:
    progress = Progress()
    history = History(tmp_path / "history", 0, progress)
    progress.begin(0.0, relaunch=False)
    history.note(Cause.UNKNOWN, 1, 0.0)
    progress.begin(1.0, relaunch=True)
    assert history.tried(LONG_RUN_S).since_progress
    assert not history.tried(LONG_RUN_S + 1.0).since_progress


@pytest.mark.parametrize(
    ("cause", "first_s", "second_s", "further"),
    [
        (Cause.UNKNOWN, 1800.0, 1850.0, False),
        (Cause.UNKNOWN, 1800.0, 1000.0, True),
        (Cause.UNKNOWN, 1800.0, 2500.0, True),
        (Cause.NODE_LOST, 1800.0, 1800.0, True),
        (Cause.OUT_OF_MEMORY, 1800.0, 1800.0, False),
        (Cause.UNKNOWN, 1800.0, 60.0, False),
    ],
)
def test_a_long_run_without_steps_that_fails_where_the_one_before_did_got_no_further(
    cause: Cause, first_s: float, second_s: float, further: bool, tmp_path: Path
) -> None:
    run = History(tmp_path / "history", 0, Progress())
    run.progress.begin(0.0, relaunch=False)
    run.note(cause, 1, first_s)
    run.progress.begin(first_s + 5, relaunch=True)
    assert bool(run.tried(first_s + 5 + second_s).since_progress) is not further


def test_how_long_a_run_lasted_is_known_to_the_next_run_of_the_job(tmp_path: Path) -> None:
    first, path = Progress(), tmp_path / "history"
    first.begin(0.0, relaunch=False)
    History(path, 0, first).leave(FAILED, 1800.0)
    again = History(path, 1, Progress())
    again.progress.begin(0.0, relaunch=False)
    assert again.tried(1800.0).since_progress == (Setback(Cause.UNKNOWN, 1),)
    assert again.tried(2500.0).since_progress == ()


def test_the_next_run_of_the_job_knows_what_the_application_did(tmp_path: Path) -> None:
    path, progress = file_of(tmp_path, ["python", "train.py"]), Progress(best=12)
    history = History(path, 0, progress)
    for cause in (Cause.NODE_LOST, Cause.UNKNOWN):
        history.note(cause, 1, 0.0)
        progress.fruitless += 1
    history.leave(FAILED, 0.0)
    found = History(path, 1, Progress())
    assert (found.before, found.progress.best) == (IncidentKind.APPLICATION_FAILED, 12)
    assert found.tried(0.0).since_progress == (Setback(Cause.UNKNOWN, 1),) * 2
    assert is_empty(History(path, 0, Progress())), "another call of the same script"


def is_empty(history: History) -> bool:
    return (history.setbacks, history.relaunches, history.before) == ([], 0, None)


def test_a_run_that_ended_well_leaves_no_blame(tmp_path: Path) -> None:
    path = file_of(tmp_path, ["true"])
    History(path, 0, Progress(best=5)).leave(AttemptVerdict(move=NextMove.SUCCEEDED), 0.0)
    after = History(path, 1, Progress())
    assert is_empty(after)
    assert after.progress.best == 5


@pytest.mark.parametrize("text", ["", "{", "[]", '{"restart": 0}', '{"restart": 0, "setbacks": [[1]], "best": 1}'])
def test_what_cannot_be_read_is_as_good_as_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "history.x"
    path.write_text(text)
    found = History(path, 1, Progress())
    assert is_empty(found)
    assert found.progress == Progress()


FAILED = AttemptVerdict(move=NextMove.FAILED, code=1, kind=IncidentKind.APPLICATION_FAILED, cause=Cause.UNKNOWN)


def test_a_run_that_got_further_takes_back_what_was_left_though_it_ends_without_a_word(tmp_path: Path) -> None:
    path = file_of(tmp_path, ["python", "train.py"])
    History(path, 0, Progress(best=12)).leave(FAILED, 0.0)
    second, attempt = History(path, 1, Progress()), Attempt(7, 1, 0)
    assert second.tried(0.0).since_progress == (Setback(Cause.UNKNOWN, 1),)
    for step, is_kept in ((12, True), (13, False)):
        second.progress.take([ProgressPoint(attempt=attempt, step=step, unix=0.0)], attempt, 0.0)
        second.note_progress()
        for thread in threading.enumerate():
            if thread.name == "deeplink-history":
                thread.join(LIMIT_S)
        assert path.exists() is is_kept
    third = History(path, 2, Progress())
    assert (third.tried(0.0).since_progress, third.before) == ((), None)
    second.leave(FAILED, 0.0)
    assert History(path, 2, Progress()).before is IncidentKind.APPLICATION_FAILED


def test_an_end_that_nobody_is_to_blame_for_adds_no_blame_for_what_was_before_the_newest_step(
    tmp_path: Path,
) -> None:
    path, run = tmp_path / "history", History(tmp_path / "history", 0, Progress(best=12))
    run.note(Cause.UNKNOWN, 1, 0.0)
    run.leave(AttemptVerdict(move=NextMove.FAILED, code=143, kind=IncidentKind.TIME_LIMIT), 0.0)
    assert not History(path, 1, Progress()).setbacks


def test_each_command_has_its_own(tmp_path: Path) -> None:
    assert file_of(tmp_path, ["a", "b"]) != file_of(tmp_path, ["a b"])
