"""What a hint for nodes never does on a real Slurm: it holds no job, and binds none that nobody looks after."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from deeplink.scheduler.placement.hint import decision
from deeplink.scheduler.placement.hint.decision import HintKind, Recorded, Why
from deeplink.scheduler.slurm.nodeset import unfold
from deeplink.scheduler.testbed.cluster import Options, Sandbox
from deeplink.scheduler.testbed.shape import CTL, Shape
from tests.cluster.test_placing import hold, other_than_stock
from tests.cluster.watchdogs import watchdog
from tests.processes import PATIENT_SBATCH
from tests.waiting import LIMIT_S, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

# Slurm's main scheduler looks at no job for a minute after its submission: time for a planner to come first.
SLOW = Options(extra=("SchedulerParameters=defer,batch_sched_delay=60,sched_interval=60,bf_interval=120",))

TRIES = 5
"""Slurm's minute may end within the seconds of a test."""


@dataclass
class Cluster:
    sandbox: Sandbox
    env: dict[str, str]

    def submit(self, *words: str) -> tuple[int, Recorded]:
        argv = [*PATIENT_SBATCH, "--parsable", "-o", "/dev/null", *words, "--wrap", "sleep 900"]
        done = self.sandbox.run(CTL, argv, env={"DEEPLINK_PLAN": "off", **self.env})
        assert done.code == 0, done.stderr
        job = int(done.stdout)
        return job, decision.read(decision.job_folder(self.sandbox.home / ".local/state/deeplink", job))[-1]

    def bound(self) -> int:
        """Submit a job that is named nodes; it waits for a minute, unless Slurm comes by just now."""
        job, recorded = self.submit("-N4", "--exclusive", "--deeplink-data=images")
        assert recorded.decision.kind is HintKind.NODES
        return job

    def told(self, job: int, columns: str = "%T|%r|%N|%n|%k") -> list[str]:
        said = self.sandbox.run(CTL, ["squeue", "-h", "-j", str(job), "-o", columns]).stdout
        return ["" if field == "(null)" else field for field in said.strip("\n").split("|")]

    def nodes(self, job: int) -> set[str]:
        until(lambda: self.told(job)[0] == "RUNNING", 3 * LIMIT_S, lambda: str(self.told(job)))
        return {*unfold(self.told(job)[2])}

    def planned_once_released(self, *words: str) -> tuple[int, dict[str, object]]:
        """Have a job looked at that was held when it was submitted, before Slurm (26.05: within 3 s) starts it."""
        for _ in range(TRIES):
            job, _recorded = self.submit("--hold", "--exclusive", *words)
            argv = ["deeplink", "plan", "--once", "--json", "--job", str(job)]
            release = f"scontrol release {job} && exec {shlex.join(argv)}"
            done = self.sandbox.run(CTL, ["sh", "-c", release], env=self.env)
            if done.code == 0 and self.told(job)[0] == "PENDING":
                return job, dict(json.loads(done.stdout))
            assert self.told(job)[0] == "RUNNING", done.stderr
            self.cancel(job)
        raise AssertionError("Slurm started each at once")

    def cancel(self, *jobs: int) -> None:
        self.sandbox.run(CTL, ["scancel", *map(str, jobs)])
        self.sandbox.await_idle(LIMIT_S)


@pytest.fixture
def cluster(fresh_sandbox: Callable[..., Sandbox]) -> Iterator[Cluster]:
    """Eight nodes on two leaves, and a watchdog."""
    sandbox = fresh_sandbox(Shape(interleave=True))
    with watchdog(sandbox) as env:
        yield Cluster(sandbox, env)


@pytest.fixture
def slow(fresh_sandbox: Callable[..., Sandbox]) -> Iterator[Cluster]:
    """The same with a Slurm that comes late to what waits."""
    sandbox = fresh_sandbox(Shape(interleave=True), SLOW)
    with watchdog(sandbox) as env:
        yield Cluster(sandbox, env)


def test_a_job_that_was_cancelled_leaves_nothing_behind_for_the_next(cluster: Cluster) -> None:
    first, one = cluster.submit("-N4", "--exclusive")
    ran_on = cluster.nodes(first)
    cluster.cancel(first)
    second, other = cluster.submit("-N4", "--exclusive")
    assert (one.decision.why, other.decision.why) == (Why.AS_GOOD, Why.AS_GOOD)
    assert cluster.nodes(second) == ran_on
    assert cluster.told(second)[3:] == ["", ""]


