"""Listening to agents: real gRPC servers, stopped and frozen."""

from __future__ import annotations

import json
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import grpc
import pytest
from typing_extensions import override

from deeplink.core.clock import ManualClock, SystemClock
from deeplink.core.errors import DeepLinkError
from deeplink.core.publish import read_members
from deeplink.core.types import Attempt, NodeName
from deeplink.rpc.channel import attempt_to_wire
from deeplink.rpc.grpc_server import BoundServer, bound_server
from deeplink.rpc.tokens import RunTokens, new_token, token_of
from deeplink.scheduler.launch import agent_pool
from deeplink.scheduler.launch.agent_monitor import POLL_S, AgentMonitor, Unheard
from deeplink.scheduler.launch.agent_pool import START_S, AgentPool
from deeplink.scheduler.launch.agent_restart import AgentRestart
from deeplink.scheduler.launch.backend import HeldRole, LaunchError, NodesLostError, NoSlurmdError
from deeplink.scheduler.launch.environment import NodeFacts
from deeplink.scheduler.launch.process import last_line
from deeplink.scheduler.node.rank_processes import SlotReport, agents_socket
from deeplink.scheduler.node.rank_slots import RankSlots
from deeplink.scheduler.node.servicer import NodeServicer, add_to
from deeplink.scheduler.recovery.relaunch import RelaunchPolicy
from deeplink.v1 import common_pb2, node_pb2
from tests.waiting import LIMIT_S, until

TOKEN = new_token()


def token_of_any(_attempt: Attempt) -> str:
    """Return what agents of these tests take, whichever attempt it is."""
    return TOKEN


ATTEMPT = Attempt(7, 0, 0)


def came_up(
    fleet: AgentPool,
    nodes: Collection[NodeName],
    need: int,
    *,
    logs: str,
    told_to_end: bool = False,
    unheard: Unheard | None = None,
) -> bool:
    silent = unheard or Unheard(lambda _nodes: {}, fleet._clock, 0.0)
    return fleet.gather(nodes, need, logs=logs, told_to_end=lambda: told_to_end, unheard=silent)


@dataclass
class Agents:
    """Stands where srun's agents would: what they announce, and that they were ended."""

    said: list[NodeFacts] = field(default_factory=list)
    code: int | None = None
    stopped: bool = False
    words: str = ""
    starter: str = "srun"
    doubt: str = "Does it?"
    gone: frozenset[NodeName] = frozenset()
    were_killed: frozenset[NodeName] = frozenset()

    def killed(self) -> frozenset[NodeName]:
        return self.were_killed

    def announced(self) -> list[NodeFacts]:
        said, self.said = self.said, []
        return said

    def ended(self) -> int | None:
        return self.code

    def abandon(self) -> None:
        self.stopped = True

    def last_words(self) -> str:
        return self.words

    def stop(self) -> None:
        self.stopped = True


@dataclass
class Node:
    facts: NodeFacts
    server: BoundServer
    servicer: NodeServicer


@pytest.fixture
def node() -> Iterator[Callable[[str], Node]]:
    servers: list[BoundServer] = []

    def start(name: str) -> Node:
        servicer = NodeServicer(NodeName(name), f"core.leaf0.{name}", lambda: node_pb2.StoreStatus(shards=3))
        bound = bound_server("127.0.0.1:0", TOKEN, lambda server: [add_to(server, servicer)])
        bound.server.start()
        servers.append(bound)
        return Node(NodeFacts(node=name, address=f"127.0.0.1:{bound.port}"), bound, servicer)

    yield start
    for bound in servers:
        bound.server.stop(0).wait(LIMIT_S)


def gathered(*nodes: Node, late: tuple[str, ...] = ()) -> tuple[AgentPool, Agents]:
    agents = Agents([one.facts for one in nodes])
    fleet = AgentPool(agents, token_of_any, Ticks())
    names = [NodeName(one.facts.node) for one in nodes] + [NodeName(name) for name in late]
    assert came_up(fleet, names, len(nodes), logs="the log")
    return fleet, agents


class Ticks(ManualClock):
    """Moves with each tick, and never faster than time does: no stall of a busy machine is one of its nodes'."""

    @override
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
        super().sleep(seconds)


def ticked(fleet: AgentPool, question: Callable[[], bool], bound_s: float = LIMIT_S) -> list[common_pb2.Progress]:
    end = time.monotonic() + bound_s
    heard: list[common_pb2.Progress] = []
    while not question():
        assert time.monotonic() < end
        heard += fleet.tick(ATTEMPT)
        fleet._clock.sleep(0.02)
    return heard


def report(node: Node, step: int, attempt: Attempt = ATTEMPT) -> None:
    progress = common_pb2.Progress(rank=0, attempt=attempt_to_wire(attempt), step=step, unix=time.time())
    node.servicer.bulletin.report(progress)


