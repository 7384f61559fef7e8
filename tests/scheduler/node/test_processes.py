"""Real zombies and real uninterruptible sleep."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from deeplink.core.clock import ManualClock
from deeplink.core.finding import Severity
from deeplink.scheduler.node.host_checks import ProcessCheck, Still, judge_processes, parse_stat, read_still
from deeplink.scheduler.node.settings import ProcessSettings
from tests.waiting import LIMIT_S

SETTINGS = ProcessSettings(zombie_s=600, stuck_s=120)
# A parent sleeps uninterruptibly until the child of its vfork execs or ends.
VFORK = """
import ctypes, os, sys, time
libc = ctypes.PyDLL(None)
if libc.vfork() == 0:
    libc.write(1, b"x", 1)
    libc.pause()
    libc._exit(0)
"""


def state_of(pid: int) -> str:
    found = parse_stat(Path(f"/proc/{pid}/stat").read_text())
    return found.state if found else ""


def wait_for(pid: int, state: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while state_of(pid) != state:
        assert time.monotonic() < deadline, state_of(pid)
        time.sleep(0.01)


def only(tmp_path: Path, pid: int) -> Path:
    """Return a view of /proc with one process: others here may be still, too."""
    (tmp_path / str(pid)).symlink_to(f"/proc/{pid}")
    return tmp_path


def of_pid(check: ProcessCheck, pid: int) -> list[str]:
    return [complaint.problem for complaint in check.look().complaints if f"({pid})" in complaint.problem]


def test_a_zombie_is_told_once_it_is_old(tmp_path: Path) -> None:
    clock = ManualClock()
    with subprocess.Popen(["true"]) as child:
        check = ProcessCheck(SETTINGS, clock, only(tmp_path, child.pid))
        wait_for(child.pid, "Z")
        assert of_pid(check, child.pid) == []
        clock.sleep(601)
        assert "dead and not waited for" in of_pid(check, child.pid)[0]
    assert of_pid(check, child.pid) == []


def test_one_that_sleeps_uninterruptibly_for_long_is_told(tmp_path: Path) -> None:
    clock = ManualClock()
    with subprocess.Popen([sys.executable, "-c", VFORK], stdout=subprocess.PIPE, start_new_session=True) as stuck:
        try:
            assert stuck.stdout is not None
            assert stuck.stdout.read(1) == b"x"
            wait_for(stuck.pid, "D")
            check = ProcessCheck(SETTINGS, clock, only(tmp_path, stuck.pid))
            assert of_pid(check, stuck.pid) == []
            clock.sleep(121)
            (problem,) = of_pid(check, stuck.pid)
            assert "uninterruptible, for up to 121 s" in problem
        finally:
            os.killpg(stuck.pid, signal.SIGKILL)
    assert of_pid(check, stuck.pid) == []


def test_a_process_that_is_uninterruptible_again_and_again_is_not_stuck() -> None:
    clock = ManualClock()
    busy = [Still(7, 1, "dd", "D", switches) for switches in range(9)]
    since: dict[Still, float] = {}
    for still in busy:
        since = {still: since.get(still, clock.monotonic())}
        clock.sleep(100)
        assert not list(judge_processes([(still, 0.0)], SETTINGS))
    assert len(since) == 1


def test_many_zombies_are_a_comment() -> None:
    dead = [(Still(n, 1, "sh", "Z"), 700.0) for n in range(100)]
    (complaint,) = judge_processes(dead, SETTINGS)
    assert complaint.severity is Severity.WARNING
    assert complaint.problem == "100 processes dead and not waited for: sh (0), sh (1), sh (2) and 97 more"
    (complaint,) = judge_processes(dead[:1], SETTINGS)
    assert complaint.severity is Severity.NOTE


def test_a_folder_of_processes_that_come_and_go_is_read() -> None:
    assert all(still.state in {"Z", "D"} for still in read_still(Path("/proc")))


@given(st.text(max_size=80))
def test_no_line_is_more_than_no_process(line: str) -> None:
    found = parse_stat(line)
    assert found is None or found.pid >= 0


@given(st.text(st.characters(blacklist_characters="\n"), min_size=1, max_size=15))
def test_a_name_may_hold_anything(name: str) -> None:
    tail = " ".join(str(n) for n in range(40))
    found = parse_stat(f"12 ({name}) Z {tail}")
    assert found == Still(12, 18, name, "Z")
