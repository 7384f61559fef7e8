"""What standing agents and launchers say of nodes: kept, believed as long as it is fresh, and put together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from prometheus_client import CollectorRegistry

from deeplink.core.clock import ManualClock
from deeplink.core.finding import Finding, Severity
from deeplink.core.metrics import WatchMetrics
from deeplink.core.types import Attempt, NodeName
from deeplink.rpc.channel import open_channel
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.liveness.heartbeats import KEEP_S, AgentReport, HeartbeatTable, beat_to_wire, words
from deeplink.scheduler.recovery.evidence import WatchPolicy
from deeplink.scheduler.recovery.records import (
    Beat,
    IncidentOutcome,
    NodeRecord,
    Phase,
)
from deeplink.scheduler.watch.server import WatchServicer, watch_server
from deeplink.v1 import common_pb2, watch_pb2, watch_pb2_grpc
from tests.scheduler.watch.callers import TOKEN, AnySite, authorizer
from tests.waiting import LIMIT_S

N1, N2 = NodeName("n1"), NodeName("n2")
POLICY = WatchPolicy()
DISK = Finding(check="disk", severity=Severity.ERROR, text="read-only")


class Standing:
    """A watchdog's server, and a standing agent that speaks to it."""

    def __init__(self, journal: Journal, address: str, heartbeats: HeartbeatTable, clock: ManualClock) -> None:
        self.journal, self.address, self.heartbeats, self.clock = journal, address, heartbeats, clock

    def attend(self, node: str = "n1", **fields: object) -> bool:
        return self.answer(node, **fields).known

    def answer(self, node: str = "n1", **fields: object) -> watch_pb2.AttendReply:
        request = watch_pb2.AttendRequest(node=node, boot_id="kernel-1", **fields)  # type: ignore[arg-type] # a test's
        with open_channel(self.address, TOKEN) as channel:
            reply: watch_pb2.AttendReply = watch_pb2_grpc.WatchStub(channel).Attend(request, timeout=LIMIT_S)
            return reply


@pytest.fixture
def standing(tmp_path: Path) -> Iterator[Standing]:
    clock, heartbeats, metrics = ManualClock(), HeartbeatTable(), WatchMetrics(CollectorRegistry())
    with Journal(tmp_path / "j.sqlite") as journal:
        servicer = WatchServicer(
            journal,
            heartbeats,
            clock,
            metrics,
            authorizer(journal, clock, AnySite(knows=lambda name: name.startswith("n"))),
        )
        bound = watch_server("127.0.0.1:0", servicer)
        bound.server.start()
        yield Standing(journal, f"127.0.0.1:{bound.port}", heartbeats, clock)
        bound.server.stop(0.5).wait(2.0)


def wire(severity: str, since: float = 100.0) -> common_pb2.Finding:
    return common_pb2.Finding(check="disk", severity=severity, problem="slow", since_unix=since)


def test_a_node_that_slurm_does_not_know_is_not_kept(standing: Standing) -> None:
    assert standing.attend("n1")
    assert not standing.attend("elsewhere")
    assert [node.name for node in standing.journal.nodes()] == ["n1"]
    assert [one.node.name for one in standing.heartbeats.attended()] == ["n1"]


def test_the_answer_has_the_watchdogs_clock_for_the_agent_to_compare_its_own_with(standing: Standing) -> None:
    assert standing.answer().unix == standing.clock.unix()


def test_a_launchers_word_on_a_node_ends_no_finding_of_its_standing_agent(standing: Standing) -> None:
    def kept() -> list[str]:
        return [one.text for one in standing.journal.nodes()[0].health]

    def launcher_speaks() -> None:
        with open_channel(standing.address, TOKEN) as channel:
            said = beat_to_wire(beat(NodeRecord(name=N1, job=17, boot_id="kernel-1")))
            watch_pb2_grpc.WatchStub(channel).Beat(said, timeout=LIMIT_S)

    standing.attend(health=[wire("comment")])
    launcher_speaks()
    assert kept() == ["slow"], "a job's agent runs a part of the checks"
    standing.clock.sleep(KEEP_S)
    launcher_speaks()
    assert kept() == [], "nobody says so any more"


def test_what_does_not_change_is_written_down_now_and_then_only(standing: Standing) -> None:
    def written() -> float:
        return standing.journal.nodes()[0].seen_unix

    standing.attend()
    first = written()
    standing.clock.sleep(5.0)
    standing.attend()
    assert written() == first
    standing.attend(health=[wire("comment")])
    assert written() == first + 5.0
    standing.clock.sleep(KEEP_S)
    standing.attend(health=[wire("comment")])
    assert written() == first + 5.0 + KEEP_S


def test_what_passed_while_the_watchdog_was_away_is_one_incident_told_twice_or_not(standing: Standing) -> None:
    missed = [wire("drain", 90.0), wire("comment", 95.0), wire("observe", 80.0), wire("unknown", 70.0)]
    for _ in range(2):
        standing.attend(missed=missed)
    (incident,) = standing.journal.incidents()
    assert (incident.kind, incident.node, incident.outcome) == ("node-sick", "n1", IncidentOutcome.RECOVERED)
    assert incident.began_unix == 90.0
    standing.attend(missed=[wire("observe")])
    assert len(standing.journal.incidents()) == 1


