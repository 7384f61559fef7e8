"""What Slurm takes from a job: its time, or its nodes for another. It goes on where it was."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deeplink.scheduler.slurm.states import JobState
from deeplink.scheduler.testbed.cluster import Options, Sandbox
from deeplink.scheduler.testbed.shape import Shape
from tests.cluster.jobs import Job, folder_of, submit
from tests.waiting import LIMIT_S, until

pytestmark = [pytest.mark.cluster]
RANK = Path(__file__).parent / "keeping_rank.py"


def keeping(cluster: Sandbox, options: str, *args: str) -> Job:
    """Submit a job whose ranks save; `args` are theirs, after the folder."""
    folder = folder_of(cluster)
    shutil.copy(RANK, folder / "keeping.py")
    train = shlex.join([sys.executable, str(folder / "keeping.py"), str(folder), *args])
    script = f"exec deeplink run --nproc-per-node 1 --time-margin 40 -- {train}"
    return submit(cluster, options, script, folder=folder)


def test_before_the_time_limit_the_ranks_save_and_the_job_goes_on_from_there(
    fresh_sandbox: Callable[..., Sandbox],
) -> None:
    cluster = fresh_sandbox(Shape.of(2))
    job = keeping(cluster, "-N2 --time=1 --requeue", "300", "60", "1000000", "0")
    until(lambda: job.row().state is JobState.PENDING and job.row().restarts == 1, LIMIT_S, job.told)
    told = int((job.folder / "saved").read_text())
    assert 0 < told < 300, job.told()
    job.start_again("TimeLimit=5")
    assert job.await_end(3 * LIMIT_S).state is JobState.COMPLETED, job.told()
    begins = [path.read_text().split()[:2] for path in job.folder.glob(f"{job.id}.1.0.from*")]
    assert begins == [[str(told)] * 2] * 2, "saved for its sake alone, and all ranks go on from there"


def test_a_preempted_job_goes_back_into_the_queue_and_on_from_its_newest_checkpoint(
    fresh_sandbox: Callable[..., Sandbox],
) -> None:
    extra = (
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        "PartitionName=low Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=5",
        "PartitionName=high Nodes=ALL PriorityTier=9 PreemptMode=OFF",
    )
    cluster = fresh_sandbox(Shape.of(2), Options(extra=extra))
    job = keeping(cluster, "-N2 -plow --requeue", "200", "60", "5", "0")
    saved = job.folder / "saved"
    until(lambda: saved.exists() and int(saved.read_text() or 0) >= 15, LIMIT_S, job.told)
    other = submit(cluster, "-N2 -phigh --exclusive", "srun sleep 1")
    assert other.await_end().state is JobState.COMPLETED, other.told()
    until(lambda: job.row().state is JobState.PENDING and job.row().restarts == 1, LIMIT_S, job.told)
    newest = int(saved.read_text())
    job.start_again()
    assert job.await_end(3 * LIMIT_S).state is JobState.COMPLETED, job.told()
    begins = [path.read_text().split()[:2] for path in job.folder.glob(f"{job.id}.1.0.from*")]
    assert begins == [[str(newest)] * 2] * 2
