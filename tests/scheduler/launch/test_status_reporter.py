"""What is told of a job: which incident ends when."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deeplink.core.clock import ManualClock
from deeplink.core.finding import Finding
from deeplink.core.types import Attempt, NodeName
from deeplink.scheduler.launch.backend import RunContext
from deeplink.scheduler.launch.environment import NodeFacts
from deeplink.scheduler.launch.event_log import EventLog, EventSink
from deeplink.scheduler.launch.launch_spec import LaunchSpec
from deeplink.scheduler.launch.local_backend import LocalBackend
from deeplink.scheduler.launch.status_reporter import FROZEN_S, StatusReporter
from deeplink.scheduler.recovery.records import Action, Beat, Incident, IncidentKind, IncidentOutcome, Phase
from deeplink.scheduler.recovery.relaunch import RelaunchPolicy, Silence
from tests.waiting import LIMIT_S, until

N1, N2 = NodeName("n1"), NodeName("n2")
SPEC = LaunchSpec(command=("true",), per_node=1, count=2)


class NoAgents:
    """What an account uses of a fleet that hears nobody."""

    def __init__(self) -> None:
        self.facts: Mapping[NodeName, NodeFacts] = {}
        self.answered: dict[NodeName, float] = {}

    def silence(self) -> Mapping[NodeName, Silence]:
        return {}

    def health(self) -> Mapping[NodeName, tuple[Finding, ...]]:
        return {}

    def boot_ids(self) -> Mapping[NodeName, str]:
        return {}

    def unix(self) -> Mapping[NodeName, float]:
        return self.answered


@dataclass
class Told:
    """An account, and what the watchdog hears of it: the newest telling of each incident."""

    account: StatusReporter
    agents: NoAgents
    chronicle: EventLog
    clock: ManualClock
    beats: list[Beat] = field(default_factory=list)

    def incidents(self) -> dict[str, Incident]:
        self.chronicle.close()
        return {incident.kind: incident for beat in self.beats for incident in beat.incidents}


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Told]:
    clock, beats = ManualClock(), list[Beat]()
    backend = LocalBackend(7, "ann", (N1, N2), {}, tmp_path, tmp_path)
    chronicle = EventLog(tmp_path, clock, [EventSink(beats.append, "test")])
    agents: Any = NoAgents()
    account = StatusReporter(RunContext(backend, agents, chronicle, clock, SPEC, RelaunchPolicy()))
    yield Told(account, agents, chronicle, clock, beats)
    chronicle.close()


def relaunched(told: Told) -> None:
    """Ranks failed on n1, and were started again."""
    told.account.open(IncidentKind.RANK_FAILED, N1, 0.0, "exit code 1", Action.RELAUNCH)
    told.account.enter(Phase.RECOVERING)
    told.account.acted()


def test_an_incident_is_over_with_the_first_step_of_the_attempt_it_led_to(told: Told) -> None:
    relaunched(told)
    told.clock.sleep(5.0)
    told.account.note_first_step(12, 3)
    (over,) = told.incidents().values()
    assert (over.outcome, over.recovered_unix, over.steps_repeated) == (
        IncidentOutcome.RECOVERED,
        told.clock.unix(),
        3,
    )


def test_it_is_not_over_because_the_ranks_that_are_being_ended_still_report(told: Told) -> None:
    told.account.open(IncidentKind.NODE_SILENT, N1, 2.5, "nothing heard of n1", Action.RELAUNCH)
    told.account.note_first_step(1, 0)
    assert told.account.incident is not None
    assert told.account.incident.outcome is IncidentOutcome.OPEN


def test_the_loss_of_a_spare_meanwhile_is_another_incident_and_ends_none(told: Told) -> None:
    relaunched(told)
    told.account.lose_spares({N2: 2.5}, "nothing heard of n2")
    told.account.note_first_step(12, 0)
    found = told.incidents()
    assert {kind: one.outcome for kind, one in found.items()} == {
        IncidentKind.RANK_FAILED: IncidentOutcome.RECOVERED,
        IncidentKind.NODE_SILENT: IncidentOutcome.RECOVERED,
    }
    lost = found[IncidentKind.NODE_SILENT]
    assert (lost.node, lost.detected_unix - lost.began_unix, lost.ranks) == (N2, 2.5, 0)


def test_a_node_that_was_held_back_for_long_is_told_of_when_it_is_heard_again(told: Told) -> None:
    for quiet_s in (2.5, 12.5, 32.5):
        told.account.hold_back({N2: quiet_s}, f"nothing heard of n2 for {quiet_s} s; asking Slurm")
        told.clock.sleep(10.0)
    told.account.come_back()
    told.account.come_back()
    (one,) = told.incidents().values()
    assert (one.kind, one.node, one.action, one.outcome) == (
        IncidentKind.NODE_SILENT,
        N2,
        Action.NONE,
        IncidentOutcome.RECOVERED,
    )
    assert (one.detected_unix - one.began_unix, one.recovered_unix - one.began_unix) == (2.5, 32.5)
    assert one.evidence == "nothing heard of n2 for 2.5 s; asking Slurm; it came back, and nothing was done"


def test_one_that_was_held_back_for_a_moment_or_is_acted_on_is_not_told_of_so(told: Told) -> None:
    told.account.hold_back({N2: 2.5}, "nothing heard of n2 for 2.5 s; asking Slurm")
    told.clock.sleep(1.0)
    told.account.come_back()
    told.account.hold_back({N2: 2.5}, "nothing heard of n2 for 2.5 s; asking Slurm")
    told.clock.sleep(20.0)
    told.account.open(IncidentKind.JOB_STRANDED, N2, 22.5, "nothing heard of n2 for 22.5 s", Action.NONE)
    told.account.come_back()
    told.account.settle(IncidentOutcome.RECOVERED)
    assert set(told.incidents()) == {IncidentKind.JOB_STRANDED}


def taken_over(told: Told, host: NodeName | None) -> None:
    launch = SimpleNamespace(attempt=Attempt(7, 0, 0), world_size=2)
    layout: Any = SimpleNamespace(launch=launch, active=(N1, N2), resting=(), crossings=0, crossings_stock=0)
    told.account.take_over(layout, None, "n1 is silent, and n2 has taken the launcher's role", 6.0, host)
    told.account.come_back()


def test_a_launcher_that_was_started_again_is_an_incident_that_is_over(told: Told) -> None:
    taken_over(told, None)
    (one,) = told.incidents().values()
    assert (one.kind, one.node, one.outcome) == (
        IncidentKind.LAUNCHER_RESTARTED,
        None,
        IncidentOutcome.RECOVERED,
    )


@pytest.mark.parametrize("rests", [True, False])
def test_a_host_that_is_lost_with_its_launcher_is_one_incident(told: Told, *, rests: bool) -> None:
    taken_over(told, N1)
    told.clock.sleep(1.0)
    if rests:
        told.account.lose_spares({N1: 2.5}, "nothing heard of n1 for 2.5 s")
    else:
        told.account.open(IncidentKind.NODE_SILENT, N1, 2.5, "nothing heard of n1 for 2.5 s", Action.RELAUNCH)
        told.account.acted()
        told.account.note_first_step(12, 0)
    told.account.enter(Phase.SUCCEEDED)
    (one,) = told.incidents().values()
    assert (one.kind, one.node, one.outcome) == (IncidentKind.NODE_SILENT, N1, IncidentOutcome.RECOVERED)
    assert one.detected_unix - one.began_unix == 7.0
    assert one.evidence.endswith("; n1 is silent, and n2 has taken the launcher's role")


def test_of_several_lost_nodes_the_host_of_the_launcher_that_died_is_named(told: Told) -> None:
    assert (told.account.named([N2, N1]), told.account.named([])) == (N2, None)
    taken_over(told, N1)
    assert (told.account.named([N2, N1]), told.account.named([N2])) == (N1, N2)


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_host_of_which_nothing_more_is_found_than_its_launchers_death_is_an_incident_all_the_same(
    told: Told, *, comes_back: bool
) -> None:
    taken_over(told, N1)
    told.account.lose_spares({N2: 2.5}, "nothing heard of n2 for 2.5 s")
    if comes_back:
        told.agents.answered[N1] = 1.0
        told.account.come_back()
        told.account.come_back()
    told.account.enter(Phase.SUCCEEDED)
    assert set(told.incidents()) == {IncidentKind.LAUNCHER_RESTARTED, IncidentKind.NODE_SILENT}
    assert sum(one.kind is IncidentKind.LAUNCHER_RESTARTED for beat in told.beats for one in beat.incidents) == 1


def test_a_host_of_which_nothing_is_found_before_the_run_is_ended_counts_as_lost_and_is_open(told: Told) -> None:
    taken_over(told, N1)
    told.account.enter(Phase.FAILED)
    (one,) = told.incidents().values()
    assert (one.id, one.kind, one.node) == ("7.0.0-node-lost-n1", IncidentKind.NODE_SILENT, N1)
    assert one.outcome is IncidentOutcome.OPEN, "who restarts the job says when it trains again"


def test_a_slow_rank_is_told_of_once_and_once_more_when_it_is_not_slow(told: Told) -> None:
    for found in ({N1: "1.4 times"}, {N1: "1.5 times"}, {}):
        told.account.note_slow(found)
        told.clock.sleep(1.0)
    slow = told.incidents()[IncidentKind.STRAGGLER]
    assert (slow.outcome, slow.evidence) == (IncidentOutcome.RECOVERED, "1.4 times")
    assert slow.recovered_unix - slow.began_unix == 2.0


def test_storage_that_takes_no_word_is_an_incident_until_it_does_again(tmp_path: Path) -> None:
    clock, beats, stalled, goes_on = ManualClock(), list[Beat](), threading.Event(), threading.Event()

    def on_frozen_storage(_: Beat) -> None:
        stalled.set()
        assert goes_on.wait(LIMIT_S)

    backend = LocalBackend(7, "ann", (N1, N2), {}, tmp_path, tmp_path)
    couriers = [EventSink(on_frozen_storage, "journal", clock), EventSink(beats.append, "watchdog", clock)]
    chronicle = EventLog(tmp_path, clock, couriers)
    agents: Any = NoAgents()
    account = StatusReporter(RunContext(backend, agents, chronicle, clock, SPEC, RelaunchPolicy()))

    def told() -> list[IncidentOutcome]:
        kinds = [one for beat in beats for one in beat.incidents]
        assert {one.kind for one in kinds} <= {IncidentKind.STORAGE_FROZEN}
        return [one.outcome for one in kinds]

    account.enter(Phase.RUNNING)
    assert stalled.wait(LIMIT_S)
    clock.sleep(FROZEN_S - 1)
    account.tick()
    clock.sleep(2)
    account.tick()
    until(lambda: told() == [IncidentOutcome.OPEN])
    goes_on.set()

    def over() -> bool:
        clock.sleep(2)
        account.tick()
        return told()[-1] is IncidentOutcome.RECOVERED

    until(over)
    chronicle.close()
    assert told() == [IncidentOutcome.OPEN, IncidentOutcome.RECOVERED]
