"""What nobody scripted, on a real Slurm: the watchdog's disk full, its crash loop, most nodes of a job lost.

Seconds are measured and printed (`pytest -s`, or the report of a failure), never asserted.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from deeplink.scheduler.testbed.cluster import Sandbox
from deeplink.scheduler.testbed.shape import CTL, Shape
from tests.cluster.jobs import Job
from tests.cluster.test_watch import RUN, Watch, in_second_run, told
from tests.waiting import LIMIT_S, until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
LIFE_S = 2.5


@pytest.fixture
def watch(fresh_sandbox: Callable[..., Sandbox]) -> Iterator[Watch]:
    cluster = fresh_sandbox(Shape(leaves=2, nodes_per_leaf=4))
    folder = cluster.home / "watch"
    folder.mkdir()
    shutil.chown(folder, cluster.user.uid, cluster.user.gid)
    watch = Watch(cluster, folder)
    yield watch
    sys.stdout.write(watch.said())


def losing_a_node(watch: Watch, job: Job, what: str) -> None:
    """Kill a node of the job, which has no spare; return when it runs again."""
    host = job.row().batch_host
    victim = next(name for name in reversed(job.row().nodes) if name != host)
    began = time.monotonic()
    watch.cluster.crash(victim)
    until(lambda: in_second_run(job), 2 * LIMIT_S, lambda: watch.said() + job.told())
    told(f"{what}: job runs again", began)
    assert victim not in job.row().nodes


def started(watch: Watch) -> Job:
    job = watch.submit("-N4 --exclusive --gres=gpu:2 --no-kill --requeue", RUN)
    job.await_event("first-step")
    return job


def test_with_its_journals_disk_full_a_watchdog_acts_as_ever(watch: Watch) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(watch.folder)]
    assert watch.cluster.run(CTL, mount, root=True).code == 0
    with watch.running("--act"):
        job = started(watch)
        watch.cluster.run(CTL, ["dd", "if=/dev/zero", f"of={watch.folder / 'fill'}", "bs=4k"], root=True)
        losing_a_node(watch, job, "journal's disk full")
        assert "going on in" in watch.said()
        assert watch.cluster.run(CTL, ["rm", str(watch.folder / "fill")], root=True).code == 0
        until(lambda: "it is written again" in watch.said(), LIMIT_S, watch.said)
    assert watch.said().count(": requeue job") == 1


def test_a_watchdog_that_is_killed_every_few_seconds_still_acts(watch: Watch) -> None:
    argv = [sys.executable, "-m", "deeplink", "-v", "watch", "--act", "--bind", watch.address]
    argv += ["--journal", str(watch.journal), "--token-file", str(watch.folder / "secret")]
    loop = ["sh", "-c", 'while :; do timeout -s KILL "$0" "$@"; done', str(LIFE_S), *argv]
    with (watch.folder / "said").open("ab") as said:
        process = watch.cluster.spawn(CTL, loop, root=True, stdout=said, stderr=said)
    try:
        until(lambda: watch.said().count("watching: ") > 1, LIMIT_S, watch.said)
        losing_a_node(watch, started(watch), f"watchdog killed every {LIFE_S} s")
        assert watch.absences() == 1, "a crash loop is one incident"
    finally:
        process.kill()
        process.wait(LIMIT_S)


def test_most_nodes_of_a_job_that_die_at_once_are_one_incident(watch: Watch) -> None:
    with watch.running("--act"):
        job = started(watch)
        host = job.row().batch_host
        victims = [name for name in job.row().nodes if name != host]
        began = time.monotonic()
        for victim in victims:
            watch.cluster.crash(victim)
        until(lambda: in_second_run(job), 2 * LIMIT_S, lambda: watch.said() + job.told())
        told("3 of 4 nodes lost: job runs again", began)
        assert not {*victims} & {*job.row().nodes}
        job.await_event("first-step", LIMIT_S, count=2)
        (incident,) = watch.faults()
        assert all(victim in incident.evidence for victim in victims), incident