def test_nodes_named_for_a_job_that_was_cancelled_are_named_for_the_next(cluster: Cluster) -> None:
    better = other_than_stock(cluster.sandbox)
    hold(cluster.sandbox, better)
    for _ in range(2):
        job, recorded = cluster.submit("-N4", "--exclusive", "--deeplink-data=images")
        assert recorded.decision.kind is HintKind.NODES, recorded.decision.words
        assert cluster.nodes(job) == set(recorded.decision.nodes) == better
        assert cluster.told(job)[4].startswith("deeplink-wish=")
        cluster.cancel(job)


def test_a_bound_job_without_a_planner_starts_elsewhere_when_a_node_of_it_dies(cluster: Cluster) -> None:
    sandbox = cluster.sandbox
    better = other_than_stock(sandbox)
    hold(sandbox, better)
    job, recorded = cluster.submit("-N3", "--exclusive", "--deeplink-data=images", "--comment=mine")
    assert recorded.decision.kind is HintKind.NODES
    bound = cluster.nodes(job)
    assert {*unfold(cluster.told(job)[3])} == bound <= better
    dead = max(bound)
    sandbox.crash(dead)
    until(lambda: cluster.told(job)[0] == "PENDING", 3 * LIMIT_S, lambda: str(cluster.told(job)))
    until(lambda: cluster.told(job)[3:] == ["", "mine"], 3 * LIMIT_S, lambda: str(cluster.told(job)))
    sandbox.run(CTL, ["scontrol", "update", f"jobid={job}", "StartTime=now"])
    assert dead not in cluster.nodes(job)
    assert len(cluster.nodes(job)) == 3


def test_no_nodes_are_named_where_no_watchdog_is(fresh_sandbox: Callable[..., Sandbox]) -> None:
    alone = Cluster(fresh_sandbox(Shape(interleave=True)), {})
    hold(alone.sandbox, other_than_stock(alone.sandbox))
    job, recorded = alone.submit("-N4", "--exclusive", "--deeplink-data=images")
    assert (recorded.decision.kind, recorded.decision.why) == (HintKind.NOTHING, Why.NOT_LOOKED_AFTER)
    assert alone.told(job)[3:] == ["", ""]


def test_the_planner_names_what_the_submission_would_and_nothing_else(slow: Cluster) -> None:
    better = other_than_stock(slow.sandbox)
    hold(slow.sandbox, better)
    kinds = {
        "off": ("-N4", "--deeplink-place=off"),
        "as good": ("-N4",),
        "one node": ("-N1", "--deeplink-data=images"),
        "gains": ("-N4", "--deeplink-data=images"),
    }
    seen = {}
    for name, words in kinds.items():
        job, seen[name] = slow.planned_once_released(*words)
        if name != "gains":
            assert slow.told(job)[3:] == ["", ""], name
            slow.cancel(job)
    assert {name: found["deed"] for name, found in seen.items()} == {
        "off": "leave",
        "as good": "leave",
        "one node": "leave",
        "gains": "pin",
    }
    assert (seen["off"]["words"], seen["as good"]["why"]) == ("--deeplink-place=off", "as good")
    assert set(seen["gains"]["nodes"]) == better  # type: ignore[call-overload]


def test_a_bound_job_that_slurm_does_not_come_to_is_freed_by_the_watchdog_alone(slow: Cluster) -> None:
    hold(slow.sandbox, other_than_stock(slow.sandbox))
    for _ in range(TRIES):
        job = slow.bound()
        until(lambda: slow.told(job)[0] == "RUNNING" or slow.told(job)[3:] == ["", ""], 3 * LIMIT_S)  # noqa: B023
        if slow.told(job)[3:] == ["", ""]:
            return
        slow.cancel(job)
    pytest.fail("Slurm started each within seconds")


def test_a_watchdog_that_comes_back_frees_the_job_and_until_then_status_says_how(
    fresh_sandbox: Callable[..., Sandbox],
) -> None:
    sandbox = fresh_sandbox(Shape(interleave=True), SLOW)
    hold(sandbox, other_than_stock(sandbox))
    for _ in range(TRIES):
        with watchdog(sandbox) as env:
            lone = Cluster(sandbox, env)
            job = lone.bound()
        marked = lone.told(job)[4]
        said = sandbox.run(CTL, ["deeplink", "status", str(job)]).stdout
        with watchdog(sandbox):
            until(lambda: lone.told(job)[0] == "RUNNING" or lone.told(job)[3:] == ["", ""], 3 * LIMIT_S)  # noqa: B023
        if lone.told(job)[3:] == ["", ""]:
            assert marked.startswith("deeplink-wish=")
            assert f"scontrol update jobid={job} ReqNodeList=" in " ".join(said.split())
            said = sandbox.run(CTL, ["deeplink", "status", str(job)]).stdout
            assert "ReqNodeList=" not in said
            return
        lone.cancel(job)
    pytest.fail("Slurm started each within seconds")