def test_a_launcher_learns_from_an_agent_that_another_one_has_its_role(node: Callable[[str], Node]) -> None:
    one = node("n0")
    older, _ = gathered(one)
    newer = AgentPool(Agents([one.facts]), token_of_any, Ticks(), role=HeldRole(1))
    assert came_up(newer, [NodeName("n0")], 1, logs="the log")
    ticked(older, lambda: older.boot_ids() is not None and older.silence()[NodeName("n0")].question_s > 0.0)
    assert not older.has_lost_role
    ticked(newer, lambda: one.servicer._status(node_pb2.StatusRequest()).term == 1)
    ticked(older, lambda: older.has_lost_role)
    assert not newer.has_lost_role
    older.close()
    newer.close()


@pytest.mark.parametrize("elsewhere", [False, True])
def test_only_a_launcher_elsewhere_than_the_srun_has_slots_keep_what_ranks_write_and_once(
    tmp_path: Path, *, elsewhere: bool
) -> None:
    slots = RankSlots(SystemClock())
    slots.listen(tmp_path)
    servicer = NodeServicer(NodeName("n0"), "", node_pb2.StoreStatus, slots=slots)
    bound = bound_server("127.0.0.1:0", TOKEN, lambda server: [add_to(server, servicer)])
    bound.server.start()
    facts = NodeFacts(node="n0", address=f"127.0.0.1:{bound.port}")
    with socket.socket(socket.AF_UNIX) as slot, agents_socket(tmp_path) as path:
        slot.connect(path)
        slot.sendall(json.dumps(asdict(SlotReport(step=1, slot=0, pid=os.getpid()))).encode() + b"\n")
        until(lambda: slots._slots)

        def supervised(term: int) -> None:
            pool = AgentPool(Agents([facts]), token_of_any, Ticks(), role=HeldRole(term), output_gone=elsewhere)
            assert came_up(pool, [NodeName("n0")], 1, logs="the log")
            ticked(pool, lambda: bool(pool.unix()))
            pool.close()

        for term in (1, 1, 2):  # the second is the first one, started again
            supervised(term)
        slots.fence(ATTEMPT, over=True)
        with slot.makefile("rb") as orders:
            told = []
            while "leave" not in (order := json.loads(orders.readline())):
                told.append(order)
    assert told == [{"keep": True}] * (2 if elsewhere else 0)
    bound.server.stop(0).wait(LIMIT_S)
    slots.close()


@pytest.mark.parametrize("answers_as", ["another node", "another token"])
def test_what_is_not_the_agent_is_asked_no_more(node: Callable[[str], Node], answers_as: str) -> None:
    there = node("n2" if answers_as == "another node" else "n1")
    token = TOKEN if answers_as == "another node" else new_token()
    one = AgentMonitor(replace(there.facts, node="n1"), 0.0)
    one.token = token
    try:
        now = 1.0
        while not one.is_stranger:
            if one.is_due(now, 0.0):
                one.ask(node_pb2.StatusRequest(attempt=attempt_to_wire(ATTEMPT)), now)
            time.sleep(0.01)
            one.harvest(now, [])
            now += 0.5
            assert now < 3000.0
        assert not one.is_due(now + 100.0, now + 100.0)
        assert one.heard == 0.0
    finally:
        one.close()


def test_an_agent_that_has_heard_of_the_next_attempt_first_is_no_stranger() -> None:
    tokens, following = RunTokens("secret"), replace(ATTEMPT, relaunch=1)
    servicer = NodeServicer(NodeName("n0"), "", node_pb2.StoreStatus)
    bound = bound_server("127.0.0.1:0", tokens.is_valid, lambda server: [add_to(server, servicer)])
    bound.server.start()
    assert tokens.is_valid(token_of("secret", following)), "from one of its ranks"
    one = AgentMonitor(NodeFacts(node="n0", address=f"127.0.0.1:{bound.port}"), 0.0)
    try:
        one.token = token_of("secret", ATTEMPT)
        one.ask(node_pb2.StatusRequest(attempt=attempt_to_wire(ATTEMPT)), 1.0)
        until(one._pending[0][2].done, LIMIT_S)
        one.token = token_of("secret", following)
        assert one.harvest(1.5, [])
        assert not one.is_stranger
        assert one.is_due(2.0, 0.0)
        one.ask(node_pb2.StatusRequest(attempt=attempt_to_wire(following)), 2.0)
        until(one._pending[0][2].done, LIMIT_S)
        assert not one.harvest(2.5, [])
        assert one.heard == 2.5
    finally:
        one.close()
        bound.server.stop(0).wait(LIMIT_S)


def test_reports_arrive_once_and_in_order(node: Callable[[str], Node]) -> None:
    one = node("n0")
    fleet, agents = gathered(one)
    heard: list[int] = []
    for step in range(1, 40):
        report(one, step)
        heard += [progress.step for progress in fleet.tick(ATTEMPT)]
        fleet._clock.sleep(0.03)
    heard += [progress.step for progress in ticked(fleet, lambda: fleet.silence()[NodeName("n0")].answer_s < 0.1)]
    end = time.monotonic() + LIMIT_S
    while heard[-1:] != [39] and time.monotonic() < end:
        heard += [progress.step for progress in fleet.tick(ATTEMPT)]
        fleet._clock.sleep(0.02)
    assert heard == list(range(1, 40))
    assert fleet.store_of(NodeName("n0")).shards == 3
    fleet.close()
    assert agents.stopped


