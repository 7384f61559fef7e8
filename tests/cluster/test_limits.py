"""A job's time limit, for real: its ranks save before it, and the job goes on from there."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deeplink.scheduler.sandbox.cluster import Sandbox
from deeplink.scheduler.sandbox.shape import CTL, Shape
from deeplink.scheduler.slurm.states import JobState
from tests.cluster.jobs import folder_of, submit
from tests.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]
RANK = Path(__file__).parent / "keeping_rank.py"


def test_before_the_time_limit_the_ranks_save_and_the_job_goes_on_from_there(
    fresh_sandbox: Callable[..., Sandbox],
) -> None:
    cluster = fresh_sandbox(Shape.of(2))
    folder = folder_of(cluster)
    shutil.copy(RANK, folder / "keeping.py")
    train = shlex.join([sys.executable, str(folder / "keeping.py"), str(folder), "300", "60", "1000000", "0"])
    script = f"exec deeplink run --nproc-per-node 1 --time-margin 40 -- {train}"
    job = submit(cluster, "-N2 --time=1 --requeue", script, folder=folder)
    until(lambda: job.row().state is JobState.PENDING and job.row().restarts == 1, 70, job.told)
    told = int((folder / "saved").read_text())
    assert 0 < told < 300, job.told()
    cluster.run(CTL, ["scontrol", "update", f"jobid={job.id}", "StartTime=now"])
    assert job.await_end(90).state is JobState.COMPLETED, job.told()
    begins = [path.read_text().split()[:2] for path in folder.glob(f"{job.id}.1.0.from*")]
    assert begins == [[str(told)] * 2] * 2, "saved for its sake alone, and all ranks go on from there"
