"""`deeplink status`, `top`, `logs` and `cancel` beside programs that stand for Slurm's."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from typing_extensions import override

from deeplink.cli import cli, status_screen
from deeplink.cli.output import console, figure
from deeplink.cli.status import ScreenChoice, ordered
from deeplink.cli.status_screen import of_job
from deeplink.core.clock import ManualClock, SystemClock
from deeplink.core.errors import DeepLinkError
from deeplink.core.types import NodeName
from deeplink.scheduler.jobs.job_folder import note
from deeplink.scheduler.jobs.job_view import JobOnFabric
from deeplink.scheduler.jobs.picture import Picture, TrainingRate
from deeplink.scheduler.placement.hint.decision import Ask, Decision, HintKind, Recorded, Why, append
from deeplink.scheduler.recovery.records import Phase
from deeplink.scheduler.slurm import command as processes
from deeplink.scheduler.slurm.command import Finished
from deeplink.scheduler.topology.graph import Fabric
from tests.scheduler.jobs.left import event, launched
from tests.scheduler.jobs.programs import TOPOLOGY, Programs, job, nodes

Call = Callable[..., Result]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    for name in [name for name in os.environ if name.startswith(("SLURM", "DEEPLINK_", "SQUEUE_"))]:
        monkeypatch.delenv(name)
    programs = Programs(tmp_path / "slurm")
    monkeypatch.setenv("PATH", f"{programs.bin}:{os.environ['PATH']}")
    monkeypatch.setenv("DEEPLINK_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("DEEPLINK_CONFIG", os.devnull)
    runtime = tmp_path / "run"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setattr("deeplink.scheduler.jobs.job_view.me", lambda: "eve")
    programs.say(
        **{
            "jobs": [job(7), job(8, "PENDING", Reason="Resources")],
            "scontrol show node": nodes(["n0", "n1", "n2"], "ALLOCATED"),
            "scontrol show topology": TOPOLOGY,
        }
    )
    return programs


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def call(slurm: Programs) -> Call:
    def run(*words: str, env: dict[str, str] | None = None) -> Result:
        done = CliRunner(env=env).invoke(cli, words)
        if isinstance(done.exception, Exception) and not isinstance(done.exception, DeepLinkError | SystemExit):
            raise done.exception
        return done

    return run


def lines(done: Result) -> dict[str, str]:
    """Return the facts of one screen by their names."""
    found = (re.match(r"(\w\S*)\s{2,}(\S.*?)\s*$", line) for line in done.stdout.splitlines())
    return {each[1]: each[2] for each in found if each}


def test_one_job_on_one_screen(call: Call, state: Path) -> None:
    launched(state, 7, SystemClock().unix())
    done = call("status", "7")
    assert done.exit_code == 0
    facts = lines(done)
    assert facts["state"] == "RUNNING; its launcher: running"
    assert facts["attempt"].startswith("7.0.0 (started again by Slurm: 0")
    assert facts["step"].startswith("5, ")
    assert facts["step"].endswith("1 steps/s")
    assert (facts["loss"], facts["samples/s"], facts["reads"]) == ("0.2", "8", "unknown")
    assert facts["ring"] == "2 of 2 hops cross leaf switches (2 in order of names); its ranks are on 2 leaves"
    assert facts["checkpoint"] == "unknown"
    assert facts["incident"] == "none open"
    assert "n1  ranks 0-1" in done.stdout
    assert "n2  spare" in done.stdout
    assert "\x1b" not in done.stdout


def test_a_job_that_waits_says_for_what(call: Call) -> None:
    facts = lines(call("status", "8"))
    assert facts["state"] == "PENDING; Resources: no suitable nodes are free"
    assert facts["nodes"] == "none now"
    assert facts["step"] == "unknown"


def test_the_table(call: Call, state: Path) -> None:
    launched(state, 7, SystemClock().unix())
    said = call("status").stdout
    assert re.search(r"7 +tr ü +RUNNING +0\.0 +3 +5 +1 +8 +0\.2 +unknown", said)
    assert "1 more job of yours without DeepLink: --all" in said
    assert "PENDING" in call("status", "--all").stdout


def test_a_held_job_is_reported_with_the_command_that_lets_it_go(call: Call, slurm: Programs, state: Path) -> None:
    launched(state, 9, SystemClock().unix(), phase=Phase.FAILED, sick="n0")
    held = job(9, "PENDING", Reason="job requeued in held state", JobArrayID="6_2", RestartCnt="1")
    slurm.say(jobs=[held])
    said = call("status").stdout
    assert "PENDING held" in said
    assert "failed" not in said
    assert "job 6_2: held: `scontrol release 6_2` lets it start" in said
    one = call("status", "6_2").stdout
    assert re.search(r"remedy +held: `scontrol release 6_2` lets it start", one)
    assert "its launcher" not in one
    told = json.loads(call("status", "6_2", "--json").stdout)
    assert (told["held"], told["phase"], told["remedies"]) == (
        True, None, ["held: `scontrol release 6_2` lets it start"],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("required", "now", "is_told"),
    [
        ("n[0-1]", "PENDING", True),
        ("n[0-2]", "PENDING", False),
        ("(null)", "PENDING", False),
        ("n[0-1]", "RUNNING", False),
    ],
)
def test_a_job_that_waits_for_the_nodes_hinted_for_it_is_reported_with_what_frees_it(
    call: Call, slurm: Programs, state: Path, required: str, now: str, *, is_told: bool
) -> None:
    wished = Decision(kind=HintKind.NODES, why=Why.FREE_NOW, words="", nodes=(NodeName("n1"), NodeName("n0")))
    append(
        state / "jobs" / "9", Recorded(unix=SystemClock().unix(), by="sbatch", ask=Ask(nodes=2), decision=wished)
    )
    slurm.say(jobs=[job(9, now, ReqNodes=required)])
    said = (
        "it waits for the nodes that were hinted for it, n[0-1]: "
        "`scontrol update jobid=9 ReqNodeList=` lets it start anywhere"
    )
    assert call("status").stdout.count(f"job 9: {said}") == is_told
    assert bool(re.search(r"remedy +" + re.escape(said), call("status", "9").stdout)) is is_told


def test_what_checks_find_on_a_jobs_nodes_is_reported_with_what_helps(call: Call, state: Path) -> None:
    launched(state, 7, SystemClock().unix(), sick="n0")
    expected = "n0: disk (comment): slow; `deeplink health` on n0 looks again"
    assert f"job 7: {expected}" in call("status").stdout
    assert expected in call("status", "7").stdout


def test_json_has_null_for_what_is_not_known(call: Call, state: Path) -> None:
    launched(state, 7, SystemClock().unix())
    one = json.loads(call("status", "7", "--json").stdout)
    assert (one["id"], one["step"], one["samples_per_s"], one["reads"], one["open_incident"]) == (
        7,
        5,
        8.0,
        None,
        None,
    )
    assert one["seats"][0] == {
        "node": "n1", "ranks": [0, 1], "spare": False, "trouble": "", "switches": ["core", "leaf1"],
    }  # fmt: skip
    table = json.loads(call("status", "--all", "--json").stdout)
    assert [each["state"] for each in table["jobs"]] == ["RUNNING", "PENDING"]
    assert table["slurm"]["problem"] is None


def test_many_looks_are_one_question_of_each_kind(
    call: Call, slurm: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deeplink.cli.status.DEFAULT_S", 1e6)
    for _ in range(3):
        call("status", "7")
        call("status", "8")
    assert [argv[0:3] for argv in slurm.asked()] == [
        ["squeue", "-h", "-a"],
        ["scontrol", "show", "node"],
        ["scontrol", "show", "topology"],
    ]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["status", "99"], 1, "Slurm knows no such job"),
        (["status", "n0"], 2, "is no job id"),
        (["status", "7", "--all"], 2, "--all"),
        (["status", "--watch=0"], 2, "--watch"),
        (["logs", "x7"], 2, "is no job id"),
        (["logs", "8"], 1, "has no output file"),
        (["logs", "99"], 1, "Slurm knows no such job"),
        (["logs", "7", "--events"], 1, "left no events"),
        (["cancel", "seven"], 2, "is no job id"),
        (["cancel", "7", "--signal=a b"], 2, "--signal"),
        (["requeue", "99"], 1, "knows no such job"),
        (["status", "7", "--watch=nan"], 2, "no finite number"),
        (["top", "--interval", "nan"], 2, "no finite number"),
        (["requeue", "7", "--wait", "inf"], 2, "no finite number"),
        (["requeue", "7", "--exclude", "n[1-99999999]"], 2, "no cluster has so many nodes"),
        (["requeue", "7", "--exclude", "n[0"], 1, "no set of nodes"),
        (["requeue", "7", "--exclude", "n77"], 2, "no node of this cluster: n77"),
    ],
)
def test_what_cannot_be_done_is_said(call: Call, words: list[str], code: int, said: str) -> None:
    done = call(*words)
    problem = done.exception
    assert (problem.exit_code if isinstance(problem, DeepLinkError) else done.exit_code) == code
    assert said in (str(problem) if isinstance(problem, DeepLinkError) else done.stderr)


def test_without_an_answer_of_slurm_the_folder_is_shown(call: Call, slurm: Programs, state: Path) -> None:
    launched(state, 7, SystemClock().unix())
    slurm.say(fail={"squeue": "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"})
    done = call("status", "7")
    assert lines(done)["state"] == "unknown; its launcher: running"
    assert "Slurm does not answer, nothing is known from it: squeue exited 1" in done.stdout
    assert len(slurm.asked()) == 1


def test_a_job_that_has_vanished_is_reported_with_what_may_help(call: Call, state: Path) -> None:
    folder = launched(state, 5, SystemClock().unix())
    event(folder, "ended", SystemClock().unix(), code=0, because="done")
    said = lines(call("status", "5"))["state"]
    assert said.startswith("Slurm does not know it any more")
    assert "ended with exit code 0: done" in said
    assert "sacct -j" in said


def test_a_name_that_would_write_on_the_terminal_is_made_harmless(call: Call, slurm: Programs) -> None:
    slurm.say(jobs=[job(7, Name="a\x1b[31m\nb")])
    assert "a\\x1b[31m\\nb" in call("status", "7").stdout


def test_a_job_in_a_state_of_a_newer_slurm_hides_no_other(call: Call, slurm: Programs) -> None:
    slurm.say(jobs=[job(7, "TELEPORTING"), job(8)])
    said = call("status", "--all").stdout
    assert "OTHER" in said
    assert "RUNNING" in said


def test_output_of_a_job_and_its_end(call: Call, slurm: Programs, tmp_path: Path, state: Path) -> None:
    out = tmp_path / "slurm-7.out"
    out.write_text("".join(f"{number % 3}: line {number}\n" for number in range(100)))
    slurm.say(jobs=[job(7, STDOUT=f"{tmp_path}/slurm-%j.out")])
    assert call("logs", "7", "-n", "2").stdout == "2: line 98\n0: line 99\n"
    assert call("logs", "7", "-n", "1", "--rank", "1").stdout == "1: line 97\n"
    launched(state, 7, SystemClock().unix())
    assert call("logs", "7", "-n", "1", "--node", "n1").stdout == "0: line 99\n"
    assert "n7 runs no ranks" in str(call("logs", "7", "--node", "n7").exception)
    assert "has no lines of attempt 7.0.0" in call("logs", "7", "--attempt", "0.0").stderr
    assert "`deeplink run` started on n[0-2]" in call("logs", "7", "--events").stdout


def test_lines_without_a_ranks_number_are_explained(call: Call, slurm: Programs, tmp_path: Path) -> None:
    (tmp_path / "o").write_text("a\nb\n")
    slurm.say(jobs=[job(7, STDOUT=f"{tmp_path}/o")])
    assert "--srun-option=--label" in call("logs", "7", "--rank", "0").stderr


def test_following_ends_with_the_job(
    call: Call, slurm: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deeplink.scheduler.jobs.follow.QUIET_TICKS", 1)
    (tmp_path / "o").write_text("a\nb")
    slurm.say(jobs=[job(7, "COMPLETED", STDOUT=f"{tmp_path}/o")])
    assert call("logs", "7", "-f").stdout == "a\nb"


def test_a_vanished_jobs_output_is_where_its_launcher_noted_it(call: Call, state: Path, tmp_path: Path) -> None:
    (tmp_path / "o").write_text("a\n")
    event(launched(state, 5, SystemClock().unix()), "job-started", SystemClock().unix(), output=f"{tmp_path}/o")
    assert call("logs", "5").stdout == "a\n"


def test_cancel_is_scancel_and_a_note(call: Call, slurm: Programs, state: Path) -> None:
    folder = launched(state, 7, SystemClock().unix())
    done = call("cancel", "7", "8")
    assert done.exit_code == 0
    assert slurm.asked("scancel") == [["scancel", "7", "8"]]
    assert json.loads((folder / "notes.jsonl").read_text())["by"] == "eve"
    assert not (state / "jobs" / "8").exists()


def test_cancelling_a_task_that_has_not_started_is_not_noted_for_the_one_that_will_have_its_id(
    call: Call, slurm: Programs, state: Path
) -> None:
    """All that wait carry the array's id, which the task that starts last keeps."""
    folder = launched(state, 6, SystemClock().unix())
    waiting = [job(6, "PENDING", Reason="Resources", JobArrayID=f"6_{task}") for task in (1, 2, 3)]
    slurm.say(jobs=waiting)
    shown = call("cancel", "--dry-run", "6_[1-2]").stdout
    assert ("6_1 " in shown, "6_2 " in shown, "6_3 " in shown) == (True, True, False)
    assert call("cancel", "6_1").exit_code == 0
    assert slurm.asked("scancel") == [["scancel", "6_1"]]
    assert not (folder / "notes.jsonl").exists()


