"""Beats over real gRPC: kept before they are answered, refused without the token or with what cannot be kept."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from google.protobuf import text_format
from prometheus_client import CollectorRegistry

from deeplink.core.clock import ManualClock
from deeplink.core.metrics import WatchMetrics
from deeplink.core.types import Attempt, NodeName
from deeplink.rpc.channel import open_channel
from deeplink.rpc.listeners import PortBusyError
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.liveness.heartbeats import (
    HeartbeatTable,
    beat_from_wire,
    beat_to_wire,
    incident_from_wire,
    words,
)
from deeplink.scheduler.recovery.evidence import WatchPolicy
from deeplink.scheduler.recovery.incident_merging import (
    MOST_MOMENTS,
    MOST_STACK_CHARACTERS,
    MOST_STACKS,
)
from deeplink.scheduler.recovery.records import (
    LONGEST_STACK,
    Beat,
    Incident,
    IncidentOutcome,
    Moment,
    NodeRecord,
    Phase,
    ProgressPoint,
    RankStack,
    RecordError,
)
from deeplink.scheduler.watch.server import SERVICE, WatchServicer, watch_server
from deeplink.v1 import node_pb2, watch_pb2, watch_pb2_grpc
from tests.scheduler.watch.callers import ME, NOBODYS, TOKEN, AnySite, authorizer
from tests.waiting import LIMIT_S

FIRST, SECOND = Attempt(17, 0, 0), Attempt(17, 0, 1)


def beat(attempt: Attempt = FIRST, phase: Phase = Phase.RUNNING, step: int = 5, silent_s: float = 0.0) -> Beat:
    return Beat(
        attempt=attempt,
        phase=phase,
        user="ada",
        job_name="resnet",
        nodes=(NodeName("n1"), NodeName("n0")),
        spares=(NodeName("n2"),),
        world_size=8,
        node_beats=(
            NodeRecord(name=NodeName("n0"), topology_address="core.leaf0.n0", silent_s=silent_s, shards=2, job=17),
        ),
        progress=(ProgressPoint(attempt=attempt, step=step, unix=5.0, rank=0, metrics={"loss": 0.25}),),
        incidents=(
            Incident(
                id="17.0.0-node-silent-n1",
                kind="node-silent",
                node=NodeName("n1"),
                attempt=FIRST,
                action="relaunch",
                evidence="agent missed",
                began_unix=1.0,
                detected_unix=4.0,
                outcome=IncidentOutcome.OPEN,
            ),
        ),
        ring_crossings=2,
        ring_crossings_stock=8,
        step_timeout_s=30.0,
        detail="all well",
    )


class Running(NamedTuple):
    stub: watch_pb2_grpc.WatchStub
    address: str
    journal: Journal
    heartbeats: HeartbeatTable
    clock: ManualClock
    metrics: WatchMetrics
    servicer: WatchServicer


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    clock, heartbeats, metrics = ManualClock(), HeartbeatTable(), WatchMetrics(CollectorRegistry())
    with Journal(tmp_path / "j.sqlite") as journal:
        servicer = WatchServicer(journal, heartbeats, clock, metrics, authorizer(journal, clock))
        bound = watch_server("127.0.0.1:0", servicer)
        bound.server.start()
        address = f"127.0.0.1:{bound.port}"
        with open_channel(address, TOKEN) as channel:
            yield Running(
                watch_pb2_grpc.WatchStub(channel), address, journal, heartbeats, clock, metrics, servicer
            )
        bound.server.stop(0.5).wait(2.0)


def code_of(refused: pytest.ExceptionInfo[grpc.RpcError]) -> Any:
    return getattr(refused.value, "code")()  # noqa: B009 - grpc's errors have it, its annotations do not


def test_what_a_beat_says_survives_the_wire() -> None:
    said = beat()
    (node,) = said.node_beats
    for verified in (None, 0, 7):  # an older launcher does not say
        told = dataclasses.replace(said, node_beats=(dataclasses.replace(node, verified_bytes=verified),))
        heard = beat_from_wire(beat_to_wire(told), now_unix=0.0)
        assert heard == told
    late = beat_from_wire(beat_to_wire(dataclasses.replace(said, waited_s=1.5)), now_unix=10.0)
    assert (late.waited_s, late.node_beats[0].seen_unix) == (1.5, 8.5)


def incident_to_wire(incident: Incident) -> watch_pb2.IncidentRecord:
    return beat_to_wire(dataclasses.replace(beat(), incidents=(incident,))).incidents[0]


def test_the_course_and_the_stacks_of_an_incident_survive_the_wire() -> None:
    (plain,) = beat().incidents
    said = dataclasses.replace(
        plain,
        timeline=(Moment(1.0, "first sign of it"), Moment(4.0, "detected")),
        ranks=8,
        step_s=0.5,
        stacks=(RankStack(rank=3, pid=9, state="D", source="kernel", text="nfs_wait", flight='{"entries": []}'),),
    )
    assert incident_from_wire(incident_to_wire(said)) == said


def test_what_is_too_much_to_keep_of_an_incident_is_cut_or_refused() -> None:
    (plain,) = beat().incidents
    moments = tuple(Moment(float(at), "again") for at in range(MOST_MOMENTS + 10))
    stacks = tuple(RankStack(rank=rank, text="x" * (LONGEST_STACK + 1), flight="{}") for rank in range(64))
    heard = incident_from_wire(incident_to_wire(dataclasses.replace(plain, timeline=moments, stacks=stacks)))
    assert [moment.unix for moment in heard.timeline[:64]] == [float(at) for at in range(64)]
    assert heard.timeline[-1] == moments[-1]
    assert len(heard.timeline) == MOST_MOMENTS
    assert sum(len(stack.text) for stack in heard.stacks) in range(
        MOST_STACK_CHARACTERS - 1_000, MOST_STACK_CHARACTERS
    )
    assert {stack.flight for stack in heard.stacks} == {"{}"}
    for field, one in (("timeline", watch_pb2.Moment()), ("stacks", node_pb2.RankStack())):
        message = incident_to_wire(plain)
        getattr(message, field).extend([one] * (MOST_STACKS + 1))
        with pytest.raises(RecordError, match="at most"):
            incident_from_wire(message)


def test_a_beat_is_on_record_when_it_is_answered(running: Running) -> None:
    reply = running.stub.Beat(beat_to_wire(beat()), timeout=LIMIT_S)
    assert reply.known
    job = running.journal.job(17)
    assert job is not None
    assert (job.newest.nodes, job.newest.last_step, job.newest.ring_crossings_stock) == (("n1", "n0"), 5, 8)
    assert [incident.action for incident in running.journal.incidents()] == ["relaunch"]
    (heard,) = running.heartbeats.all()
    assert heard.heard_at == running.clock.monotonic()


def test_a_beat_ages_while_it_is_written_down(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    record = running.journal.record_beat

    def slowly(beat: Beat, now_unix: float) -> None:
        running.clock.sleep(3.0)
        record(beat, now_unix)

    monkeypatch.setattr(running.journal, "record_beat", slowly)
    running.stub.Beat(beat_to_wire(dataclasses.replace(beat(), waited_s=0.5)), timeout=LIMIT_S)
    (heard,) = running.heartbeats.all()
    assert (heard.heard_at, heard.beat.waited_s) == (running.clock.monotonic() - 3.0, 0.5)


def test_without_the_token_nothing_is_kept(running: Running) -> None:
    with open_channel(running.address, "another") as channel, pytest.raises(grpc.RpcError) as refused:
        watch_pb2_grpc.WatchStub(channel).Beat(beat_to_wire(beat()), timeout=LIMIT_S)
    assert code_of(refused) is grpc.StatusCode.UNAUTHENTICATED
    assert running.journal.jobs() == ()


def test_the_token_of_another_user_restarts_nothing(running: Running) -> None:
    with open_channel(running.address, NOBODYS) as channel:
        stub = watch_pb2_grpc.WatchStub(channel)
        for call in (
            lambda: stub.Beat(beat_to_wire(dataclasses.replace(beat(), user=ME)), timeout=LIMIT_S),
            lambda: stub.Attend(watch_pb2.AttendRequest(node="n1", boot_id="7"), timeout=LIMIT_S),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                call()
            assert code_of(refused) is grpc.StatusCode.PERMISSION_DENIED
    assert (running.journal.jobs(), running.journal.nodes(), running.heartbeats.all()) == ((), (), ())


HEAD = "attempt { job: 17 } phase: PHASE_RUNNING "
BAD = {
    "no attempt": "phase: PHASE_RUNNING",
    "no phase": "attempt { job: 17 }",
    "another job's progress": HEAD + "progress { attempt { job: 18 } step: 1 }",
    "another job's incident": HEAD + "incidents { id: 'x' kind: 'node-dead' attempt { job: 18 } }",
    "another job's incident by its id": HEAD
    + "incidents { id: '18.0.0-node-dead-n1' kind: 'node-dead' attempt { job: 17 } outcome: 'recovered' }",
    "an incident of no job": HEAD + "incidents { id: 'cluster-switch-suspect-leaf0@1' kind: 'switch-suspect' }",
    "an unknown outcome": HEAD
    + "incidents { id: '17.0.0-x' kind: 'node-dead' attempt { job: 17 } outcome: 'who knows' }",
    "a kind that is no word": HEAD + "incidents { id: 'x' kind: '<b>' attempt { job: 17 } }",
    "a time that is none": HEAD + "step_timeout_s: nan",
    "a time to come": HEAD + "waited_s: -1",
    "a number too large": HEAD + "progress { attempt { job: 17 } step: 18446744073709551615 }",
    "too many nodes": HEAD + "nodes: 'n' " * 20_000,
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_kept_is_refused_whole(running: Running, case: str) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        running.stub.Beat(text_format.Parse(BAD[case], watch_pb2.BeatRequest()), timeout=LIMIT_S)
    assert code_of(refused) is grpc.StatusCode.INVALID_ARGUMENT
    assert running.journal.jobs() == ()
    assert running.metrics.registry.get_sample_value("deeplink_watch_beats_total", {"answer": "refused"}) == 1


def test_of_a_node_that_slurm_does_not_know_nothing_is_kept(running: Running) -> None:
    servicer = WatchServicer(
        running.journal,
        running.heartbeats,
        running.clock,
        running.metrics,
        authorizer(running.journal, running.clock, AnySite(knows=lambda name: name != "n0")),
    )
    bound = watch_server("127.0.0.1:0", servicer)
    bound.server.start()
    with open_channel(f"127.0.0.1:{bound.port}", TOKEN) as channel:
        assert watch_pb2_grpc.WatchStub(channel).Beat(beat_to_wire(beat()), timeout=LIMIT_S).known
    bound.server.stop(0.5).wait(2.0)
    assert running.journal.nodes() == ()
    assert running.heartbeats.all()[0].beat.node_beats == ()


def test_a_journal_that_fails_leaves_the_beat_unanswered_and_yet_it_was_heard(running: Running) -> None:
    running.journal.close()
    with pytest.raises(grpc.RpcError) as failed:
        running.stub.Beat(beat_to_wire(beat()), timeout=LIMIT_S)
    assert code_of(failed) is grpc.StatusCode.UNAVAILABLE
    assert [heard.heard_at for heard in running.heartbeats.all()] == [running.clock.monotonic()]


def test_an_address_in_use_is_said_with_its_remedy(running: Running) -> None:
    with pytest.raises(PortBusyError) as refused:
        watch_server(running.address, running.servicer)
    assert "--bind" in refused.value.remedy


def test_the_service_has_the_name_that_health_and_reflection_tell() -> None:
    assert SERVICE == "deeplink.v1.Watch"


def test_an_older_attempt_says_nothing_any_more() -> None:
    heartbeats = HeartbeatTable()
    assert heartbeats.hear(beat(SECOND), 10.0)
    assert not heartbeats.hear(beat(FIRST, step=99), 11.0)
    (heard,) = heartbeats.all()
    assert (heard.beat.attempt, heard.heard_at) == (SECOND, 10.0)


def test_a_beat_that_was_held_up_is_not_the_newest() -> None:
    heartbeats = HeartbeatTable()
    assert heartbeats.hear(beat(step=6), 12.0)
    assert not heartbeats.hear(beat(phase=Phase.STRANDED, step=5), 10.0)
    (heard,) = heartbeats.all()
    assert (heard.beat.phase, heard.heard_at) == (Phase.RUNNING, 12.0)


def test_a_beat_that_came_as_we_returned_is_heard() -> None:
    heartbeats = HeartbeatTable()
    heartbeats.hear(beat(step=5), 10.0)
    heartbeats.forgive(20.0)
    assert heartbeats.hear(beat(phase=Phase.SUCCEEDED, step=6), 19.5)
    assert [heard.beat.phase for heard in heartbeats.all()] == [Phase.SUCCEEDED]


def test_bad_news_wakes_the_loop_and_good_news_does_not() -> None:
    alarm = threading.Event()
    heartbeats = HeartbeatTable(alarm)
    heartbeats.hear(beat(), 1.0)
    alarm.clear()
    heartbeats.hear(beat(step=6), 2.0)
    assert not alarm.is_set()
    heartbeats.hear(beat(step=7, silent_s=1.0), 3.0)
    assert alarm.is_set()
    alarm.clear()
    heartbeats.hear(beat(phase=Phase.STRANDED, step=8), 4.0)
    assert alarm.is_set()


def test_after_our_own_absence_every_silence_begins_anew(running: Running) -> None:
    running.stub.Beat(beat_to_wire(beat()), timeout=LIMIT_S)
    running.clock.sleep(500.0)
    heartbeats = HeartbeatTable()
    heartbeats.restore(running.journal.jobs(), running.clock.monotonic(), running.clock.unix())
    running.heartbeats.forgive(running.clock.monotonic())
    for (heard,) in (heartbeats.all(), running.heartbeats.all()):
        assert heard.missed_s == pytest.approx(500.0)
        assert heard.heard_at == running.clock.monotonic()
        assert heard.beat.step_timeout_s == 30.0


def test_what_was_said_before_a_doubt_of_our_network_says_nothing_of_now() -> None:
    heartbeats = HeartbeatTable()
    heartbeats.hear(beat(), 10.0)
    heartbeats.attend(NodeRecord(name=NodeName("n1")), 10.0, kept=True)
    heartbeats.forgive(30.0, away=False)
    (heard,) = heartbeats.all()
    assert (heard.heard_at, heard.ourselves, heard.missed_s) == (30.0, True, 20.0)
    said = words(heartbeats.attended(), [(heard, frozenset(heard.beat.nodes))], 31.0, WatchPolicy())
    assert {one.heard_s for one in said.values()} == {None}
    heartbeats.hear(beat(), 32.0)
    (heard,) = heartbeats.all()
    assert heard.missed_s == 0.0, "it has spoken since"