def test_a_slurmd_that_was_started_anew_while_the_watchdog_was_away_is_told_once(standing: Standing) -> None:
    anew = common_pb2.Finding(check="slurmd", severity="observe", problem="started again", since_unix=90.0)
    for _ in range(2):
        standing.attend(missed=[anew, wire("observe", 91.0)])
    (incident,) = standing.journal.incidents()
    assert (incident.kind, incident.node, incident.outcome) == ("slurmd-lost", "n1", IncidentOutcome.RECOVERED)


def test_who_speaks_while_the_journal_takes_nothing_is_heard_and_what_he_says_again_is_written_down(
    standing: Standing,
) -> None:
    standing.journal._db.execute("PRAGMA query_only = ON")
    with pytest.raises(grpc.RpcError) as failed:
        standing.attend(health=[wire("comment")])
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
    (heard,) = standing.heartbeats.attended()
    assert (len(heard.node.health), heard.heard_at) == (1, standing.clock.monotonic())
    standing.journal._db.execute("PRAGMA query_only = OFF")
    assert standing.attend(health=[wire("comment")])
    assert [len(node.health) for node in standing.journal.nodes()] == [1]


def test_what_cannot_be_kept_is_refused(standing: Standing) -> None:
    with pytest.raises(grpc.RpcError):
        standing.attend(missed=[common_pb2.Finding(severity="drain")])
    assert standing.journal.incidents() == ()


def test_a_grave_finding_and_another_kernel_wake_the_loop() -> None:
    heartbeats = HeartbeatTable()
    well = NodeRecord(name=N1, boot_id="a")
    for record, wakes in (
        (well, False),
        (NodeRecord(name=N1, boot_id="a", health=(DISK,)), True),
        (NodeRecord(name=N1, boot_id="a", health=(DISK,)), False),
        (NodeRecord(name=N1, boot_id="b"), True),
    ):
        heartbeats.alarm.clear()
        heartbeats.attend(record, 1.0, kept=True)
        assert heartbeats.alarm.is_set() is wakes


def said(heartbeats: HeartbeatTable, now: float, *nodes: NodeName) -> dict[NodeName, AgentReport]:
    return words(heartbeats.attended(), [(one, frozenset(nodes)) for one in heartbeats.all()], now, POLICY)


def beat(*nodes: NodeRecord) -> Beat:
    return Beat(attempt=Attempt(17, 0, 0), phase=Phase.RUNNING, nodes=(N1, N2), node_beats=nodes)


def test_a_word_counts_for_a_while_and_not_at_all_when_it_is_from_the_journal() -> None:
    heartbeats = HeartbeatTable()
    heartbeats.attend(NodeRecord(name=N1, boot_id="a", health=(DISK,)), 100.0, kept=True)
    assert said(heartbeats, 105.0)[N1] == AgentReport((DISK,), 5.0, 5.0, "a")
    assert said(heartbeats, 100.0 + POLICY.told_s)[N1] == AgentReport((), POLICY.told_s, POLICY.told_s, "a")
    again = HeartbeatTable()
    again.restore((), 200.0, 0.0, [NodeRecord(name=N1, boot_id="a", health=(DISK,)), NodeRecord(name=N2, job=17)])
    assert said(again, 201.0) == {N1: AgentReport((), None, 1.0, "a")}
    heartbeats.forgive(300.0)
    assert said(heartbeats, 301.0)[N1] == AgentReport((), None, 1.0, "a")


def test_a_launcher_is_believed_of_the_nodes_that_slurm_gave_its_job() -> None:
    heartbeats = HeartbeatTable()
    sick = [NodeRecord(name=name, job=17, boot_id="a", health=(DISK,)) for name in (N1, N2)]
    heartbeats.hear(beat(*sick), 100.0)
    assert said(heartbeats, 100.5, N1) == {N1: AgentReport((DISK,), 0.5, None, "a")}


def test_what_a_launcher_says_is_older_by_what_it_waited() -> None:
    heartbeats = HeartbeatTable()
    heartbeats.hear(dataclasses.replace(beat(NodeRecord(name=N1, silent_s=0.25)), waited_s=1.5), 100.0)
    assert said(heartbeats, 101.0, N1)[N1].heard_s == 2.75


def test_of_two_agents_the_graver_word_counts_and_who_is_missed_is_not_heard() -> None:
    heartbeats = HeartbeatTable()
    light = Finding(check="disk", severity=Severity.NOTE, text="slow")
    heartbeats.attend(NodeRecord(name=N1, boot_id="a", health=(light,)), 100.0, kept=True)
    heartbeats.hear(beat(NodeRecord(name=N1, job=17, boot_id="a", health=(DISK,))), 101.0)
    assert said(heartbeats, 102.0, N1)[N1] == AgentReport((DISK,), 1.0, 2.0, "a")
    heartbeats.hear(beat(NodeRecord(name=N1, job=17, silent_s=4.0, boot_id="a", health=(DISK,))), 102.0)
    assert said(heartbeats, 102.0, N1)[N1].heard_s == 2.0, "the launcher misses it"


def test_the_kernels_that_an_attempt_began_with_are_remembered() -> None:
    heartbeats = HeartbeatTable()
    heartbeats.hear(beat(NodeRecord(name=N1, job=17)), 1.0)
    heartbeats.hear(beat(NodeRecord(name=N1, job=17, boot_id="a")), 2.0)
    heartbeats.hear(beat(NodeRecord(name=N1, job=17, boot_id="b")), 3.0)
    (heard,) = heartbeats.all()
    assert heard.boots == {"n1": "a"}
