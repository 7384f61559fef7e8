"""`deeplink incidents`: the list, one in detail, JSON, and what is said where there is nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from deeplink.cli.incidents import IncidentUnknownError, command
from deeplink.errors import DeepLinkError
from deeplink.scheduler.watch.journal import Journal, JournalMissingError
from deeplink.scheduler.watch.records import ActionRecord, Incident, Outcome
from deeplink.types import Attempt, NodeName

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
    outcome=Outcome.RECOVERED,
    steps_repeated=7,
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
            ActionRecord(key="k", incident=ENDED.id, remedy="drain-down", attempt=ENDED.attempt, node=ENDED.node)
        )
        journal.end_action("k", "down", 1_700_000_004.0)
    return tmp_path


def told(state: Path, *arguments: str) -> Result:
    return CliRunner().invoke(command, list(arguments), env={"DEEPLINK_STATE": str(state)})


def test_the_newest_come_first_one_line_each(state: Path) -> None:
    done = told(state)
    assert done.exit_code == 0
    rows = [line.split() for line in done.output.splitlines() if "n1" in line or "ranks-hung" in line]
    assert [row[0] for row in rows] == ["2", "1"]
    assert rows[1][-3:] == ["+10.5", "s", "recovered"]


def test_one_in_detail_by_number_or_id(state: Path) -> None:
    by_number = told(state, "1").output
    assert by_number == told(state, ENDED.id).output
    assert "steps repeated: 7" in by_number
    assert "+3.5 s" in by_number
    assert "slurmd is silent" in by_number
    assert "drain-down n1: down" in by_number


def test_json_for_programs(state: Path) -> None:
    listed = json.loads(told(state, "--json", "--open").output)
    assert [incident["id"] for incident in listed] == [OPEN.id]
    one = json.loads(told(state, "1", "--json").output)
    assert (one["attempt"], one["outcome"], one["actions"][0]["result"]) == ("17.0.0", "recovered", "down")
    assert [incident["number"] for incident in json.loads(told(state, "--json", "--job", "18").output)] == [2]


def test_an_unknown_one_is_an_error(state: Path) -> None:
    done = told(state, "99")
    assert isinstance(done.exception, IncidentUnknownError)
    assert "no incident '99'" in str(done.exception)
    assert "deeplink incidents" in done.exception.remedy


def test_an_unknown_one_is_in_none_of_the_jobs_journals(tmp_path: Path) -> None:
    for job in ("17", "18"):
        (tmp_path / "jobs" / job).mkdir(parents=True)
        with Journal(tmp_path / "jobs" / job / "journal.sqlite") as journal:
            journal.record_incident(ENDED)
    problem = told(tmp_path, "19.1").exception
    assert isinstance(problem, IncidentUnknownError)
    assert f"the journals of 2 jobs below {tmp_path / 'jobs'}" in str(problem)


def test_without_a_journal_the_remedy_is_named(tmp_path: Path) -> None:
    done = told(tmp_path)
    assert isinstance(done.exception, JournalMissingError)
    assert isinstance(done.exception, DeepLinkError)
    assert "--journal" in done.exception.remedy


def test_nothing_went_wrong(tmp_path: Path) -> None:
    Journal(tmp_path / "watch.sqlite").close()
    assert told(tmp_path).output == "no incidents\n"
    assert told(tmp_path, "--json").output == "[]\n"


def test_without_a_watchdog_those_of_the_own_jobs_are_listed(tmp_path: Path) -> None:
    for incident in (ENDED, OPEN):
        assert incident.attempt is not None
        folder = tmp_path / "jobs" / str(incident.attempt.job)
        folder.mkdir(parents=True)
        with Journal(folder / "journal.sqlite") as journal:
            journal.record_incident(incident)
    listed = told(tmp_path)
    rows = [line.split() for line in listed.output.splitlines() if "n1" in line or "ranks-hung" in line]
    assert [row[0] for row in rows] == ["18.1", "17.1"]
    assert ENDED.id in told(tmp_path, "17.1").output
    assert OPEN.id in told(tmp_path, OPEN.id).output
    for unknown in ("1", "17.2", "19.1"):
        assert told(tmp_path, unknown).exit_code == 1
