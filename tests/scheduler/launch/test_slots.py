"""Slots and the agents they hear of their ranks from: real processes at a real socket."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from deeplink.core.clock import SystemClock
from deeplink.core.types import Attempt, NodeName
from deeplink.rpc.channel import agent_channel, attempt_to_wire
from deeplink.rpc.grpc_server import bound_server
from deeplink.rpc.listeners import listening_socket
from deeplink.scheduler.launch import agent_ranks
from deeplink.scheduler.launch.agent_ranks import AgentRanks
from deeplink.scheduler.launch.environment import (
    SLOTS_VARIABLE,
    Launch,
    NodeFacts,
    RankTask,
    leave_launch,
    leave_slots,
    slurm_variables,
)
from deeplink.scheduler.node.rank_slots import RankSlots
from deeplink.scheduler.node.servicer import NodeServicer, add_to
from deeplink.scheduler.recovery.rank_failure import Failed
from deeplink.v1 import node_pb2
from tests.waiting import LIMIT_S, until

FIRST, SECOND = Attempt(7, 0, 0), Attempt(7, 0, 1)
TOKEN = "t"  # noqa: S105
STEP = 5
ALL = tuple(map(NodeName, ("n0", "n1", "n2", "n3")))
# What a rank does, by the words in its file: it says what it is, then sleeps, exits, or leaves something behind.
RANK = """
import json, os, pathlib, signal, subprocess, sys, time
folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
words = (folder / f"do{rank}").read_text().split() if (folder / f"do{rank}").exists() else ["0"]
if "stubborn" in words:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "answer" in words:
    signal.signal(signal.SIGUSR1, lambda *_: (folder / f"usr1.{rank}").touch())
if "leave" in words:
    more = "import os, sys, time; os.setsid(); open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    left = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {more!r}, sys.argv[1]])"
    subprocess.run([sys.executable, "-c", left, str(folder / f"new.left{rank}")], check=True)
    while not (folder / f"new.left{rank}").exists() or not (folder / f"new.left{rank}").read_text():
        time.sleep(0.01)
    (folder / f"new.left{rank}").rename(folder / f"left.{rank}")
told = {**os.environ, "pid": str(os.getpid()), "parent": str(os.getppid()), "group": str(os.getpgid(0))}
(folder / f"new{rank}").write_text(json.dumps(told))
(folder / f"new{rank}").rename(folder / f"{os.environ['DEEPLINK_ATTEMPT']}.{rank}")
if "sleep" in words:
    while True:
        time.sleep(0.05)
sys.exit(int(words[-1]))
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@dataclass
class Node:
    """A node on this machine: an agent's slots, those processes, and the agent's server where there is one."""

    folder: Path
    name: str
    address: str = "127.0.0.1:1"
    agent: RankSlots = field(default_factory=lambda: RankSlots(SystemClock()))
    slots: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def facts(self) -> NodeFacts:
        return NodeFacts(node=self.name, address=self.address, token_file=str(self.folder / self.name / "secret"))

    def listen(self) -> None:
        (self.folder / self.name).mkdir(exist_ok=True)
        self.agent.listen(self.folder / self.name)

    def start_slots(
        self,
        count: int,
        others: tuple[NodeFacts, ...] = (),
        step: int = STEP,
        program: str = sys.executable,
    ) -> None:
        script = self.folder / "rank.py"
        script.write_text(RANK)
        launch = Launch(
            attempt=FIRST,
            nodes=(self.facts, *others),
            spares=(),
            ranks=(count,) * (1 + len(others)),
            master_port=1,
            passed_on={},
        )
        told = leave_slots(self.folder, step, launch, ALL)
        slurm = {"SLURMD_NODENAME": self.name, "SLURM_STEP_ID": "3"}
        for number in range(count):
            argv = [sys.executable, "-P", "-m", "deeplink.scheduler.launch.slot", "--"]
            env = {**os.environ, **slurm, SLOTS_VARIABLE: told, "SLURM_LOCALID": str(number)}
            self.slots.append(subprocess.Popen([*argv, program, str(script), str(self.folder)], env=env))

    def ask(self, launch: Launch, **wanted: object) -> node_pb2.RanksReply:
        ranks = range(launch.ranks[0])
        request = node_pb2.RanksRequest(
            attempt=attempt_to_wire(launch.attempt),
            launch=leave_launch(launch, self.folder),
            ranks=ranks,
            **{"step": STEP, **wanted},  # type: ignore[arg-type]
        )
        return self.agent.ranks(request)

    def await_ranks(
        self, launch: Launch, holds: Callable[[node_pb2.RankState], object], **wanted: object
    ) -> list[node_pb2.RankState]:
        found: list[node_pb2.RankState] = []

        def are_so() -> bool:
            found[:] = self.ask(launch, **wanted).ranks
            return len(found) == launch.ranks[0] and all(map(holds, found))

        until(are_so, told=lambda: found)
        return found

    def told(self, attempt: Attempt, rank: int) -> dict[str, str]:
        path = self.folder / f"{attempt}.{rank}"
        until(path.exists)
        said: dict[str, str] = json.loads(path.read_text())
        return said

    def let(self, rank: int, do: str) -> None:
        (self.folder / f"do{rank}").write_text(do)

    def close(self) -> None:
        self.agent.close()
        for one in self.slots:
            one.terminate()
        for one in self.slots:
            with suppress(subprocess.TimeoutExpired):
                one.wait(5.0)
            one.kill()
            one.wait(LIMIT_S)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    one = Node(tmp_path, "n0")
    one.listen()
    yield one
    one.close()


