"""Agents started once more."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from deeplink.core.clock import ManualClock
from deeplink.core.types import NodeName
from deeplink.scheduler.launch.agent_restart import LONGEST_PAUSE_S, MOST_TRIES, PAUSE_S, TRY_S, AgentRestart
from deeplink.scheduler.launch.backend import NoSlurmdError
from deeplink.scheduler.launch.environment import NodeFacts
from tests.waiting import LIMIT_S, until

N1, N2 = NodeName("n1"), NodeName("n2")
Nodes = Mapping[NodeName, NodeFacts]


@dataclass
class Step:
    """A step of agents that comes up when it is told to."""

    said: list[NodeFacts] = field(default_factory=list)
    code: int | None = None
    ended_by: str = ""
    starter: str = "srun"
    doubt: str = ""
    gone: frozenset[NodeName] = frozenset()

    def announced(self) -> list[NodeFacts]:
        said, self.said = self.said, []
        return said

    def ended(self) -> int | None:
        return self.code

    def killed(self) -> frozenset[NodeName]:
        return frozenset()

    def last_words(self) -> str:
        return ""

    def abandon(self) -> None:
        self.ended_by = "abandon"

    def stop(self) -> None:
        self.ended_by = "stop"


def facts(*names: NodeName) -> Nodes:
    return {name: NodeFacts(node=name, address="10.0.0.1:5") for name in names}


class Bench:
    """A revival whose steps are made here, and counted."""

    def __init__(self) -> None:
        self.clock, self.steps, self.nodes = ManualClock(), list[Step](), list[set[NodeName]]()
        self.revival = AgentRestart(self._start, self.clock)

    def _start(self, nodes: Nodes) -> Step:
        self.nodes.append(set(nodes))
        self.steps.append(Step())
        return self.steps[-1]

    def announced(self) -> list[str]:
        found: list[NodeFacts] = []

        def are_there() -> bool:
            found.extend(self.revival.announced())
            return bool(found)

        until(are_there)
        return [one.node for one in found]

    def begin(self, *nodes: NodeName) -> tuple[NodeName, ...]:
        before = len(self.steps)
        tried = self.revival.begin(facts(*nodes))
        until(lambda: len(self.steps) == before + bool(tried))
        until(lambda: all(one.step is not None for one in self.revival._tries))
        return tried


def test_a_node_is_tried_one_try_at_a_time_and_a_hanging_one_is_given_up() -> None:
    bench = Bench()
    assert bench.begin(N1) == (N1,)
    assert bench.begin(N1) == ()
    assert bench.begin(N1, N2) == (N2,), "one that hangs does not keep the others waiting"
    bench.clock.now += TRY_S
    assert bench.begin(N1) == (N1,)
    assert [step.ended_by for step in bench.steps] == ["abandon", "abandon", ""]


def test_who_fails_is_tried_again_ever_more_seldom_and_anew_once_it_was_up() -> None:
    bench, pauses = Bench(), []
    for _ in range(6):
        assert bench.begin(N1) == (N1,)
        bench.steps[-1].code = 1
        began = bench.clock.now
        while not bench.begin(N1):
            bench.clock.now += 0.5
        pauses.append(bench.clock.now - began)
        bench.steps[-1].code = 1
        bench.clock.now += LONGEST_PAUSE_S
    assert pauses[0] == PAUSE_S
    assert max(pauses) <= LONGEST_PAUSE_S
    assert pauses == sorted(pauses)
    assert bench.begin(N1) == (N1,)
    bench.steps[-1].said = list(facts(N1).values())
    assert bench.announced() == ["n1"]
    assert bench.begin(N1) == (N1,), "its agent was up, and is lost once more"


def test_who_is_slower_to_come_up_than_others_of_the_same_try_is_waited_for() -> None:
    bench = Bench()
    bench.begin(N1, N2)
    bench.steps[0].said = list(facts(N1).values())
    bench.announced()
    bench.clock.now += PAUSE_S
    assert bench.begin(N2) == ()
    bench.clock.now += TRY_S
    assert bench.begin(N2) == (N2,)


def test_no_more_tries_at_once_than_are_bounded() -> None:
    bench = Bench()
    names = [NodeName(f"n{number}") for number in range(MOST_TRIES + 1)]
    assert [bench.begin(name) for name in names] == [*((name,) for name in names[:-1]), ()]


def test_who_came_up_is_ended_in_the_end() -> None:
    bench = Bench()
    bench.begin(N1)
    bench.steps[0].said = list(facts(N1).values())
    assert bench.announced() == ["n1"]
    assert bench.revival.announced() == []
    bench.begin(N1)
    bench.revival.close()
    assert [step.ended_by for step in bench.steps] == ["stop", "abandon"]


def test_a_start_that_hangs_keeps_nobody_waiting_and_is_let_go_of_once_it_is_over() -> None:
    free, step = threading.Event(), Step()

    def start(_nodes: Nodes) -> Step:
        free.wait(LIMIT_S)
        return step

    revival = AgentRestart(start, ManualClock())
    assert revival.begin(facts(N1)) == (N1,)
    assert revival.announced() == []
    revival.close()
    free.set()
    until(lambda: step.ended_by == "abandon")


def test_a_node_whose_slurmd_is_gone_too_is_deserted_until_a_try_finds_it_again() -> None:
    step, gone = Step(), {N1}

    def start(nodes: Nodes) -> Step:
        if gone >= nodes.keys():
            raise NoSlurmdError(gone)
        return step

    clock = ManualClock()
    revival = AgentRestart(start, clock)
    revival.begin(facts(N1))
    until(lambda: not revival.begin(facts(N1)) and revival.deserted == {N1})
    gone.clear()
    clock.now += LONGEST_PAUSE_S
    assert revival.begin(facts(N1)) == (N1,)
    step.said = list(facts(N1).values())
    until(lambda: revival.announced() != [])
    assert revival.deserted == set()


def test_a_node_whose_slurmd_is_gone_is_deserted_at_once_while_the_others_of_its_try_come_up() -> None:
    step, tried = Step(gone=frozenset({N1})), list[set[NodeName]]()

    def start(nodes: Nodes) -> Step:
        tried.append(set(nodes))
        return step if len(tried) == 1 else Step()

    clock = ManualClock()
    revival = AgentRestart(start, clock)
    assert revival.begin(facts(N1, N2)) == (N1, N2)
    until(lambda: revival.announced() == [] and revival.deserted == {N1})
    clock.now += PAUSE_S
    assert revival.begin(facts(N1, N2)) == (N1,), "it is awaited no longer, and N2 is"
    step.said = list(facts(N2).values())
    until(lambda: revival.announced() != [])
    assert revival.deserted == {N1}
    until(lambda: len(tried) == 2)
    assert tried[1] == {N1}


def test_a_start_that_fails_is_told_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    def start(_nodes: Nodes) -> Step:
        raise OSError("no room")

    clock = ManualClock()
    revival = AgentRestart(start, clock)
    revival.begin(facts(N1))
    until(lambda: "no room" in caplog.text)
    clock.now += PAUSE_S
    assert revival.begin(facts(N1)) == (N1,)
