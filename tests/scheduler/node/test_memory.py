from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deeplink.core.clock import ManualClock
from deeplink.core.finding import Severity
from deeplink.scheduler.node.check_result import CheckState, LookTime, findings, folded
from deeplink.scheduler.node.host_checks import (
    KernelLog,
    MemoryCheck,
    MemoryPaths,
    MemoryReading,
    judge_memory,
    read_memory,
)
from deeplink.scheduler.node.reading import group_oom_kills
from deeplink.scheduler.node.settings import MemorySettings
from tests.waiting import LIMIT_S

SETTINGS = MemorySettings()
GROUPS = Path("/sys/fs/cgroup")
EATER = "import sys\nsys.stdin.readline()\nheap = b'x' * (200 << 20)\nprint(len(heap))"


@contextlib.contextmanager
def small_group() -> Iterator[Path]:
    """Make a control group that may have 32 MiB, of whichever version there is; skip where none can be made."""
    old, new = GROUPS / "memory", GROUPS
    base, bound = (old, "memory.limit_in_bytes") if old.is_dir() else (new, "memory.max")
    group = base / f"deeplink-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / bound).write_text(str(32 << 20))
    except OSError as problem:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group of memory can be made here: {problem}")
    with contextlib.suppress(OSError):
        (group / "memory.swappiness").write_text("0")
    try:
        yield group
    finally:
        group.rmdir()


def test_a_process_that_is_really_killed_for_memory_is_told_for_a_while() -> None:
    clock = ManualClock()
    check = MemoryCheck(SETTINGS, clock)
    with small_group() as group:
        assert not [one for one in check.look().complaints if one.subject.startswith("oom")]
        with subprocess.Popen(
            [sys.executable, "-c", EATER], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        ) as eater:
            (group / "cgroup.procs").write_text(str(eater.pid))
            eater.communicate(b"\n", timeout=LIMIT_S)
        assert eater.returncode == -9
        (told,) = [one for one in check.look().complaints if one.subject == "oom node"]
        assert told.severity is Severity.NOTE
        assert "killed for want of memory" in told.problem
        assert told.at_unix == clock.unix()
        # The kernel's log has the numbers of the first pid namespace (its inode: linux/proc_ns.h).
        if KernelLog().may_read() and Path("/proc/self/ns/pid").stat().st_ino == 0xEFFFFFFC:
            assert f"({eater.pid})" in told.problem
        clock.sleep(601)
        assert not [one for one in check.look().complaints if one.subject == "oom node"]


def lay_out(
    root: Path, *, available: int = 1000, kills: int = 0, group_kills: int = 0, errors: int = 0
) -> MemoryPaths:
    paths = MemoryPaths(root / "proc", root / "cgroup", root / "edac")
    (paths.proc / "self").mkdir(parents=True, exist_ok=True)
    (paths.cgroup / "job_7").mkdir(parents=True, exist_ok=True)
    (paths.edac / "mc0").mkdir(parents=True, exist_ok=True)
    (paths.proc / "meminfo").write_text(f"MemTotal: 100000 kB\nMemFree: 1 kB\nMemAvailable: {available} kB\n")
    (paths.proc / "vmstat").write_text(f"pgfault 1\noom_kill {kills}\n")
    (paths.proc / "self" / "cgroup").write_text("0::/job_7\n")
    (paths.cgroup / "job_7" / "memory.events").write_text(f"low 0\noom 1\noom_kill {group_kills}\n")
    (paths.edac / "mc0" / "ue_count").write_text(f"{errors}\n")
    return paths


@pytest.mark.parametrize(("group", "kills"), [("slurm/job_7/step_0/user/task_0", 3), ("slurm", None)])
def test_where_the_tasks_group_counts_nothing_its_steps_does_and_nothing_above_its_job(
    group: str, kills: int | None, tmp_path: Path
) -> None:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(f"0::/{group}\n")
    step = tmp_path / "cgroup" / "slurm" / "job_7" / "step_0"
    step.mkdir(parents=True)
    (step / "memory.events").write_text("oom_kill 3\n")
    (tmp_path / "cgroup" / "memory.events").write_text("oom_kill 9\n")
    assert group_oom_kills(tmp_path / "proc", tmp_path / "cgroup") == kills


def test_kills_in_the_agents_own_group_are_told(tmp_path: Path) -> None:
    check = MemoryCheck(SETTINGS, ManualClock(), lay_out(tmp_path, group_kills=1))
    assert check.look().complaints == ()
    lay_out(tmp_path, kills=1, group_kills=3)
    assert {one.subject: one.problem.split(" killed")[0] for one in check.look().complaints} == {
        "oom node": "1 process here",
        "oom group": "2 processes in the agent's control group",
    }


def test_a_finding_of_kills_is_since_the_last_one_and_names_whom(tmp_path: Path) -> None:
    paths, kmsg, clock = lay_out(tmp_path, kills=3), tmp_path / "kmsg", ManualClock()
    old = "6,1,1000,-;Out of memory: Killed process 7 (old) total-vm:1kB, anon-rss:1kB\n"
    kmsg.write_text(old)
    check = MemoryCheck(SETTINGS, clock, paths, KernelLog(kmsg))

    def found(state: CheckState) -> tuple[CheckState, list[tuple[str, float]]]:
        state = folded(state, check.look(), SETTINGS, LookTime(clock.unix(), clock.monotonic()))
        return state, [(one.text, one.since_unix) for one in findings("memory", state, SETTINGS).values()]

    state, told = found(CheckState())
    assert told == []
    first = clock.unix()
    lay_out(tmp_path, kills=4)
    state, told = found(state)
    assert told == [("1 process here killed for want of memory", first)]
    clock.sleep(0.5)
    kmsg.write_text(
        old + "6,2,2000,-;Memory cgroup out of memory: Killed process 41 (python3) total-vm:9kB, UID:0\n"
    )
    state, told = found(state)
    assert [problem for problem, _ in told] == ["1 process here killed for want of memory: python3 (41)"]
    clock.sleep(300)
    second = clock.unix()
    lay_out(tmp_path, kills=6)
    state, told = found(state)
    assert told == [("2 processes here killed for want of memory", second)]


def test_what_is_available_and_what_controllers_count(tmp_path: Path) -> None:
    reading = read_memory(lay_out(tmp_path, available=999, errors=2))
    assert {one.subject: one.severity for one in judge_memory(reading, SETTINGS)} == {
        "available": Severity.WARNING,
        "mc0 errors": Severity.ERROR,
    }
    assert not list(judge_memory(read_memory(lay_out(tmp_path, available=1000)), SETTINGS))
    assert not list(judge_memory(MemoryReading(), SETTINGS))


def test_where_nothing_can_be_read_it_cannot_tell(tmp_path: Path) -> None:
    check = MemoryCheck(SETTINGS, ManualClock(), MemoryPaths(tmp_path, tmp_path, tmp_path))
    assert check.look().unknown


def test_this_machine_is_read() -> None:
    reading = read_memory(MemoryPaths())
    assert 0 < reading.available <= reading.total