def launched(node: Node, ranks: int = 1, attempt: Attempt = FIRST) -> Launch:
    return Launch(attempt=attempt, nodes=(node.facts,), spares=(), ranks=(ranks,), master_port=1, passed_on={})


def test_a_slot_runs_one_attempts_rank_after_the_others_with_its_environment(node: Node) -> None:
    node.start_slots(2)
    for rank, code in ((0, "0"), (1, "3")):
        node.let(rank, code)
    ended = node.await_ranks(launched(node, 2), lambda one: one.ended)
    assert [(one.rank, one.exited, one.code) for one in ended] == [(0, True, 0), (1, True, 3)]
    said = node.told(FIRST, 1)
    assert (said["RANK"], said["SLURM_PROCID"], said["SLURM_LOCALID"]) == ("1", "1", "1")
    assert (said["SLURM_NNODES"], said["SLURM_STEP_NODELIST"], said["SLURM_NTASKS"]) == ("1", "n0", "2")
    assert said["pid"] == said["group"] == str(ended[1].pid) == said["SLURM_TASK_PID"]
    assert SLOTS_VARIABLE not in said
    assert node.ask(launched(node, 2)).step_id == 4, "the step's number, plus 1"
    node.await_ranks(launched(node, 2, SECOND), lambda one: one.ended)
    again = node.told(SECOND, 1)
    assert again["parent"] == said["parent"], "the same slot"
    assert again["pid"] != said["pid"]


def test_to_ask_again_starts_nothing_again_and_to_ask_late_neither(node: Node) -> None:
    node.start_slots(1)
    first = launched(node)
    node.await_ranks(first, lambda one: one.ended)
    pid = node.told(FIRST, 0)["pid"]
    assert str(node.ask(first).ranks[0].pid) == pid
    second = launched(node, attempt=SECOND)
    node.ask(second, end=True, grace_s=0.0)
    assert not node.ask(second).ranks, "it was to end before it was started"
    assert not node.ask(first).ranks, "a newer one has followed"
    assert not (node.folder / f"{SECOND}.0").exists()


def test_what_left_its_session_is_gone_before_the_rank_is_said_to_have_ended(node: Node) -> None:
    node.start_slots(1)
    node.let(0, "leave sleep")
    node.await_ranks(launched(node), lambda one: one.pid)
    node.told(FIRST, 0)
    left = int((node.folder / "left.0").read_text())
    assert alive(left)
    (ended,) = node.await_ranks(launched(node), lambda one: one.ended, end=True, grace_s=0.5)
    assert ended.code == 128 + signal.SIGTERM
    assert not alive(left)
    assert not alive(ended.pid)


def test_what_a_rank_leaves_behind_serves_the_others_until_all_have_exited(node: Node) -> None:
    node.start_slots(2)
    node.let(0, "leave 0")
    node.let(1, "sleep")
    launch = launched(node, 2)
    until(lambda: [one.exited for one in node.ask(launch).ranks] == [True, False])
    node.told(FIRST, 1)
    left = int((node.folder / "left.0").read_text())
    assert alive(left)
    assert not node.ask(launch).ranks[0].ended
    os.kill(node.ask(launch).ranks[1].pid, signal.SIGKILL)
    codes = [one.code for one in node.await_ranks(launch, lambda one: one.ended)]
    assert codes == [0, 128 + signal.SIGKILL]
    assert not alive(left)


