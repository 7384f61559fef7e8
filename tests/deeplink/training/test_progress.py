"""`deeplink.report` against the real gRPC server."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from deeplink.core import process_metrics
from deeplink.core.clock import SystemClock
from deeplink.core.types import Attempt, FencedError, NodeName
from deeplink.rpc.channel import attempt_to_wire, open_channel
from deeplink.rpc.grpc_server import BoundServer, PlainClients, bound_server
from deeplink.rpc.plain import PlainConnection
from deeplink.rpc.tokens import write_token
from deeplink.scheduler.node.servicer import NodeServicer, add_to
from deeplink.training import progress
from deeplink.training.progress import Destination, Reporter, destination
from deeplink.v1 import common_pb2, node_pb2, node_pb2_grpc
from tests.waiting import LIMIT_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ATTEMPT = Attempt(5, 0, 1)
REPORT = "/deeplink.v1.Node/Report"


@pytest.fixture(autouse=True)
def no_vitals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers that other tests left alive count for nothing here."""
    monkeypatch.setattr(process_metrics, "of_process", process_metrics.Vitals())


class Agent:
    """The Node service on a real server, that can be stopped and started again on its port."""

    def __init__(self) -> None:
        self.port = 0
        self.start()

    def start(self) -> None:
        self.servicer = NodeServicer(NodeName("n0"), "", node_pb2.StoreStatus)
        self.bound: BoundServer = bound_server(
            f"127.0.0.1:{self.port}",
            "secret",
            lambda server: [add_to(server, self.servicer)],
            plain=PlainClients(node="n0", token="secret"),  # noqa: S106 - of a server that lives as long as its test
        )
        self.port = self.bound.port
        self.bound.server.start()

    def stop(self) -> None:
        self.bound.server.stop(None).wait(LIMIT_S)

    def wish(self, save_at: int) -> None:
        asked = node_pb2.StatusRequest(attempt=attempt_to_wire(ATTEMPT), save_at=save_at)
        with open_channel(f"127.0.0.1:{self.port}", "secret") as channel:
            node_pb2_grpc.NodeStub(channel).Status(asked, timeout=LIMIT_S)

    def steps(self) -> list[int]:
        return [record.step for record in self.servicer.bulletin.since(0).records]


@pytest.fixture
def agent() -> Iterator[Agent]:
    made = Agent()
    yield made
    made.stop()


@pytest.fixture
def to(agent: Agent, tmp_path: Path) -> Destination:
    write_token(tmp_path / "token", "secret")
    return Destination(agent=f"127.0.0.1:{agent.port}", token_file=tmp_path / "token", attempt=ATTEMPT, rank=3)


def request(step: int = 1, **metrics: float) -> bytes:
    attempt = common_pb2.Attempt(job=5)
    made = common_pb2.Progress(step=step, attempt=attempt, metrics=metrics)
    return node_pb2.ReportRequest(progress=made).SerializeToString()


def test_the_first_report_leaves_at_once_and_the_newest_of_many_is_the_last(agent: Agent, to: Destination) -> None:
    reporter = Reporter(to)
    reporter.tell(1, {"loss": 2.5})
    until(lambda: agent.steps() == [1])
    for step in range(2, 500):
        reporter.tell(step, {"loss": 1.0})
    assert reporter.flush(LIMIT_S)
    steps = agent.steps()
    assert steps[-1] == 499
    assert len(steps) < 250  # those in between gave way
    record = agent.servicer.bulletin.since(0).records[0]
    assert (record.rank, record.attempt.job, record.attempt.relaunch, dict(record.metrics)) == (
        3,
        5,
        1,
        {"loss": 2.5},
    )


def test_a_fenced_rank_learns_it_in_its_training_loop(agent: Agent, to: Destination) -> None:
    agent.servicer.bulletin.learn(Attempt(5, 1, 0))
    reporter = Reporter(to)
    reporter.tell(1, {})

    def fenced() -> bool:
        try:
            reporter.tell(2, {})
        except FencedError:
            return True
        return False

    until(fenced)
    with pytest.raises(FencedError) as refused:
        reporter.tell(3, {})
    assert (refused.value.attempt, refused.value.newest) == (ATTEMPT, Attempt(5, 1, 0))
    reporter.flush(LIMIT_S)
    assert agent.steps() == []


