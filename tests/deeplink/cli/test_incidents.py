"""`deeplink incidents`: the list, one in detail, JSON, and what is said where there is nothing."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result

from deeplink.cli import cli
from deeplink.cli.incidents import command
from deeplink.cli.incidents import incident as one
from deeplink.core.errors import DeepLinkError
from deeplink.core.types import Attempt, NodeName
from deeplink.scheduler.journal.journal import Journal, JournalMissingError
from deeplink.scheduler.recovery.records import ActionRecord, Beat, Incident, IncidentOutcome, Phase, RankStack

ENDED = Incident(
    id="17.0.0-node-dead-n1",
    kind="node-dead",
    node=NodeName("n1"),
    attempt=Attempt(17, 0, 0),
    action="drain-down",
    evidence="slurmd is silent for 3.1 s",
    began_unix=1_700_000_000.0,
    detected_unix=1_700_000_003.5,
    acted_unix=1_700_000_004.0,
    recovered_unix=1_700_000_010.5,
    outcome=IncidentOutcome.RECOVERED,
    steps_repeated=7,
    ranks=1_440,
    step_s=0.5,
    stacks=(
        RankStack(rank=0, pid=4242, state="S", source="py-spy", text="all_reduce (dist.py:7)\nstep (train.py:3)"),
        RankStack(rank=1, text="n1 does not answer"),
    ),
)
OPEN = Incident(
    id="18.0.0-ranks-hung",
    kind="ranks-hung",
    attempt=Attempt(18, 0, 0),
    began_unix=1_700_000_100.0,
    detected_unix=1_700_000_130.0,
)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    with Journal(tmp_path / "watch.sqlite") as journal:
        journal.record_incident(ENDED)
        journal.record_incident(OPEN)
        journal.begin_action(
            ActionRecord(
                key="k",
                incident=ENDED.id,
                remedy="drain-down",
                attempt=ENDED.attempt,
                node=ENDED.node,
                began_unix=1_700_000_003.6,
            )
        )
        journal.end_action("k", "down", 1_700_000_004.0)
    return tmp_path


def shown(state: Path, *arguments: str) -> Result:
    return CliRunner().invoke(command, list(arguments), env={"DEEPLINK_STATE": str(state)})


def test_the_newest_come_first_one_line_each(state: Path) -> None:
    done = shown(state)
    assert done.exit_code == 0
    rows = [line.split() for line in done.output.splitlines() if "n1" in line or "ranks-hung" in line]
    assert [row[0] for row in rows] == ["2", "1"]
    assert rows[1][-3:] == ["+10.5", "s", "recovered"]


def test_one_in_detail_by_number_or_id(state: Path) -> None:
    by_number = shown(state, "1").output
    assert by_number == shown(state, ENDED.id).output
    assert "steps repeated: 7" in by_number
    assert "+3.5 s" in by_number
    assert "slurmd is silent" in by_number
    assert "drain-down n1: down (0.4 s)" in by_number


def test_one_is_shown_with_its_course_and_its_cost(state: Path) -> None:
    text = CliRunner().invoke(one, ["1"], env={"DEEPLINK_STATE": str(state)}).output
    assert text == shown(state, "1").output
    course = [line.split(None, 1)[1].strip() for line in text.splitlines() if " s  " in line]
    assert course == [
        "+0.0 s  first sign of it",
        "+3.5 s  detected: node-dead: slurmd is silent for 3.1 s",
        "+3.6 s  begun: drain-down of n1",
        "+4.0 s  done: drain-down",
        "+4.0 s  ended: drain-down: down",
        "+10.5 s  training again, 7 steps done again",
    ]
    # 1,440 ranks: 10.5 s of standing still, and 7 steps of half a second.
    assert "5.60 rank-hours (4.20 standing still + 1.40 repeated steps; 1,440 ranks, 0.5 s a step)" in text


def test_stacks_are_shown_in_short_and_on_demand_whole(state: Path) -> None:
    environment = {"DEEPLINK_STATE": str(state)}
    short = CliRunner().invoke(one, ["1"], env=environment).output
    assert "rank 0: process 4242 S, by py-spy" in short
    assert "rank 1: no process: n1 does not answer" in short
    assert "train.py" not in short
    assert "deeplink incident 1 --stacks" in short
    whole = CliRunner().invoke(one, ["1", "--stacks"], env=environment).output
    assert "      all_reduce (dist.py:7)\n      step (train.py:3)\n" in whole
    document = json.loads(CliRunner().invoke(one, ["1", "--json"], env=environment).output)
    assert [stack["rank"] for stack in document["stacks"]] == [0, 1]
    assert document["cost"] == {"rank_hours": 5.6, "standing_rank_hours": 4.2, "repeated_rank_hours": 1.4}
    assert document["timeline"][0] == {"unix": 1_700_000_000.0, "what": "first sign of it"}


def test_they_are_chosen_by_kind_node_and_age(state: Path) -> None:
    def numbers(*arguments: str) -> list[int]:
        return [incident["number"] for incident in json.loads(shown(state, "--json", *arguments).output)]

    assert numbers("--kind", "ranks-hung") == [2]
    assert numbers("--node", "n1") == [1]
    assert numbers("--node", "n2") == []
    assert numbers("--since", "1d") == []
    assert numbers("--since", "2023-01-01") == [2, 1]
    with Journal(state / "watch.sqlite") as journal:
        fresh = Incident(id="now", kind="node-dead", began_unix=time.time() - 7_000, detected_unix=time.time())
        journal.record_incident(fresh)
    assert numbers("--since", "2h") == [3]
    assert numbers("--since", "60m") == []
    for wrong in ("yesterday", "-1d", "nan", "1e9", ""):
        assert shown(state, "--since", wrong).exit_code == 2


def test_what_they_cost_together(state: Path) -> None:
    text = shown(state, "--summary").output
    assert "2 incidents: 5.60 rank-hours, and what 1 incident cost is not known" in text
    assert {"2023-W46", "node-dead", "n1"} <= set(text.split())
    totals = json.loads(shown(state, "--summary", "--json").output)
    assert totals["kind"] == [
        {"name": "node-dead", "incidents": 1, "open": 0, "failed": 0, "lost_h": pytest.approx(5.6), "unknown": 0},
        {"name": "ranks-hung", "incidents": 1, "open": 1, "failed": 0, "lost_h": 0.0, "unknown": 1},
    ]


def test_the_shell_offers_the_newest(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPLINK_STATE", str(state))
    shell = ShellComplete(cli, {}, "deeplink", "_DEEPLINK_COMPLETE")
    assert [offer.value for offer in shell.get_completions(["incident"], "")] == ["2", "1"]
    assert {"incident", "incidents"} <= {offer.value for offer in shell.get_completions([], "inc")}
    monkeypatch.setenv("DEEPLINK_STATE", str(state / "nothing-here"))
    assert shell.get_completions(["incident"], "") == []


def test_json_for_programs(state: Path) -> None:
    listed = json.loads(shown(state, "--json", "--open").output)
    assert [incident["id"] for incident in listed] == [OPEN.id]
    one = json.loads(shown(state, "1", "--json").output)
    assert (one["attempt"], one["outcome"], one["actions"][0]["result"]) == ("17.0.0", "recovered", "down")
    assert [incident["number"] for incident in json.loads(shown(state, "--json", "--job", "18").output)] == [2]


def test_a_task_of_an_array_is_asked_for_by_its_name(state: Path) -> None:
    attempt = Attempt(19, 0, 0)
    hung = Incident(id="19.0.0-ranks-hung", kind="ranks-hung", attempt=attempt, began_unix=1.0, detected_unix=2.0)
    with Journal(state / "watch.sqlite") as journal:
        journal.record_beat(Beat(attempt=attempt, phase=Phase.RUNNING, job_label="12_3", incidents=(hung,)), 3.0)
    (one,) = json.loads(shown(state, "--json", "--job", "12_3").output)
    assert (one["id"], one["job_label"]) == (hung.id, "12_3")
    assert "12_3.0.0" in shown(state, "--job", "12_3").output
    assert json.loads(shown(state, "--json", "--job", "12_4").output) == []
    assert shown(state, "--job", "12_[1-3]").exit_code


def test_an_unknown_one_is_an_error(state: Path) -> None:
    done = shown(state, "99")
    assert isinstance(done.exception, DeepLinkError)
    assert "no incident '99' in" in str(done.exception)
    assert "no incident '99'" in str(done.exception)
    assert "deeplink incidents" in done.exception.remedy


def test_an_unknown_one_is_in_none_of_the_jobs_journals(tmp_path: Path) -> None:
    for job in ("17", "18"):
        (tmp_path / "jobs" / job).mkdir(parents=True)
        with Journal(tmp_path / "jobs" / job / "journal.sqlite") as journal:
            journal.record_incident(ENDED)
    problem = shown(tmp_path, "19.1").exception
    assert isinstance(problem, DeepLinkError)
    assert f"the journals of 2 jobs below {tmp_path / 'jobs'}" in str(problem)


def test_without_a_journal_the_remedy_is_named(tmp_path: Path) -> None:
    done = shown(tmp_path)
    assert isinstance(done.exception, JournalMissingError)
    assert isinstance(done.exception, DeepLinkError)
    assert "--journal" in done.exception.remedy


def test_nothing_went_wrong(tmp_path: Path) -> None:
    Journal(tmp_path / "watch.sqlite").close()
    assert shown(tmp_path).output == "no incidents\n"
    assert shown(tmp_path, "--json").output == "[]\n"


def test_without_a_watchdog_those_of_the_own_jobs_are_listed(tmp_path: Path) -> None:
    for incident in (ENDED, OPEN):
        assert incident.attempt is not None
        folder = tmp_path / "jobs" / str(incident.attempt.job)
        folder.mkdir(parents=True)
        with Journal(folder / "journal.sqlite") as journal:
            journal.record_incident(incident)
    (tmp_path / "jobs" / "20").mkdir()
    (tmp_path / "jobs" / "20" / "journal.sqlite").touch()  # its launcher was killed while making it
    listed = shown(tmp_path)
    rows = [line.split() for line in listed.output.splitlines() if "n1" in line or "ranks-hung" in line]
    assert [row[0] for row in rows] == ["18.1", "17.1"]
    assert ENDED.id in shown(tmp_path, "17.1").output
    assert OPEN.id in shown(tmp_path, OPEN.id).output
    for unknown in ("1", "17.2", "19.1"):
        assert shown(tmp_path, unknown).exit_code == 1