def test_signals_are_passed_on_once_and_a_rank_that_heeds_none_is_killed(node: Node) -> None:
    node.start_slots(1)
    node.let(0, "answer stubborn sleep")
    launch = launched(node)
    node.await_ranks(launch, lambda one: one.pid)
    node.told(FIRST, 0)
    passed = [node_pb2.RankSignal(id=1, number=signal.SIGUSR1)]
    node.ask(launch, signals=passed)
    mark = node.folder / "usr1.0"
    until(mark.exists)
    mark.unlink()
    node.ask(launch, signals=passed)
    (ended,) = node.await_ranks(launch, lambda one: one.ended, signals=passed, end=True, grace_s=0.3)
    assert ended.code == 128 + signal.SIGKILL
    assert not mark.exists()


def test_signals_of_slurm_to_all_of_a_step_leave_the_slot_there_until_its_rank_has_ended(node: Node) -> None:
    node.start_slots(1)
    node.let(0, "answer stubborn sleep")
    launch = launched(node)
    node.await_ranks(launch, lambda one: one.pid)
    node.told(FIRST, 0)
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
        node.slots[0].send_signal(number)
    os.kill(node.ask(launch).ranks[0].pid, signal.SIGKILL)
    (ended,) = node.await_ranks(launch, lambda one: one.ended)
    assert ended.code == 128 + signal.SIGKILL, "it was there to tell"
    assert node.slots[0].wait(LIMIT_S) == 0, "and then left, as it was told to"


def test_an_agent_that_is_started_again_hears_what_runs_and_how_it_ended(node: Node) -> None:
    node.start_slots(1)
    node.let(0, "sleep")
    launch = launched(node)
    (before,) = node.await_ranks(launch, lambda one: one.pid)
    node.agent.close()
    node.agent = RankSlots(SystemClock())
    node.listen()
    (after,) = node.await_ranks(launch, lambda one: one.pid)
    assert (after.pid, after.exited) == (before.pid, False)
    os.kill(after.pid, signal.SIGKILL)
    node.await_ranks(launch, lambda one: one.ended and one.code == 128 + signal.SIGKILL)


def test_a_slot_that_is_killed_takes_its_rank_with_it_and_that_is_told(node: Node) -> None:
    node.start_slots(1)
    node.let(0, "leave sleep")
    launch = launched(node)
    (running,) = node.await_ranks(launch, lambda one: one.pid)
    node.told(FIRST, 0)
    left = int((node.folder / "left.0").read_text())
    node.slots[0].kill()
    (ended,) = node.await_ranks(launch, lambda one: one.ended)
    assert ended.code == 128 + signal.SIGKILL
    until(lambda: not alive(running.pid))
    assert not alive(left)


def test_a_newer_attempt_that_the_agent_hears_of_ends_the_ranks_of_the_older_one(node: Node) -> None:
    node.start_slots(1)
    node.let(0, "sleep")
    launch = launched(node)
    (running,) = node.await_ranks(launch, lambda one: one.pid)
    node.agent.fence(FIRST)
    assert alive(running.pid)
    node.agent.fence(SECOND)
    until(lambda: not alive(running.pid))


def test_an_agent_that_no_launcher_asked_for_ranks_ends_those_of_an_older_attempt_all_the_same(node: Node) -> None:
    node.start_slots(1)
    node.let(0, "sleep")
    (running,) = node.await_ranks(launched(node), lambda one: one.pid)
    node.agent.close()
    node.agent = RankSlots(SystemClock())
    node.listen()
    until(lambda: node.agent._slots)
    node.agent.fence(FIRST)
    assert alive(running.pid)

    def fenced() -> bool:  # as every heartbeat does: the slot may come after the first one
        node.agent.fence(SECOND)
        return not alive(running.pid)

    until(fenced)


def test_an_attempt_runs_in_one_step_only_whichever_a_launcher_asks_for_last(node: Node) -> None:
    node.start_slots(1, step=STEP + 1)
    node.let(0, "sleep")
    launch = launched(node)
    (newer,) = node.await_ranks(launch, lambda one: one.pid, step=STEP + 1)
    node.start_slots(1)
    node.await_ranks(launch, lambda one: one.pid and one.pid != newer.pid)
    until(lambda: not alive(newer.pid))