def told_by(fleet: AgentPool, servicers: list[NodeServicer]) -> Callable[[], list[set[str]]]:
    """Return what tells which lists of members each of these was told so far."""
    told: list[set[str]] = [set() for _ in servicers]
    for servicer, found in zip(servicers, told, strict=True):
        servicer._told_members = found.add
    return lambda: told


def test_heartbeats_name_the_file_that_lists_the_agents(node: Callable[[str], Node], tmp_path: Path) -> None:
    one, two = node("n0"), node("n1")
    agents = Agents([one.facts, two.facts])
    fleet = AgentPool(agents, token_of_any, SystemClock(), folder=tmp_path)
    told = told_by(fleet, [one.servicer, two.servicer])
    assert came_up(fleet, [NodeName("n0"), NodeName("n1")], 2, logs="the log")
    ticked(fleet, lambda: all(told()))
    (value,) = {value for found in told() for value in found}
    assert [member.name for member in read_members(value)] == ["n0", "n1"]
    assert Path(value.removeprefix("@")).parent == tmp_path
    fleet.readdress({NodeName("n1"): replace(two.facts, domain="leaf1")})
    ticked(fleet, lambda: all(len(found) == 2 for found in told()))
    (other,) = told()[0] - {value}
    assert [member.domain for member in read_members(other)] == ["", "leaf1"]
    fleet.close()


def test_without_a_folder_to_write_to_the_heartbeat_goes_on(node: Callable[[str], Node], tmp_path: Path) -> None:
    one = node("n0")
    fleet = AgentPool(Agents([one.facts]), token_of_any, SystemClock(), folder=tmp_path / "nowhere")
    told = told_by(fleet, [one.servicer])
    assert came_up(fleet, [NodeName("n0")], 1, logs="the log")
    report(one, 1)
    assert ticked(fleet, lambda: fleet.store_of(NodeName("n0")).shards == 3)
    assert told() == [set()]
    fleet.close()


