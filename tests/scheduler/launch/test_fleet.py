"""Listening to agents: real gRPC servers, stopped and frozen."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import grpc
import pytest
from typing_extensions import override

from deeplink.clock import ManualClock, SystemClock
from deeplink.scheduler.launch.backend import AgentsFailedError
from deeplink.scheduler.launch.environment import NodeFacts
from deeplink.scheduler.launch.fleet import Fleet
from deeplink.scheduler.launch.revival import Revival
from deeplink.scheduler.launch.watched import Watched
from deeplink.scheduler.node.servicer import NodeServicer, add_to
from deeplink.tokens import new_token
from deeplink.types import Attempt, NodeName
from deeplink.v1 import common_pb2, node_pb2
from deeplink.wire import BoundServer, attempt_to_wire, bound_server
from tests.waiting import until

TOKEN = new_token()
ATTEMPT = Attempt(7, 0, 0)


@dataclass
class Agents:
    """Stands where srun's agents would: what they announce, and that they were ended."""

    said: list[NodeFacts] = field(default_factory=list)
    code: int | None = None
    stopped: bool = False
    words: str = ""
    starter: str = "srun"
    doubt: str = "Does it?"

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
        bound.server.stop(0).wait(5)


def gathered(*nodes: Node, late: tuple[str, ...] = ()) -> tuple[Fleet, Agents]:
    agents = Agents([one.facts for one in nodes])
    fleet = Fleet(agents, TOKEN, SystemClock())
    names = [NodeName(one.facts.node) for one in nodes] + [NodeName(name) for name in late]
    assert fleet.gather(names, len(nodes), logs="the log", told_to_end=lambda: False)
    return fleet, agents


def ticked(fleet: Fleet, question: Callable[[], bool], bound_s: float = 20.0) -> list[common_pb2.Progress]:
    end = time.monotonic() + bound_s
    heard: list[common_pb2.Progress] = []
    while not question():
        assert time.monotonic() < end
        heard += fleet.tick(ATTEMPT)
        time.sleep(0.02)
    return heard


def report(node: Node, step: int, attempt: Attempt = ATTEMPT) -> None:
    progress = common_pb2.Progress(rank=0, attempt=attempt_to_wire(attempt), step=step, unix=time.time())
    node.servicer.bulletin.report(progress)


def test_reports_arrive_once_and_in_order(node: Callable[[str], Node]) -> None:
    one = node("n0")
    fleet, agents = gathered(one)
    heard: list[int] = []
    for step in range(1, 40):
        report(one, step)
        heard += [progress.step for progress in fleet.tick(ATTEMPT)]
        time.sleep(0.03)
    heard += [progress.step for progress in ticked(fleet, lambda: fleet.silence()[NodeName("n0")].answer_s < 0.1)]
    end = time.monotonic() + 10
    while heard[-1:] != [39] and time.monotonic() < end:
        heard += [progress.step for progress in fleet.tick(ATTEMPT)]
    assert heard == list(range(1, 40))
    assert fleet.store_of(NodeName("n0")).shards == 3
    fleet.close()
    assert agents.stopped


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
            self.free.wait(10)
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
        return step in heard

    heard += [progress.step for progress in ticked(fleet, servicer.ready.is_set)]
    (_, first), *_ = fleet._nodes[NodeName("n0")]._pending
    report(one, 2)
    until(lambda: has_heard(2))
    servicer.free.set()
    heard += [progress.step for progress in ticked(fleet, first.done)]
    report(one, 3)
    until(lambda: has_heard(3))
    assert heard == [1, 2, 3]
    fleet.close()
    bound.server.stop(0).wait(5)