def test_a_slot_without_an_agent_does_not_wait_for_ever(tmp_path: Path) -> None:
    one = Node(tmp_path, "n0")
    told = leave_slots(tmp_path, STEP, launched(one), ALL)
    short = "import os, sys; from deeplink.scheduler.launch import slot; slot.AGENT_S = 0.3; "
    run = f"{short}sys.exit(slot.main(['--', 'true'], dict(os.environ)))"
    env = {**os.environ, SLOTS_VARIABLE: told, "SLURMD_NODENAME": "n0"}
    done = subprocess.run([sys.executable, "-c", run], env=env, timeout=LIMIT_S, check=False)
    assert done.returncode == 0
    elsewhere = {**env, "SLURMD_NODENAME": "n9"}
    done = subprocess.run([sys.executable, "-c", run], env=elsewhere, timeout=LIMIT_S, check=False)
    assert done.returncode == 2


def test_slurms_variables_are_those_of_the_attempts_nodes_in_slurms_own_order() -> None:
    facts = tuple(NodeFacts(node=name, address=f"{name}:1") for name in ("n2", "n0", "n1"))
    launch = Launch(attempt=FIRST, nodes=facts, spares=(), ranks=(1, 2, 2), master_port=1, passed_on={})
    told = slurm_variables(launch, RankTask(2, 1, "n0"), ALL)
    assert (told["SLURM_NODEID"], told["SLURM_GTIDS"], told["SLURM_NTASKS"]) == ("0", "1,2", "5")
    assert (told["SLURM_TASKS_PER_NODE"], told["SLURM_STEP_NODELIST"]) == ("2(x2),1", "n[0-2]")


# A launcher's side: several agents with servers of their own.


@dataclass
class Given:
    """A step of slots that is there, or is not."""

    number: int = STEP
    code: int | None = None
    step_id: int | None = None

    def begun(self, step_id: int | None) -> None:
        self.step_id = step_id

    def ended(self) -> int | None:
        return self.code

    def failed(self) -> Failed:
        return Failed() if self.code is None else Failed(said="srun itself exited", is_of_rank=False)

    def abandon(self) -> None: ...

    def stop(self) -> None: ...


@dataclass
class Cluster:
    """Two nodes, and the steps that were asked for."""

    nodes: list[Node]
    used: list[Given] = field(default_factory=list)
    made: list[Given] = field(default_factory=list)

    def launch(self, attempt: Attempt = FIRST) -> Launch:
        facts = tuple(one.facts for one in self.nodes)
        return Launch(attempt=attempt, nodes=facts, spares=(), ranks=(1, 1), master_port=1, passed_on={})

    def ranks(
        self,
        slots: Given,
        attempt: Attempt = FIRST,
        *,
        are_new: bool = True,
        start: int = 0,
        before: Given | None = None,
    ) -> AgentRanks:
        """Return an attempt's ranks; asked for other slots, it starts `start` on each node."""

        def make() -> Given:
            another = Given(number=slots.number + 1)
            self.made.append(another)
            for node in self.nodes if start else ():
                node.start_slots(start, step=another.number)
            another.code = None if start else 1
            return another

        launch = self.launch(attempt)
        file = leave_launch(launch, self.nodes[0].folder)
        use = self.used.append
        return AgentRanks(launch, file, self.reach, slots, make=make, use=use, before=before, are_new=are_new)

    def reach(self, name: NodeName) -> grpc.Channel:
        return agent_channel(next(one.address for one in self.nodes if one.name == name), TOKEN)

    def start_slots(self) -> None:
        for one in self.nodes:
            one.start_slots(1)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        nodes = []
        for name in ("n0", "n1"):
            node = Node(tmp_path, name)
            listener = listening_socket("127.0.0.1:0")
            node.address = f"127.0.0.1:{listener.getsockname()[1]}"
            node.listen()

            def register(server: grpc.Server, node: Node = node) -> list[str]:
                servicer = NodeServicer(NodeName(node.name), "", node_pb2.StoreStatus, slots=node.agent)
                stack.callback(servicer.close)
                return [add_to(server, servicer)]

            served = bound_server(listener, TOKEN, register)
            served.server.start()
            stack.callback(served.server.stop, 0)
            stack.callback(node.close)
            nodes.append(node)
        yield Cluster(nodes)


def ended(step: AgentRanks) -> int:
    until(lambda: step.exit_code() is not None)
    code = step.exit_code()
    assert code is not None
    return code