def test_ranks_are_told_once_each_at_which_step_to_save(agent: Agent, to: Destination) -> None:
    reporter = Reporter(to)
    assert not reporter.is_save_due(1)
    agent.wish(7)

    def told() -> bool:
        reporter.tell(5, {})
        return reporter.is_save_due(8)

    until(told)
    assert not reporter.is_save_due(9), "once is enough"
    reporter.flush(LIMIT_S)


def test_a_wish_is_for_its_own_attempt_and_no_step_before(agent: Agent, to: Destination) -> None:
    agent.wish(7)
    reporter = Reporter(to)
    reporter.tell(5, {})
    until(lambda: agent.steps() == [5])
    assert reporter.flush(LIMIT_S)
    assert not reporter.is_save_due(6)
    assert reporter.is_save_due(7)
    other = Reporter(replace(to, attempt=Attempt(ATTEMPT.job, ATTEMPT.restart, ATTEMPT.relaunch + 1)))
    other.tell(5, {})
    assert other.flush(5.0)
    assert not other.is_save_due(100)


def test_reports_go_on_when_the_agent_comes_back(
    agent: Agent, to: Destination, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "RETRY_AFTER_S", 0.01)
    monkeypatch.setattr(progress, "SEND_EVERY_S", 0.0)
    reporter = Reporter(to)
    reporter.tell(1, {})
    until(lambda: agent.steps() == [1])
    agent.stop()
    with caplog.at_level(logging.WARNING):
        for step in range(2, 10):
            reporter.tell(step, {})
            until(lambda: reporter._waiting is None and not reporter._sending)
    assert caplog.text.count("training goes on") == 1
    agent.start()

    def arrived() -> bool:
        reporter.tell(11, {})
        return bool(agent.steps())

    until(arrived)
    assert reporter.flush(LIMIT_S)


def test_a_report_is_not_lost_to_an_agent_that_was_started_anew(
    agent: Agent, to: Destination, caplog: pytest.LogCaptureFixture
) -> None:
    reporter = Reporter(to)
    reporter.tell(1, {})
    until(lambda: agent.steps() == [1])
    agent.stop()
    agent.start()
    reporter.tell(2, {})
    assert reporter.flush(10.0)
    assert agent.steps() == [2]
    assert not caplog.records


def test_a_metric_that_is_no_number_is_left_out_and_said_once(
    agent: Agent, to: Destination, caplog: pytest.LogCaptureFixture
) -> None:
    reporter = Reporter(to)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            reporter.tell(1, {"loss": 1.5, "note": "a text"})
    assert reporter.flush(LIMIT_S)
    assert caplog.text.count("'note'") == 1
    assert dict(agent.servicer.bulletin.since(0).records[-1].metrics) == {"loss": 1.5}


def test_a_step_that_no_message_takes_ends_no_reporting(
    agent: Agent, to: Destination, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "RETRY_AFTER_S", 0.01)
    reporter = Reporter(to)
    with caplog.at_level(logging.WARNING):
        reporter.tell(-1, {})
        until(lambda: reporter._silent)
    reporter.tell(7, {})
    until(lambda: agent.steps() == [7])
    assert reporter.flush(LIMIT_S)
    assert caplog.text.count("training goes on: Value out of range: -1") == 1