def leaf_of(
    node: Callable[[str], Node], count: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[AgentPool, list[Node]]:
    """Return agents of one leaf that are asked by one of them."""
    monkeypatch.setattr(agent_pool, "FEW", 1)
    nodes = [node(f"n{number}") for number in range(count)]
    nodes = [replace(one, facts=replace(one.facts, domain="leaf0")) for one in nodes]
    return gathered(*nodes)[0], nodes


def launchers(fleet: AgentPool) -> set[NodeName]:
    """Return the nodes that the launcher itself has a connection to."""
    return {name for name, one in fleet._nodes.items() if one._channel is not None}


def answering(fleet: AgentPool, *names: str) -> bool:
    silence = fleet.silence()
    return all(silence[NodeName(name)].answer_s < POLL_S + 0.4 for name in names or silence)


def test_of_a_leaf_one_agent_is_asked_and_all_are_heard(
    node: Callable[[str], Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, nodes = leaf_of(node, 4, monkeypatch)
    ticked(fleet, lambda: all(fleet.store_of(NodeName(f"n{at}")).shards == 3 for at in range(4)))
    for step in range(1, 20):
        report(nodes[3], step)
    heard: list[int] = []

    def tick(attempt: Attempt) -> list[int]:
        fleet._clock.sleep(0.02)
        return [one.step for one in fleet.tick(attempt)]

    def all_came() -> bool:
        heard.extend(tick(ATTEMPT))
        return heard[-1:] == [19]

    until(all_came, LIMIT_S)
    assert heard == list(range(1, 20)), "once, and in order"
    fleet.save_at = 40
    later = replace(ATTEMPT, relaunch=1)
    until(lambda: not tick(later) and all(one.servicer._save_at.get(later) == 40 for one in nodes), LIMIT_S)
    assert launchers(fleet) == {"n0"}
    fleet.close()
    for one in nodes:
        one.servicer.close()


@pytest.mark.parametrize("lost", [0, 2])
def test_an_agent_of_a_leaf_that_ends_is_told_as_soon_and_the_others_go_on_being_heard(
    node: Callable[[str], Node], monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    fleet, nodes = leaf_of(node, 4, monkeypatch)
    others = [one.facts.node for at, one in enumerate(nodes) if at != lost]
    ticked(fleet, lambda: answering(fleet) and fleet.store_of(NodeName("n3")).shards == 3)
    nodes[lost].server.server.stop(0).wait(LIMIT_S)
    began, longest = fleet._clock.monotonic(), 0.0
    name = NodeName(f"n{lost}")

    def is_told() -> bool:
        nonlocal longest
        silence = fleet.silence()
        longest = max(longest, *(silence[NodeName(other)].contact_s for other in others))
        return silence[name].contact_s >= RelaunchPolicy().silence_s

    ticked(fleet, is_told)
    assert fleet._clock.monotonic() - began < RelaunchPolicy().silence_s + POLL_S
    assert longest < 1.5, "no other node is in doubt"
    ticked(fleet, lambda: answering(fleet, *others))
    fleet.close()


def test_a_leaf_whose_gathering_agent_freezes_is_asked_through_another_one(
    node: Callable[[str], Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, nodes = leaf_of(node, 4, monkeypatch)
    ticked(fleet, lambda: answering(fleet) and fleet.store_of(NodeName("n3")).shards == 3)
    free = threading.Event()
    # Its server is there, and answers nothing.
    monkeypatch.setattr(nodes[0].servicer._gatherer, "gather", lambda *_: free.wait(LIMIT_S))
    monkeypatch.setattr(nodes[0].servicer, "_status", lambda _: free.wait(LIMIT_S))
    ticked(fleet, lambda: fleet.silence()[NodeName("n0")].answer_s > 1.6)
    assert answering(fleet, "n1", "n2", "n3")
    assert launchers(fleet) >= {"n0", "n1"}
    free.set()
    fleet.close()


class Overtaken(NodeServicer):
    """Has its answer to the first question ready at once, and gives it when it is let."""

    def __init__(self) -> None:
        super().__init__(NodeName("n0"), "", node_pb2.StoreStatus)
        self.ready, self.free = threading.Event(), threading.Event()

    @override
    def Status(self, request: node_pb2.StatusRequest, context: grpc.ServicerContext) -> node_pb2.StatusReply:
        is_first, reply = not self.ready.is_set(), super().Status(request, context)
        if is_first:
            self.ready.set()
            self.free.wait(LIMIT_S)
        return reply


def test_an_answer_that_a_later_one_overtook_tells_nothing_twice() -> None:
    servicer, heard = Overtaken(), list[int]()
    bound = bound_server("127.0.0.1:0", TOKEN, lambda server: [add_to(server, servicer)])
    bound.server.start()
    one = Node(NodeFacts(node="n0", address=f"127.0.0.1:{bound.port}"), bound, servicer)
    report(one, 1)
    fleet, _ = gathered(one)

    def has_heard(step: int) -> bool:
        heard.extend(progress.step for progress in fleet.tick(ATTEMPT))
        fleet._clock.sleep(0.02)
        return step in heard

    heard += [progress.step for progress in ticked(fleet, servicer.ready.is_set)]
    (_, _, first), *_ = fleet._nodes[NodeName("n0")]._pending
    report(one, 2)
    until(lambda: has_heard(2))
    servicer.free.set()
    heard += [progress.step for progress in ticked(fleet, first.done)]
    report(one, 3)
    until(lambda: has_heard(3))
    assert heard == [1, 2, 3]
    fleet.close()
    bound.server.stop(0).wait(LIMIT_S)


def test_a_launcher_that_stalls_again_and_again_takes_in_what_agents_answer(node: Callable[[str], Node]) -> None:
    one, clock = node("n0"), ManualClock()
    fleet = AgentPool(Agents([one.facts]), token_of_any, clock)
    assert came_up(fleet, [NodeName("n0")], 1, logs="")
    report(one, 1)
    end = time.monotonic() + LIMIT_S
    heard: list[int] = []
    while 1 not in heard:
        assert time.monotonic() < end
        clock.now += 2.0
        heard += [progress.step for progress in fleet.tick(ATTEMPT)]
        time.sleep(0.02)
    fleet.close()


def test_for_the_agents_of_many_nodes_more_files_may_be_opened() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    try:
        for count, is_raised in ((2, False), (1_000, True)):
            nodes = [NodeName(f"n{number}") for number in range(count)]
            fleet = AgentPool(Agents(), token_of_any, SystemClock())
            assert not came_up(fleet, nodes, count, logs="", told_to_end=True)
            assert (resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 512) is is_raised
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_asked_agents_fence_older_attempts(node: Callable[[str], Node]) -> None:
    one = node("n0")
    fleet, _ = gathered(one)
    newer = Attempt(7, 0, 1)
    end = time.monotonic() + LIMIT_S
    while one.servicer.bulletin.learn(ATTEMPT) != newer:
        assert time.monotonic() < end
        fleet.tick(newer)
        fleet._clock.sleep(0.02)
    fleet.close()


def test_a_stopped_agent_falls_silent_and_the_other_does_not(node: Callable[[str], Node]) -> None:
    one, two = node("n0"), node("n1")
    fleet, _ = gathered(one, two)
    two.server.server.stop(0).wait(LIMIT_S)
    ticked(fleet, lambda: fleet.silence()[NodeName("n1")].contact_s > 1.6)
    assert fleet.silence()[NodeName("n0")].answer_s < 1.5
    fleet.close()


def test_a_frozen_agent_stays_in_contact() -> None:
    with socket.create_server(("127.0.0.1", 0)) as frozen:  # its kernel accepts, nobody answers
        facts = NodeFacts(node="n0", address=f"127.0.0.1:{frozen.getsockname()[1]}")
        fleet = AgentPool(Agents([facts]), token_of_any, Ticks())
        assert came_up(fleet, [NodeName("n0")], 1, logs="")
        ticked(fleet, lambda: fleet.silence()[NodeName("n0")].answer_s > 2.5)
        assert fleet.silence()[NodeName("n0")].contact_s < 2.0
        fleet.close()


def test_a_node_that_dies_as_the_agents_come_up_late_is_not_forgiven_in_advance(
    node: Callable[[str], Node],
) -> None:
    one, clock = node("n0"), ManualClock()
    one.server.server.stop(0).wait(LIMIT_S)
    agents = Agents()
    fleet = AgentPool(agents, token_of_any, clock)
    clock.now += 60.0
    agents.said = [one.facts]
    assert came_up(fleet, [NodeName("n0")], 1, logs="")
    fleet.tick(ATTEMPT)
    clock.now += 4.0
    assert fleet.silence()[NodeName("n0")].contact_s >= 4.0
    fleet.close()


def revived_by(step: Agents) -> AgentRestart:
    return AgentRestart(lambda _nodes: step, SystemClock())


def test_a_machine_that_refuses_has_lost_its_agent_and_gets_another(node: Callable[[str], Node]) -> None:
    one, two, again = node("n0"), node("n1"), Agents()
    agents = Agents([one.facts, two.facts])
    fleet = AgentPool(agents, token_of_any, Ticks(), revived_by(again))
    n0, n1 = NodeName("n0"), NodeName("n1")
    assert came_up(fleet, [n0, n1], 2, logs="")
    ticked(fleet, lambda: fleet.silence()[n1].answer_s < 0.1)
    two.server.server.stop(0).wait(LIMIT_S)
    longest = 0.0

    def is_bereft() -> bool:
        nonlocal longest
        longest = max(longest, fleet.silence()[n1].contact_s)
        return fleet.without_agent([n0, n1]) == (n1,)

    ticked(fleet, is_bereft)
    assert longest < 2.0, "it is no lost node meanwhile"
    assert fleet.restart([n1]) == (n1,)
    again.said = [node("n1").facts]
    ticked(fleet, lambda: fleet.silence()[n1].answer_s < 0.1 and not fleet.without_agent([n0, n1]))
    fleet.close()


def test_a_machine_that_has_lost_slurmd_too_was_in_no_contact_since_it_refuses(
    node: Callable[[str], Node],
) -> None:
    def start(nodes: Mapping[NodeName, NodeFacts]) -> Agents:
        raise NoSlurmdError(nodes)

    one, two = node("n0"), node("n1")
    fleet = AgentPool(Agents([one.facts, two.facts]), token_of_any, Ticks(), AgentRestart(start, SystemClock()))
    n0, n1 = NodeName("n0"), NodeName("n1")
    assert came_up(fleet, [n0, n1], 2, logs="")
    ticked(fleet, lambda: fleet.silence()[n1].answer_s < 0.1)
    two.server.server.stop(0).wait(LIMIT_S)

    def is_lost() -> bool:
        fleet.restart(fleet.without_agent([n0, n1]))
        return fleet.silence()[n1].contact_s > 2.5

    ticked(fleet, is_lost)
    assert fleet.silence()[n1].answer_s < 5.0, "from the first refusal on"
    assert fleet.silence()[n0].contact_s < 1.0
    fleet.close()


def test_while_the_starter_ends_all_agents_none_is_missed(node: Callable[[str], Node]) -> None:
    one = node("n0")
    agents = Agents([one.facts])
    fleet = AgentPool(agents, token_of_any, Ticks(), revived_by(Agents()))
    n0 = NodeName("n0")
    assert came_up(fleet, [n0], 1, logs="")
    ticked(fleet, lambda: fleet.silence()[n0].answer_s < 0.1)
    one.server.server.stop(0).wait(LIMIT_S)
    ticked(fleet, lambda: fleet.silence()[n0].answer_s > 2.5)
    assert fleet.without_agent([n0]) == ()
    agents.code = 143
    assert fleet.without_agent([n0]) == (n0,)
    fleet.close()


def test_a_machine_that_was_out_of_reach_and_refuses_now_was_booted_anew() -> None:
    n0, callers = NodeName("n0"), [socket.socket() for _ in range(4)]
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        for caller in callers:  # its queue is full: who knocks now gets no answer at all
            caller.setblocking(False)
            caller.connect_ex(full.getsockname())
        facts = NodeFacts(node="n0", address=f"127.0.0.1:{full.getsockname()[1]}")
        fleet = AgentPool(Agents([facts], code=1), token_of_any, Ticks(), revived_by(Agents()))
        assert came_up(fleet, [n0], 1, logs="")
        ticked(fleet, lambda: fleet.silence()[n0].contact_s > 1.8)
    ticked(fleet, lambda: fleet.silence()[n0].contact_s > 2.6)
    assert fleet.without_agent([n0]) == ()
    fleet.close()
    for caller in callers:
        caller.close()


@pytest.mark.parametrize("listens", [True, False])
def test_a_machine_whose_agent_is_filtered_away_answers_at_slurmds_port(listens: bool) -> None:
    callers = [socket.socket() for _ in range(4)]
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as full,
        socket.create_server(("127.0.0.1", 0)) as slurmd,
    ):
        for caller in callers:  # its queue is full: no answer comes from the agent's port
            caller.setblocking(False)
            caller.connect_ex(full.getsockname())
        address = slurmd.getsockname()
        if not listens:
            slurmd.close()  # refused is an answer, too
        one = AgentMonitor(NodeFacts(node="n0", address=f"127.0.0.1:{full.getsockname()[1]}"), 1000.0)
        one.slurmd = address
        longest, moment = 0.0, 1000.0
        for _ in range(100):
            moment += 0.1
            one.probe(moment, failed=False, may_be_gone=True)
            time.sleep(0.002)  # what comes over loopback has come by then
            longest = max(longest, one.silence(moment).contact_s)
        assert 1.5 < longest < 2.5, "never lost"
        assert one.silence(moment).deaf_s > 9.0, "and its agent does not answer"
        before = one.silence(moment).contact_s
        one.forgive(60.0, moment + 60.0)
        assert one.silence(moment + 60.0).contact_s == pytest.approx(before), "it was we who did nothing"
        moment += 60.0
    for caller in callers:
        caller.close()
    for _ in range(30):  # now the agent's port refuses: the machine has lost it, and what ran there
        moment += 0.1
        one.probe(moment, failed=True, may_be_gone=True)
        time.sleep(0.002)
    assert one.silence(moment).contact_s > 9.0
    one.close()


def test_who_is_in_reach_again_is_asked_at_once_by_a_connection_of_its_own(node: Callable[[str], Node]) -> None:
    n0, callers, one = NodeName("n0"), [socket.socket() for _ in range(4)], node("n0")
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        port = full.getsockname()[1]
        for caller in callers:
            caller.setblocking(False)
            caller.connect_ex(full.getsockname())
        fleet = AgentPool(Agents([NodeFacts(node="n0", address=f"127.0.0.1:{port}")]), token_of_any, Ticks())
        assert came_up(fleet, [n0], 1, logs="")
        ticked(fleet, lambda: fleet.silence()[n0].contact_s > 2.6)
        before = fleet.silence()[n0]
        assert before.deaf_s > 2.0
    for caller in callers:
        caller.close()
    server = bound_server(f"127.0.0.1:{port}", TOKEN, lambda server: [add_to(server, one.servicer)])
    server.server.start()
    ticked(fleet, lambda: fleet.silence()[n0].contact_s < 0.5)
    assert fleet.silence()[n0].deaf_s < 1.0, "the time out of reach is not the agent's"
    ticked(fleet, lambda: fleet.silence()[n0].answer_s < 0.5, LIMIT_S)
    fleet.close()
    server.server.stop(0).wait(LIMIT_S)


@pytest.fixture
def many_files() -> Iterator[None]:
    """As many open files as the launcher of a thousand nodes has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2_048, hard), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1_100)]
    yield
    for file in held:
        os.close(file)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
def test_a_silent_node_is_knocked_at_though_a_thousand_files_are_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        fleet = AgentPool(
            Agents([NodeFacts(node="n0", address=f"127.0.0.1:{frozen.getsockname()[1]}")]),
            token_of_any,
            Ticks(),
        )
        assert came_up(fleet, [NodeName("n0")], 1, logs="")
        ticked(fleet, lambda: fleet.silence()[NodeName("n0")].answer_s > 1.8)
        assert fleet.silence()[NodeName("n0")].contact_s < 1.5
        fleet.close()


def test_time_in_which_we_did_nothing_blames_nobody(node: Callable[[str], Node]) -> None:
    one, clock = node("n0"), ManualClock()
    fleet = AgentPool(Agents([one.facts]), token_of_any, clock)
    assert came_up(fleet, [NodeName("n0")], 1, logs="")
    fleet.tick(ATTEMPT)
    clock.sleep(1.6)
    fleet.tick(ATTEMPT)
    assert fleet.silence()[NodeName("n0")].answer_s < 1.0
    fleet.close()


@pytest.mark.parametrize(("silence_s", "left_s"), [(2.5, 1.1), (1.0, 1.0), (30.0, 28.6)])
def test_of_a_host_that_was_silent_before_its_launchers_role_was_taken_some_of_it_counts(
    node: Callable[[str], Node], silence_s: float, left_s: float
) -> None:
    clock = ManualClock()
    fleet = AgentPool(Agents([]), token_of_any, clock)
    fleet.adopt([node("n0").facts, node("n1").facts])
    fleet.count_silence(NodeName("n1"), silence_s)
    silence = fleet.silence()
    assert silence[NodeName("n0")].contact_s == 0.0
    assert silence_s - silence[NodeName("n1")].contact_s == pytest.approx(left_s), "there is time for a question"
    fleet.close()


def test_a_node_whose_agent_came_up_once_more_on_another_boot_was_booted_anew() -> None:
    servers: list[BoundServer] = []

    def start(boot: str, *findings: common_pb2.Finding) -> NodeFacts:
        servicer = NodeServicer(NodeName("n0"), "", node_pb2.StoreStatus, boot_id=boot, health=lambda: findings)
        servers.append(bound_server("127.0.0.1:0", TOKEN, lambda server: [add_to(server, servicer)]))
        servers[-1].server.start()
        return NodeFacts(node="n0", address=f"127.0.0.1:{servers[-1].port}", interface="ib0")

    n0, again = NodeName("n0"), Agents()
    fleet = AgentPool(
        Agents([start("first")]), token_of_any, Ticks(), AgentRestart(lambda _nodes: again, SystemClock())
    )
    assert came_up(fleet, [n0], 1, logs="the log")
    ticked(fleet, lambda: fleet.boot_ids()[n0] == "first")
    assert fleet.rebooted() == set()
    assert not fleet.sick()
    servers[0].server.stop(0).wait(LIMIT_S)
    ticked(fleet, lambda: fleet.silence()[n0].answer_s > 0.6)
    fleet.restart([n0])
    broken = common_pb2.Finding(check="disk", severity="drain", problem="read-only")
    again.said = [start("second", broken, common_pb2.Finding(severity="drain"))]
    ticked(fleet, lambda: fleet.sick() == {n0})
    assert fleet.rebooted() == {n0}
    assert [finding.check for finding in fleet.health()[n0]] == ["disk"], "the other one cannot be read"
    assert abs(fleet.unix()[n0] - SystemClock().unix()) < 60
    fleet.close()
    assert again.stopped
    servers[1].server.stop(0).wait(LIMIT_S)


def test_too_few_agents_is_an_error_that_names_the_nodes(node: Callable[[str], Node]) -> None:
    agents = Agents([node("n0").facts], code=1)
    fleet = AgentPool(agents, token_of_any, SystemClock())
    with pytest.raises(LaunchError) as caught:
        came_up(fleet, [NodeName("n0"), NodeName("n1")], 2, logs="/the/log")
    assert "an agent came up on n1:" in str(caught.value)
    assert "/the/log" in caught.value.remedy
    fleet.close()


def test_who_still_hangs_is_said_early_and_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    fleet = AgentPool(Agents(), token_of_any, ManualClock())
    with pytest.raises(LaunchError, match="srun still hangs") as caught:
        came_up(fleet, [NodeName("n0")], 1, logs="/the/log")
    assert caught.value.remedy == "Does it? /the/log has what was said."
    assert [record.message for record in caplog.records] == [
        "srun has not started the agents yet, after 10 s. Does it?"
    ]
    fleet.close()


@pytest.mark.parametrize("all_ended", [False, True])
def test_agents_that_were_killed_before_all_had_come_up_are_started_again(
    node: Callable[[str], Node], *, all_ended: bool
) -> None:
    one, two = node("n0"), node("n1")
    before = replace(one.facts, address="127.0.0.1:1", pid=1)
    first = Agents([before], code=233 if all_ended else None, were_killed=frozenset({NodeName("n1")}))
    first.words = "srun: error: n1: task 1: Killed"
    started: list[set[str]] = []

    def start(nodes: Mapping[NodeName, NodeFacts]) -> Agents:
        started.append({*nodes})
        return Agents([there.facts for there in (one, two) if there.facts.node in nodes])

    clock = Ticks()
    fleet = AgentPool(first, token_of_any, clock, AgentRestart(start, clock))
    assert came_up(fleet, [NodeName("n0"), NodeName("n1")], 2, logs="the log")
    assert started == [{"n0", "n1"} if all_ended else {"n1"}]
    assert fleet.facts[NodeName("n0")] == (one.facts if all_ended else before)
    fleet.close()


def test_agents_that_say_why_they_ended_are_not_started_again(caplog: pytest.LogCaptureFixture) -> None:
    def start(_nodes: Mapping[NodeName, NodeFacts]) -> Agents:
        raise AssertionError

    clock, agents = Ticks(), Agents(code=1, words="deeplink: no folder for the store")
    fleet = AgentPool(agents, token_of_any, clock, AgentRestart(start, clock))
    with pytest.raises(LaunchError, match="no folder for the store"):
        came_up(fleet, [NodeName("n0")], 1, logs="the log")
    assert "starting once more" not in caplog.text


def test_who_ended_is_quoted(caplog: pytest.LogCaptureFixture) -> None:
    fleet = AgentPool(Agents(code=1, words="srun: error: no such node"), token_of_any, SystemClock())
    with pytest.raises(LaunchError, match=r"srun exited 1 .* n0: srun: error: no such node"):
        came_up(fleet, [NodeName("n0")], 1, logs="")
    assert not caplog.records
    fleet.close()


def test_who_did_not_come_up_is_quoted_though_the_others_are_up(
    node: Callable[[str], Node], caplog: pytest.LogCaptureFixture
) -> None:
    words, both = "deeplink: /ssd/x: it belongs to user nobody", [NodeName("n0"), NodeName("n1")]
    fleet = AgentPool(Agents([node("n0").facts], words=words), token_of_any, ManualClock())
    assert came_up(fleet, both, 1, logs="")
    assert caplog.messages == [f"going on without agents on n1: {words}"]
    fleet.close()
    fleet = AgentPool(Agents([node("n0").facts], words=words), token_of_any, ManualClock())
    with pytest.raises(LaunchError, match="no node agent came up on n1 within 120 s: deeplink: /ssd/x"):
        came_up(fleet, both, 2, logs="")
    fleet.close()


def test_a_programs_own_words_count_before_those_of_its_end(tmp_path: Path) -> None:
    log = tmp_path / "agents.log"
    before = "deeplink: of the run before\n"
    log.write_text(before)
    assert last_line(log, len(before)) == ""
    log.write_text(f"{before}srun: error: no such node\n\n")
    assert last_line(log, len(before)) == "srun: error: no such node"
    log.write_text(f"{before}deeplink: it belongs to nobody\n  Name another.\nsrun: error: n1: task 1: Exited\n")
    assert last_line(log, len(before)) == "deeplink: it belongs to nobody"


@dataclass
class Answered(Agents):
    """Agents that are looked at again only once Slurm has answered: the clock does not run ahead of it."""

    unheard: Unheard | None = None

    @override
    def announced(self) -> list[NodeFacts]:
        thread = None if self.unheard is None else self.unheard._last._thread
        if thread is not None:
            thread.join(LIMIT_S)
        return super().announced()


@pytest.mark.parametrize("code", [None, 1])
@pytest.mark.parametrize(
    ("told", "patience_s", "wanted"),
    [
        ({"n1": True}, 900.0, NodesLostError),
        ({"n1": False}, 30.0, NodesLostError),  # as while Slurm's own patience is long
        ({}, 900.0, LaunchError),
        (None, 900.0, LaunchError),
        ({"n0": True}, 900.0, LaunchError),  # which has its agent
    ],
)
def test_a_node_that_slurm_does_not_hear_of_is_lost_and_no_other(
    node: Callable[[str], Node],
    told: dict[NodeName, bool] | None,
    patience_s: float,
    code: int | None,
    wanted: type[Exception],
) -> None:
    clock, asked = ManualClock(), set[tuple[NodeName, ...]]()

    def ask(nodes: Collection[NodeName]) -> dict[NodeName, bool] | None:
        asked.add(tuple(nodes))
        return told

    unheard = Unheard(ask, clock, patience_s)
    fleet = AgentPool(Answered([node("n0").facts], code=code, unheard=unheard), token_of_any, clock)
    began = clock.monotonic()
    with pytest.raises(wanted, match="n1"):
        came_up(fleet, [NodeName("n0"), NodeName("n1")], 2, logs="", unheard=unheard)
    assert asked == {("n1",)}
    if told == {"n1": True}:
        assert clock.monotonic() - began < START_S, "not waited for"
    fleet.close()


def test_told_to_end_while_agents_start() -> None:
    fleet = AgentPool(Agents(), token_of_any, SystemClock())
    assert not came_up(fleet, [NodeName("n0")], 1, logs="", told_to_end=True)
    fleet.close()


def test_a_pressed_agent_is_asked_at_that_moment_however_lately_it_was_asked(node: Callable[[str], Node]) -> None:
    one, name = node("n0"), NodeName("n0")
    clock = ManualClock()
    agents = Agents([one.facts])
    fleet = AgentPool(agents, token_of_any, clock)
    assert came_up(fleet, [name], 1, logs="the log")

    def asked_s() -> float:
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            fleet.tick(ATTEMPT)
            if fleet.silence()[name].question_s < 0.05:
                break
            time.sleep(0.005)
        return fleet.silence()[name].question_s

    clock.sleep(1.0)
    assert asked_s() == 0.0
    fleet.ask_at(clock.monotonic() + 0.2)
    clock.sleep(0.1)
    fleet.tick(ATTEMPT)
    clock.sleep(0.11)
    assert asked_s() == 0.0, "well before its next turn"
    fleet.close()


def test_nodes_with_one_store_between_them_are_refused_with_the_line_to_write(node: Callable[[str], Node]) -> None:
    first, second = node("n0"), node("n1")
    shared = replace(second.facts, store="/home/ann/store", shares_store="host0")
    fleet = AgentPool(Agents([first.facts, shared]), token_of_any, SystemClock())
    with pytest.raises(DeepLinkError, match="share it") as refused:
        came_up(fleet, [NodeName("n0"), NodeName("n1")], 2, logs="the log")
    assert "n1 and host0" in str(refused.value)
    assert 'store = "/local/' in refused.value.remedy
    fleet.close()
