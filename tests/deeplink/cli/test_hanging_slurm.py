"""`deeplink run` and `deeplink pack` in an allocation whose srun hangs, fails, or is not there."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import deeplink.cli
from deeplink.cli import main
from deeplink.scheduler.launch import agent_pool
from deeplink.scheduler.testbed.processes import ProcessId

Fails = Callable[[], tuple[int, str]]


def program(bin_folder: Path, text: str, name: str = "srun") -> None:
    path = bin_folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job of two nodes whose programs are those of the returned folder alone."""
    for name in [name for name in os.environ if name.startswith(("SLURM", "DEEPLINK_"))]:
        monkeypatch.delenv(name)
    for name, value in {"JOB_ID": "7", "JOB_NUM_NODES": "2", "JOB_NODELIST": "n[0-1]"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    for name in ("CATALOG", "STORE", "STATE"):
        monkeypatch.setenv(f"DEEPLINK_{name}", str(tmp_path / name.lower()))
    monkeypatch.setenv("DEEPLINK_CONFIG", os.devnull)
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    program(
        folder,
        r"printf 'JobId=7 JobName=x\n   Requeue=1 Restarts=0\n   NumNodes=2 NumCPUs=2 NumTasks=2 CPUs/Task=1\n'",
        "scontrol",
    )
    return folder


@pytest.fixture(params=["run", "pack"])
def fails(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Fails:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a").write_text("a")
    words = {"run": ["--", "true"], "pack": [str(tmp_path / "source"), "digits"]}[request.param]

    def call() -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["deeplink", request.param, *words])
        monkeypatch.setattr(deeplink.cli, "OWN_PROCESS", None)  # this one is pytest's: it must not become a parent
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        return ended.value.code, capsys.readouterr().err

    return call


def test_an_srun_that_hangs_is_named_and_ended(
    bin_folder: Path,
    fails: Fails,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    program(bin_folder, f"echo $$ >{tmp_path}/pid; exec /bin/sleep 60")
    monkeypatch.setattr(agent_pool, "QUIET_S", 0.2)
    monkeypatch.setattr(agent_pool, "START_S", 3.0)
    code, said = fails()
    assert code == 1
    assert "srun still hangs" in said
    assert "`scontrol ping`" in said
    # A shard that an earlier test's reader heals in the background may be said meanwhile.
    said_by_launch = [record for record in caplog.records if record.name.startswith("deeplink.scheduler")]
    assert [record.message.partition(",")[0] for record in said_by_launch] == [
        "srun has not started the agents yet"
    ]
    assert ProcessId.of(int((tmp_path / "pid").read_text())) is None


def test_an_srun_that_fails_is_quoted(bin_folder: Path, fails: Fails, tmp_path: Path) -> None:
    log = tmp_path / "state" / "jobs" / "7" / "agents.log"
    log.parent.mkdir(parents=True)
    log.write_text("of an earlier step\n")
    program(bin_folder, "exit 3")
    assert "srun exited 3 before an agent came up on n0, n1: (it said nothing)" in fails()[1]
    program(bin_folder, "echo 'srun: error: Invalid account' >&2; exit 1")
    code, said = fails()
    assert code == 1
    assert "srun: error: Invalid account" in said
    assert str(log) in said


@pytest.mark.usefixtures("bin_folder")
def test_an_srun_that_is_not_there_is_127(fails: Fails) -> None:
    code, said = fails()
    assert code == 127
    assert "srun is not on PATH" in said
