"""A watchdog that is killed at any of its commands, and started again: each takes effect once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from deeplink.core.clock import ManualClock
from deeplink.core.metrics import WatchMetrics
from deeplink.core.types import Attempt, NodeName
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.liveness.heartbeats import HeartbeatTable
from deeplink.scheduler.recovery.evidence import Remedy, Verdict, WatchPolicy
from deeplink.scheduler.recovery.records import ActionRecord, Beat, IncidentKind, Phase, ProgressPoint
from deeplink.scheduler.slurm.client import Slurm
from deeplink.scheduler.watch.actor import Actor
from deeplink.scheduler.watch.observer import Observer
from tests.effort import examples
from tests.scheduler.watch.slurm_machine import Job, Killed, Machine

ATTEMPT = Attempt(17, 0, 0)
DEATHS = st.dictionaries(st.integers(1, 12), st.sampled_from(["before", "after", "unheard"]), max_size=6)
ARGV = ("sbatch", "--requeue", "-N2", "--comment=mine", "train.sh", "--epochs", "9")


class Watchdog:
    """What is killed and started again: all but journal, clock, Slurm and the user's folder."""

    def __init__(self, machine: Machine, folder: Path) -> None:
        self.machine, self.state = machine, folder / "state"
        self.journal = Journal(folder / "j.sqlite")
        self.clock = ManualClock()
        self.said: list[str] = []
        (self.state / "jobs" / "17").mkdir(parents=True)
        self.journal.record_beat(
            Beat(attempt=ATTEMPT, phase=Phase.STRANDED, user="ada", nodes=tuple(map(NodeName, ("n0", "n1")))),
            self.clock.unix(),
        )
        self.start()

    def start(self) -> None:
        slurm = Slurm(self.machine)
        self.heartbeats = HeartbeatTable()
        observer = Observer(
            slurm=slurm,
            prober=self.machine,
            heartbeats=self.heartbeats,
            journal=self.journal,
            clock=self.clock,
            policy=WatchPolicy(),
        )
        observer.ask()
        self.actor = Actor(
            slurm=slurm,
            journal=self.journal,
            observer=observer,
            clock=self.clock,
            metrics=WatchMetrics(CollectorRegistry()),
            say=self.said.append,
        )

    def beat(self, attempt: Attempt = ATTEMPT, phase: Phase = Phase.RUNNING, step: int | None = None) -> None:
        points = () if step is None else (ProgressPoint(attempt=attempt, rank=0, step=step, unix=1.0),)
        self.heartbeats.hear(
            Beat(attempt=attempt, phase=phase, user="ada", progress=points), self.clock.monotonic()
        )

    def act(self, *verdicts: Verdict) -> None:
        """Act until all is done, whoever dies meanwhile."""
        for verdict in verdicts:
            self.actor.begin(verdict, None)
        for _ in range(400):
            try:
                if not self.actor.work():
                    return
            except Killed:
                self.start()
            self.clock.sleep(0.5)
        raise AssertionError(self.said)

    @property
    def actions(self) -> tuple[ActionRecord, ...]:
        return self.journal.actions()


@contextmanager
def watchdog(machine: Machine) -> Iterator[Watchdog]:
    with TemporaryDirectory() as folder:
        made = Watchdog(machine, Path(folder))
        yield made
        made.journal.close()


def verdict(kind: IncidentKind, remedy: Remedy, node: str = "", *exclude: str) -> Verdict:
    return Verdict(
        kind=kind,
        remedy=remedy,
        reasons=("seen",),
        attempt=ATTEMPT,
        node=NodeName(node) if node else None,
        exclude=tuple(map(NodeName, exclude)),
    )


MUTE = verdict(IncidentKind.LAUNCHER_LOST, Remedy.RESTART, "", "n1")


@settings(max_examples=examples(25))
@given(deaths=DEATHS)
def test_a_job_is_requeued_once_and_the_suspect_excluded(deaths: dict[int, str]) -> None:
    machine = Machine({17: Job(17, nodes=("n0", "n1"), excluded="n5")}, deaths=deaths)
    with watchdog(machine) as made:
        made.act(MUTE)
        job = machine.jobs[17]
        assert (job.state, job.restarts, job.ran) == ("RUNNING", 1, 2)
        assert job.excluded == "n[1,5]"
        assert sum("requeue" in order for order in machine.orders) == 1
        assert all(action.done_unix for action in made.actions)


@settings(max_examples=examples(25))
@given(deaths=DEATHS)
def test_a_dead_node_is_drained_and_downed_once_and_its_job_started_once(deaths: dict[int, str]) -> None:
    machine = Machine({17: Job(17, nodes=("n0", "n1"))}, dead={"n1"}, deaths=deaths)
    with watchdog(machine) as made:
        made.act(
            verdict(IncidentKind.NODE_DEAD, Remedy.DRAIN_DOWN, "n1"),
            verdict(IncidentKind.JOB_STRANDED, Remedy.RESTART, "n1", "n1"),
        )
        job = machine.jobs[17]
        assert (job.state, job.restarts, job.ran, job.excluded) == ("RUNNING", 1, 2, "n1")
        assert machine.states["n1"] == "DOWN+DRAIN"
        for order in ("state=drain", "state=down", "requeue"):
            assert sum(order in line for line in machine.orders) == 1, order