def test_all_ranks_that_exit_0_are_a_success_and_the_next_attempt_needs_no_step(cluster: Cluster) -> None:
    cluster.start_slots()
    slots = Given()
    assert ended(cluster.ranks(slots)) == 0
    assert slots.step_id == 3
    assert ended(cluster.ranks(slots, SECOND, are_new=False)) == 0
    assert cluster.nodes[0].told(SECOND, 1)["DEEPLINK_ATTEMPT"] == str(SECOND)
    assert cluster.used == []


def test_a_command_that_one_node_lacks_is_that_nodes_failure_and_one_that_all_lack_is_the_commands(
    cluster: Cluster,
) -> None:
    cluster.nodes[0].let(0, "sleep")
    cluster.nodes[0].start_slots(1)
    cluster.nodes[1].start_slots(1, program="/none/such")
    step = cluster.ranks(Given())
    assert ended(step) == 127
    failed = step.failed()
    assert (failed.node, failed.is_of_rank) == ("n1", False)
    assert failed.said == "rank 1 could not be started: /none/such: no such command on n1"
    for node in cluster.nodes:
        node.start_slots(1, step=STEP + 1, program="/none/such")
    step = cluster.ranks(Given(number=STEP + 1), SECOND)
    assert ended(step) == 127
    assert (step.failed().node, step.failed().is_of_rank) == (None, True)


def test_a_slot_that_can_start_no_process_says_so_and_it_is_not_the_applications_failure(cluster: Cluster) -> None:
    cluster.nodes[0].let(0, "sleep")
    cluster.start_slots()
    poor = cluster.nodes[1]
    until(lambda: poor.agent._slots)
    descriptors = len(os.listdir(f"/proc/{poor.slots[0].pid}/fd"))
    resource.prlimit(poor.slots[0].pid, resource.RLIMIT_NOFILE, (descriptors, descriptors))
    step = cluster.ranks(Given())
    assert ended(step) == 1
    failed = step.failed()
    assert (failed.node, failed.is_of_rank) == ("n1", False)
    assert failed.said == "rank 1 could not be started: no process for it on n1: Too many open files"


def test_the_first_rank_that_fails_ends_the_others_and_its_code_is_the_steps(cluster: Cluster) -> None:
    cluster.nodes[0].let(0, "stubborn sleep")
    cluster.nodes[0].let(1, "5")
    cluster.start_slots()
    step = cluster.ranks(Given())
    assert ended(step) == 5
    assert (step.failed().said, step.failed().node) == ("rank 1 on n1: exit code 5", "n1")
    assert not alive(int(cluster.nodes[0].told(FIRST, 0)["pid"]))


def test_ranks_are_killed_and_what_they_left_too_in_bounded_time(cluster: Cluster) -> None:
    cluster.nodes[0].let(0, "leave stubborn sleep")
    cluster.nodes[0].let(1, "sleep")
    cluster.start_slots()
    step = cluster.ranks(Given())
    pids = [int(cluster.nodes[0].told(FIRST, rank)["pid"]) for rank in (0, 1)]
    step.kill()
    assert ended(step) != 0
    assert not any(map(alive, [*pids, int((cluster.nodes[0].folder / "left.0").read_text())]))


def test_another_launcher_adopts_ranks_that_run(cluster: Cluster) -> None:
    for rank in (0, 1):
        cluster.nodes[0].let(rank, "sleep")
    cluster.start_slots()
    first = cluster.ranks(Given())
    pids = [int(cluster.nodes[0].told(FIRST, rank)["pid"]) for rank in (0, 1)]
    first.abandon()
    second = cluster.ranks(Given(), are_new=False)
    assert second.exit_code() is None
    os.kill(pids[1], signal.SIGKILL)
    assert ended(second) == 128 + signal.SIGKILL
    assert "rank 1 on n1" in second.failed().said
    assert not alive(pids[0])


def test_a_signal_that_comes_before_any_rank_keeps_all_from_being_started(cluster: Cluster) -> None:
    step = cluster.ranks(Given())
    step.send(signal.SIGTERM)
    assert ended(step) == 128 + signal.SIGTERM
    cluster.start_slots()
    until(lambda: all(one.agent.ranks(node_pb2.RanksRequest(step=STEP)) for one in cluster.nodes))
    assert not (cluster.nodes[0].folder / f"{FIRST}.0").exists()


def test_where_the_slots_that_were_there_are_gone_another_step_is_started(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_ranks, "FITS_S", 0.5)
    assert ended(cluster.ranks(Given(), are_new=False, start=1)) == 0
    assert cluster.used == cluster.made
    assert len(cluster.made) == 1


