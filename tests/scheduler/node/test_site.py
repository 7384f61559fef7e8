"""Real programs with Nagios exit codes, and one that answers as LBNL NHC does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.core.clock import SystemClock
from deeplink.core.finding import Severity
from deeplink.scheduler.node.check_result import GOOD, Look
from deeplink.scheduler.node.child import CommandResult
from deeplink.scheduler.node.command_checks import SiteCheck, judge_answer, site_checks
from deeplink.scheduler.node.settings import SiteSettings
from tests.waiting import LIMIT_S

NHC = "ERROR:  nhc:  Health check failed:  check_fs_mount:  /scratch not mounted"


def program(folder: Path, name: str, *lines: str) -> Path:
    path = folder / name
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return path


def look(path: Path, **settings: float) -> Look:
    check = SiteCheck(SiteSettings(command=(str(path),), **settings), SystemClock())  # type: ignore[arg-type]
    try:
        return check.look()
    finally:
        check.close()


@pytest.mark.parametrize(
    ("lines", "severity", "problem"),
    [
        (["echo 'OK - all well | t=3s'"], None, ""),
        (["echo 'WARNING - warm | t=81'", "exit 1"], Severity.WARNING, "WARNING - warm"),
        (["echo 'CRITICAL - hot'", "exit 2"], Severity.ERROR, "CRITICAL - hot"),
        (["exit 2"], Severity.ERROR, "it exited 2 and said nothing"),
        (
            ["echo checking", f"echo '{NHC}' >&2", "exit 1"],
            Severity.ERROR,
            "ERROR: nhc: Health check failed: check_fs_mount: /scratch not mounted",
        ),
    ],
)  # fmt: skip
def test_a_program_is_believed_by_its_exit_code(
    tmp_path: Path, lines: list[str], severity: Severity | None, problem: str
) -> None:
    found = look(program(tmp_path, "check", *lines))
    assert [(one.severity, one.problem) for one in found.complaints] == ([(severity, problem)] if severity else [])
    assert found.unknown == ""


@pytest.mark.parametrize("lines", [["echo odd", "exit 3"], ["exit 77"], ["kill -9 $$"]])
def test_everything_else_is_unknown(tmp_path: Path, lines: list[str]) -> None:
    found = look(program(tmp_path, "check", *lines))
    assert found.complaints == ()
    assert found.unknown


def test_a_program_that_is_not_there_is_unknown(tmp_path: Path) -> None:
    found = look(tmp_path / "absent")
    assert found.complaints == ()
    assert "absent" in found.unknown


def test_one_that_does_not_end_is_killed_with_all_it_started_and_unknown(tmp_path: Path) -> None:
    hangs, pid, deadline_s = program(tmp_path, "check", f"echo $$ >{tmp_path}/pid", "sleep 1000"), 0, 0.5
    while not pid:  # it has to come so far before it is killed
        found = look(hangs, deadline_s=deadline_s)
        assert found.complaints == ()
        assert "was killed" in found.unknown
        assert deadline_s < LIMIT_S
        deadline_s *= 2
        pid = int((tmp_path / "pid").read_text()) if (tmp_path / "pid").exists() else 0
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root must not run them")
@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_program_that_anyone_may_write_is_not_run_as_root(tmp_path: Path, mode: int) -> None:
    path = program(tmp_path, "check", "exit 2")
    path.chmod(mode)
    found = look(path)
    assert found.complaints == ()
    assert "anyone may write" in found.unknown


def test_a_folders_executables_are_checks_and_the_settings_say_how(tmp_path: Path) -> None:
    for name in ("fan.sh", "nhc", ".hidden", "old~", "disk", "b d", "site.sh"):
        program(tmp_path, name, "exit 0")
    (tmp_path / "readme.txt").write_text("not a check")
    own = SiteSettings(command=("/bin/true",))
    found = site_checks(tmp_path, {"fan": SiteSettings(interval_s=7.0), "mine": own})
    assert set(found.checks) == {"fan", "nhc", "mine"}
    assert found.checks["fan"] == SiteSettings(interval_s=7.0, command=(str(tmp_path / "fan.sh"),))
    assert found.checks["mine"] == own
    assert len(found.refused) == 3
    assert site_checks(tmp_path / "absent", {}).refused == ()
    (refused,) = site_checks(tmp_path / "readme.txt", {}).refused
    assert "its checks cannot be listed" in refused


@given(st.integers(-64, 255), st.text(max_size=200), st.text(max_size=200))
def test_whatever_it_writes_only_its_end_decides(code: int, stdout: str, stderr: str) -> None:
    found = judge_answer(CommandResult(code, stdout, stderr))
    if code == 0:
        assert found == GOOD
    elif code in {1, 2}:
        assert len(found.complaints) == 1
    else:
        assert not found.complaints
        assert found.unknown
