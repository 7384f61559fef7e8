"""Agents started once more."""

from __future__ import annotations

from dataclasses import dataclass, field

from deeplink.clock import ManualClock
from deeplink.scheduler.launch.environment import NodeFacts
from deeplink.scheduler.launch.revival import TRY_S, Revival
from deeplink.types import NodeName

N1 = NodeName("n1")


@dataclass
class Step:
    """A step of agents that comes up when it is told to."""

    said: list[NodeFacts] = field(default_factory=list)
    code: int | None = None
    ended_by: str = ""
    starter: str = "srun"
    doubt: str = ""

    def announced(self) -> list[NodeFacts]:
        said, self.said = self.said, []
        return said

    def ended(self) -> int | None:
        return self.code

    def last_words(self) -> str:
        return ""

    def abandon(self) -> None:
        self.ended_by = "abandon"

    def stop(self) -> None:
        self.ended_by = "stop"


def test_one_try_at_a_time_and_a_hanging_one_is_given_up() -> None:
    clock, steps = ManualClock(), []

    def start(_nodes: object) -> Step:
        steps.append(Step())
        return steps[-1]

    revival = Revival(start, clock)
    revival.begin([N1])
    revival.begin([N1])
    assert len(steps) == 1
    clock.now += TRY_S
    revival.begin([N1])
    assert [step.ended_by for step in steps] == ["abandon", ""]
    steps[1].code = 1
    revival.begin([N1])
    assert len(steps) == 3, "who failed is tried again"


def test_who_came_up_is_ended_in_the_end() -> None:
    up = Step([NodeFacts(node="n1", address="10.0.0.1:5")])
    steps = [up, Step()]
    revival = Revival(lambda _nodes: steps.pop(0), ManualClock())
    revival.begin([N1])
    assert [facts.node for facts in revival.announced()] == ["n1"]
    assert revival.announced() == []
    hanging = steps[0]
    revival.begin([N1])
    revival.close()
    assert (up.ended_by, hanging.ended_by) == ("stop", "abandon")
