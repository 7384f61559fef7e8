"""The queue against a plain one that tries everything, and what holds whatever comes."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulate.engine import Engine, JobOutcome, Rules, Work, promised
from benchmarks.simulate.floor import Floor, bits
from benchmarks.simulate.policies import SchedulingPolicy, chooser
from benchmarks.simulate.state import FreeGpuState, JobShape
from deeplink.core.types import NodeName
from deeplink.scheduler.topology.graph import Fabric
from tests.effort import examples

GPUS = (4, 4, 2, 4, 1)


def floor() -> Floor:
    names = [NodeName(f"n{number}") for number in range(len(GPUS))]
    fabric = Fabric({name: ("core", f"leaf{number % 2}") for number, name in enumerate(names)})
    return Floor(names, fabric)


shapes = st.one_of(
    st.builds(JobShape, nodes=st.just(1), gpus=st.integers(1, 4), whole=st.just(False)),
    st.builds(JobShape, nodes=st.integers(2, 3), gpus=st.just(4), whole=st.just(True)),
    st.builds(JobShape, nodes=st.integers(1, 5), gpus=st.just(1), whole=st.just(True)),
)


@st.composite
def works(draw: st.DrawFn) -> list[Work]:
    gaps = draw(st.lists(st.integers(0, 40), min_size=1, max_size=25))
    now, found = 0, []
    for number, gap in enumerate(gaps):
        now += gap
        found.append(Work(number, now, draw(st.integers(1, 200)), draw(shapes)))
    return found


rules = st.builds(
    Rules,
    interval_s=st.sampled_from([1.0, 30.0, 100.0]),
    depth=st.sampled_from([1, 3, 500]),
    overestimate=st.sampled_from([1.0, 2.0]),
)


def run(work: list[Work], how: Rules, policy: SchedulingPolicy = SchedulingPolicy.PACK) -> Engine:
    engine = Engine(FreeGpuState(floor(), GPUS), chooser(policy, random.Random(3)), how)  # noqa: S311 - no secret
    engine.run(work)
    return engine


@dataclass
class Plain:
    """The same queue without any shortcut: lists, loops, the fullest node by counting."""

    how: Rules
    free: list[int] = field(default_factory=lambda: list(GPUS))
    running: list[tuple[float, float, Work, list[int]]] = field(default_factory=list)  # limit, end
    found: dict[int, tuple[float, int]] = field(default_factory=dict)

    def run(self, work: list[Work]) -> dict[int, tuple[float, int]]:
        free, running = self.free, self.running
        coming, waiting = list(work), list[Work]()
        next_pass, news, promise = float("-inf"), False, None
        while coming or running or waiting:
            now = min([one.submit_s for one in coming] + [one[1] for one in running], default=float("inf"))
            if waiting and news:
                now = min(now, next_pass)
            for done in [one for one in running if one[1] <= now]:
                running.remove(done)
                for node in done[3]:
                    free[node] = GPUS[node] if done[2].shape.whole else free[node] + done[2].shape.gpus
                news, promise = True, None
            while coming and coming[0].submit_s <= now:
                waiting.append(coming.pop(0))
                news = True
            while waiting and (nodes := self.fit(free, waiting[0].shape, set())):
                self.start(waiting.pop(0), nodes, now)
                promise = None
            if waiting and news and now >= next_pass:
                promise = promise or self.promise(waiting[0].shape)
                for one in waiting[1 : self.how.depth]:
                    shut = set() if now + one.duration_s * self.how.overestimate <= promise[0] else promise[1]
                    if nodes := self.fit(free, one.shape, shut):
                        self.start(one, nodes, now)
                        waiting.remove(one)
                news, next_pass = False, now + self.how.interval_s
        return self.found

    def fit(self, free: list[int], shape: JobShape, shut: set[int]) -> list[int] | None:
        able = [node for node in range(len(GPUS)) if node not in shut and free[node] >= shape.gpus]
        if shape.whole:
            able = [node for node in able if free[node] == GPUS[node]]
        else:
            able.sort(key=lambda node: (free[node], node))
        return able[: shape.nodes] if len(able) >= shape.nodes else None

    def start(self, one: Work, nodes: list[int], now: float) -> None:
        for node in nodes:
            self.free[node] = 0 if one.shape.whole else self.free[node] - one.shape.gpus
        self.running.append((now + one.duration_s * self.how.overestimate, now + one.duration_s, one, nodes))
        self.found[one.number] = (now, sum(1 << node for node in nodes))

    def promise(self, shape: JobShape) -> tuple[float, set[int]]:
        then = list(self.free)
        chosen = [
            node for node in range(len(GPUS)) if self.fit(then, JobShape(1, shape.gpus, shape.whole), others(node))
        ]
        for limit, _, one, nodes in sorted(self.running, key=lambda one: (one[0], one[2].number)):
            for node in sorted(nodes):
                then[node] = GPUS[node] if one.shape.whole else then[node] + one.shape.gpus
                alone = self.fit(then, JobShape(1, shape.gpus, shape.whole), others(node))
                if node not in chosen and alone:
                    chosen.append(node)
                if len(chosen) == shape.nodes:
                    return limit, set(chosen)
        raise AssertionError


def others(node: int) -> set[int]:
    return set(range(len(GPUS))) - {node}


@given(work=works(), how=rules)
@settings(max_examples=examples(300))
def test_every_job_starts_when_and_where_the_plain_queue_starts_it(work: list[Work], how: Rules) -> None:
    assert {one.work.number: (one.start_s, one.nodes) for one in run(work, how).outcomes} == Plain(how).run(work)


def test_the_same_where_jobs_are_known_to_start_before_others() -> None:
    draw = random.Random(1)  # noqa: S311
    early = 0
    for _ in range(50):
        work = [
            Work(
                number,
                5.0 * number,
                draw.randint(5, 300),
                draw.choice([JobShape(1, 1, False), JobShape(3, 4, True)]),
            )
            for number in range(30)
        ]
        outcomes = run(work, Rules()).outcomes
        assert {one.work.number: (one.start_s, one.nodes) for one in outcomes} == Plain(Rules()).run(work)
        early += [one.work.number for one in outcomes] != sorted(one.work.number for one in outcomes)
    assert early > 40


@given(work=works(), how=rules, policy=st.sampled_from(list(SchedulingPolicy)))
@settings(max_examples=examples(150))
def test_no_node_is_over_committed_and_no_job_is_lost(
    work: list[Work], how: Rules, policy: SchedulingPolicy
) -> None:
    engine = run(work, how, policy)
    assert sorted(one.work.number for one in engine.outcomes) == [one.number for one in work]
    for one in engine.outcomes:
        assert one.start_s >= one.work.submit_s
        assert one.end_s == one.start_s + one.work.duration_s
        assert one.nodes.bit_count() == one.work.shape.nodes
        for other in beside(one, engine.outcomes):
            assert not (one.work.shape.whole and other.nodes & one.nodes)
        for node in bits(one.nodes):
            there = [other for other in [one, *beside(one, engine.outcomes)] if other.nodes >> node & 1]
            assert sum(other.work.shape.gpus for other in there) <= GPUS[node]


def beside(one: JobOutcome, all_of_them: list[JobOutcome]) -> list[JobOutcome]:
    """Return those that ran when it started."""
    return [other for other in all_of_them if other is not one and other.start_s <= one.start_s < other.end_s]


@given(work=works(), how=rules, policy=st.sampled_from(list(SchedulingPolicy)))
@settings(max_examples=examples(150))
def test_who_waits_first_starts_no_later_than_promised(
    work: list[Work], how: Rules, policy: SchedulingPolicy
) -> None:
    engine = run(work, how, policy)
    started = {one.work.number: one.start_s for one in engine.outcomes}
    for number, promise in engine.reserved.items():
        assert started[number] <= promise.start_s


@given(work=works(), policy=st.sampled_from(list(SchedulingPolicy)))
@settings(max_examples=examples(50))
def test_without_backfill_jobs_start_in_the_order_in_which_they_came(
    work: list[Work], policy: SchedulingPolicy
) -> None:
    engine = run(work, Rules(depth=1), policy)
    assert [one.work.number for one in engine.outcomes] == [one.number for one in work]


@given(work=works(), policy=st.sampled_from(list(SchedulingPolicy)))
@settings(max_examples=examples(30))
def test_the_same_seed_gives_the_same_answer(work: list[Work], policy: SchedulingPolicy) -> None:
    assert run(work, Rules(), policy).outcomes == run(work, Rules(), policy).outcomes


def test_a_job_on_slow_nodes_runs_longer_and_is_not_killed() -> None:
    work = [Work(0, 0.0, 100.0, JobShape(1, 4, whole=False))]
    who = chooser(SchedulingPolicy.PACK, random.Random(0))  # noqa: S311
    engine = Engine(FreeGpuState(floor(), GPUS), who, Rules(), slowed=lambda _one, _nodes: 3.0)
    (outcome,) = engine.run(work)
    assert outcome.end_s == 300.0


def test_a_job_that_no_empty_cluster_holds_is_never_waited_for() -> None:
    state = FreeGpuState(floor(), GPUS)
    assert not state.holds(JobShape(4, 4, whole=True))
    assert not state.holds(JobShape(1, 5, whole=False))
    with pytest.raises(AssertionError, match="fits on no cluster"):
        promised(state, [], JobShape(4, 4, whole=True))


def test_more_than_a_node_has_is_never_given() -> None:
    state = FreeGpuState(floor(), GPUS)
    with pytest.raises(AssertionError, match="n4 of 1 GPUs would have -1 free"):
        state.take(1 << 4, JobShape(1, 2, whole=False))