def test_the_end_of_the_process_waits_for_a_silent_agent_no_longer_than_told(tmp_path: Path) -> None:
    write_token(tmp_path / "token", "secret")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        to = Destination(
            agent=f"127.0.0.1:{silent.getsockname()[1]}",
            token_file=tmp_path / "token",
            attempt=ATTEMPT,
            rank=0,
        )
        reporter = Reporter(to)
        reporter.tell(1, {})
        assert not reporter.flush(0.05)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("DEEPLINK_AGENT", "DEEPLINK_TOKEN_FILE", "DEEPLINK_ATTEMPT", "RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    progress._process.forget()
    yield
    progress._process.flush()
    progress._process.forget()


@pytest.mark.usefixtures("fresh")
def test_outside_of_a_job_a_report_does_nothing() -> None:
    before = threading.active_count()
    progress.report(step=1, loss=0.5)
    assert threading.active_count() == before


@pytest.mark.usefixtures("fresh")
def test_an_environment_that_makes_no_sense_does_not_stop_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DEEPLINK_AGENT", "127.0.0.1:1")
    monkeypatch.setenv("DEEPLINK_TOKEN_FILE", "/nowhere")
    monkeypatch.setenv("DEEPLINK_ATTEMPT", "not an attempt")
    progress.report(step=1)
    progress.report(step=2)
    assert caplog.text.count("progress is not reported") == 1


@pytest.mark.usefixtures("fresh")
def test_the_environment_says_where_reports_go(
    agent: Agent, to: Destination, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {
        "DEEPLINK_AGENT": to.agent,
        "DEEPLINK_TOKEN_FILE": str(to.token_file),
        "DEEPLINK_ATTEMPT": "5.0.1",
        "RANK": "3",
    }
    assert destination(env) == to
    assert destination({**env, "RANK": "", "SLURM_PROCID": "4", "DEEPLINK_ATTEMPT": ""}) == Destination(
        agent=to.agent, token_file=to.token_file, attempt=Attempt(0, 0, 0), rank=4
    )
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    progress.report(step=12, loss=0.25)
    until(lambda: agent.steps() == [12])


@pytest.mark.usefixtures("fresh")
def test_a_forked_child_of_a_process_that_reports_can_use_grpc(
    agent: Agent, to: Destination, tmp_path: Path
) -> None:
    # In a process of its own: this one has used gRPC. DataLoader workers are such children.
    script = f"""
import os, sys
import deeplink
deeplink.report(step=1)
from deeplink.training import progress
from deeplink.core.clock import SystemClock
reporter = progress._process.reporter
assert reporter is not None and reporter.flush({LIMIT_S})
assert not {{"grpc", "numpy"}}.intersection(sys.modules)
child = os.fork()
if child == 0:
    from deeplink.v1 import node_pb2, node_pb2_grpc
    from deeplink.rpc.channel import open_channel
    with open_channel({to.agent!r}, "secret") as channel:
        node_pb2_grpc.NodeStub(channel).Status(node_pb2.StatusRequest(), timeout={LIMIT_S})
    deeplink.report(step=2)
    progress._process.flush()
    os._exit(0)
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    env = {**os.environ, "DEEPLINK_AGENT": to.agent, "DEEPLINK_TOKEN_FILE": str(to.token_file)}
    done = subprocess.run([sys.executable, "-c", script], env=env, timeout=LIMIT_S, check=False)
    assert done.returncode == 0
    assert agent.steps() == [1, 2]


def test_grpc_in_a_child_of_a_process_that_used_grpc_is_refused_and_does_not_hang(agent: Agent) -> None:
    script = f"""
import os
from deeplink.v1 import node_pb2, node_pb2_grpc
from deeplink.core.errors import DeepLinkError
from deeplink.rpc.channel import open_channel
with open_channel("127.0.0.1:{agent.port}", "secret") as channel:
    node_pb2_grpc.NodeStub(channel).Status(node_pb2.StatusRequest(), timeout={LIMIT_S})
    child = os.fork()
    if child == 0:
        try:
            open_channel("127.0.0.1:{agent.port}", "secret")
        except DeepLinkError as refused:
            os._exit(0 if "forkserver" in refused.remedy else 3)
        os._exit(4)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=LIMIT_S, check=False).returncode == 0


def test_the_agent_is_the_same_to_grpcio_and_to_plain_calls(agent: Agent) -> None:
    address = f"127.0.0.1:{agent.port}"
    with open_channel(address, "secret") as channel, PlainConnection(address, "secret", SystemClock()) as plainly:
        node_pb2_grpc.NodeStub(channel).Report(
            node_pb2.ReportRequest.FromString(request(1, loss=0.5)), timeout=LIMIT_S
        )
        plainly.call(REPORT, request(1, loss=0.5), time.monotonic() + LIMIT_S)
    first, second = agent.servicer.bulletin.since(0).records
    assert first == second


def test_a_step_is_counted_for_a_loop_until_it_reports_one_itself(agent: Agent, to: Destination) -> None:
    reporter = Reporter(to)
    for step in (101, 102):  # resumed
        assert reporter.takes_count(step)
        reporter.tell(step, {})
    reporter.tell(7, {"loss": 1.0})  # the loop counts otherwise
    assert not reporter.takes_count(103)
    reporter.tell(8, {"loss": 1.0})
    assert not reporter.takes_count(104)
    assert reporter.flush(LIMIT_S)
    assert agent.steps()[-1] == 8
