"""Ranks that hang, in whole runs on this machine: who is restarted, who is left alone, what is kept."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.recovery.records import IncidentOutcome
from deeplink.scheduler.recovery.relaunch import RelaunchPolicy
from tests.waiting import LIMIT_S

pytestmark = [pytest.mark.slow]

RANK = """
import os, sys, threading, time
from pathlib import Path
import deeplink

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
rank, attempt = int(os.environ["RANK"]), os.environ["DEEPLINK_ATTEMPT"].rpartition(".")[2]
(folder / f"{attempt}.{rank}").write_text(str(os.getpid()))
state = folder / "state"
first = int(state.read_text()) if state.exists() else 0

def all_reduce(step):
    '''Wait until every rank has done this step.'''
    (folder / f"at.{rank}.{step}").touch()
    while not all((folder / f"at.{other}.{step}").exists() for other in range(int(os.environ["WORLD_SIZE"]))):
        time.sleep(0.01)

def sleeps():
    threading.Event().wait(500)

end = time.monotonic() + 500

def waits(step, where):
    return str(step) == os.environ.get(where) and attempt == "0" and not (folder / "go").exists()

for step in range(first + 1, steps + 1):
    while waits(step, "GATE") and time.monotonic() < end:
        time.sleep(0.01)
    while waits(step, "PAUSE_AT") and time.monotonic() < end:
        sum(range(10_000))
    if rank == 1 and waits(step, "SLEEPS_AT"):
        sleeps()
    time.sleep(0.05)
    all_reduce(step)
    deeplink.report(step=step, work_s=0.05 * (2.0 if os.environ.get("SLOW") == str(rank) else 1.0))
    if rank == 0 and step % 5 == 0:
        (folder / "draft").write_text(str(step))
        (folder / "draft").replace(state)
