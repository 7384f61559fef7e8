"""Whole jobs, step by step, of which some are healthy and others stand still: who is restarted, and when."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.core.clock import ManualClock
from deeplink.core.types import Attempt, NodeName
from deeplink.rpc.channel import attempt_to_wire
from deeplink.scheduler.launch.hangs import Hangs, Late
from deeplink.v1 import common_pb2, node_pb2
from tests.waiting import LIMIT_S, until

ATTEMPT = Attempt(7, 0, 0)
TICK_S = 0.5
WAITS = "    all_reduce (distributed_c10d.py:9)\n    <module> (train.py:3)"
# What a rank does, its state and where it is: beside work, all of them use no CPU.
PLACES = {
    "works": ("R", "    forward (model.py:9)\n    <module> (train.py:3)"),
    "loads": ("S", "    _try_get_data (dataloader.py:9)\n    <module> (train.py:3)"),
    "saves": ("S", "    _save (serialization.py:9)\n    save (train.py:5)\n    <module> (train.py:3)"),
    "writes": ("S", "    wait (threading.py:9)\n    save (train.py:5)\n    <module> (train.py:3)"),
    "reads": ("D", "    read (storage.py:9)\n    <module> (train.py:3)"),
    "waits": ("S", WAITS),
    "hangs": ("S", "    hang (train.py:5)\n    <module> (train.py:3)"),
    "stopped": ("T", WAITS),
}


class Answer:
    """A call that is answered, or never will be."""

    def __init__(self, reply: Any) -> None:
        self.reply = reply

    def done(self) -> bool:
        return self.reply is not None

    def cancelled(self) -> bool:
        return False

    def exception(self) -> None:
        return None

    def result(self) -> Any:
        return self.reply


@dataclass
class World:
    """Ranks, one on each node, that do something for a time each, and then wait for all others."""

    count: int
    spin: bool = False  # whether ranks that wait use the CPU, as NCCL has them
    silent: set[int] = field(default_factory=set)  # nodes whose agents do not answer
    cut: set[int] = field(default_factory=set)  # nodes whose ports for ranks are dropped
    suspended: bool = False
    clock: ManualClock = field(default_factory=ManualClock)
    step: int = 0
    section: str = ""  # that ranks are in, and the one they have said so of
    said: str = ""

    def __post_init__(self) -> None:
        self.doing = ["works"] * self.count
        self.left_s = [1.0] * self.count
        self.cpu_s = [0.0] * self.count
        nodes = [SimpleNamespace(name=NodeName(f"n{rank}"), host=f"10.0.0.{rank}") for rank in range(self.count)]
        pool = SimpleNamespace(facts={one.name: one for one in nodes}, stubs=self._stubs)
        spec = SimpleNamespace(step_timeout_s=None, replace_stragglers=False)
        events = SimpleNamespace(event=lambda *_args, **_fields: None)
        backend = SimpleNamespace(folder=Path("/proc/nowhere"))
        run: Any = SimpleNamespace(agents=pool, events=events, clock=self.clock, spec=spec, backend=backend)
        self.hangs = Hangs(run)
        self.hangs._save = lambda: None  # type: ignore[method-assign] # nothing is kept from one trace to the next
        launch: Any = SimpleNamespace(nodes=nodes, ranks=(1,) * self.count, attempt=ATTEMPT, world_size=self.count)
        self.hangs.begin(launch)

    def _stubs(self, nodes: Iterable[NodeName]) -> dict[NodeName, Any]:
        return {node: self._stub(int(node[1:])) for node in nodes}

    def _stub(self, node: int) -> Any:
        def stacks(request: node_pb2.StacksRequest, timeout: float) -> Answer:
            if node in self.silent:
                return Answer(None)
            state, text = PLACES[self.doing[node]]
            text = "" if request.states_only else f'Thread 1: "MainThread"\n{text}\n'
            state = "T" if self.suspended else state
            rank = node_pb2.RankStack(rank=node, pid=9, state=state, cpu_s=self.cpu_s[node], text=text)
            return Answer(node_pb2.StacksReply(ranks=[rank]))

        def peers(request: node_pb2.TestPeersRequest, timeout: float) -> Answer:
            asked = [peer for peer in request.peers if not {node, int(peer.split(":")[1])} & self.cut]
            return Answer(node_pb2.TestPeersReply(port=node if request.listen_on else 0, reached=asked))

        return SimpleNamespace(Stacks=SimpleNamespace(future=stacks), TestPeers=SimpleNamespace(future=peers))

    def draw(self, what: list[tuple[str, float]]) -> None:
        """Have each rank do this next."""
        for rank, (doing, seconds) in enumerate(what):
            self.doing[rank], self.left_s[rank] = doing, seconds

    def run(self, seconds: float) -> tuple[float, Late]:
        """Let the time pass, to the end of the step at most; return how much passed, and what was said."""
        began = self.clock.monotonic()
        while self.clock.monotonic() - began < seconds:
            self.clock.now += TICK_S
            if not self.suspended:
                self._work()
            reports = self._ended() if not self.suspended else []
            if self.section != self.said and not self.suspended:
                self.said = self.section
                self.hangs.take(self._reports())
            self.hangs.take(reports)
            late = self.hangs.look()
            # The threads of the test of the network; real ones, which do not wait for anything here.
            until(lambda: not self.hangs._neighbours.is_under_way, LIMIT_S)
            if late.hung or reports:
                return self.clock.monotonic() - began, late
        return seconds, Late()

    def _work(self) -> None:
        for rank, doing in enumerate(self.doing):
            if doing in {"hangs", "stopped"}:
                continue
            if doing == "works" or (doing == "waits" and self.spin):
                self.cpu_s[rank] += TICK_S
            self.left_s[rank] -= TICK_S
            if self.left_s[rank] <= 0:
                self.doing[rank] = "waits"

    def _ended(self) -> list[common_pb2.Progress]:
        if set(self.doing) != {"waits"} or self.cut:
            return []
        self.step += 1
        self.section = self.said = ""
        return self._reports()

    def _reports(self) -> list[common_pb2.Progress]:
        return [
            common_pb2.Progress(attempt=attempt_to_wire(ATTEMPT), rank=rank, step=self.step, section=self.section)
            for rank in range(self.count)
            if rank not in self.silent
        ]


def warmed(world: World, step_s: float, steps: int = 6) -> World:
    for _ in range(steps):
        world.draw([("works", step_s)] * world.count)
        assert not world.run(10 * step_s)[1].hung
    return world


pauses = st.lists(
    st.tuples(
        st.sampled_from(["works", "loads", "saves", "writes", "reads"]),
        st.floats(0.5, 400.0),
        st.sampled_from(["all", "one", "most"]),
        st.sampled_from(["", "agent silent", "suspended", "we slept"]),
        st.sampled_from(["", "evaluation", "checkpoint"]),
    ),
    min_size=1,
    max_size=5,
)


@given(
    st.integers(2, 5), st.booleans(), st.floats(0.5, 20.0), st.floats(0.5, 1000.0), pauses, st.integers(0, 1000)
)
def test_a_healthy_job_is_never_judged(  # noqa: PLR0917 - drawn
    count: int,
    spin: bool,
    step_s: float,
    compiles_s: float,
    pauses: list[tuple[str, float, str, str, str]],
    seed: int,
) -> None:
    """Whatever ranks pause for, all of them or some, declared or not; and whatever else happens meanwhile."""
    chance = random.Random(seed)  # noqa: S311 - a trace
    world = World(count, spin=spin)
    world.draw([("works", compiles_s)] * count)
    assert not world.run(compiles_s + 10.0)[1].hung
    warmed(world, step_s)
    for doing, seconds, who, else_, section in pauses:
        world.section = "checkpoint" if doing == "writes" else section  # else nobody could tell
        number = {"all": count, "one": 1, "most": count - 1}[who]
        chosen = chance.sample(range(count), number)
        world.draw([(doing, seconds) if rank in chosen else ("works", step_s) for rank in range(count)])
        world.silent = {chance.randrange(count)} if else_ == "agent silent" else set()
        if else_ == "we slept":  # a suspended machine, a clock that jumps: nobody was there to look
            world.clock.now += 5000.0
        if else_ == "suspended":
            world.suspended = True
            assert not world.run(300.0)[1].hung
            world.suspended = False
        assert not world.run(seconds + 10 * step_s + 5.0)[1].hung
        world.silent = set()


BOUND_S = 15.0
"""So much later than the limit somebody must have said so, on machines that answer at once."""


@given(
    st.integers(2, 6),
    st.booleans(),
    st.floats(0.5, 20.0),
    st.sampled_from(["hangs", "stopped", "cut", "deadlock"]),
    st.integers(0, 5),
)
def test_a_job_that_stands_still_is_always_judged_and_the_right_node_is_named(
    count: int, spin: bool, step_s: float, fault: str, victim: int
) -> None:
    world, victim = warmed(World(count, spin=spin and fault != "deadlock"), step_s), victim % count
    what = [("works", step_s)] * count
    if fault in {"hangs", "stopped"}:
        what[victim] = (fault, 0.0)
    if fault == "cut":
        world.cut = {victim}
    if fault == "deadlock":
        what = [("waits", 1e9)] * count
        world.cut = set()
        world._ended = list  # type: ignore[method-assign] # of what they wait for nothing comes
    world.draw(what)
    took_s, late = world.run(1000.0)
    assert late.hung
    assert took_s <= max(30.0, 5 * (step_s + 2 * TICK_S)) + BOUND_S
    if fault in {"hangs", "stopped"} or (fault == "cut" and count > 2):
        assert late.suspects == (f"n{victim}",)
    elif fault == "deadlock":
        assert "every rank waits" in late.hung


def test_a_job_that_reports_nothing_is_not_judged() -> None:
    world = World(3)
    world.draw([("hangs", 0.0)] * 3)
    assert not world.run(3000.0)[1].hung


@pytest.mark.parametrize("doing", ["loads", "hangs"])
def test_where_nobody_works_for_ten_minutes_nothing_more_is_waited_for(doing: str) -> None:
    world = warmed(World(3), 1.0)
    world.draw([(doing, 1e9)] * 3)
    took_s, late = world.run(1000.0)
    assert "no rank has worked for 6" in late.hung
    assert 600.0 < took_s < 630.0
