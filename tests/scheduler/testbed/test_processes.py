from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from deeplink.scheduler.testbed.processes import ProcessId, arguments, descendants, first_processes, marked, table
from tests.waiting import until


def test_a_process_is_alive_until_it_ends_and_a_zombie_is_not(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        who = ProcessId.of(process.pid)
        assert who is not None
        assert who.alive
        who.keep(tmp_path / "pid")
        assert ProcessId.kept(tmp_path / "pid") == who
        assert who.send(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, and not yet taken: a zombie
        assert ProcessId.of(process.pid) is None
        assert not ProcessId(who.pid, who.start).alive
        assert not who.send(signal.SIGTERM)
        assert ProcessId.kept(tmp_path / "pid") is None


def test_a_process_that_has_the_number_of_an_older_one_is_left_alone() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        who = ProcessId.of(process.pid)
        assert who is not None
        older = ProcessId(who.pid, who.start - 1)
        assert not older.alive
        assert not older.send(signal.SIGKILL)
        assert who.alive
        process.kill()


def test_children_of_children_are_found_with_their_arguments() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 61; :"]) as process:
        below: list[ProcessId] = []
        while not any(arguments(who.pid) == ["sleep", "61"] for who in below):
            below = descendants(process.pid, table())
            assert process.poll() is None
        assert below[0] in descendants(os.getpid(), table())
        process.kill()
        for who in below:
            who.send(signal.SIGKILL)


def test_processes_are_found_by_a_mark_in_their_environment(tmp_path: Path) -> None:
    mark = f"DEEPLINK_TEST={tmp_path}"
    with subprocess.Popen(["sleep", "60"], env={**os.environ, "DEEPLINK_TEST": str(tmp_path)}) as process:
        # Popen returns when exec has begun; /proc shows the new environment a moment later.
        until(lambda: [who.pid for who in marked(mark)] == [process.pid])
        assert marked(mark + "x") == []
        process.kill()


def test_only_process_1_of_another_pid_namespace_is_a_first_process() -> None:
    argv = ["sleep", "62"]
    with subprocess.Popen(argv) as process:
        while arguments(process.pid) != argv:
            assert process.poll() is None
        assert first_processes([argv]) == {}
        process.kill()
