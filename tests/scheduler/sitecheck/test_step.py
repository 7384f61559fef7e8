"""The conversation with the nodes: real processes behind a stand-in for srun that starts them on this host."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deeplink.core.clock import SystemClock
from deeplink.scheduler.sitecheck import examine as module
from deeplink.scheduler.sitecheck.examine import RunningStep, StepResult, plans_for, step_command
from deeplink.scheduler.sitecheck.site_evidence import NodeProbePlan

SRUN = """
import os, subprocess, sys, threading
program = sys.argv[sys.argv.index("--") + 1:]
nodes = {nodes!r}
env = lambda node: {{**os.environ, "SLURMD_NODENAME": node, "SLURM_STEP_NODELIST": {listed!r}}}
started = [subprocess.Popen(program, stdin=subprocess.PIPE, env=env(node)) for node in nodes]
print("slurmstepd: a warning of some plugin's", flush=True)
def pass_on():
    for line in sys.stdin.buffer:
        for one in started:
            try:
                one.stdin.write(line)
                one.stdin.flush()
            except BrokenPipeError:
                pass
    for one in started:
        one.stdin.close()
threading.Thread(target=pass_on, daemon=True).start()
code = max(one.wait() for one in started)
sys.stdout.flush()
os._exit(code)
"""

Run = Callable[..., StepResult]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(module, "GRACE_S", 2.0)
    (tmp_path / "home").mkdir()

    def go(
        nodes: list[str],
        listed: str,
        program: list[str] | None = None,
        cancel: Callable[[], None] = lambda: pytest.fail("it ended by itself"),
    ) -> StepResult:
        srun = tmp_path / "srun.py"
        srun.write_text(SRUN.format(nodes=nodes, listed=listed))
        program = program or [sys.executable, "-P", "-m", "deeplink", "doctor", "--as-node", "run"]
        argv = step_command(2, inside=False, options=[], program=["--", *program])
        env = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "DEEPLINK"))}
        env |= {"HOME": str(tmp_path / "home"), "DEEPLINK_CONFIG": os.devnull, "XDG_RUNTIME_DIR": ""}
        step = RunningStep(
            [sys.executable, str(srun), *argv[1:]], env, 2, SystemClock(), lambda _: None, cancel=cancel
        )
        return step.run(lambda hosts: plans_for(hosts, NodeProbePlan(disk_bytes=1 << 20)))

    return go


@pytest.mark.slow
def test_two_nodes_tell_of_themselves_and_of_each_other(run: Run, tmp_path: Path) -> None:
    result = run(["n0", "n1"], "n[0-1]")
    assert (sorted(result.reports), result.silent, result.problem) == (["n0", "n1"], (), "")
    for node, report in result.reports.items():
        assert report.offset is not None
        assert abs(report.offset.ahead_s) <= report.offset.error_s + 0.001, "one host has one clock"
        assert report.measured is not None
        (peer,) = {"n0", "n1"} - {node}
        assert set(report.measured.reached) == {peer}
        assert report.measured.markers["state"] == (peer,)
    assert not list((tmp_path / "home").rglob(".deeplink-doctor*"))


@pytest.mark.slow
def test_a_node_that_never_comes_up_is_silent_and_the_other_one_counts(run: Run) -> None:
    result = run(["n0"], "n[0-1]")
    assert (list(result.reports), result.silent) == (["n0"], ("n1",))
    assert "1 of 2 nodes said nothing" in result.problem
    assert "a warning of some plugin's" in result.problem


def test_where_no_node_comes_up_what_was_said_last_is_the_reason(run: Run) -> None:
    # Written at once: of two writes those of two nodes would mix.
    said = "import os, sys; os.write(2, b'srun: error: Unable to allocate resources: busy\\n'); sys.exit(1)"
    words = [sys.executable, "-c", said]
    result = run(["n0", "n1"], "n[0-1]", words)
    assert not result.reports
    assert result.problem == "no node answered: srun: error: Unable to allocate resources: busy"


def test_nodes_on_which_srun_says_that_nothing_runs_are_silent_and_not_waited_for(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GRACE_S", 50.0)
    said = (
        "import os, sys; os.write(2, b'srun: error: n[0-1]: tasks 0-1: Exited with exit code 127\\n'); sys.exit(1)"
    )
    result = run(["n0"], "n[0-1]", [sys.executable, "-c", said])
    assert result.silent == ("n0", "n1")
    assert "Exited with exit code 127" in result.problem


def test_a_step_that_hangs_is_given_up_and_ended(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "START_S", 0.5)
    monkeypatch.setattr(module, "GRACE_S", 0.1)
    monkeypatch.setattr(module, "END_S", 0.1)
    cancelled: list[bool] = []
    words = [sys.executable, "-c", "import time; time.sleep(60)"]
    result = run(["n0"], "n0", words, cancel=lambda: cancelled.append(True))
    assert result.problem.startswith("no node answered")
    assert cancelled, "an srun that is killed leaves its allocation"


def test_inside_an_allocation_it_takes_nothing_from_the_jobs_own_steps() -> None:
    argv = step_command(3, inside=True, options=["--mem=1G"], program=["x"])
    assert {"--overlap", "--gres=none", "--mem=0", "--no-kill", "--nodes=3"} <= set(argv)
    assert argv[-2:] == ["--mem=1G", "x"], "the user's options come last, and win"
    assert not any(word.startswith("--immediate") for word in argv)
    outside = step_command(3, inside=False, options=[], program=["x"])
    assert any(word.startswith("--immediate=") for word in outside), "a full cluster is told, not waited for"