def test_a_launcher_that_stalls_again_and_again_takes_in_what_agents_answer(node: Callable[[str], Node]) -> None:
    one, clock = node("n0"), ManualClock()
    fleet = Fleet(Agents([one.facts]), TOKEN, clock)
    assert fleet.gather([NodeName("n0")], 1, logs="", told_to_end=lambda: False)
    report(one, 1)
    end = time.monotonic() + 20
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
            fleet = Fleet(Agents(), TOKEN, SystemClock())
            assert not fleet.gather(nodes, count, logs="", told_to_end=lambda: True)
            assert (resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 512) is is_raised
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_asked_agents_fence_older_attempts(node: Callable[[str], Node]) -> None:
    one = node("n0")
    fleet, _ = gathered(one)
    newer = Attempt(7, 0, 1)
    end = time.monotonic() + 10
    while one.servicer.bulletin.learn(ATTEMPT) != newer:
        assert time.monotonic() < end
        fleet.tick(newer)
        time.sleep(0.02)
    fleet.close()


def test_a_stopped_agent_falls_silent_and_the_other_does_not(node: Callable[[str], Node]) -> None:
    one, two = node("n0"), node("n1")
    fleet, _ = gathered(one, two)
    two.server.server.stop(0).wait(5)
    ticked(fleet, lambda: fleet.silence()[NodeName("n1")].contact_s > 1.6)
    assert fleet.silence()[NodeName("n0")].answer_s < 1.5
    fleet.close()


def test_a_frozen_agent_stays_in_contact() -> None:
    with socket.create_server(("127.0.0.1", 0)) as frozen:  # its kernel accepts, nobody answers
        facts = NodeFacts(node="n0", address=f"127.0.0.1:{frozen.getsockname()[1]}")
        fleet = Fleet(Agents([facts]), TOKEN, SystemClock())
        assert fleet.gather([NodeName("n0")], 1, logs="", told_to_end=lambda: False)
        ticked(fleet, lambda: fleet.silence()[NodeName("n0")].answer_s > 2.5)
        assert fleet.silence()[NodeName("n0")].contact_s < 2.0
        fleet.close()


def test_a_node_that_dies_as_the_agents_come_up_late_is_not_forgiven_in_advance(
    node: Callable[[str], Node],
) -> None:
    one, clock = node("n0"), ManualClock()
    one.server.server.stop(0).wait(5)
    agents = Agents()
    fleet = Fleet(agents, TOKEN, clock)
    clock.now += 60.0
    agents.said = [one.facts]
    assert fleet.gather([NodeName("n0")], 1, logs="", told_to_end=lambda: False)
    fleet.tick(ATTEMPT)
    clock.now += 4.0
    assert fleet.silence()[NodeName("n0")].contact_s >= 4.0
    fleet.close()


def revived_by(step: Agents) -> Revival:
    return Revival(lambda _nodes: step, SystemClock())


def test_a_machine_that_refuses_has_lost_its_agent_and_gets_another(node: Callable[[str], Node]) -> None:
    one, two, again = node("n0"), node("n1"), Agents()
    agents = Agents([one.facts, two.facts])
    fleet = Fleet(agents, TOKEN, SystemClock(), revived_by(again))
    n0, n1 = NodeName("n0"), NodeName("n1")
    assert fleet.gather([n0, n1], 2, logs="", told_to_end=lambda: False)
    ticked(fleet, lambda: fleet.silence()[n1].answer_s < 0.1)
    two.server.server.stop(0).wait(5)
    longest = 0.0

    def is_bereft() -> bool:
        nonlocal longest
        longest = max(longest, fleet.silence()[n1].contact_s)
        return fleet.bereft([n0, n1]) == (n1,)

    ticked(fleet, is_bereft)
    assert longest < 2.0, "it is no lost node meanwhile"
    assert fleet.revive([n1]) == (n1,)
    again.said = [node("n1").facts]
    ticked(fleet, lambda: fleet.silence()[n1].answer_s < 0.1 and not fleet.bereft([n0, n1]))
    fleet.close()


