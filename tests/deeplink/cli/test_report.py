"""`deeplink report`, on journals and without Slurm's accounting."""

from __future__ import annotations

import json
import time
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

from deeplink.cli import cli
from deeplink.cli.report import months_of
from deeplink.core.types import Attempt, NodeName
from deeplink.scheduler.jobs.job_view import me
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.recovery.records import Beat, Phase, ProgressPoint


def beat(user: str, job: int, phase: Phase, unix: float, steps: dict[int, float]) -> Beat:
    this = Attempt(job, 0, 0)
    points = tuple(ProgressPoint(attempt=this, step=step, unix=at) for step, at in steps.items())
    return Beat(
        attempt=this,
        phase=phase,
        user=user,
        job_name="train",
        nodes=(NodeName("n1"),),
        world_size=4,
        progress=points,
    )


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", str(tmp_path))  # no sacct
    path, now = tmp_path / "watch.sqlite", time.time()
    with Journal(path) as opened:
        for user, job, first in (("eva", 12, 60.0), ("adam", 13, 1800.0)):
            opened.record_beat(beat(user, job, Phase.RUNNING, 0.0, {}), now - 3600)
            steps = {1: now - 3600 + first, 50: now - 10}
            opened.record_beat(beat(user, job, Phase.SUCCEEDED, 0.0, steps), now)
    return path


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli, ["report", *words])
    return done.exit_code, done.output


def test_the_table_has_all_users_and_jobs_and_says_what_is_not_counted(journal: Path) -> None:
    code, said = run("--journal", str(journal))
    assert code == 0, said
    lines = {" ".join(line.split()[:2]): line for line in said.splitlines()}
    assert "8.0" in lines["all 8.0"]
    assert "74.2 %" in lines["all 8.0"]
    assert lines["user adam"].split()[2:5] == ["4.0", "50.0", "%"]
    assert list(lines).index("job 13") < list(lines).index("job 12"), "what lost most first"
    assert "jobs that no journal has are not counted" in said
    assert "1 more jobs: --limit" in run("--journal", str(journal), "--limit", "1")[1]


def test_one_users_and_for_programs(journal: Path) -> None:
    code, said = run("--journal", str(journal), "--user", "eva", "--json")
    assert code == 0, said
    found = json.loads(said)
    assert [each["job"] for each in found["jobs"]] == ["12"]
    assert found["whole"]["lost_h"]["start"] == pytest.approx(4 * 60 / 3600, rel=0.01)
    assert found["unwatched"] is None
    assert "no jobs on record" in run("--journal", str(journal), "--user", "nobody")[1]


def test_of_ones_own_journals_slurm_is_asked_for_ones_own_jobs(
    journal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sacct, asked = tmp_path / "sacct", tmp_path / "asked"
    sacct.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$*\" >> {asked}\necho '99|{me()}|3600|2'\n")
    sacct.chmod(0o755)
    assert "1 more without DeepLink, 2.0 node hours" in run("--journal", str(journal))[1]
    assert asked.read_text().split()[-1] == "-a"
    monkeypatch.setenv("DEEPLINK_STATE", str(tmp_path / "state"))
    own = tmp_path / "state" / "jobs" / "12" / "journal.sqlite"
    own.parent.mkdir(parents=True)
    journal.rename(own)
    code, said = run()
    assert code == 0, said
    assert "1 more without DeepLink" in said
    assert asked.read_text().split()[-2:] == ["-u", me()]
    assert "jobs that no journal has are not counted: there are journals of your own" in run("--user", "adam2")[1]
    assert len(asked.read_text().splitlines()) == 2


def test_wrong_usage_and_a_journal_that_is_none(journal: Path, tmp_path: Path) -> None:
    assert run("--since", "yesterday")[0] == 2
    missing = CliRunner().invoke(cli, ["report", "--journal", str(tmp_path / "none")])
    assert missing.exit_code != 0
    (tmp_path / "text").write_text("no journal")
    assert CliRunner().invoke(cli, ["report", "--journal", str(tmp_path / "text")]).exit_code != 0
    assert journal.exists()


def test_months_are_cut_where_they_begin() -> None:
    begin, end = datetime(2026, 11, 20, 12).timestamp(), datetime(2027, 2, 3).timestamp()  # noqa: DTZ001
    months = months_of(begin, end)
    assert [month for month, _, _ in months] == ["2026-11", "2026-12", "2027-01", "2027-02"]
    assert (months[0][1], months[-1][2]) == (begin, end)
    assert all(one[2] == other[1] for one, other in pairwise(months))
    assert months_of(end, end) == []