def test_a_rank_that_ran_in_slots_that_were_given_up_is_no_failure_of_its_node(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_ranks, "FITS_S", 0.5)
    monkeypatch.setattr(agent_ranks, "LOST_S", 0.0)
    cluster.nodes[0].let(0, "sleep")
    cluster.nodes[0].start_slots(1)
    step = cluster.ranks(Given(), are_new=False, start=1)
    cluster.nodes[0].told(FIRST, 0)
    cluster.nodes[0].let(0, "0")
    assert ended(step) == 0, step.failed()
    assert len(cluster.made) == 1


def test_an_agent_that_comes_up_at_another_address_is_asked_there(cluster: Cluster) -> None:
    address = cluster.nodes[1].address
    cluster.nodes[1].address = "127.0.0.1:1"
    step = cluster.ranks(Given())
    cluster.start_slots()
    cluster.nodes[0].told(FIRST, 0)
    assert step.exit_code() is None
    cluster.nodes[1].address = address
    assert ended(step) == 0


def test_a_signal_that_an_agent_has_taken_is_not_sent_to_it_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in (0, 1):
        cluster.nodes[0].let(rank, "answer sleep")
    cluster.start_slots()
    step = cluster.ranks(Given())
    for rank in (0, 1):
        cluster.nodes[0].told(FIRST, rank)
    agent, carried = cluster.nodes[0].agent, list[int]()
    take = agent._take

    def noted(request: node_pb2.RanksRequest) -> None:
        carried.append(len(request.signals))
        take(request)

    monkeypatch.setattr(agent, "_take", noted)
    until(lambda: carried)
    step.send(signal.SIGUSR1)
    until(lambda: 1 in carried and carried[-1] == 0)
    until((cluster.nodes[0].folder / "usr1.0").exists)
    step.kill()


def test_an_error_of_ours_ends_the_attempt_and_is_told(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptor(_slots: Given) -> int | None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Given, "ended", no_descriptor)
    step = cluster.ranks(Given())
    assert ended(step) == 1
    assert (step.failed().is_of_rank, "Too many open files" in step.failed().said) == (False, True)


def test_while_new_slots_cannot_be_made_nobody_waits_and_they_are_ended_once_they_come(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, stopped = threading.Event(), threading.Event()
    monkeypatch.setattr(Given, "stop", lambda _: stopped.set())
    node, begun = cluster.nodes[0], threading.Event()

    def hang(_count: int, **_: object) -> None:
        begun.set()
        hangs.wait(LIMIT_S)

    monkeypatch.setattr(node, "start_slots", hang)
    step = cluster.ranks(Given(code=1), are_new=False, start=1)
    assert begun.wait(LIMIT_S)
    step.kill()
    assert not stopped.is_set()
    hangs.set()
    assert stopped.wait(LIMIT_S)
    assert cluster.used == []


def test_slots_that_cannot_be_started_are_told_apart_from_ranks_that_fail(cluster: Cluster) -> None:
    step = cluster.ranks(Given(code=1))
    assert ended(step) == 1
    assert not step.failed().is_of_rank


@pytest.mark.parametrize("come", [True, False])
def test_the_second_choice_is_used_where_the_first_does_not_come_to_be(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, *, come: bool
) -> None:
    monkeypatch.setattr(agent_ranks, "PATIENCE_S", LIMIT_S if come else 0.2)
    first, second = Given(), Given(number=STEP - 1)
    for one in cluster.nodes:
        one.start_slots(1, step=STEP - 1)
        if come:
            one.start_slots(1)
    until(lambda: all(len(one.agent._slots) == len(one.slots) for one in cluster.nodes))
    assert ended(cluster.ranks(first, before=second)) == 0
    assert cluster.used == [first if come else second]


def test_of_an_agent_that_is_silent_ranks_are_not_waited_for_when_they_are_to_end(cluster: Cluster) -> None:
    cluster.nodes[0].let(0, "sleep")
    cluster.nodes[0].let(1, "sleep")
    cluster.start_slots()
    step = cluster.ranks(Given())
    for rank in (0, 1):
        cluster.nodes[0].told(FIRST, rank)
    with cluster.nodes[1].agent._changed:  # it hangs from here on
        thread = threading.Thread(target=step.kill)
        thread.start()
        thread.join(LIMIT_S)
        assert step.exit_code() is not None
