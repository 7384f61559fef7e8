"""What a run leaves for the next run of its job."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from deeplink.scheduler.launch.failure import Cause, Setback
from deeplink.scheduler.launch.history import History, Log, carried_over, file_of, leave
from deeplink.scheduler.launch.progress import LONG_RUN_S, Progress
from deeplink.scheduler.launch.verdict import AttemptVerdict, NextMove
from deeplink.scheduler.watch.records import IncidentKind, ProgressPoint
from deeplink.types import Attempt
from tests.waiting import LIMIT_S


def test_setbacks_count_since_the_newest_step() -> None:
    progress, history = Progress(), History()
    progress.begin(0.0, relaunch=False)
    history.note(Cause.UNKNOWN, 1)
    progress.begin(1.0, relaunch=True)
    assert history.tried(progress, 1.0).since_progress == (Setback(Cause.UNKNOWN, 1),)
    attempt = Attempt(7, 0, 1)
    progress.take([ProgressPoint(attempt=attempt, step=3, unix=0.0)], attempt, 2.0)
    assert history.tried(progress, 2.0).since_progress == ()
    history.note(Cause.NODE_LOST, 0)
    progress.begin(3.0, relaunch=True)
    tried = history.tried(progress, 3.0)
    assert (tried.since_progress, tried.best) == ((Setback(Cause.NODE_LOST),), 3)


def test_a_job_that_reports_nothing_makes_progress_by_running_long() -> None:
    progress, history = Progress(), History()
    progress.begin(0.0, relaunch=False)
    history.note(Cause.UNKNOWN, 1)
    progress.begin(1.0, relaunch=True)
    assert history.tried(progress, LONG_RUN_S).since_progress
    assert not history.tried(progress, LONG_RUN_S + 1.0).since_progress


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
    run = Log(tmp_path / "history", 0, Progress())
    run.progress.begin(0.0, relaunch=False)
    run.note(cause, 1, first_s)
    run.progress.begin(first_s + 5, relaunch=True)
    assert bool(run.tried(first_s + 5 + second_s).since_progress) is not further


def test_how_long_a_run_lasted_is_known_to_the_next_run_of_the_job(tmp_path: Path) -> None:
    first, path = Progress(), tmp_path / "history"
    first.begin(0.0, relaunch=False)
    Log(path, 0, first).leave(FAILED, 1800.0)
    again = Log(path, 1, Progress())
    again.progress.begin(0.0, relaunch=False)
    assert again.tried(1800.0).since_progress == (Setback(Cause.UNKNOWN, 1),)
    assert again.tried(2500.0).since_progress == ()


def test_the_next_run_of_the_job_knows_what_the_application_did(tmp_path: Path) -> None:
    path, progress = file_of(tmp_path, ["python", "train.py"]), Progress(best=12)
    history = History()
    for cause in (Cause.NODE_LOST, Cause.UNKNOWN):
        history.note(cause, 1)
        progress.fruitless += 1
    tried = history.tried(progress, 0.0)
    leave(path, 0, tried, Setback(Cause.UNKNOWN, 1), IncidentKind.APPLICATION_FAILED)
    after = Progress()
    found = carried_over(path, 1, after)
    assert (found.before, after.best) == (IncidentKind.APPLICATION_FAILED, 12)
    assert found.tried(after, 0.0).since_progress == (Setback(Cause.UNKNOWN, 1),) * 2
    assert carried_over(path, 0, Progress()) == History(), "another call of the same script"


def test_a_run_that_ended_well_leaves_no_blame(tmp_path: Path) -> None:
    path, progress = file_of(tmp_path, ["true"]), Progress(best=5)
    leave(path, 0, History().tried(progress, 0.0), None, None)
    assert carried_over(path, 1, progress) == History()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"restart": 0}', '{"restart": 0, "setbacks": [[1]], "best": 1}'])
def test_what_cannot_be_read_is_as_good_as_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "history.x"
    path.write_text(text)
    assert carried_over(path, 1, Progress()) == History()


FAILED = AttemptVerdict(move=NextMove.FAILED, code=1, kind=IncidentKind.APPLICATION_FAILED, cause=Cause.UNKNOWN)


def test_a_run_that_got_further_takes_back_what_was_left_though_it_ends_without_a_word(tmp_path: Path) -> None:
    path = file_of(tmp_path, ["python", "train.py"])
    Log(path, 0, Progress(best=12)).leave(FAILED, 0.0)
    second, attempt = Log(path, 1, Progress()), Attempt(7, 1, 0)
    assert second.tried(0.0).since_progress == (Setback(Cause.UNKNOWN, 1),)
    for step, is_kept in ((12, True), (13, False)):
        second.progress.take([ProgressPoint(attempt=attempt, step=step, unix=0.0)], attempt, 0.0)
        second.note_progress()
        for thread in threading.enumerate():
            if thread.name == "deeplink-history":
                thread.join(LIMIT_S)
        assert path.exists() is is_kept
    third = Log(path, 2, Progress())
    assert (third.tried(0.0).since_progress, third.history.before) == ((), None)
    second.leave(FAILED, 0.0)
    assert Log(path, 2, Progress()).history.before is IncidentKind.APPLICATION_FAILED


def test_an_end_that_nobody_is_to_blame_for_adds_no_blame_for_what_was_before_the_newest_step(
    tmp_path: Path,
) -> None:
    path, run = tmp_path / "history", Log(tmp_path / "history", 0, Progress(best=12))
    run.history.note(Cause.UNKNOWN, 1)
    run.leave(AttemptVerdict(move=NextMove.FAILED, code=143, kind=IncidentKind.TIME_LIMIT), 0.0)
    assert not carried_over(path, 1, Progress()).setbacks


def test_each_command_has_its_own(tmp_path: Path) -> None:
    assert file_of(tmp_path, ["a", "b"]) != file_of(tmp_path, ["a b"])
