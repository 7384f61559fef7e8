"""Random histories of a cluster: a hint is never what holds a job for longer than a round."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from typing_extensions import override

from deeplink.core.types import NodeName
from deeplink.scheduler.placement.hint.decision import Ask, Decision, HintKind, Why
from deeplink.scheduler.placement.hint.reconcile import Deed, HintChange
from tests.effort import examples
from tests.scheduler.placement.hint.simulated import NODES, NOTHING, PATHS, Cluster, Job, Round

pytestmark = pytest.mark.slow

INTERVAL_S = 6
SOON_S = 2
WISHES = ("none", "pin", "switches")


class History:
    """A cluster second by second; the planner goes round where `planned`."""

    def __init__(self, *, plans: bool, planned: bool, period: int, depth: int = 100) -> None:
        self.cluster = Cluster(plans=plans, depth=depth)
        self.round = Round(self.cluster) if planned else None
        self.period, self.next_round, self.worst = period, 0, 0

    @property
    def bound(self) -> int:
        """From the look that found a job held to the round; once more where that race was lost, too.

        Each time until Slurm comes by.
        """
        return INTERVAL_S + SOON_S + 2 * self.period

    def pass_time(self, seconds: int) -> None:
        for _ in range(seconds):
            if self.cluster.now % self.period == 0:
                self.cluster.schedule(self.period)
                self.worst = max([self.worst, *(job.held_s for job in self.cluster.jobs if job.ask)])
            if self.round and self.cluster.now >= self.next_round:
                self.check(self.round.go())
            self.cluster.now += 1

    def check(self, moves: list[HintChange]) -> None:
        survey = self.cluster.survey()
        pinned = [move for move in moves if move.decision.kind is HintKind.NODES]
        self.next_round = self.cluster.now + (SOON_S if pinned else INTERVAL_S)
        promised: set[str] = set()
        for move in (move for move in moves if move.deed is Deed.PIN):  # what was named before stays for a moment
            nodes = set(move.decision.nodes)
            assert len(nodes) == move.job.ask.nodes
            assert nodes <= survey.had(move.job.ask, frozenset()).free, "a node that is not free"
            assert not nodes & promised, "two jobs are to get one node"
            promised |= nodes
            ahead = [job for job in self.cluster.waiting if job.priority > move.job.row.priority]
            assert not any(nodes & job.planned for job in ahead), "a node that is kept for a job before it"
            loose = [job for job in ahead if not job.planned and job.wish.kind is not HintKind.NODES]
            assert not loose, "a job before it may be given any of them"

    def ours(self, nodes: int, priority: int, runs_s: int, wish: str) -> None:
        job = Job(len(self.cluster.jobs), nodes, priority, runs_s, Ask(nodes=nodes, exclusive=True))
        if self.round:
            job.wish = self._wish(nodes, wish)
            job.required, job.wished_at = frozenset(job.wish.nodes), self.cluster.now
        self.cluster.jobs.append(job)

    def other(self, nodes: int, priority: int, runs_s: int) -> None:
        self.cluster.jobs.append(Job(len(self.cluster.jobs), nodes, priority, runs_s))

    def _wish(self, nodes: int, wish: str) -> Decision:
        """Return what sbatch would have hinted, as far as a simulation needs it."""
        free = [node for node in NODES if node not in self.cluster.busy and node not in self.cluster.down]
        if wish == "tried":  # only where Slurm would start it at once, on nodes that no other submission claims
            claimed = {node for job in self.cluster.waiting for node in job.required}
            free = [node for node in free if node not in claimed]
            free = [] if any(not job.required for job in self.cluster.waiting) else free
        if wish in {"pin", "tried"} and len(free) >= nodes:
            named = tuple(free[-nodes:])
            return Decision(kind=HintKind.NODES, why=Why.FREE_NOW, words="", nodes=named, expected=named)
        if wish == "switches" and nodes > 1:
            leaves = -(-nodes // 2)
            return Decision(kind=HintKind.SWITCHES, why=Why.BUSY, words="", switches=leaves, patience_s=60)
        return NOTHING


sizes, priorities, times = st.integers(1, 4), st.integers(1, 4), st.integers(1, 25)


class Machine(RuleBasedStateMachine):
    """Nodes fall and rise, jobs of ours and of others come and end."""

    history: History

    @initialize(plans=st.booleans(), period=st.integers(1, 4), depth=st.sampled_from([100, 100, 2]))
    def begin(self, plans: bool, period: int, depth: int) -> None:
        self.history = History(plans=plans, planned=True, period=period, depth=depth)

    @rule(nodes=sizes, priority=priorities, runs_s=times, wish=st.sampled_from(WISHES))
    def ours_comes(self, nodes: int, priority: int, runs_s: int, wish: str) -> None:
        self.history.ours(nodes, priority, runs_s, wish)

    @rule(nodes=sizes, priority=priorities, runs_s=times)
    def other_comes(self, nodes: int, priority: int, runs_s: int) -> None:
        self.history.other(nodes, priority, runs_s)

    @rule(node=st.sampled_from(NODES))
    def falls(self, node: NodeName) -> None:
        self.history.cluster.down.add(node)

    @precondition(lambda self: self.history.cluster.down)
    @rule()
    def all_rise(self) -> None:
        self.history.cluster.down.clear()

    @rule(seconds=st.integers(1, 9))
    def time_passes(self, seconds: int) -> None:
        self.history.pass_time(seconds)
        assert self.history.worst <= self.history.bound

    @override
    def teardown(self) -> None:
        if hasattr(self, "history"):
            self.history.pass_time(INTERVAL_S + SOON_S + 8)
            assert self.history.worst <= self.history.bound


TestHistories = Machine.TestCase
TestHistories.settings = settings(max_examples=examples(80), stateful_step_count=30)

jobs = st.tuples(st.integers(0, 6), sizes, times, st.sampled_from(["none", "tried"]))


@settings(max_examples=examples(80))
@given(
    others=st.lists(st.tuples(st.integers(1, 5), times), min_size=2, max_size=6),
    ours=st.lists(jobs, min_size=3, max_size=12),
    plans=st.booleans(),
    period=st.integers(1, 4),
)
def test_without_races_every_job_starts_as_early_as_with_stock_slurm(
    others: list[tuple[int, int]], ours: list[tuple[int, int, int, str]], plans: bool, period: int
) -> None:
    """Jobs of others all come first, so that nobody takes a hinted node between a round and a look of Slurm."""

    def played(*, planned: bool) -> History:
        history = History(plans=plans, planned=planned, period=period)
        for nodes, runs_s in others:
            history.other(nodes, 9, runs_s)
        for gap, nodes, runs_s, wish in ours:
            history.pass_time(gap)
            history.ours(nodes, 1, runs_s, wish)
        history.pass_time(200)
        return history

    stock, with_us = played(planned=False), played(planned=True)
    for before, after in zip(stock.cluster.jobs, with_us.cluster.jobs, strict=True):
        if before.started is not None:
            assert after.started is not None
            assert after.started <= before.started + with_us.bound


def test_the_simulation_can_fail() -> None:
    """Without rounds a hint for few switches holds a job until its patience is over."""
    history = History(plans=False, planned=True, period=1)
    history.cluster.down = {node for node in NODES if node not in NODES[:2]}
    assert PATHS[NODES[0]] != PATHS[NODES[1]]
    history.next_round = 1_000
    history.ours(2, 1, 9, "switches")
    history.pass_time(50)
    assert history.worst > history.bound