def test_while_the_starter_ends_all_agents_none_is_missed(node: Callable[[str], Node]) -> None:
    one = node("n0")
    agents = Agents([one.facts])
    fleet = Fleet(agents, TOKEN, SystemClock(), revived_by(Agents()))
    n0 = NodeName("n0")
    assert fleet.gather([n0], 1, logs="", told_to_end=lambda: False)
    ticked(fleet, lambda: fleet.silence()[n0].answer_s < 0.1)
    one.server.server.stop(0).wait(5)
    ticked(fleet, lambda: fleet.silence()[n0].answer_s > 2.5)
    assert fleet.bereft([n0]) == ()
    agents.code = 143
    assert fleet.bereft([n0]) == (n0,)
    fleet.close()


def test_a_machine_that_was_out_of_reach_and_refuses_now_was_booted_anew() -> None:
    n0, callers = NodeName("n0"), [socket.socket() for _ in range(4)]
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        for caller in callers:  # its queue is full: who knocks now gets no answer at all
            caller.setblocking(False)
            caller.connect_ex(full.getsockname())
        facts = NodeFacts(node="n0", address=f"127.0.0.1:{full.getsockname()[1]}")
        fleet = Fleet(Agents([facts], code=1), TOKEN, SystemClock(), revived_by(Agents()))
        assert fleet.gather([n0], 1, logs="", told_to_end=lambda: False)
        ticked(fleet, lambda: fleet.silence()[n0].contact_s > 1.8)
    ticked(fleet, lambda: fleet.silence()[n0].contact_s > 2.6)
    assert fleet.bereft([n0]) == ()
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
        one = Watched.begun(NodeFacts(node="n0", address=f"127.0.0.1:{full.getsockname()[1]}"), TOKEN, 1000.0)
        one.slurmd = address
        longest, moment = 0.0, 1000.0
        for _ in range(100):
            moment += 0.1
            one.knock(moment, failed=False, may_be_gone=True)
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
        one.knock(moment, failed=True, may_be_gone=True)
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
        fleet = Fleet(Agents([NodeFacts(node="n0", address=f"127.0.0.1:{port}")]), TOKEN, SystemClock())
        assert fleet.gather([n0], 1, logs="", told_to_end=lambda: False)
        ticked(fleet, lambda: fleet.silence()[n0].contact_s > 2.6)
        before = fleet.silence()[n0]
        assert before.deaf_s > 2.0
    for caller in callers:
        caller.close()
    server = bound_server(f"127.0.0.1:{port}", TOKEN, lambda server: [add_to(server, one.servicer)])
    server.server.start()
    ticked(fleet, lambda: fleet.silence()[n0].contact_s < 0.5)
    assert fleet.silence()[n0].deaf_s < 1.0, "the time out of reach is not the agent's"
    ticked(fleet, lambda: fleet.silence()[n0].answer_s < 0.5, 5.0)
    fleet.close()
    server.server.stop(0).wait(5)


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
        fleet = Fleet(
            Agents([NodeFacts(node="n0", address=f"127.0.0.1:{frozen.getsockname()[1]}")]), TOKEN, SystemClock()
        )
        assert fleet.gather([NodeName("n0")], 1, logs="", told_to_end=lambda: False)
        ticked(fleet, lambda: fleet.silence()[NodeName("n0")].answer_s > 1.8)
        assert fleet.silence()[NodeName("n0")].contact_s < 1.5
        fleet.close()


def test_time_in_which_we_did_nothing_blames_nobody(node: Callable[[str], Node]) -> None:
    one, clock = node("n0"), ManualClock()
    fleet = Fleet(Agents([one.facts]), TOKEN, clock)
    assert fleet.gather([NodeName("n0")], 1, logs="", told_to_end=lambda: False)
    fleet.tick(ATTEMPT)
    clock.sleep(1.6)
    fleet.tick(ATTEMPT)
    assert fleet.silence()[NodeName("n0")].answer_s < 1.0
    fleet.close()