def test_a_signal_is_passed_on_and_no_end(call: Call, slurm: Programs, state: Path) -> None:
    folder = launched(state, 7, SystemClock().unix())
    call("cancel", "--signal", "USR1", "--full", "7")
    assert slurm.asked("scancel") == [["scancel", "--signal=USR1", "--full", "7"]]
    assert not (folder / "notes.jsonl").exists()


def test_cancel_ends_as_scancel_does(call: Call, slurm: Programs, state: Path) -> None:
    folder = launched(state, 7, SystemClock().unix())
    slurm.say(fail={"scancel": "scancel: error: Kill job error on job id 7: Access/permission denied"})
    done = call("cancel", "7")
    assert done.exit_code == 1
    assert "Access/permission denied" in done.stderr
    assert not (folder / "notes.jsonl").exists()


def test_of_several_jobs_those_that_were_cancelled_are_noted_though_one_was_refused(
    call: Call, slurm: Programs, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [launched(state, number, SystemClock().unix()) for number in (7, 8, 9)]
    slurm.say(jobs=[job(7), job(8), job(9, "COMPLETING")])

    really = processes.finish

    def finish(argv: Sequence[str], *, timeout_s: float) -> Finished:
        if argv[0] != "scancel":
            return really(argv, timeout_s=timeout_s)
        slurm.say(jobs=[job(7, "CANCELLED"), job(8), job(9, "COMPLETING")])
        return Finished(
            argv=tuple(argv), code=1, stdout="", stderr=f"{argv[0]}: error: job 8: denied within {timeout_s}"
        )

    monkeypatch.setattr("deeplink.scheduler.slurm.command.finish", finish)
    assert call("cancel", "7", "8", "9").exit_code == 1
    assert [(folder / "notes.jsonl").exists() for folder in folders] == [True, False, False]


def test_events_are_reported_with_what_the_user_did(
    call: Call, slurm: Programs, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = SystemClock().unix()
    folder = launched(state, 7, now)
    note(folder, "requeued", now - 8.5, by="eve", exclude=["n3"])
    note(folder, "cancelled", now, by="eve")
    told = [line.split("  ", 1)[1] for line in call("logs", "7", "--events").stdout.splitlines()]
    assert told[0].startswith("`deeplink run` started")
    assert told[1] == "requeued by eve, not to run on n3"
    assert told[2].startswith("attempt 7.0.0 started")
    assert told[3] == "cancelled by eve"
    assert call("logs", "7", "--events", "-n", "1").stdout.endswith("cancelled by eve\n")
    assert not call("logs", "7", "--events", "-n", "0").stdout
    monkeypatch.setattr("deeplink.scheduler.jobs.follow.QUIET_TICKS", 1)
    slurm.say(jobs=[job(7, "CANCELLED")])
    assert len(call("logs", "7", "--events", "-f").stdout.splitlines()) == 4


def test_a_job_that_never_began_tells_who_cancelled_it(call: Call, state: Path) -> None:
    folder = state / "jobs" / "8"
    folder.mkdir(parents=True)
    note(folder, "cancelled", SystemClock().unix(), by="eve")
    assert call("logs", "8", "--events").stdout.endswith("cancelled by eve\n")


def test_an_event_of_no_time_that_is_one_keeps_none_of_the_others_back(call: Call, state: Path) -> None:
    now = SystemClock().unix()
    folder = launched(state, 7, now)
    for unix in (float("nan"), 1e300, -1.0):
        event(folder, "back", unix)
    assert len(call("logs", "7", "--events").stdout.splitlines()) == 2


def test_a_metric_may_be_called_anything() -> None:
    shown = Picture(
        id=7, label="7", state="RUNNING", used_s=0.0, pace=TrainingRate(metric="[/x]\x1b[31m", value=1.0)
    )
    out = console()
    with out.capture() as said:
        out.print(of_job(JobOnFabric(picture=shown, fabric=Fabric({}), problem="", told_unix=1.0), 1.0))
    assert "[/x]\\x1b[31m" in said.get()
    assert "runs for 0 s" in said.get()


def test_a_dry_run_of_cancel_does_nothing(call: Call, slurm: Programs) -> None:
    assert call("cancel", "--dry-run", "7").stdout == "scancel 7\n  7 (RUNNING, tr ü)\n"
    assert slurm.asked("scancel") == []


def test_top_prints_one_table_where_there_is_no_terminal(call: Call, state: Path) -> None:
    launched(state, 7, SystemClock().unix())
    said = call("top").stdout
    assert "1 job running on 3 nodes, 0 waiting; by job" in said
    assert re.search(r"7 +tr ü +RUNNING.* < 59:00 min", said)
    assert json.loads(call("top", "--json", "--all").stdout)["jobs"][1]["state"] == "PENDING"


def test_top_sorts_the_greatest_first_and_what_is_unknown_last() -> None:
    def one(number: int, step: int | None) -> Picture:
        return Picture(id=number, label=str(number), pace=TrainingRate(step=step))

    pictures = [one(1, 5), one(2, None), one(3, 9)]
    assert [each.id for each in ordered(pictures, ScreenChoice(sort="step"))] == [3, 1, 2]
    assert [each.id for each in ordered(pictures, ScreenChoice(sort="step", turned=True))] == [1, 3, 2]
    assert ScreenChoice().pressed("l").pressed("a").pressed("x") == ScreenChoice(sort="loss", everything=True)
    assert ScreenChoice().pressed("q").over


def test_watching_goes_on_until_the_job_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    shown = iter([("one", False), ("two", False), ("three", True)])
    out = console()
    monkeypatch.setattr(status_screen, "console", lambda: out)
    with out.capture() as said:
        status_screen.repaint(lambda: next(shown), 5.0, clock)
    assert said.get().split() == ["one", "two", "three"]
    assert clock.now == 1010.0


def test_an_interrupt_ends_watching_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    import click

    class Interrupted(ManualClock):
        @override
        def sleep(self, seconds: float) -> None:
            raise KeyboardInterrupt

    out = console()
    monkeypatch.setattr(status_screen, "console", lambda: out)
    with out.capture(), pytest.raises(click.exceptions.Exit) as ended:
        status_screen.repaint(lambda: ("x", False), 5.0, Interrupted())
    assert ended.value.exit_code == 130


def test_watch_takes_its_seconds_after_the_equals_sign_alone(call: Call, slurm: Programs) -> None:
    slurm.say(jobs=[job(7, "COMPLETED")])
    assert lines(call("status", "--watch", "7"))["state"] == "COMPLETED"
    assert lines(call("status", "7", "--watch=60"))["state"] == "COMPLETED"


def test_figures_are_short() -> None:
    facts: list[Any] = [figure(0.0), figure(float("inf")), figure(1e6)]
    assert facts == ["0", "inf", "1,000,000"]
