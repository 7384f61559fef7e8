"""The recorded day: made at once, the same each time, and it says what it is."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from deeplink.cli.console import command
from deeplink.console.concerns import ConcernKind
from deeplink.console.demo_sources import DemoDay
from deeplink.console.journal_queries import JournalQueries
from deeplink.console.query import Query
from deeplink.console.snapshot import build


def test_the_day_holds_what_an_operator_meets_and_is_made_at_once(tmp_path: Path) -> None:
    began = time.process_time()
    day = DemoDay(tmp_path)
    assert time.process_time() - began < 4.0, "one second where nothing else runs"
    day.collector.refresh_slurm()
    day.collector.refresh_datasets()
    made = build(day.collector.readings())
    assert len(made.nodes) == 256
    assert {"stranded", "down", "silent", "leaf", "held", "finding", "drained", "incident"} <= {
        each.kind.value for each in made.concerns
    }
    said = {each.kind: each for each in made.concerns}
    assert said[ConcernKind.STARVING].title == "job 17 waits for its data"
    assert "came from the source" in said[ConcernKind.STARVING].evidence
    assert said[ConcernKind.LEMON].title == "n142 fails again and again"
    assert said[ConcernKind.LEMON].place == "incidents?node=n142"
    course = JournalQueries(day.collector.settings.journal).timeline(26, Query(), ())
    assert course is not None
    assert course["measured"]["binds"]["slowest"]["node"] == "n119"
    assert {len(row["own_s"]) for row in course["measured"]["ranks"]} == {16}
    held = next(each for each in made.concerns if each.kind is ConcernKind.HELD)
    assert held.command == "scontrol release 29"
    by_id = {job.id: job for job in made.jobs}
    assert (by_id[22].word, by_id[22].attempt, len(by_id[22].attempts)) == ("running", "22.0.1", 2)
    assert made.document()["demo"] is True
    day.close()


def test_it_is_the_same_each_time(tmp_path: Path) -> None:
    told = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        day = DemoDay(folder)
        incidents = day.collector.readings().journal.incidents
        told.append([(each.id, each.began_unix, each.evidence) for each in incidents])
        day.close()
    assert told[0] == told[1]


def test_the_command_shows_it_without_any_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    said = CliRunner().invoke(command, ["--demo", "--json"])
    assert said.exit_code == 0, said.output
    document = json.loads(said.output)
    assert document["cluster"] == "demo"
    assert {source["state"] for source in document["sources"].values()} == {"ok"}
    assert CliRunner().invoke(command, ["--demo", "--no-slurm"]).exit_code == 2
