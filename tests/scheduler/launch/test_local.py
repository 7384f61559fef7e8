"""Whole runs on this machine: real agents, real ranks, nodes that die."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from grpc import Channel
from typing_extensions import override

from deeplink.core.clock import SystemClock
from deeplink.core.config import load_config
from deeplink.core.types import Attempt, NodeName
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.launch.backend import LaunchError, RankStep
from deeplink.scheduler.launch.environment import Launch
from deeplink.scheduler.launch.job import run_job
from deeplink.scheduler.launch.launch_spec import LaunchSpec
from deeplink.scheduler.launch.local_backend import LocalBackend
from deeplink.scheduler.recovery.rank_failure import RelaunchLimits
from deeplink.scheduler.recovery.relaunch import AGAIN_CODE, RelaunchPolicy
from deeplink.scheduler.testbed.processes import ProcessId
from tests.waiting import LIMIT_S

pytestmark = [pytest.mark.slow]

RANK = """
import os, signal, sys, time
from pathlib import Path
import deeplink

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
rank = int(os.environ["RANK"])
if os.environ.get("LEAVE_TERM"):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
state = folder / "state"
step = int(state.read_text()) if state.exists() else 0
relaunch = os.environ["DEEPLINK_ATTEMPT"].rpartition(".")[2]
(folder / f"{relaunch}.{rank}.{os.environ['DEEPLINK_NODE']}").write_text(str(os.getpid()))
(folder / f"from.{relaunch}.{rank}").write_text(str(step))
while step < steps or (step < 10_000 and relaunch == "0" and os.environ.get("LOSES_A_NODE")):
    time.sleep(0.05)
    if os.environ.get("HANG_AT") == str(step) and os.environ["DEEPLINK_ATTEMPT"].endswith(".0"):
        time.sleep(600)
    step += 1
    deeplink.report(step=step, loss=1 / step)
    if rank == 0 and step % 5 == 0:
        (folder / "draft").write_text(str(step))
        (folder / "draft").replace(state)
    failing, _, at = os.environ.get("FAIL_AT", "").partition(".")
    if failing == str(rank) and step >= int(at):
        sys.exit(5)
    if os.environ.get("FAIL_ONCE_AT") == f"{rank}.{step}" and relaunch == "0":
        while not state.exists():  # rank 0 may be behind
            time.sleep(0.01)
        sys.exit(5)