@settings(max_examples=examples(25))
@given(deaths=DEATHS)
def test_without_rights_the_dead_node_is_taken_out_and_the_job_started_once(deaths: dict[int, str]) -> None:
    machine = Machine({17: Job(17, nodes=("n0", "n1"))}, dead={"n1"}, rights=False, deaths=deaths)
    with watchdog(machine) as made:
        made.act(verdict(IncidentKind.JOB_STRANDED, Remedy.RESTART, "n1", "n1"))
        job = machine.jobs[17]
        assert (job.state, job.restarts, job.ran, job.excluded) == ("RUNNING", 1, 2, "n1")
        assert len(machine.jobs) == 1, "its id is kept where that can be"


def until_killed(made: Watchdog) -> None:
    """Work until death, which comes within some rounds."""
    with pytest.raises(Killed):
        for _ in range(20):
            made.actor.work()
            made.clock.sleep(0.5)


@settings(max_examples=examples(25))
@given(deaths=DEATHS)
def test_without_rights_a_job_without_its_batch_host_waits_for_slurms_word_and_starts_once(
    deaths: dict[int, str],
) -> None:
    machine = Machine({17: Job(17, nodes=("n0", "n1"))}, dead={"n0"}, rights=False, deaths=deaths)
    with watchdog(machine) as made:
        made.actor.begin(verdict(IncidentKind.LAUNCHER_LOST, Remedy.RESTART, "n0", "n0"), None)
        for _ in range(20):
            made.actor.work()
            made.clock.sleep(1.0)
        assert not machine.orders
        machine.states["n0"], machine.jobs[17].nodes = "DOWN", ("n1",)
        made.act()
        job = machine.jobs[17]
        assert (job.state, job.restarts, job.ran, job.excluded) == ("RUNNING", 1, 2, "n0")
        assert sum("requeue" in order for order in machine.orders) == 1


STEPPED = pytest.param(ATTEMPT, 41, id="ranks made a step")
RELAUNCHED = pytest.param(Attempt(17, 0, 1), None, id="its launcher started them again")


@pytest.mark.parametrize(("attempt", "step"), [STEPPED, RELAUNCHED])
def test_a_job_that_went_on_while_the_watchdog_was_away_is_left_alone(
    tmp_path: Path, attempt: Attempt, step: int | None
) -> None:
    machine = Machine({17: Job(17, nodes=("n0", "n1"))}, deaths={1: "before"})
    made = Watchdog(machine, tmp_path)
    made.actor.begin(MUTE, None)
    until_killed(made)
    made.clock.sleep(60.0)
    made.start()
    made.actor.work()
    made.clock.sleep(0.5)
    made.beat(attempt, step=step)
    made.act()
    assert machine.orders == []
    assert [action.result for action in made.actions] == ["gave up: the job goes on by itself"]


def test_that_the_ranks_that_are_left_make_steps_helps_no_job_that_lost_a_node(tmp_path: Path) -> None:
    machine = Machine({17: Job(17, nodes=("n0", "n1"))}, dead={"n1"})
    made = Watchdog(machine, tmp_path)
    made.actor.begin(verdict(IncidentKind.NODE_DEAD, Remedy.DRAIN_DOWN, "n1"), None)
    made.actor.begin(verdict(IncidentKind.JOB_STRANDED, Remedy.RESTART, "n1", "n1"), None)
    for step in range(40):
        made.actor.work()
        made.clock.sleep(0.5)
        made.beat(step=step)
    assert machine.jobs[17].restarts == 1


def test_a_launcher_that_was_lost_and_is_heard_again_is_let_be(tmp_path: Path) -> None:
    machine = Machine({17: Job(17, nodes=("n0", "n1"))}, deaths={1: "before"})
    made = Watchdog(machine, tmp_path)
    made.actor.begin(verdict(IncidentKind.LAUNCHER_LOST, Remedy.RESTART), None)
    until_killed(made)
    made.start()
    made.actor.work()
    made.clock.sleep(0.5)
    made.beat()
    made.act()
    assert machine.orders == []


def test_a_launcher_that_says_the_same_as_before_is_helped_after_all(tmp_path: Path) -> None:
    machine = Machine({17: Job(17, nodes=("n0", "n1"))}, deaths={1: "before"})
    made = Watchdog(machine, tmp_path)
    made.actor.begin(verdict(IncidentKind.JOB_STRANDED, Remedy.RESTART, "", "n1"), None)
    until_killed(made)
    made.start()
    for _ in range(40):
        made.clock.sleep(0.5)
        made.beat(phase=Phase.STRANDED)
        made.actor.work()
    assert machine.jobs[17].restarts == 1
