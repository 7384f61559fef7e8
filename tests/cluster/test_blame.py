"""Who is to blame, beside a real Slurm: a leaf switch, a slurmd, a reboot that Slurm does not notice.

Seconds are measured and printed (`pytest -s`, or the report of a failure), never asserted.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from deeplink.rpc.tokens import new_token, write_token
from deeplink.scheduler.recovery.records import Incident
from deeplink.scheduler.slurm.client import Slurm
from deeplink.scheduler.slurm.states import JobState
from deeplink.scheduler.testbed.cluster import Sandbox
from deeplink.scheduler.testbed.lab.laboratory import Laboratory
from deeplink.scheduler.testbed.shape import Shape
from tests.cluster.test_watch import RUN, Watch, in_second_run, node, told
from tests.waiting import LIMIT_S, until

pytestmark = [pytest.mark.cluster]


@pytest.fixture
def watch(fresh_sandbox: Callable[..., Sandbox]) -> Iterator[Watch]:
    cluster = fresh_sandbox(Shape(leaves=3, nodes_per_leaf=4))
    folder = cluster.home / "watch"
    folder.mkdir()
    shutil.chown(folder, cluster.user.uid, cluster.user.gid)
    token = new_token()
    write_token(folder / "token", token)
    write_token(folder / "user.token", token)
    shutil.chown(folder / "user.token", cluster.user.uid, cluster.user.gid)
    watch = Watch(cluster, folder)
    yield watch
    sys.stdout.write(watch.said())


def of_kind(watch: Watch, kind: str) -> list[Incident]:
    return [one for one in watch.incidents() if one.kind == kind]


def test_a_cut_leaf_is_named_and_its_job_runs_elsewhere(watch: Watch) -> None:
    slurm = Slurm(watch.cluster.runner())
    with watch.running("--act"):
        job = watch.submit("-N6 --exclusive --gres=gpu:2 --no-kill --requeue", RUN)
        job.await_event("first-step")
        first = set(job.row().nodes)
        below = {switch.name: set(switch.nodes) for switch in slurm.topology() if switch.level == 0}
        (leaf,) = (name for name, nodes in below.items() if nodes & first and job.row().batch_host not in nodes)
        began = time.monotonic()
        Laboratory(watch.cluster).inject("leaf-cut", leaf)
        until(lambda: bool(of_kind(watch, "switch-suspect")), LIMIT_S, watch.said)
        told("leaf cut: named", began)
        until(lambda: in_second_run(job), LIMIT_S, watch.said)
        told("leaf cut: job runs again", began)
        assert not set(job.row().nodes) & below[leaf]
        job.await_event("first-step", LIMIT_S, count=2)
        told("leaf cut: job trains again", began)
        drained = {row.name: row.reason for row in slurm.nodes() if row.drained}
        assert set(drained) == first & below[leaf], "what the job had of the leaf, and no more"
        assert all(f"switch-suspect-{leaf}" in reason for reason in drained.values())
        assert not of_kind(watch, "node-dead")


def test_a_slurmd_that_is_killed_is_told_and_costs_nothing(watch: Watch) -> None:
    with watch.running("--act"):
        job = watch.submit("-N3 --exclusive --no-kill --requeue", RUN)
        job.await_event("first-step")
        victim = next(name for name in job.row().nodes if name != job.row().batch_host)
        began = time.monotonic()
        laboratory = Laboratory(watch.cluster)
        laboratory.inject("slurmd-killed", victim)
        until(lambda: bool(of_kind(watch, "slurmd-lost")), LIMIT_S, watch.said)
        told("slurmd killed: told", began)
        laboratory.undo("slurmd-killed", victim)
        until(lambda: ": over" in watch.said(), LIMIT_S, watch.said)
        assert (job.row().state, job.row().restarts) == (JobState.RUNNING, 0), job.told()
        assert not node(watch.cluster, victim).drained
        assert watch.actions() == (), watch.said()


def test_a_slurmd_that_stays_dead_costs_nothing_until_it_is_back_and_then_a_restart(watch: Watch) -> None:
    with watch.running("--act"):
        job = watch.submit("-N3 --exclusive --no-kill --requeue", RUN)
        job.await_event("first-step")
        victim = next(name for name in job.row().nodes if name != job.row().batch_host)
        laboratory = Laboratory(watch.cluster)
        laboratory.inject("slurmd-killed", victim)
        until(lambda: node(watch.cluster, victim).down, LIMIT_S, watch.said)
        time.sleep(3.0)  # Slurm has given the node up, and nobody ends the ranks there
        assert (job.row().state, job.row().restarts) == (JobState.RUNNING, 0), job.told()
        assert len(job.events("attempt-started")) == 1
        assert watch.actions() == (), watch.said()
        laboratory.undo("slurmd-killed", victim)  # it ends what is not its job's any more
        until(lambda: in_second_run(job), LIMIT_S, watch.said)
        assert job.await_event("first-step", LIMIT_S, count=2)["step"] > 1, "from a checkpoint"
        assert of_kind(watch, "slurmd-lost")


@pytest.mark.parametrize("which", ["last", "batch host"])
def test_a_reboot_that_slurm_does_not_notice_hangs_no_job(watch: Watch, which: str) -> None:
    with watch.running("--act"):
        job = watch.submit("-N3 --exclusive --no-kill --requeue", RUN)
        job.await_event("first-step")
        host = job.row().batch_host
        victim = host if which == "batch host" else next(name for name in job.row().nodes if name != host)
        assert victim is not None
        began = time.monotonic()
        Laboratory(watch.cluster).inject("fast-reboot", victim)
        told(f"{which} rebooted: up again", began)
        until(lambda: bool(watch.faults()), LIMIT_S, watch.said)
        told(f"{which} rebooted: told", began)
        until(lambda: in_second_run(job), LIMIT_S, watch.said)
        told(f"{which} rebooted: job runs again", began)
        job.await_event("first-step", LIMIT_S, count=2)
        told(f"{which} rebooted: job trains again", began)
        (incident,) = watch.faults()
        assert incident.node == victim, watch.said()
        # On a busy machine it is away for as long as one that has died, and is drained as such.
        was_taken_for_dead = f"node-dead {victim}" in watch.said()
        assert was_taken_for_dead or not node(watch.cluster, victim).drained, watch.said()