def test_a_node_whose_agent_came_up_once_more_on_another_boot_was_booted_anew() -> None:
    servers: list[BoundServer] = []

    def start(boot: str, *findings: common_pb2.Finding) -> NodeFacts:
        servicer = NodeServicer(NodeName("n0"), "", node_pb2.StoreStatus, boot_id=boot, health=lambda: findings)
        servers.append(bound_server("127.0.0.1:0", TOKEN, lambda server: [add_to(server, servicer)]))
        servers[-1].server.start()
        return NodeFacts(node="n0", address=f"127.0.0.1:{servers[-1].port}", interface="ib0")

    n0, again = NodeName("n0"), Agents()
    fleet = Fleet(Agents([start("first")]), TOKEN, SystemClock(), Revival(lambda _nodes: again, SystemClock()))
    assert fleet.gather([n0], 1, logs="the log", told_to_end=lambda: False)
    ticked(fleet, lambda: fleet.boot_ids()[n0] == "first")
    assert not fleet.sick()
    servers[0].server.stop(0).wait(5)
    ticked(fleet, lambda: fleet.silence()[n0].answer_s > 0.6)
    fleet.revive([n0])
    broken = common_pb2.Finding(check="disk", severity="drain", problem="read-only")
    again.said = [start("second", broken, common_pb2.Finding(severity="drain"))]
    ticked(fleet, lambda: fleet.sick() == {n0})
    assert fleet.rebooted() == {n0}
    assert [finding.check for finding in fleet.health()[n0]] == ["disk"], "the other one cannot be read"
    assert abs(fleet.unix()[n0] - SystemClock().unix()) < 60
    fleet.close()
    assert again.stopped
    servers[1].server.stop(0).wait(5)


def test_too_few_agents_is_an_error_that_names_the_nodes(node: Callable[[str], Node]) -> None:
    agents = Agents([node("n0").facts], code=1)
    fleet = Fleet(agents, TOKEN, SystemClock())
    with pytest.raises(AgentsFailedError) as caught:
        fleet.gather([NodeName("n0"), NodeName("n1")], 2, logs="/the/log", told_to_end=lambda: False)
    assert caught.value.missing == ("n1",)
    assert "/the/log" in caught.value.remedy
    fleet.close()


def test_who_still_hangs_is_said_early_and_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet(Agents(), TOKEN, ManualClock())
    with pytest.raises(AgentsFailedError, match="srun still hangs") as caught:
        fleet.gather([NodeName("n0")], 1, logs="/the/log", told_to_end=lambda: False)
    assert caught.value.remedy == "Does it? /the/log has what was said."
    assert [record.message for record in caplog.records] == [
        "srun has not started the agents yet, after 10 s. Does it?"
    ]
    fleet.close()


def test_who_ended_is_quoted(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet(Agents(code=1, words="srun: error: no such node"), TOKEN, SystemClock())
    with pytest.raises(AgentsFailedError, match=r"srun exited 1 .* n0: srun: error: no such node"):
        fleet.gather([NodeName("n0")], 1, logs="", told_to_end=lambda: False)
    assert not caplog.records
    fleet.close()


def test_told_to_end_while_agents_start() -> None:
    fleet = Fleet(Agents(), TOKEN, SystemClock())
    assert not fleet.gather([NodeName("n0")], 1, logs="", told_to_end=lambda: True)
    fleet.close()


def test_a_pressed_agent_is_asked_at_that_moment_however_lately_it_was_asked(node: Callable[[str], Node]) -> None:
    one, name = node("n0"), NodeName("n0")
    clock = ManualClock()
    agents = Agents([one.facts])
    fleet = Fleet(agents, TOKEN, clock)
    assert fleet.gather([name], 1, logs="the log", told_to_end=lambda: False)

    def asked_s() -> float:
        end = time.monotonic() + 10
        while time.monotonic() < end:
            fleet.tick(ATTEMPT)
            if fleet.silence()[name].question_s < 0.05:
                break
            time.sleep(0.005)
        return fleet.silence()[name].question_s

    clock.sleep(1.0)
    assert asked_s() == 0.0
    fleet.press(clock.monotonic() + 0.2)
    clock.sleep(0.1)
    fleet.tick(ATTEMPT)
    clock.sleep(0.11)
    assert asked_s() == 0.0, "well before its next turn"
    fleet.close()
