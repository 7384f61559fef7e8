"""The node agent as a real process: what it says, serves, refuses, and leaves behind."""

from __future__ import annotations

import http.client
import json
import os
import signal
import stat
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deeplink.agent.agent import Agent, AgentSettings
from deeplink.cache.packer import pack
from deeplink.core.config import Config
from deeplink.core.errors import DeepLinkError
from deeplink.core.types import Attempt, NodeName
from deeplink.rpc.channel import open_channel
from deeplink.rpc.listeners import PortBusyError
from deeplink.rpc.tokens import token_of
from deeplink.scheduler.launch.environment import SEATS_VARIABLE, NodeFacts, leave_seats
from deeplink.v1 import cache_pb2, cache_pb2_grpc, node_pb2, node_pb2_grpc
from tests.processes import children
from tests.waiting import LIMIT_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.slow]
SECRET = "a-secret-of-this-run"  # noqa: S105 - of an agent that lives as long as its test
TOKEN = token_of(SECRET, Attempt(42, 0, 0))


class Process:
    """A `deeplink node` that has said it is ready."""

    def __init__(self, popen: subprocess.Popen[str], said: dict[str, Any]) -> None:
        self.popen, self.said = popen, said

    def end(self, number: int) -> int:
        self.popen.send_signal(number)
        return self.popen.wait(LIMIT_S)


@contextmanager
def running(*options: str, token: str | None = None, env: dict[str, str] | None = None) -> Iterator[Process]:
    popen = subprocess.Popen(
        [sys.executable, "-m", "deeplink", "node", *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
    )
    try:
        if token is not None:
            line_to(popen.stdin, token)
        assert popen.stdout is not None
        line = popen.stdout.readline()
        assert line, popen.communicate(timeout=LIMIT_S)[1]
        yield Process(popen, json.loads(line))
    finally:
        popen.kill()
        popen.communicate(timeout=LIMIT_S)


def line_to(stdin: IO[str] | None, line: str) -> None:
    assert stdin is not None
    stdin.write(f"{line}\n")
    stdin.flush()


def refused(*options: str, token: str = "", env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deeplink", "node", *options],
        input=token,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env={**os.environ, **(env or {})},
    )


def status(address: str, token: str = TOKEN) -> node_pb2.StatusReply:
    with open_channel(address, token) as channel:
        return node_pb2_grpc.NodeStub(channel).Status(node_pb2.StatusRequest(), timeout=LIMIT_S)


def test_an_agent_of_a_job_says_how_it_is_reached_serves_and_leaves_nothing(tmp_path: Path) -> None:
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    env = {
        "XDG_RUNTIME_DIR": str(runtime),
        "SLURM_JOB_ID": "42",
        "SLURMD_NODENAME": "n3",
        "SLURM_TOPOLOGY_ADDR": "core.spine0.leaf1.n3",
    }
    store = tmp_path / "ssd" / "store"
    with running("--job", "--bind", "0.0.0.0:0", "--store", str(store), token=SECRET, env=env) as agent:
        said = agent.said
        assert (said["node"], said["topology_address"]) == ("n3", "core.spine0.leaf1.n3")
        assert (said["store"], said["pid"]) == (str(store), agent.popen.pid)
        assert said["interface"]
        token_file = Path(said["token_file"])
        assert token_file.read_text() == SECRET
        assert stat.S_IMODE(token_file.stat().st_mode) == 0o600
        assert token_file.is_relative_to(runtime)
        heartbeat = status(said["address"])
        assert (heartbeat.node, heartbeat.topology_address) == ("n3", "core.spine0.leaf1.n3")
        assert heartbeat.store.free_bytes > 0
        with pytest.raises(grpc.RpcError) as no:
            status(said["address"], "another token")
        assert no.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with open_channel(said["address"], TOKEN) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for service in ("", "deeplink.v1.Node", "deeplink.v1.Cache"):
                answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=LIMIT_S)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            assert cache_pb2_grpc.CacheStub(channel).Stat(cache_pb2.StatRequest(), timeout=LIMIT_S).node == "n3"
        assert agent.end(signal.SIGTERM) == 0
    assert list(runtime.iterdir()) == []