"""


class Run:
    def __init__(self, folder: Path, *options: str, steps: int = 10, **env: str) -> None:
        self.folder = folder
        script = folder / "rank.py"
        script.write_text(textwrap.dedent(RANK))
        argv = [sys.executable, "-m", "deeplink", "run", *options, "--"]
        argv += [sys.executable, str(script), str(folder), str(steps)]
        state = {
            "DEEPLINK_STATE": str(folder / "own"),
            "DEEPLINK_STORE": str(folder / "store"),
            "HOME": str(folder),
        }
        self.process = subprocess.Popen(
            argv, env={**os.environ, **state, **env}, stderr=subprocess.PIPE, text=True
        )

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = [
            line for path in self.folder.glob("own/jobs/*/events.jsonl") for line in path.read_text().splitlines()
        ]
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def wait_for(self, question: Callable[[], object], bound_s: float = LIMIT_S) -> None:
        end = time.monotonic() + bound_s
        while not question():
            assert self.process.poll() is None or question(), self.process.communicate()[1]
            assert time.monotonic() < end
            time.sleep(0.05)

    def ended(self) -> tuple[int, str]:
        said = self.process.communicate(timeout=3 * LIMIT_S)[1]
        return self.process.returncode, said


def test_ranks_on_two_nodes_with_two_each(tmp_path: Path) -> None:
    code, said = Run(tmp_path, "--local", "2", "--nproc-per-node", "2").ended()
    assert code == 0, said
    assert sorted(path.name for path in tmp_path.glob("0.*")) == [
        "0.0.local0",
        "0.1.local0",
        "0.2.local1",
        "0.3.local1",
    ]
    assert (tmp_path / "store" / "local1").is_dir()


def test_the_failed_ranks_exit_code_and_no_relaunch_where_none_is_wanted(tmp_path: Path) -> None:
    run = Run(tmp_path, "--local", "2", "--no-retry", steps=5000, FAIL_AT="1.3")
    code, said = run.ended()
    assert code == 5, said
    assert "rank 1" in said
    assert not run.events("relaunch")


def test_ranks_that_fail_once_go_on_where_they_were_saved(tmp_path: Path) -> None:
    run = Run(tmp_path, "--local", "2", steps=30, FAIL_ONCE_AT="1.12")
    code, said = run.ended()
    assert code == 0, said
    assert run.events("relaunch")[0]["because"] == "rank 1 on local1: exit code 5"
    assert int((tmp_path / "from.1.0").read_text()) >= 5, "it went on where it was saved"
    assert recorded(run) == [("rank-failed", "relaunch", "recovered")]


def test_ranks_that_fail_again_without_a_new_step_are_the_applications_failure(tmp_path: Path) -> None:
    run = Run(tmp_path, "--local", "2", "--spares", "1", steps=5000, FAIL_AT="0.12")
    code, said = run.ended()
    assert code == 5, said
    attempts = run.events("attempt-started")
    assert len(attempts) == 2
    silent = {node for event in run.events("node-silent") for node in event["nodes"]}
    if len(run.events("agents-ready")[0]["agents"].keys() - silent) > 1:  # a starved one may come up too late
        assert attempts[0]["nodes"] != attempts[1]["nodes"], "there was another node to try"
    assert "the application" in run.events("ended")[0]["because"]
    assert recorded(run) == [("rank-failed", "relaunch", "recovered"), ("application-failed", "none", "failed")]


def test_an_elastic_run_goes_on_with_fewer_nodes(tmp_path: Path) -> None:
    run = Run(tmp_path, "--local", "3", "--elastic", "2", steps=150, LOSES_A_NODE="1")
    run.wait_for(lambda: (tmp_path / "state").exists() and run.events("first-step"))
    agents = run.events("agents-ready")[0]["agents"]
    os.killpg(agents["local1"]["pid"], signal.SIGKILL)
    code, said = run.ended()
    assert code == 0, said
    attempts = run.events("attempt-started")
    assert [attempt["world_size"] for attempt in attempts] == [3, 2]
    assert attempts[1]["nodes"] == ["local0", "local2"]


def recorded(run: Run) -> list[tuple[str, str, str]]:
    (path,) = run.folder.glob("own/jobs/*/journal.sqlite")
    with Journal(path, read_only=True) as journal:
        found = sorted(journal.incidents(), key=lambda incident: incident.detected_unix)
    assert all(incident.ranks for incident in found)
    return [(incident.kind, str(incident.action), incident.outcome.value) for incident in found]


def test_a_node_that_dies_is_replaced_by_the_spare(tmp_path: Path) -> None:
    run = Run(tmp_path, "--local", "3", "--spares", "1", "--group-size", "2", steps=150, LOSES_A_NODE="1")
    rank = tmp_path / "0.1.local1"
    run.wait_for(lambda: (tmp_path / "state").exists() and run.events("first-step"))
    run.wait_for(lambda: rank.exists() and rank.read_text())
    agents = run.events("agents-ready")[0]["agents"]
    os.killpg(agents["local1"]["pid"], signal.SIGKILL)
    os.kill(int(rank.read_text()), signal.SIGKILL)
    code, said = run.ended()
    assert code == 0, said
    assert run.events("node-silent")[0]["nodes"] == ["local1"]
    assert run.events("attempt-started")[1]["nodes"] == ["local0", "local2"]
    assert [attempt["groups_cut"] for attempt in run.events("attempt-started")] == [{"2": 0}, {"2": 0}]
    assert int((tmp_path / "from.1.0").read_text()) >= 5, "it went on where it was saved"
    assert run.events("ended")[0]["attempts"] == 2


def test_ranks_that_hang_are_started_again_in_place(tmp_path: Path) -> None:
    run = Run(tmp_path, "--local", "2", "--step-timeout", "3", steps=30, HANG_AT="12")
    code, said = run.ended()
    assert code == 0, said
    assert "no progress" in run.events("relaunch")[0]["because"]
    assert run.events("attempt-started")[1]["nodes"] == ["local0", "local1"]


def test_where_ranks_hung_is_kept_of_a_run_that_is_given_up(tmp_path: Path) -> None:
    run = Run(tmp_path, "--local", "2", "--step-timeout", "3", "--max-relaunches", "0", steps=30, HANG_AT="12")
    code, said = run.ended()
    assert code == 1, said
    assert recorded(run) == [("ranks-hung", "none", "failed")]
    (path,) = run.folder.glob("own/jobs/*/journal.sqlite")
    with Journal(path, read_only=True) as journal:
        (incident,) = journal.incidents()
        assert [one.rank for one in journal.stacks(incident.id)] == [0, 1]
    assert "stacks of 2 ranks" in incident.evidence


def test_a_signal_is_passed_on_and_the_answer_comes_back(tmp_path: Path) -> None:
    run = Run(tmp_path, "--local", "2", steps=5000, LEAVE_TERM="1")
    run.wait_for(lambda: run.events("first-step"))
    run.process.send_signal(signal.SIGTERM)
    code, said = run.ended()
    assert code == 9, said


def test_a_signal_while_the_agents_start_ends_them_too(tmp_path: Path) -> None:
    run = Run(tmp_path, "--local", "2", steps=5000)
    run.wait_for(lambda: run.events("job-started"))
    run.process.send_signal(signal.SIGTERM)
    code, said = run.ended()
    assert code == 128 + signal.SIGTERM, said
    assert run.events("ended")[0]["code"] == code


@dataclass(frozen=True)
class Noting(LocalBackend):
    """Remembers that a run told it that no node was lost."""

    told: list[str] = field(default_factory=list)

    @override
    def ended_whole(self) -> None:
        self.told.append("whole")


@dataclass(frozen=True)
class Killing(SystemClock):
    """Ends the agent of local1 once ranks are started."""

    folder: Path
    killed: list[int] = field(default_factory=list)

    @override
    def sleep(self, seconds: float) -> None:
        events = self.folder / "events.jsonl"
        lines = events.read_text().splitlines() if events.exists() and not self.killed else []
        if any('"attempt-started"' in line for line in lines):
            (ready,) = (json.loads(line) for line in lines if '"agents-ready"' in line)
            self.killed.append(ready["agents"]["local1"]["pid"])
            os.killpg(self.killed[0], signal.SIGKILL)
        super().sleep(seconds)


def test_the_loss_that_a_run_is_given_up_for_is_a_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPLINK_STATE", str(tmp_path / "own"))
    names = tuple(NodeName(f"local{number}") for number in range(3))
    folder = tmp_path / "job"
    backend = Noting(1, "ann", names, os.environ, tmp_path / "store", folder)
    order = LaunchSpec(command=(sys.executable, "-c", "import time; time.sleep(600)"), per_node=1, count=2)
    policy = RelaunchPolicy(limits=RelaunchLimits(most_relaunches=0))
    assert run_job(backend, order, load_config(), clock=Killing(folder), policy=policy) == AGAIN_CODE
    assert backend.told == []
    with Journal(folder / "journal.sqlite", read_only=True) as journal:
        (incident,) = journal.incidents()
    assert (incident.kind, incident.node, incident.outcome.value) == ("node-silent", "local1", "failed")


@dataclass(frozen=True)
class ReadOnlyFolder(LocalBackend):
    """Its folder takes no writes while ranks are started for the first times."""

    times: list[int] = field(default_factory=lambda: [2])

    @override
    def start_ranks(
        self, launch: Launch, command: Sequence[str], reach: Callable[[NodeName], Channel]
    ) -> RankStep:
        if self.times[0]:
            self.times[0] -= 1
            raise OSError(errno.EROFS, "Read-only file system", str(self.folder / "launch"))
        return LocalBackend.start_ranks(self, launch, command, reach)


@pytest.mark.parametrize(("patience_s", "code"), [(60.0, 0), (0.0, AGAIN_CODE)])
def test_ranks_are_started_once_the_folder_of_the_job_takes_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience_s: float, code: int
) -> None:
    monkeypatch.setenv("DEEPLINK_STATE", str(tmp_path / "own"))
    folder = tmp_path / "job"
    backend = ReadOnlyFolder(1, "ann", (NodeName("local0"),), os.environ, tmp_path / "store", folder)
    order = LaunchSpec(command=("true",), per_node=1, count=1, strand_timeout_s=patience_s)
    if code:
        with pytest.raises(LaunchError, match="takes no writes") as raised:
            run_job(backend, order, load_config())
        assert raised.value.exit_code == code
    else:
        assert run_job(backend, order, load_config()) == 0
        events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        assert [one["event"] for one in events].count("waiting") == 1


def test_too_few_nodes_left_and_nobody_to_ask_is_an_end_with_75(tmp_path: Path) -> None:
    run = Run(tmp_path, "--local", "2", steps=5000)
    run.wait_for(lambda: run.events("first-step"))
    agents = run.events("agents-ready")[0]["agents"]
    os.killpg(agents["local0"]["pid"], signal.SIGKILL)
    code, said = run.ended()
    assert code == 75, said
    assert "local0" in said


def test_nothing_stays_behind(tmp_path: Path) -> None:
    run = Run(tmp_path, "--local", "2")
    code, said = run.ended()
    assert code == 0, said
    for agent in run.events("agents-ready")[0]["agents"].values():
        with pytest.raises(ProcessLookupError):
            os.kill(agent["pid"], 0)


def test_ranks_meet_at_a_port_that_the_kernel_gives_to_nobody_who_connects_meanwhile(tmp_path: Path) -> None:
    backend = LocalBackend.on_this_machine(1, os.environ, tmp_path / "store", tmp_path / "own")
    given = range(*map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()))
    ports = [backend.port_for(Attempt(backend.job, 0, relaunch)) for relaunch in range(20)]
    assert not [port for port in ports if port in given]
    assert len(set(ports)) > 1
    with socket.create_server(("", ports[0])):
        assert backend.port_for(Attempt(backend.job, 0, 0)) != ports[0]


@dataclass(frozen=True)
class BrokenClock(SystemClock):
    """Fails, as an error of ours would, once rank 0 runs."""

    pid_file: Path

    @override
    def sleep(self, seconds: float) -> None:
        if self.pid_file.exists() and self.pid_file.read_text():
            raise ArithmeticError("an error of ours")
        super().sleep(seconds)


def test_an_error_of_ours_leaves_no_rank_unwatched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPLINK_STATE", str(tmp_path / "own"))
    pid_file = tmp_path / "pid"
    rank = (
        f"import os, pathlib, time; pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid())); time.sleep(600)"
    )
    backend = LocalBackend.on_this_machine(1, os.environ, tmp_path / "store", tmp_path / "own")
    order = LaunchSpec(command=(sys.executable, "-c", rank), per_node=1, count=1)
    with pytest.raises(ArithmeticError):
        run_job(backend, order, load_config(), clock=BrokenClock(pid_file))
    assert ProcessId.of(int(pid_file.read_text())) is None


@pytest.mark.slow
def test_ranks_that_are_started_again_are_told_how_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPLINK_STATE", str(tmp_path / "own"))
    rank = (
        "import os, pathlib, sys; "
        f"said = pathlib.Path({str(tmp_path)!r}) / os.environ['TORCHELASTIC_RESTART_COUNT']; "
        "said.write_text(os.environ['TORCHELASTIC_MAX_RESTARTS']); sys.exit(3 if said.name == '0' else 0)"
    )
    backend = LocalBackend.on_this_machine(1, os.environ, tmp_path / "store", tmp_path / "own")
    order = LaunchSpec(command=(sys.executable, "-c", rank), per_node=1, count=1)
    assert run_job(backend, order, load_config()) == 0
    assert ((tmp_path / "0").read_text(), (tmp_path / "1").read_text()) == ("2", "3")


@pytest.mark.slow
def test_what_a_launcher_leaves_is_its_users_alone_and_ranks_have_the_umask_they_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPLINK_STATE", str(tmp_path / "own"))
    backend = LocalBackend.on_this_machine(1, os.environ, tmp_path / "store", tmp_path / "own")
    order = LaunchSpec(command=("sh", "-c", f"umask > {tmp_path}/mask"), per_node=1, count=1)
    before = os.umask(0o022)
    try:
        assert run_job(backend, order, load_config()) == 0
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
    assert (tmp_path / "mask").read_text() == "0022\n"
    modes = {path.name: f"{stat.S_IMODE(path.stat().st_mode):04o}" for path in backend.folder.iterdir()}
    assert {"events.jsonl", "attempt", "journal.sqlite"} <= set(modes)
    assert set(modes.values()) <= {"0600", "0700"}, modes
