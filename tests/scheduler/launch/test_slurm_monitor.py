"""Between a run and Slurm: when Slurm is asked, and what is done only once it has answered."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from deeplink.core import process_metrics
from deeplink.core.clock import ManualClock
from deeplink.core.types import Attempt, NodeName
from deeplink.scheduler.launch.backend import JobStatus, RunContext
from deeplink.scheduler.launch.ending import TICK_S
from deeplink.scheduler.launch.event_log import EventLog
from deeplink.scheduler.launch.launch_spec import LaunchSpec
from deeplink.scheduler.launch.slurm_monitor import (
    AFTERMATH_S,
    AGAIN_S,
    END_S,
    FRESH_S,
    LEAST_MARGIN_S,
    SLOW_S,
    SlurmMonitor,
)
from deeplink.scheduler.recovery.records import IncidentKind, ProgressPoint
from deeplink.scheduler.recovery.relaunch import AttemptVerdict, NextMove, RelaunchPolicy
from tests.waiting import LIMIT_S

OURS = JobStatus(ours=True, runs=True, left_s=3600.0, requeueable=True, word="RUNNING")
ELSEWHERE = JobStatus(ours=False, runs=True, requeueable=True, word="RUNNING")
SILENT = AttemptVerdict(
    move=NextMove.WAIT, because="3 of 4 nodes are silent at once", kind=IncidentKind.AGENTS_SILENT
)
WELL = AttemptVerdict(move=NextMove.CONTINUE)


@dataclass
class Controller:
    """What a liaison uses of a backend: Slurm's word."""

    word: JobStatus | None = OURS
    asked: int = 0
    can_requeue: bool = True
    free: threading.Event = field(default_factory=threading.Event)

    def job_status(self) -> JobStatus | None:
        self.asked += 1
        assert self.free.wait(LIMIT_S)
        return self.word


@dataclass
class Agents:
    """What it uses of a fleet."""

    is_gone: bool = False
    save_at: int = 0


@dataclass
class Run:
    folder: Path
    clock: ManualClock = field(default_factory=ManualClock)
    slurm: Controller = field(default_factory=Controller)
    agents: Agents = field(default_factory=Agents)

    def __post_init__(self) -> None:
        self.chronicle = EventLog(self.folder, self.clock, [])
        slurm: Any = self.slurm  # all that it uses of them
        agents: Any = self.agents
        spec = LaunchSpec(command=("true",), per_node=1, count=2)
        self.liaison = SlurmMonitor(RunContext(slurm, agents, self.chronicle, self.clock, spec, RelaunchPolicy()))

    def look(self, *, code: int | None = None, told: str = "") -> AttemptVerdict | None:
        """Look once, with Slurm's answer, if it was asked, there at the next look."""
        self.slurm.free.clear()
        found = self.liaison.look(code, told, gained=True)
        self.slurm.free.set()
        for thread in threading.enumerate():
            if thread.name == "deeplink-status":
                thread.join(LIMIT_S)
        self.clock.now += TICK_S
        return found

    def for_s(self, seconds: float, verdict: AttemptVerdict, *, alone: bool = False) -> list[AttemptVerdict]:
        """Look so long while this is what is seen of the nodes; return what is to be done."""
        end = self.clock.now + seconds
        found = []
        while self.clock.now < end:
            found.append(self.look() or self.liaison.weigh(verdict, alone=alone))
        return found

    def slowly_for_s(self, seconds: float, takes_s: float) -> AttemptVerdict | None:
        """Look so long while every answer of Slurm's takes its time; return the first thing to be done."""
        self.slurm.free.clear()
        end, free_at = self.clock.now + seconds, float("inf")
        while self.clock.now < end and (found := self.liaison.look(None, "", gained=True)) is None:
            asking = [thread for thread in threading.enumerate() if thread.name == "deeplink-status"]
            free_at = min(free_at, self.clock.now + takes_s) if asking else float("inf")
            if self.clock.now >= free_at:
                self.slurm.free.set()
                for thread in asking:
                    thread.join(LIMIT_S)
                self.slurm.free.clear()
                free_at = float("inf")
            self.clock.now += TICK_S
        self.slurm.free.set()
        return found

    def report(self, step: int, saved: int | None = None) -> None:
        metrics = (
            {}
            if saved is None
            else {process_metrics.CHECKPOINT_STEP: saved, process_metrics.CHECKPOINT_UNIX: self.clock.unix()}
        )
        point = ProgressPoint(attempt=Attempt(7, 0, 0), step=step, unix=self.clock.unix(), rank=0, metrics=metrics)
        self.liaison.take([point])

    def left(self, seconds: float) -> None:
        """Slurm says from now on that so much is left."""
        self.slurm.word = JobStatus(ours=True, runs=True, left_s=seconds, requeueable=True)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.chronicle.close()


def test_slurm_is_spared_while_most_nodes_are_silent_and_asked_once_they_are_not(run: Run) -> None:
    run.for_s(1.0, WELL)
    before = run.slurm.asked
    assert {verdict.move for verdict in run.for_s(50.0, SILENT)} == {NextMove.WAIT}
    assert run.slurm.asked == before, "no answer of that time would count"
    run.slurm.word = ELSEWHERE
    moves = {verdict.move for verdict in run.for_s(AFTERMATH_S, WELL)}
    assert NextMove.SUPERSEDED in moves
    assert 1 <= run.slurm.asked - before <= AFTERMATH_S + 1


