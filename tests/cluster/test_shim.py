"""Scripts that were written for srun and torchrun, unchanged, in jobs with the stand-ins on PATH."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from deeplink.demo.story import has_torch
from deeplink.scheduler.slurm.states import JobState
from deeplink.scheduler.testbed.cluster import Sandbox
from deeplink.scheduler.testbed.shape import Shape
from tests.cluster.jobs import Job, submit
from tests.waiting import LIMIT_S

pytestmark = [pytest.mark.cluster]

TORCHRUN = """\
head=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
torchrun --nnodes=$SLURM_NNODES --nproc_per_node=2 --rdzv_id=$RANDOM --rdzv_backend=c10d \\
    --rdzv_endpoint=$head:29500 --no-python {train} 4
"""
TORCHRUN_BELOW_SRUN = """\
head=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
srun --ntasks-per-node=1 bash -c "torchrun --nnodes=$SLURM_NNODES --node_rank=\\$SLURM_NODEID \\
    --nproc_per_node=1 --master_addr=$head --master_port=29500 --no-python {train} 4"
"""


def in_order(job: Job, nodes: int, per_node: int) -> bool:
    begun = job.events("attempt-started")[0]
    wanted = [node for node in begun["nodes"] for _ in range(per_node)]
    return len(begun["nodes"]) == nodes and [node for node, _ in job.placed(f"{job.id}.0.0")] == wanted


def test_a_script_with_srun(sandbox: Sandbox) -> None:
    script = "srun hostname\nsrun -N1 -n1 python -c 'print(\"prepared\")'\nsrun --cpu-bind=none {train} 4"
    job = submit(sandbox, "-N4 --deeplink-shim --deeplink-spares 1", script, program="deeplink sbatch")
    assert job.await_end().state is JobState.COMPLETED, job.told()
    assert job.output().split().count("prepared") == 1
    assert len({word for word in job.output().split() if word in sandbox.nodes}) == 4, "hostname ran on all nodes"
    assert in_order(job, nodes=3, per_node=1), job.told()
    assert job.events("attempt-started")[0]["ring_crossings"] in {0, 2}


@pytest.mark.skipif(not has_torch(), reason="torchrun is torch's")
@pytest.mark.parametrize(
    ("script", "per_node"), [(TORCHRUN, 2), (TORCHRUN_BELOW_SRUN, 1)], ids=["alone", "below srun"]
)
def test_a_script_with_torchrun(sandbox: Sandbox, script: str, per_node: int) -> None:
    job = submit(sandbox, "-N2 --deeplink-shim", script, program="deeplink sbatch")
    assert job.await_end(3 * LIMIT_S).state is JobState.COMPLETED, job.told()
    assert in_order(job, nodes=2, per_node=per_node), job.told()


def test_an_unchanged_script_survives_its_node(fresh_sandbox: Callable[..., Sandbox]) -> None:
    cluster = fresh_sandbox(Shape.of(3))
    options = "-N3 --deeplink-shim --deeplink-spares 1"
    job = submit(cluster, options, "srun --ntasks-per-node=1 {train} 5000", program="deeplink sbatch")
    job.await_event("first-step")
    cluster.crash(job.events("attempt-started")[0]["nodes"][-1])
    assert job.await_event("first-step", count=2)
    row = job.let_end()
    assert (row.state, row.restarts) == (JobState.COMPLETED, 0), job.told()


def test_the_exit_code_of_a_stood_in_srun(sandbox: Sandbox) -> None:
    script = "srun python -c 'import sys; sys.exit(5)'; echo code=$?"
    job = submit(sandbox, "-N2 --deeplink-shim", script, program="deeplink sbatch")
    job.await_end()
    assert "code=5" in job.output(), job.told()
