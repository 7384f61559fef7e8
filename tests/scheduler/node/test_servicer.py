"""The Node service: progress kept, heartbeats answered, older attempts fenced."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import pytest

from deeplink.core.clock import ManualClock, SystemClock
from deeplink.core.types import Attempt, NodeName
from deeplink.rpc.channel import attempt_to_wire, open_channel
from deeplink.rpc.grpc_server import bound_server
from deeplink.scheduler.node.rank_processes import Reported
from deeplink.scheduler.node.rank_slots import RankSlots
from deeplink.scheduler.node.servicer import KEPT_JOBS, KEPT_REPORTS, Bulletin, NodeServicer, add_to
from deeplink.v1 import common_pb2, node_pb2, node_pb2_grpc
from tests.waiting import LIMIT_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

OLD, NEW, OTHER = Attempt(7, 0, 1), Attempt(7, 1, 0), Attempt(8, 0, 0)


def progress(attempt: Attempt, step: int, rank: int = 0) -> common_pb2.Progress:
    return common_pb2.Progress(attempt=attempt_to_wire(attempt), step=step, rank=rank, metrics={"loss": 0.5})


def test_records_come_back_in_order_after_the_one_named() -> None:
    bulletin = Bulletin()
    for step in range(5):
        bulletin.report(progress(OLD, step))
    assert [record.step for record in bulletin.since(3).records] == [3, 4]
    assert bulletin.since(3).last == 5
    assert bulletin.since(5).records == ()


def test_only_the_newest_records_are_kept() -> None:
    bulletin = Bulletin()
    for step in range(KEPT_REPORTS + 10):
        bulletin.report(progress(OLD, step))
    heard = bulletin.since(0)
    assert len(heard.records) == KEPT_REPORTS
    assert (heard.records[0].step, heard.last) == (10, KEPT_REPORTS + 10)


def test_a_caller_that_knew_the_agent_before_its_restart_gets_all_records() -> None:
    bulletin = Bulletin()
    bulletin.report(progress(OLD, 1))
    assert len(bulletin.since(1000).records) == 1


def test_an_older_attempt_is_fenced_and_its_progress_is_not_kept() -> None:
    bulletin = Bulletin()
    bulletin.learn(NEW)
    assert bulletin.report(progress(OLD, 5)) == NEW
    assert bulletin.report(progress(NEW, 6)) == NEW
    assert [record.step for record in bulletin.since(0).records] == [6]


def test_a_report_of_a_newer_attempt_fences_the_older_one_too() -> None:
    bulletin = Bulletin()
    bulletin.report(progress(NEW, 1))
    assert bulletin.report(progress(OLD, 2)) == NEW
    assert bulletin.learn(OLD) == NEW


def test_jobs_do_not_fence_each_other_and_are_told_apart() -> None:
    bulletin = Bulletin()
    bulletin.report(progress(NEW, 1))
    assert bulletin.report(progress(OTHER, 2)) == OTHER
    assert [record.step for record in bulletin.since(0, job=8).records] == [2]
    assert len(bulletin.since(0).records) == 2


def test_jobs_not_heard_of_for_long_are_forgotten() -> None:
    bulletin = Bulletin()
    bulletin.learn(Attempt(1, 5, 0))
    for job in range(2, KEPT_JOBS + 1):
        bulletin.learn(Attempt(job, 0, 0))
    assert bulletin.learn(Attempt(1, 0, 0)) == Attempt(1, 5, 0)
    for job in range(1000, 1000 + KEPT_JOBS):
        bulletin.learn(Attempt(job, 0, 0))
    assert bulletin.learn(Attempt(1, 0, 0)) == Attempt(1, 0, 0)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def node(clock: ManualClock) -> Iterator[node_pb2_grpc.NodeStub]:
    servicer = NodeServicer(
        NodeName("n3"), "core.leaf1.n3", lambda: node_pb2.StoreStatus(shards=2, bytes=99), clock=clock
    )
    bound = bound_server("127.0.0.1:0", "secret", lambda server: [add_to(server, servicer)])
    bound.server.start()
    with open_channel(f"127.0.0.1:{bound.port}", "secret") as channel:
        yield node_pb2_grpc.NodeStub(channel)
    bound.server.stop(None).wait(LIMIT_S)


def test_a_heartbeat_says_how_the_node_is(node: node_pb2_grpc.NodeStub, clock: ManualClock) -> None:
    clock.now += 12.5
    status = node.Status(node_pb2.StatusRequest(), timeout=LIMIT_S)
    assert (status.node, status.topology_address, status.uptime_s) == ("n3", "core.leaf1.n3", 12.5)
    assert (status.store.shards, status.store.bytes) == (2, 99)
    assert not status.HasField("newest")


def test_reports_come_back_with_the_heartbeat_and_older_attempts_learn_of_the_newer(
    node: node_pb2_grpc.NodeStub,
) -> None:
    first = node.Report(node_pb2.ReportRequest(progress=progress(OLD, 3, rank=2)), timeout=LIMIT_S)
    assert not first.fenced
    assert first.newest == attempt_to_wire(OLD)
    asked = node_pb2.StatusRequest(attempt=attempt_to_wire(OLD))
    status = node.Status(asked, timeout=LIMIT_S)
    assert [(p.rank, p.step, dict(p.metrics)) for p in status.progress] == [(2, 3, {"loss": 0.5})]
    status = node.Status(
        node_pb2.StatusRequest(attempt=attempt_to_wire(NEW), after_report=status.last_report), timeout=LIMIT_S
    )
    assert list(status.progress) == []
    fenced = node.Report(node_pb2.ReportRequest(progress=progress(OLD, 4)), timeout=LIMIT_S)
    assert fenced.fenced
    assert fenced.newest == attempt_to_wire(NEW)
    assert node.Status(asked, timeout=LIMIT_S).newest == attempt_to_wire(NEW)


def test_a_launcher_that_has_lost_its_role_is_told_and_not_obeyed(
    node: node_pb2_grpc.NodeStub, clock: ManualClock
) -> None:
    def asked(attempt: Attempt, term: int) -> node_pb2.StatusReply:
        return node.Status(
            node_pb2.StatusRequest(attempt=attempt_to_wire(attempt), term=term, save_at=9), timeout=LIMIT_S
        )

    assert asked(OLD, 0).term == 0
    clock.now += 7.0
    found = asked(OLD, 1)
    assert (found.term, found.unasked_s) == (1, 7.0), "as it was before this question"
    clock.now += 2.0
    told = asked(NEW, 0)
    assert (told.term, told.unasked_s) == (1, 2.0)
    assert not told.HasField("newest")
    assert not node.Report(node_pb2.ReportRequest(progress=progress(OLD, 4)), timeout=LIMIT_S).fenced
    assert node.Status(node_pb2.StatusRequest(), timeout=LIMIT_S).unasked_s == 2.0, "that was no launcher"
    assert asked(NEW, 2).newest == attempt_to_wire(NEW)


def test_a_question_about_ranks_tells_of_a_newer_launcher_too(clock: ManualClock) -> None:
    servicer = NodeServicer(NodeName("n3"), "", node_pb2.StoreStatus, clock=clock, slots=RankSlots(SystemClock()))
    bound = bound_server("127.0.0.1:0", "secret", lambda server: [add_to(server, servicer)])
    bound.server.start()
    with open_channel(f"127.0.0.1:{bound.port}", "secret") as channel:
        found = node_pb2_grpc.NodeStub(channel)
        found.Ranks(node_pb2.RanksRequest(attempt=attempt_to_wire(OLD), term=2), timeout=LIMIT_S)
        told = found.Status(node_pb2.StatusRequest(attempt=attempt_to_wire(OLD), term=1), timeout=LIMIT_S)
        with pytest.raises(grpc.RpcError, match="another launcher"):
            found.Ranks(node_pb2.RanksRequest(attempt=attempt_to_wire(OLD), term=1), timeout=LIMIT_S)
    bound.server.stop(None).wait(LIMIT_S)
    assert told.term == 2
    assert not told.HasField("newest"), "it has lost the role"


@pytest.mark.parametrize(
    "request_",
    [
        node_pb2.ReportRequest(),
        node_pb2.ReportRequest(progress=common_pb2.Progress(metrics={str(n): 0.0 for n in range(97)})),
        node_pb2.ReportRequest(progress=common_pb2.Progress(metrics={"x" * 129: 0.0})),
        node_pb2.ReportRequest(progress=common_pb2.Progress(section="x" * 129)),
    ],
    ids=["nothing in it", "too many metrics", "a name too long", "a section too long"],
)
def test_a_report_that_is_no_report_is_refused(
    node: node_pb2_grpc.NodeStub, request_: node_pb2.ReportRequest
) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        node.Report(request_, timeout=LIMIT_S)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert node.Status(node_pb2.StatusRequest(), timeout=LIMIT_S).last_report == 0


class Asked:
    """Says where ranks are, and keeps what it was asked."""

    def __init__(self) -> None:
        self.questions: list[tuple[Attempt, dict[int, Reported], float, bool]] = []

    def __call__(
        self, attempt: Attempt, reported: Mapping[int, Reported], deadline_s: float, *, states_only: bool
    ) -> list[node_pb2.RankStack]:
        self.questions.append((attempt, dict(reported), deadline_s, states_only))
        return [node_pb2.RankStack(rank=3, state="T")]


def test_an_agent_asked_for_stacks_knows_each_ranks_process_however_long_ago_it_reported() -> None:
    asked = Asked()
    servicer = NodeServicer(NodeName("n0"), "", node_pb2.StoreStatus, stacks=asked)
    attempt = Attempt(7, 0, 1)

    def report(rank: int, step: int, of: Attempt = attempt) -> None:
        progress = common_pb2.Progress(rank=rank, attempt=attempt_to_wire(of), step=step, pid=40 + rank, unix=step)
        servicer.bulletin.report(progress)

    report(3, 1)
    for step in range(2, 2 * KEPT_REPORTS):
        report(0, step)
    bound = bound_server("127.0.0.1:0", "secret", lambda server: [add_to(server, servicer)])
    bound.server.start()
    try:
        with open_channel(f"127.0.0.1:{bound.port}", "secret") as channel:
            stub = node_pb2_grpc.NodeStub(channel)
            request = node_pb2.StacksRequest(attempt=attempt_to_wire(attempt), deadline_s=99.0, states_only=True)
            assert [one.state for one in stub.Stacks(request, timeout=LIMIT_S).ranks] == ["T"]
            (question,) = asked.questions
            newest = Reported(pid=40, unix=2 * KEPT_REPORTS - 1)
            assert question == (attempt, {3: Reported(pid=43, unix=1), 0: newest}, 10.0, True)
            report(0, 1, Attempt(7, 0, 2))
            stub.Stacks(request, timeout=LIMIT_S)
            assert asked.questions[1][1] == {}, "an older attempt's ranks are nobody's business any more"
            with pytest.raises(grpc.RpcError):
                stub.Stacks(node_pb2.StacksRequest(), timeout=LIMIT_S)
    finally:
        bound.server.stop(0).wait(LIMIT_S)


def test_agents_are_asked_to_exchange_bytes_with_so_many_peers_and_at_an_address_of_their_own(
    node: node_pb2_grpc.NodeStub,
) -> None:
    heard = node.TestPeers(node_pb2.TestPeersRequest(listen_on="127.0.0.1", for_s=LIMIT_S), timeout=LIMIT_S)
    assert heard.port
    request = node_pb2.TestPeersRequest(peers=[f"127.0.0.1:{heard.port}", "127.0.0.1:1", "nobody"], for_s=2.0)
    assert list(node.TestPeers(request, timeout=LIMIT_S).reached) == [f"127.0.0.1:{heard.port}"]
    with pytest.raises(grpc.RpcError, match="more than 64 peers"):
        node.TestPeers(node_pb2.TestPeersRequest(peers=["127.0.0.1:1"] * 65), timeout=LIMIT_S)
    with pytest.raises(grpc.RpcError, match=r"203\.0\.113\.1"):
        node.TestPeers(node_pb2.TestPeersRequest(listen_on="203.0.113.1", for_s=1.0), timeout=LIMIT_S)