def test_after_a_silence_of_most_nodes_nothing_is_done_before_slurm_has_said_whose_the_job_is(run: Run) -> None:
    run.slurm.word = None
    run.for_s(5.0, SILENT)
    lost = AttemptVerdict(move=NextMove.RELAUNCH, because="nothing heard of n1", kind=IncidentKind.NODE_SILENT)
    assert {verdict.move for verdict in run.for_s(30.0, lost)} == {NextMove.WAIT}
    run.slurm.word = OURS
    assert run.for_s(3.0, lost)[-1].move is NextMove.RELAUNCH


STRANDED = AttemptVerdict(
    move=NextMove.STRANDED, because="nothing heard of n1", lost=(NodeName("n1"),), kind=IncidentKind.JOB_STRANDED
)


def test_one_of_two_nodes_that_hears_nobody_asks_slurm_which_of_them_is_cut_off(run: Run) -> None:
    run.slurm.word = None  # it is us: Slurm is not heard either
    run.for_s(1.0, WELL, alone=True)
    waits = run.for_s(30.0, STRANDED, alone=True)
    assert {(verdict.move, verdict.lost) for verdict in waits} == {(NextMove.WAIT, STRANDED.lost)}
    run.slurm.word = ELSEWHERE
    moves = [verdict.move for verdict in run.for_s(3.0, STRANDED, alone=True)]
    assert next(move for move in moves if move is not NextMove.WAIT) is NextMove.SUPERSEDED


def test_who_was_away_is_not_said_before_slurm_has_said_whose_the_job_is(run: Run) -> None:
    doubts = []
    for word, seconds in ((None, 10.0), (OURS, 3.0), (None, 61.0)):
        if not run.liaison.in_doubt:
            run.slurm.word = None
            run.for_s(5.0, STRANDED, alone=True)
        run.slurm.word = word
        run.for_s(seconds, WELL)
        doubts.append(run.liaison.in_doubt)
    assert doubts == [True, False, False], "without a word the doubt ends after a while"


def test_slurm_answers_before_the_other_node_is_lost_so_that_no_time_is_lost(run: Run) -> None:
    run.for_s(AGAIN_S + 3 * TICK_S, WELL, alone=True)  # in doubt, and not lost yet
    assert run.for_s(0.5, STRANDED, alone=True)[0].move is NextMove.STRANDED


def test_without_a_word_of_slurm_it_is_the_other_one_after_a_while(run: Run) -> None:
    run.slurm.word = None
    moves = [verdict.move for verdict in run.for_s(70.0, STRANDED, alone=True)]
    assert moves[0] is NextMove.WAIT
    assert moves[-1] is NextMove.STRANDED


def test_the_end_of_ranks_is_explained_however_long_nodes_were_silent_before(run: Run) -> None:
    run.for_s(20.0, SILENT)
    run.clock.now += 1.0
    run.slurm.word = JobStatus(ours=True, runs=True, left_s=0.0, requeueable=True)
    first = run.look(code=143, told="SIGTERM")
    assert first is not None
    assert first.move is NextMove.WAIT, "it has not been asked since"
    after = run.look(code=143, told="SIGTERM")
    assert after is not None
    assert (after.move, after.kind) == (NextMove.REQUEUE, IncidentKind.TIME_LIMIT)


def test_before_the_limit_the_ranks_save_and_then_the_job_starts_again(run: Run) -> None:
    run.left(LEAST_MARGIN_S - 1.0)
    run.report(10)
    run.for_s(1.0, WELL)
    assert run.agents.save_at > 10
    run.left(LEAST_MARGIN_S - 3.0)
    run.report(run.agents.save_at, saved=run.agents.save_at)
    assert run.for_s(3.0, WELL)[-1].move is NextMove.REQUEUE


def test_a_controller_that_takes_its_time_does_so_before_the_limit_too(run: Run) -> None:
    run.left(LEAST_MARGIN_S - 1.0)
    run.report(10)
    run.for_s(1.0, WELL)
    run.report(run.agents.save_at, saved=run.agents.save_at)
    run.clock.now += 2 * FRESH_S
    found = run.slowly_for_s(2 * SLOW_S, takes_s=1.5 * FRESH_S)
    assert found is not None
    assert found.move is NextMove.REQUEUE


@pytest.mark.parametrize("is_saved", [True, False])
def test_a_job_that_was_suspended_beyond_what_was_left_of_its_time_goes_on(run: Run, *, is_saved: bool) -> None:
    run.left(600.0)
    run.report(10)
    run.for_s(2.0, WELL)
    run.clock.now += 3600.0  # and Slurm, which does not count that time, takes a while
    run.slurm.word = None
    assert {verdict.move for verdict in run.for_s(2.0, WELL)} == {NextMove.CONTINUE}
    run.report(5000, saved=5000 if is_saved else None)
    assert {verdict.move for verdict in run.for_s(10.0, WELL)} == {NextMove.CONTINUE}
    run.left(598.0)
    assert {verdict.move for verdict in run.for_s(20.0, WELL)} == {NextMove.CONTINUE}


def test_a_limit_that_is_moved_at_the_last_moment_counts(run: Run) -> None:
    run.left(END_S + 5.0)
    run.report(10)
    run.for_s(1.0, WELL)
    run.left(7200.0)
    run.for_s(END_S / 2, WELL)
    run.report(run.agents.save_at, saved=run.agents.save_at)
    assert {verdict.move for verdict in run.for_s(60.0, WELL)} == {NextMove.CONTINUE}
    first = run.agents.save_at
    run.left(LEAST_MARGIN_S - 1.0)
    run.report(first + 500)
    run.clock.now += 300.0
    run.for_s(2.0, WELL)
    assert run.agents.save_at > first, "for the new one they are told again"