"""


class Run:
    def __init__(
        self,
        folder: Path,
        *options: str,
        steps: int = 10,
        by: Sequence[str] = (),
        script: Path | None = None,
        **env: str,
    ) -> None:
        self.folder = folder
        if script is None:
            script = folder / "rank.py"
            script.write_text(textwrap.dedent(RANK))
        argv = [sys.executable, "-m", "deeplink", "run", *options, "--"]
        argv += [*(by or [sys.executable]), str(script), str(folder), str(steps)]
        state = {
            "DEEPLINK_STATE": str(folder / "own"),
            "DEEPLINK_STORE": str(folder / "store"),
            "HOME": str(folder),
        }
        self.process = subprocess.Popen(
            argv, env={**os.environ, **state, **env}, stderr=subprocess.PIPE, text=True
        )

    @property
    def job(self) -> Path:
        (found,) = self.folder.glob("own/jobs/*")
        return found

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = [
            line for path in self.folder.glob("own/jobs/*/events.jsonl") for line in path.read_text().splitlines()
        ]
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def wait_for(self, question: Callable[[], object], bound_s: float = LIMIT_S) -> None:
        end = time.monotonic() + bound_s
        while not question():
            assert self.process.poll() is None or question(), self.process.communicate()[1]
            assert time.monotonic() < end, self.events("late")
            time.sleep(0.05)

    def has_step(self, step: int) -> bool:
        state = self.folder / "state"
        return state.exists() and int(state.read_text()) >= step

    def has_begun(self, rank: int) -> bool:
        file = self.folder / f"0.{rank}"
        return file.exists() and bool(file.read_text())

    def stop_ranks(self, *ranks: int) -> None:
        """Stop these, which is not too late: from the gate on nobody goes on before."""
        for rank in ranks:
            os.kill(int((self.folder / f"0.{rank}").read_text()), signal.SIGSTOP)
        (self.folder / "go").touch()

    def ended(self) -> tuple[int, str]:
        said = self.process.communicate(timeout=3 * LIMIT_S)[1]
        return self.process.returncode, said


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(*options: str, **env: Any) -> Run:
        runs.append(Run(tmp_path, *options, **env))
        return runs[-1]

    yield begin
    for one in runs:
        if one.process.poll() is None:
            one.process.kill()
            for file in one.folder.glob("[0-9].[0-9]"):  # a stopped one minds nothing else
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(file.read_text()), signal.SIGKILL)
            one.process.communicate(timeout=LIMIT_S)


def test_a_stopped_rank_is_found_by_what_was_learned_and_its_node_left_out(run: Callable[..., Run]) -> None:
    job = run("--local", "4", "--spares", "1", steps=170, GATE="101")
    job.wait_for(lambda: job.has_step(100))
    job.stop_ranks(1)
    code, said = job.ended()
    assert code == 0, said
    (relaunch,) = job.events("relaunch")
    assert "rank 1 is stopped by a signal" in relaunch["because"]
    assert "learned" in relaunch["because"]
    (stacks,) = job.events("stacks")
    assert stacks["blamed"] == [1]
    assert "local3" in job.events("attempt-started")[1]["nodes"]
    text = Path(stacks["file"]).read_text()
    assert "=== rank 1 on local1" in text
    assert "stopped (T)" in text
    assert "all_reduce" in text, "where the others wait"
    with Journal(job.job / "journal.sqlite", read_only=True) as journal:
        (incident,) = journal.incidents()
        assert incident.kind == "ranks-hung"
        assert stacks["file"] in incident.evidence
        assert [stack.state for stack in journal.stacks(incident.id)][1] == "T"


@pytest.mark.parametrize("at", [1, 0])
def test_a_rank_that_is_stopped_before_anything_was_learned_is_found_too(run: Callable[..., Run], at: int) -> None:
    job = run("--local", "3", steps=80, GATE="20")
    job.wait_for(lambda: job.has_begun(1) if not at else (job.folder / "at.1.5").exists())
    job.stop_ranks(1)
    job.wait_for(lambda: job.events("relaunch"))
    (relaunch,) = job.events("relaunch")
    assert "rank 1 is stopped by a signal" in relaunch["because"]
    code, said = job.ended()
    assert code == 0, said


def test_a_stopped_rank_below_torchrun_is_found_on_its_own_node(run: Callable[..., Run]) -> None:
    by = [sys.executable, "-m", "torch.distributed.run"]
    job = run("--local", "2", "--nproc-per-node", "2", "--recipe", "torchrun", steps=200, by=by, GATE="20")
    job.wait_for((job.folder / "at.1.5").exists)
    job.stop_ranks(1)  # the number that the second node's torchrun was given, too
    job.wait_for(lambda: job.events("relaunch"))
    (relaunch,) = job.events("relaunch")
    assert "rank 1 is stopped by a signal" in relaunch["because"]
    (stacks,) = job.events("stacks")
    assert stacks["blamed"] == [1]
    text = Path(stacks["file"]).read_text()
    assert text.count("=== rank 1 on ") == text.count("=== rank 1 on local0") == 1
    # torchrun gave it a session of its own, which nobody ends on this machine.
    os.kill(int((job.folder / "0.1").read_text()), signal.SIGKILL)
    job.process.send_signal(signal.SIGTERM)
    job.ended()


def test_a_pause_in_which_ranks_work_is_told_and_nothing_else(run: Callable[..., Run]) -> None:
    job = run("--local", "2", steps=120, PAUSE_AT="110")
    job.wait_for(lambda: job.events("late"))
    time.sleep(4.0)  # they are looked at again meanwhile
    (job.folder / "go").touch()
    code, said = job.ended()
    assert code == 0, said
    assert not job.events("relaunch")
    assert job.events("ended")[0]["attempts"] == 1
    assert {event["answer"] for event in job.events("late")} == {"working"}


def test_a_job_whose_ranks_are_all_stopped_is_somebody_elses_business(run: Callable[..., Run]) -> None:
    job = run("--local", "2", steps=220, GATE="181")
    job.wait_for(lambda: job.has_step(180))
    job.stop_ranks(0, 1)
    job.wait_for(lambda: job.events("late"))
    assert job.events("late")[0]["answer"] == "held"
    for rank in range(2):
        os.kill(int((job.folder / f"0.{rank}").read_text()), signal.SIGCONT)
    code, said = job.ended()
    assert code == 0, said
    assert not job.events("relaunch")


def test_a_straggler_is_told_and_replaced_where_that_is_wanted(run: Callable[..., Run]) -> None:
    job = run("--local", "4", "--spares", "1", "--replace-stragglers", steps=400, SLOW="2")
    job.wait_for(lambda: job.events("relaunch"))
    (told,) = job.events("straggler")
    assert (told["rank"], told["node"]) == (2, "local2")
    assert 1.9 < told["factor"] < 2.1
    job.wait_for(lambda: len(job.events("attempt-started")) > 1)
    assert "local2" not in job.events("attempt-started")[1]["nodes"]
    job.process.send_signal(signal.SIGTERM)
    job.ended()


def test_an_agent_that_is_stopped_while_training_goes_on_costs_nothing(run: Callable[..., Run]) -> None:
    job = run("--local", "3", "--spares", "1", steps=1000)
    job.wait_for(lambda: job.has_step(20))
    argv = f"--name local1 --store {job.folder}"
    found = subprocess.run(["pgrep", "-f", "--", argv], check=True, capture_output=True, text=True).stdout
    agent = [int(pid) for pid in found.split()]  # and what it started
    assert agent
    for pid in agent:
        os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        while time.monotonic() - began < RelaunchPolicy().starved_s + 10.0:
            assert not job.events("relaunch")
            time.sleep(0.5)
    finally:
        for pid in agent:
            os.kill(pid, signal.SIGCONT)
    code, said = job.ended()
    assert code == 0, said
    assert job.events("ended")[0]["attempts"] == 1


GLOO = Path(__file__).parents[2] / "cluster" / "gloo_rank.py"


def test_a_rank_three_times_as_slow_by_ddp_is_told_and_a_healthy_job_tells_nobody(
    run: Callable[..., Run], tmp_path: Path
) -> None:
    job = run("--local", "3", steps=100_000, script=GLOO)
    job.wait_for(lambda: job.has_step(5))
    time.sleep(15.0)  # four windows of 16 steps, and ten seconds
    assert not job.events("straggler")
    (tmp_path / "slow").write_text("1")
    job.wait_for(lambda: job.events("straggler"))
    (told,) = job.events("straggler")
    assert (told["rank"], told["node"]) == (1, "local1")
    assert 2.0 < told["factor"] < 3.5, told
    (tmp_path / "end").touch()
    code, said = job.ended()
    assert code == 0, said
    assert not job.events("relaunch")


def test_a_rank_that_does_nothing_is_found_after_half_a_minute_by_where_the_others_are(
    run: Callable[..., Run],
) -> None:
    job = run("--local", "3", "--spares", "1", steps=60, SLEEPS_AT="30")
    job.wait_for(lambda: job.events("relaunch"))
    (relaunch,) = job.events("relaunch")
    assert "rank 1 on local1 is in " in relaunch["because"]
    assert "wait (threading.py), 1 other in all_reduce" in relaunch["because"]
    job.wait_for(lambda: len(job.events("attempt-started")) > 1)
    assert "local1" not in job.events("attempt-started")[1]["nodes"]
    code, said = job.ended()
    assert code == 0, said


def test_a_straggler_without_a_spare_is_an_incident_that_ends_with_the_job(run: Callable[..., Run]) -> None:
    job = run("--local", "3", "--replace-stragglers", steps=300, SLOW="0")
    code, said = job.ended()
    assert code == 0, said
    assert not job.events("relaunch")
    assert job.events("straggler")[0]["rank"] == 0
    with Journal(job.job / "journal.sqlite", read_only=True) as journal:
        (incident,) = journal.incidents()
        assert (incident.kind, incident.node, incident.action) == ("straggler", "local0", "none")
        assert "2.00 x the median" in incident.evidence
        assert incident.outcome is IncidentOutcome.RECOVERED
