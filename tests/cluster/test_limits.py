"""What Slurm takes from a job: its time, or its nodes for another. It goes on where it was."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deeplink.checkpoints import inspection
from deeplink.scheduler.slurm.states import JobState
from deeplink.scheduler.testbed.cluster import Options, Sandbox
from deeplink.scheduler.testbed.shape import Shape
from tests.cluster.jobs import Job, folder_of, submit
from tests.waiting import LIMIT_S, until

pytestmark = [pytest.mark.cluster]
RANK = Path(__file__).parent / "keeping_rank.py"
NEVER = str(10**9)  # steps, or steps between two saves


def keeping(cluster: Sandbox, options: str, *args: str) -> Job:
    """Submit a job whose ranks save; `args` are theirs, after the folder."""
    folder = folder_of(cluster)
    shutil.copy(RANK, folder / "keeping.py")
    train = shlex.join([sys.executable, str(folder / "keeping.py"), str(folder), *args])
    script = f"exec deeplink run --nproc-per-node 1 --time-margin 40 -- {train}"
    return submit(cluster, options, script, folder=folder)


def newest_whole(job: Job) -> int:
    """Return the step of the newest checkpoint that is whole, on shared storage or on a node's own disk."""
    folders = [job.folder / "run", *(job.cluster.ssd(node) / "run" for node in job.cluster.nodes)]
    return max(
        one.entry.step
        for folder in folders
        if folder.is_dir()
        for one in inspection.look(folder, inspection.chosen(folder), contents=True)
        if one.state is inspection.CheckpointState.WHOLE
    )


def begins(job: Job, attempt: str) -> list[list[str]]:
    """Return the step that each rank of an attempt began at, and the one that the state it found says."""
    return [path.read_text().split()[:2] for path in job.folder.glob(f"{job.id}.{attempt}.from*")]


def completes(job: Job) -> None:
    """Let the second run of a job begin, and then end."""
    job.await_event("first-step", 3 * LIMIT_S, count=2)
    assert job.let_end().state is JobState.COMPLETED, job.told()


def test_before_the_time_limit_the_ranks_save_and_the_job_goes_on_from_there(
    fresh_sandbox: Callable[..., Sandbox],
) -> None:
    cluster = fresh_sandbox(Shape.of(2))
    job = keeping(cluster, "-N2 --time=2 --requeue", NEVER, "60", NEVER, "0")
    until(lambda: job.row().state is JobState.PENDING and job.row().restarts == 1, 2 * LIMIT_S, job.told)
    newest = newest_whole(job)
    assert newest > 0, job.told()
    job.start_again("TimeLimit=10")
    completes(job)
    assert begins(job, "1.0") == [[str(newest)] * 2] * 2, "saved for its sake alone, and all ranks begin there"


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
    job = keeping(cluster, "-N2 -plow --requeue", NEVER, "60", "5", "0")
    saved = job.folder / "saved"
    until(lambda: saved.exists() and int(saved.read_text() or 0) >= 15, LIMIT_S, job.told)
    other = submit(cluster, "-N2 -phigh --exclusive", "srun sleep 1")
    assert other.await_end().state is JobState.COMPLETED, other.told()
    until(lambda: job.row().state is JobState.PENDING and job.row().restarts == 1, LIMIT_S, job.told)
    # Not what the rank has noted in `saved`: it may have been ended between a save and its note.
    newest = newest_whole(job)
    assert newest >= int(saved.read_text() or 0), job.told()
    job.start_again()
    completes(job)
    assert begins(job, "1.0") == [[str(newest)] * 2] * 2
