"""A job's agent is killed: its ports stay its own, and what knows no other address finds it there again."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from deeplink.core.clock import SystemClock
from deeplink.core.types import Attempt
from deeplink.rpc.plain import PlainConnection, PlainRefusedError, PlainSilentError
from deeplink.rpc.tokens import read_token, token_of
from deeplink.v1 import common_pb2, keep_pb2, node_pb2
from tests.waiting import LIMIT_S, until

SECRET = "of one run"  # noqa: S105 - of an agent that lives as long as its test
FIRST, SECOND = (token_of(SECRET, Attempt(7, 0, relaunch)) for relaunch in (0, 1))


class Agent:
    """`deeplink node --job` as Slurm starts it."""

    def __init__(self, folder: Path) -> None:
        argv = [sys.executable, "-m", "deeplink", "node", "--job", "--bind", "127.0.0.1:0", "--name", "n1"]
        env = {**os.environ, "XDG_RUNTIME_DIR": "", "DEEPLINK_STATE": str(folder)}
        self.process = subprocess.Popen(
            [*argv, "--store", str(folder / "store")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
        )
        assert self.process.stdin is not None
        self.process.stdin.write(SECRET.encode() + b"\n")
        self.process.stdin.flush()
        self.said = self.announced()

    def announced(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        said: dict[str, Any] = json.loads(self.process.stdout.readline())
        return said

    @property
    def port(self) -> int:
        return int(self.said["address"].rpartition(":")[2])

    def child(self) -> int:
        """Return the process that serves."""
        (found,) = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(found)

    def call(self, token: str, method: str = "/grpc.health.v1.Health/Check", request: bytes = b"") -> bytes:
        with PlainConnection(self.said["address"], token, SystemClock()) as connection:
            return connection.call(method, request, SystemClock().monotonic() + LIMIT_S)

    def answers(self, token: str = FIRST) -> bool:
        try:
            self.call(token)
        except PlainSilentError:
            return False
        return True


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    started = Agent(tmp_path)
    yield started
    started.process.kill()
    started.process.communicate(timeout=LIMIT_S)


def taken(port: int) -> bool:
    """Tell whether a stranger is refused this port."""
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            stranger.bind(("127.0.0.1", port))
            stranger.listen()
        except OSError as problem:
            return problem.errno == errno.EADDRINUSE
    return False


def test_the_ports_of_a_killed_agent_are_nobody_elses_and_it_is_there_again(agent: Agent) -> None:
    assert agent.said["pid"] == agent.process.pid
    for _ in range(2):
        child = agent.child()
        os.kill(child, signal.SIGKILL)
        until(partial(_is_gone, child), LIMIT_S)
        assert taken(agent.port)
        assert agent.announced()["address"] == agent.said["address"]
        assert taken(agent.port)
        until(agent.answers, LIMIT_S)


def test_it_ends_in_order_and_leaves_nothing(agent: Agent) -> None:
    folder = Path(agent.said["token_file"]).parent
    assert folder.is_dir()
    agent.process.terminate()
    assert agent.process.wait(LIMIT_S) == 0
    assert not folder.exists()
    assert not taken(agent.port)


def test_nothing_serves_without_the_process_that_keeps_the_sockets(agent: Agent) -> None:
    child = agent.child()
    agent.process.kill()
    agent.process.wait(LIMIT_S)
    until(partial(_is_gone, child), LIMIT_S)
    until(lambda: not taken(agent.port), LIMIT_S)


def test_an_agent_that_is_killed_again_and_again_is_given_up(agent: Agent) -> None:
    for number in range(5):
        if number:
            agent.announced()
        os.kill(agent.child(), signal.SIGKILL)
    assert agent.process.wait(LIMIT_S) == 128 + signal.SIGKILL


def refuses(agent: Agent, token: str) -> bool:
    """Whether the agent refuses a token, whatever it is asked."""
    found = []
    for method in ("/grpc.health.v1.Health/Check", "/deeplink.v1.Cache/Read"):
        try:
            with PlainConnection(agent.said["address"], token, SystemClock()) as connection:
                connection.send(method, b"", SystemClock().monotonic() + LIMIT_S)
                list(connection.replies())
        except PlainRefusedError:
            found.append(True)
        else:
            found.append(False)
    assert len(set(found)) == 1, found
    return found[0]


def test_the_token_of_an_attempt_ends_with_the_first_of_the_next_also_for_the_agent_that_comes_after(
    agent: Agent,
) -> None:
    assert refuses(agent, SECRET), "it goes into no call"
    assert not refuses(agent, FIRST)
    with PlainConnection(agent.said["address"], FIRST, SystemClock()) as of_old:
        of_old.call("/grpc.health.v1.Health/Check", b"", SystemClock().monotonic() + LIMIT_S)
        assert not refuses(agent, SECOND)
        with pytest.raises(PlainRefusedError):  # proved, once: that was for the first attempt's calls
            of_old.call("/grpc.health.v1.Health/Check", b"", SystemClock().monotonic() + LIMIT_S)
    assert refuses(agent, FIRST)
    assert not refuses(agent, SECOND)
    assert read_token(Path(agent.said["token_file"]).with_name("token-7.0.1")) == SECOND
    os.kill(agent.child(), signal.SIGKILL)
    agent.announced()
    assert refuses(agent, FIRST)
    assert not refuses(agent, SECOND)


def test_a_rank_whose_attempt_has_ended_is_told_so_and_no_more(agent: Agent) -> None:
    first, second = common_pb2.Attempt(job=7), common_pb2.Attempt(job=7, relaunch=1)
    assert agent.answers(SECOND)
    later = common_pb2.Attempt(job=7, relaunch=9)
    for claimed in (first, later):  # what is said with the token of an attempt that has ended is not looked at
        progress = common_pb2.Progress(rank=0, attempt=claimed, step=3)
        report = node_pb2.ReportRequest(progress=progress).SerializeToString()
        reply = node_pb2.ReportReply.FromString(agent.call(FIRST, "/deeplink.v1.Node/Report", report))
        assert (reply.fenced, reply.newest) == (True, second)
        hold = keep_pb2.HoldRequest(run="r", attempt=claimed).SerializeToString()
        assert keep_pb2.HoldReply.FromString(agent.call(FIRST, "/deeplink.v1.Keep/Hold", hold)).newest == second
    asked = node_pb2.StatusRequest(attempt=second).SerializeToString()
    status = node_pb2.StatusReply.FromString(agent.call(SECOND, "/deeplink.v1.Node/Status", asked))
    assert not status.progress
    with pytest.raises(PlainRefusedError):
        agent.call(FIRST, "/deeplink.v1.Node/Status", asked)


def _is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
