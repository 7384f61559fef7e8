"""`deeplink plan` beside programs that stand for Slurm's, and how long it lives."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from deeplink.cli import cli
from deeplink.core.clock import ManualClock
from deeplink.core.config import Config
from deeplink.core.descriptors import LockHeldError
from deeplink.core.types import NodeName
from deeplink.ops.submit import MOST_AT_ONCE, BackgroundPrefetch, surveyed
from deeplink.scheduler.jobs.job_view import me
from deeplink.scheduler.placement.hint import decision
from deeplink.scheduler.placement.hint.cluster_survey import parse_queue
from deeplink.scheduler.placement.hint.decision import Ask, Decision, HintKind, Recorded, Why
from deeplink.scheduler.placement.hint.planner import (
    LEAST_S,
    Planner,
    holding,
    live,
    planner_file,
)
from deeplink.scheduler.placement.hint.reconcile import Mine, SurveyedCluster
from deeplink.scheduler.placement.model import Constants, constants_text
from deeplink.scheduler.slurm.client import Slurm
from deeplink.scheduler.slurm.command import CommandMissingError
from tests.scheduler.placement.hint.simulated import survey_of

SQUEUE = f"""#!/usr/bin/env python3
import sys
separator = sys.argv[-1].removeprefix("%A").partition("%")[0]
print("7|7|PENDING|Resources|{me()}|main|2|5|||(null)|(null)||".replace("|", separator))
"""
SCONTROL = """#!/bin/sh
[ "$1" = update ] && echo "$@" >> "$DONE"
[ -n "$REFUSED" ] && [ "$1" = update ] && { echo "Access denied" >&2; exit 1; }
exit 0
"""
SINFO = """#!/bin/sh
exit 0
"""
FEW = Decision(kind=HintKind.SWITCHES, why=Why.BUSY, words="", switches=1, patience_s=60)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("squeue", SQUEUE), ("scontrol", SCONTROL), ("sinfo", SINFO)):
        (programs / name).write_text(text)
        (programs / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("DEEPLINK_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("DONE", str(tmp_path / "done"))
    monkeypatch.delenv("SLURM_CONF", raising=False)
    made = Recorded(unix=1.0, by="sbatch", ask=Ask(nodes=2, partition="main"), decision=FEW)
    decision.append(decision.job_folder(tmp_path / "state", 7), made)
    return tmp_path / "state"


def said(*words: str, code: int = 0) -> dict[str, Any]:
    done = CliRunner().invoke(cli, ["plan", "--once", "--json", *words])
    assert done.exit_code == code, (done.output, done.exception)
    return dict(json.loads(done.stdout))


def test_one_look_changes_what_is_to_be_changed_and_a_dry_run_nothing(state: Path, tmp_path: Path) -> None:
    dry = said("--dry-run")
    # sinfo names no node: the job can never run there, which is no reason to leave it a hint.
    assert (dry["job"], dry["deed"], dry["changes"], dry["done"]) == (
        "7",
        "drop",
        {"Switches": "2@00:00:00"},
        False,
    )
    assert not (tmp_path / "done").exists()
    assert said("--job", "7")["done"] is True
    assert (tmp_path / "done").read_text() == "update jobid=7 Switches=2@00:00:00\n"
    assert decision.read(decision.job_folder(state, 7))[-1].by == "plan"
    text = CliRunner().invoke(cli, ["plan", "--once"])
    assert text.exit_code == 0
    assert "leave" in text.stdout


def test_what_slurm_refuses_is_reported_and_fails(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFUSED", "yes")
    assert said(code=1)["problem"] == "Access denied"


def test_another_planner_is_named(state: Path) -> None:
    with holding(planner_file(state, {}, "lock"), 1.0):
        done = CliRunner().invoke(cli, ["plan", "--once"])
        assert isinstance(done.exception, LockHeldError)
        assert str(os.getpid()) in str(done.exception)
        assert said("--dry-run")["job"] == "7"


def test_a_job_that_does_not_wait_is_said_so(state: Path) -> None:
    done = CliRunner().invoke(cli, ["plan", "--once", "--job", "8"])
    assert done.exit_code == 1
    assert "job 8 does not wait" in done.stderr


def test_wrong_usage_and_no_slurm(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CliRunner().invoke(cli, ["plan", "--once", "--until-idle"]).exit_code == 2
    monkeypatch.setenv("PATH", "/nowhere")
    assert isinstance(CliRunner().invoke(cli, ["plan", "--once"]).exception, CommandMissingError)


@pytest.fixture
def signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def planner(tmp_path: Path, rounds: list[str], said: list[str]) -> Planner:
    """Return one whose squeue tells these states of job 7, the last one for ever."""
    made = Recorded(unix=1.0, by="sbatch", ask=Ask(nodes=2, exclusive=True), decision=FEW)
    decision.append(decision.job_folder(tmp_path, 7), made)

    def run(argv: Sequence[str], /, *, timeout_s: float = 0.0) -> str:
        if argv[0] != "squeue":
            return ""
        found = rounds.pop(0) if len(rounds) > 1 else rounds[0]
        if found == "TERM":
            os.kill(os.getpid(), signal.SIGTERM)
        if found in {"", "TERM"}:
            return ""
        row = f"7|7|{found}|Priority|me|main|2|5|||(null)|(null)||\n"
        return row.replace("|", argv[-1].removeprefix("%A").partition("%")[0])

    return Planner(
        slurm=Slurm(run),
        user="me",
        state=tmp_path,
        survey=lambda _jobs: survey_of(set()),
        clock=ManualClock(),
        say=said.append,
    )


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize(
    ("job", "until_idle", "act", "rounds"),
    [
        (7, False, True, ["PENDING", "PENDING", "RUNNING"]),
        (7, False, True, ["PENDING", ""]),  # cancelled, or forgotten
        (None, True, True, ["PENDING", "", "", ""]),
        (None, True, True, ["", "", "PENDING", "PENDING", "", "", ""]),  # one came late
        (None, False, False, ["PENDING", "TERM"]),
    ],
    ids=["started", "cancelled", "idle", "came as it was ending", "terminated"],
)
def test_it_ends_when_no_job_needs_it(
    tmp_path: Path, job: int | None, until_idle: bool, act: bool, rounds: list[str]
) -> None:
    left = list(rounds)
    looking = planner(tmp_path, left, [])
    looking.only, looking.act = job, act
    live(looking, until_idle=until_idle)
    assert len(left) == 1


@pytest.mark.usefixtures("signals")
def test_one_that_is_not_needed_ends_without_a_word(tmp_path: Path) -> None:
    with holding(planner_file(tmp_path, os.environ, "lock"), 1.0):
        live(planner(tmp_path, ["PENDING"], []), until_idle=True)
        with pytest.raises(LockHeldError, match="a planner runs already"):
            live(planner(tmp_path, ["PENDING"], []), until_idle=False)


@pytest.mark.usefixtures("signals")
def test_a_job_that_is_submitted_during_a_round_is_looked_at_at_once_but_not_faster_than_slurm_may_be_asked(
    tmp_path: Path,
) -> None:
    rounds = ["PENDING"] * 20 + ["TERM"]
    looking = planner(tmp_path, rounds, [])
    asked: list[float] = []
    surveyed = looking.survey

    def counted(jobs: Sequence[Mine]) -> SurveyedCluster:
        asked.append(looking.clock.monotonic())
        (tmp_path / "jobs" / str(100 + len(asked))).mkdir()
        return surveyed(jobs)

    looking.survey = counted
    looking.act = False
    live(looking, until_idle=False)
    assert [later - before for before, later in pairwise(asked)] == [LEAST_S] * 19


def test_nodes_bring_data_for_few_jobs_at_once_and_nothing_is_left_of_those_that_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho $* >>$DONE\nread word <$GATE\n")
    program.chmod(stat.S_IRWXU)
    os.mkfifo(tmp_path / "gate")
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setenv("DONE", str(tmp_path / "done"))
    monkeypatch.setenv("GATE", str(tmp_path / "gate"))
    (tmp_path / "plan").mkdir()
    said: list[str] = []
    bring = BackgroundPrefetch(Config(state=tmp_path, members="n1:1"), said.append)
    for job in range(MOST_AT_ONCE + 1):
        bring(job, ("images",), [NodeName("n1")])
    assert "not warmed" in said[-1]
    assert len(said) == MOST_AT_ONCE + 1
    running = [int(line.partition("process ")[2].partition(",")[0]) for line in said[:-1]]
    with (tmp_path / "gate").open("w") as gate:
        gate.write("go\n" * MOST_AT_ONCE)
        gate.flush()
        for number in running:
            os.waitid(os.P_PID, number, os.WEXITED | os.WNOWAIT)
    bring(9, ("images",), [NodeName("n1")])
    assert "process" in said[-1]
    assert [Path(f"/proc/{number}").exists() for number in running] == [False] * MOST_AT_ONCE
    (tmp_path / "gate").open("w").close()
    last = int(said[-1].partition("process ")[2].partition(",")[0])
    os.waitpid(last, 0)
    assert "-P -m deeplink prefetch --nodes n1 -- images" in (tmp_path / "done").read_text()


def test_the_planner_compares_by_the_step_too(state: Path, tmp_path: Path) -> None:
    (tmp_path / "constants.json").write_text(constants_text(Constants()))
    (tmp_path / "bin" / "sinfo").write_text(
        '#!/bin/sh\nfor n in 0 1 2; do echo "n$n|main*|up|infinite|NO|idle|fast||gpu:0|0/4/0/4|4000|0|"; done\n'
    )
    said_by_slurm = "Job 9 to start at 2030-01-01T00:00:00 using 8 processors on nodes n[0-1] in partition main"
    (tmp_path / "bin" / "sbatch").write_text(f"#!/bin/sh\necho '{said_by_slurm}' >&2\n")
    (tmp_path / "bin" / "sbatch").chmod(stat.S_IRWXU)
    config = Config(state=state, model=tmp_path / "constants.json")
    profile = '{"format": 1, "batch": 1, "sample_s": 1, "gradient_bytes": 1}'
    asks = [Ask(nodes=2, exclusive=True, profile=text) for text in (profile, "")]
    seen = surveyed(config, [mine_asking(ask) for ask in asks])
    assert [seen.best(ask, frozenset()).cost for ask in asks] == ["predicted step", "weights"]
    assert surveyed(config, [mine_asking(asks[1])]).machines.constants is None


def mine_asking(ask: Ask) -> Mine:
    row = parse_queue("7|7|PENDING|Resources|me|main|2|5|||(null)|(null)||\n", "|")[0]
    return Mine(row=row, ask=ask, wish=FEW, wished_at=1.0)
