"""One planner per user and cluster, started behind a submission."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from deeplink.core.descriptors import LockHeldError
from deeplink.scheduler.placement.hint.planner import (
    MOST_LOG,
    ensure_planner,
    holding,
    planner_file,
    runs,
)
from deeplink.scheduler.slurm.command import CommandMissingError, detach


def test_a_planner_is_alone_and_says_who_it_is(tmp_path: Path) -> None:
    path = planner_file(tmp_path, {}, "lock")
    assert not runs(path)
    with holding(path, 1.0):
        assert runs(path)
        with pytest.raises(LockHeldError, match=f"process {os.getpid()} on"), holding(path, 2.0):
            pass
        with holding(planner_file(tmp_path, {"SLURM_CONF": "/other"}, "lock"), 2.0):
            pass
    assert not runs(path)
    with holding(path, 3.0):
        assert runs(path)


def test_a_lock_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "plan").write_text("a file where the folder should be")
    with pytest.raises(match="plan"), holding(planner_file(tmp_path, {}, "lock"), 1.0):
        pass


def test_none_is_started_where_one_runs_or_none_is_wanted(tmp_path: Path) -> None:
    assert ensure_planner(tmp_path, {"DEEPLINK_PLAN": "off"}) is None
    with holding(planner_file(tmp_path, {}, "lock"), 1.0):
        assert ensure_planner(tmp_path, {}) is None


def test_a_started_one_writes_to_its_log_and_lives_without_us(tmp_path: Path) -> None:
    env = {"PATH": "/nowhere", "HOME": str(tmp_path), "DEEPLINK_STATE": str(tmp_path), "DEEPLINK_NO_SUCH": "1"}
    log = planner_file(tmp_path, env, "log")
    log.parent.mkdir()
    log.write_bytes(b"x" * (MOST_LOG + 1))
    number = ensure_planner(tmp_path, env)
    assert number is not None
    assert os.getsid(number) == number
    os.kill(number, 9)
    os.waitpid(number, 0)
    assert log.stat().st_size < MOST_LOG


def test_what_cannot_be_started_fails_no_submission(tmp_path: Path) -> None:
    (tmp_path / "plan").write_text("a file where the folder should be")
    assert ensure_planner(tmp_path, {}) is None


def test_a_detached_command_has_its_log_and_no_input_of_ours(tmp_path: Path) -> None:
    log = tmp_path / "log"
    told = "import sys; print(repr(sys.stdin.read())); print('err', file=sys.stderr)"
    number = detach([sys.executable, "-c", told], log)
    os.waitpid(number, 0)
    assert sorted(log.read_text().split()) == ["''", "err"]
    with pytest.raises(CommandMissingError):
        detach(["/no/such/program"], log)


def test_a_detached_command_holds_no_lock_or_pipe_of_our_caller(tmp_path: Path) -> None:
    held = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    os.set_inheritable(held, True)
    told = "import os; print([os.path.realpath(f'/proc/self/fd/{one}') for one in os.listdir('/proc/self/fd')])"
    number = detach([sys.executable, "-c", told], tmp_path / "log")
    os.waitpid(number, 0)
    os.close(held)
    assert str(tmp_path / "log") in (tmp_path / "log").read_text()
    assert str(tmp_path / "lock") not in (tmp_path / "log").read_text()


def test_modules_in_the_folder_of_a_submission_are_not_the_planners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "click.py").write_text("raise SystemExit('of the user')")
    monkeypatch.chdir(tmp_path)
    env = {"PATH": "/nowhere", "DEEPLINK_STATE": str(tmp_path), "DEEPLINK_CONFIG": str(tmp_path / "none")}
    number = ensure_planner(tmp_path, env)
    assert number is not None
    os.waitpid(number, 0)  # the settings that it is given do not exist
    assert "of the user" not in planner_file(tmp_path, env, "log").read_text()
