"""The sources: asked once per interval, never waited for, each with its age."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from deeplink.console.collect import (
    HEARD_S,
    MOST_FRESH,
    QUERY_S,
    SLOW_PERIOD_S,
    Collector,
    ConsoleSettings,
    SourceState,
)
from deeplink.console.snapshot import build
from deeplink.core.clock import ManualClock
from deeplink.core.types import Attempt
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.recovery.records import Beat, Incident, Phase, ProgressPoint
from deeplink.scheduler.slurm import command
from deeplink.scheduler.slurm.client import Slurm


def journal_source(collector: Collector) -> Any:
    return collector.readings().source("journal")


def test_each_kind_is_asked_once_per_round_and_the_tree_seldom(tmp_path: Path, slurm: Any) -> None:
    clock = ManualClock()
    collector = Collector(ConsoleSettings(journal=tmp_path / "none"), clock=clock, slurm=Slurm(slurm))
    for _ in range(3):
        collector.refresh_slurm()
        for _ in range(50):
            collector.readings()
    assert sorted(set(slurm.asked)) == [
        "scontrol show config",
        "scontrol show node",
        "scontrol show topology",
        "squeue",
    ]
    assert slurm.asked.count("scontrol show node") == slurm.asked.count("squeue") == 3
    assert slurm.asked.count("scontrol show topology") == 1
    clock.sleep(SLOW_PERIOD_S)
    collector.refresh_slurm()
    assert slurm.asked.count("scontrol show topology") == 2


def test_a_dead_controller_is_asked_one_question_only(tmp_path: Path, slurm: Any) -> None:
    slurm.dead = True
    collector = Collector(ConsoleSettings(journal=tmp_path / "none"), slurm=Slurm(slurm))
    collector.refresh_slurm()
    assert slurm.asked == ["scontrol show node"]
    states = {source.name: source.state for source in collector.readings().sources}
    assert states["nodes"] is states["jobs"] is states["switches"] is SourceState.FAILING


def test_a_controller_that_came_back_is_whole_again_at_once(tmp_path: Path, slurm: Any) -> None:
    def states() -> dict[str, SourceState]:
        collector.refresh_slurm()
        return {source.name: source.state for source in collector.readings().sources[:3]}

    collector = Collector(ConsoleSettings(journal=tmp_path / "none"), slurm=Slurm(slurm))
    slurm.dead = True
    assert set(states().values()) == {SourceState.FAILING}
    slurm.dead = False
    assert set(states().values()) == {SourceState.OK}
    slurm.dead = True
    assert states()["switches"] is SourceState.OK, "it was read within its own period"
    slurm.dead = False
    assert set(states().values()) == {SourceState.OK}


def test_slurm_that_is_not_installed_is_said(tmp_path: Path) -> None:
    def missing(_argv: Any, /, *, timeout_s: float = 1.0) -> str:
        return command.within(QUERY_S)(["deeplink-no-such-program"], timeout_s=timeout_s)

    collector = Collector(ConsoleSettings(journal=tmp_path / "none"), slurm=Slurm(missing))
    collector.refresh_slurm()
    source = collector.readings().source("nodes")
    assert "not on PATH" in source.problem
    assert source.remedy


def test_no_journal_yet_is_no_fault_but_a_lost_one_is(tmp_path: Path) -> None:
    path = tmp_path / "watch.sqlite"
    collector = Collector(ConsoleSettings(journal=path, slurm=False))
    assert journal_source(collector).state is SourceState.WAITING
    with Journal(path) as journal:
        journal.record_incident(Incident(id="x-1", kind="node-dead", began_unix=1.0, detected_unix=2.0))
        assert journal_source(collector).state is SourceState.OK
        assert [each.id for each in collector.readings().journal.incidents] == ["x-1"]
        assert [each.id for each in collector.readings().journal.incidents] == ["x-1"], "read from memory"
    for file in tmp_path.iterdir():
        file.unlink()
    readings = collector.readings()
    assert readings.source("journal").state is SourceState.FAILING
    assert [each.id for each in readings.journal.incidents] == ["x-1"], "old facts stay, with their age"


def test_a_journal_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "watch.sqlite"
    collector = Collector(ConsoleSettings(journal=path, slurm=False))
    for name in ("first-1", "second-2"):
        made = tmp_path / name
        with Journal(made) as journal:
            journal.record_incident(Incident(id=name, kind="node-dead", began_unix=1.0, detected_unix=2.0))
        for old in tmp_path.glob("watch.sqlite-*"):
            old.unlink()
        os.replace(made, path)  # noqa: PTH105 - over a file that is there
        assert [each.id for each in collector.readings().journal.incidents] == [name]


def test_a_file_that_is_no_journal_is_said(tmp_path: Path) -> None:
    path = tmp_path / "watch.sqlite"
    path.write_bytes(b"no database at all, but long enough to be one" * 100)
    source = journal_source(Collector(ConsoleSettings(journal=path, slurm=False)))
    assert source.state is SourceState.FAILING
    assert source.remedy


def test_of_more_jobs_than_are_read_each_time_all_that_beat_are_running(tmp_path: Path) -> None:
    clock = ManualClock()
    collector = Collector(ConsoleSettings(journal=tmp_path / "watch.sqlite", slurm=False), clock=clock)
    beating, jobs = range(1, MOST_FRESH + 51), {}
    with Journal(tmp_path / "watch.sqlite") as journal:
        for second in range(0, 90, 10):
            for job in beating:
                attempt = Attempt(job, 0, 0)
                step = ProgressPoint(attempt=attempt, step=second, unix=clock.unix(), metrics={"loss": 1.0})
                phase = Phase.SUCCEEDED if job == 7 and second >= 30 else Phase.RUNNING
                if second == 0 or job != 9:
                    beat = Beat(attempt=attempt, phase=phase, progress=(step,))
                    journal.record_beat(beat, clock.unix() + job / 1e3)
            jobs = {job.id: job for job in build(collector.readings()).jobs}
            clock.sleep(10.0)
            wrong = [(job, jobs[job].word) for job in beating if job not in {7, 9} and jobs[job].word != "running"]
            assert not wrong, f"after {second} s"
    assert (jobs[7].word, jobs[9].word) == ("succeeded", "unknown")
    assert all(jobs[job].loss for job in beating), "each has had its turn"


def test_jobs_of_a_journal_that_was_replaced_are_gone(tmp_path: Path) -> None:
    path, clock = tmp_path / "watch.sqlite", ManualClock()
    collector = Collector(ConsoleSettings(journal=path, slurm=False), clock=clock)
    for name, jobs in (("first", range(1, 2 * MOST_FRESH)), ("second", range(1_000, 1_000 + MOST_FRESH))):
        with Journal(tmp_path / name) as journal:
            for job in jobs:
                beat = Beat(attempt=Attempt(job, 0, 0), phase=Phase.SUCCEEDED)
                journal.record_beat(beat, clock.unix() - 2 * HEARD_S)
        os.replace(tmp_path / name, path)  # noqa: PTH105 - over a file that is there
        assert sorted(record.job for record in collector.readings().journal.jobs) == list(jobs)
        clock.sleep(1.0)