def test_an_agent_that_is_started_once_more_takes_the_place_its_ranks_know(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    env = {"XDG_RUNTIME_DIR": str(tmp_path), "SLURMD_NODENAME": "n3"}
    options = ("--job", "--bind", "127.0.0.1:0", "--store", str(tmp_path / "store"))
    with running(*options, token=SECRET, env=env) as agent:
        before = agent.said
        agent.end(signal.SIGKILL)
    lock = Path(before["token_file"]).with_name("rank-0.lock")
    lock.touch()
    lost = NodeFacts(node="n3", address=before["address"], token_file=before["token_file"])
    env |= {SEATS_VARIABLE: str(leave_seats(tmp_path, {lost.name: lost}))}
    with running(*options, token=SECRET, env=env) as agent:
        assert (agent.said["address"], agent.said["token_file"]) == (before["address"], before["token_file"])
        assert status(before["address"]).node == "n3"
        assert lock.exists(), "a rank of before may hold it"
        with running(*options, token=SECRET, env=env | {"SLURMD_NODENAME": "n3"}) as other:
            assert other.said["address"] != before["address"], "it is taken"
            assert status(other.said["address"]).node == "n3"


def handles(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler of its own for a signal (proc(5))."""
    caught = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "SigCgt" in line)
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_agent_that_is_still_waiting_for_its_token_ends_too(tmp_path: Path, number: int) -> None:
    popen = subprocess.Popen(
        [sys.executable, "-m", "deeplink", "node", "--job", "--store", str(tmp_path)],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until(lambda: handles(popen.pid, signal.SIGTERM))  # the last of them
    popen.send_signal(number)
    popen.communicate(timeout=LIMIT_S)
    assert popen.returncode == 0


def test_a_standing_agent_makes_its_token_and_serves_metrics_that_promtool_likes(tmp_path: Path) -> None:
    env = {"DEEPLINK_STATE": str(tmp_path / "state"), "DEEPLINK_STORE": str(tmp_path / "store")}
    with running("--metrics-bind", "127.0.0.1:0", "--name", "n1", env=env) as agent:
        token = Path(agent.said["token_file"]).read_text()
        assert agent.said["address"].startswith("127.0.0.1:")
        assert agent.said["interface"] == "lo"
        assert status(agent.said["address"], token).node == "n1"
        text = scrape(*children(agent.popen.pid))
        assert 'deeplink_node_info{node="n1"' in text
        assert "deeplink_node_heartbeats_total 1.0" in text
        promtool = subprocess.run(
            ["promtool", "check", "metrics"],
            input=text,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert (promtool.returncode, promtool.stdout + promtool.stderr) == (0, "")
        assert agent.end(signal.SIGINT) == 0
    with running("--name", "n1", env=env) as agent:
        assert Path(agent.said["token_file"]).read_text() == token


def scrape(pid: int) -> str:
    """Read the metrics at the one port of the process that speaks HTTP."""
    inodes = {str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir() if link.exists()}
    ports = [
        int(fields[1].split(":")[1], 16)
        for fields in map(str.split, Path("/proc/net/tcp").read_text().splitlines()[1:])
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes
    ]
    for port in ports:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=LIMIT_S) as answer:
                return str(answer.read().decode())
        except (OSError, http.client.HTTPException):
            continue
    raise AssertionError(f"none of {ports} speaks HTTP")


@pytest.mark.parametrize(
    ("options", "says", "code"),
    [
        (("--bind", "0.0.0.0:0"), "there is no token file", 2),
        (("--bind", "nonsense"), "not HOST:PORT", 2),
        (("--bind", "203.0.113.77:0"), "cannot listen on 203.0.113.77:0", 2),
        (("--name", "a=b"), "cannot be a member's name", 2),
        (("--metrics-bind", "nonsense"), "not HOST:PORT", 1),
        (("--job",), "no secret on standard input", 1),
        (("--job", "--token-file", "x"), "leave --token-file out", 2),
        (("--store", "/proc/nowhere"), "/proc/nowhere", 1),
    ],
)
def test_what_cannot_be_is_a_clear_error(tmp_path: Path, options: tuple[str, ...], says: str, code: int) -> None:
    env = {"DEEPLINK_STATE": str(tmp_path / "state"), "DEEPLINK_STORE": str(tmp_path / "store")}
    done = refused(*options, env=env)
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert (done.returncode, done.stdout) == (code, "")


@pytest.fixture
def packed(tmp_path: Path) -> Config:
    for number in range(20):
        (tmp_path / "tree" / "a").mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / "a" / f"{number}").write_bytes(b"x" * 5000)
    config = Config(
        catalog=tmp_path / "catalog", store=tmp_path / "store", state=tmp_path / "state", node="n0", replicas=1
    )
    pack(str(tmp_path / "tree"), "things", config=config)
    return config


def test_the_heartbeat_tells_what_the_store_holds_and_unverified_shards_are_verified(packed: Config) -> None:
    shard = next(packed.store.glob("*.mdb"))
    for mark in packed.store.glob("*.verified"):
        mark.unlink()
    settings = AgentSettings(node=NodeName("n0"), bind="127.0.0.1:0", token=TOKEN, store=packed.store)
    agent = Agent(settings)
    said = agent.start(Path("/unused"))
    try:
        store = status(said.address).store
        assert (store.shards, store.bytes) == (1, shard.stat().st_size)
        agent.verified.wait(LIMIT_S)
        with open_channel(said.address, TOKEN) as channel:
            stat_ = cache_pb2_grpc.CacheStub(channel).Stat(cache_pb2.StatRequest(), timeout=LIMIT_S)
        assert [(s.id, s.verified) for s in stat_.shards] == [(shard.stem, True)]
    finally:
        agent.stop()
    with pytest.raises(grpc.RpcError):
        status(said.address)


def test_a_store_that_cannot_be_looked_at_is_told_always_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "s"
    agent = Agent(AgentSettings(node=NodeName("n0"), bind="127.0.0.1:0", token=TOKEN, store=folder))
    folder.rename(tmp_path / "elsewhere")
    (said,) = {agent._looked_at_store().problem for _ in range(3)}
    assert said == f"store {folder}: No such file or directory"
    (tmp_path / "elsewhere").rename(folder)
    assert not agent._looked_at_store().problem
    assert [record.message for record in caplog.records].count(said) == 1


def test_what_start_could_not_finish_is_stopped(tmp_path: Path) -> None:
    def settings(bind: str, metrics_bind: str = "") -> AgentSettings:
        return AgentSettings(
            node=NodeName("n0"), bind=bind, token=SECRET, store=tmp_path / "s", metrics_bind=metrics_bind
        )

    first = Agent(settings("127.0.0.1:0"))
    address = first.start(Path("/unused")).address
    with pytest.raises(PortBusyError, match=address):
        Agent(settings(address)).start(Path("/unused"))
    with pytest.raises(DeepLinkError, match="metrics address"):
        Agent(settings("127.0.0.1:0", address)).start(Path("/unused"))
    first.stop()
