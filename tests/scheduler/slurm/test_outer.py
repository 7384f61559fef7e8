"""What of an outer job's environment is told from a job's own."""

from __future__ import annotations

import pytest

from deeplink.scheduler.slurm.client import Allocation
from deeplink.scheduler.slurm.job_environment import LEFT_BEHIND, not_contradicted, without_outer
from deeplink.scheduler.slurm.parse import JobAddress

ADDRESS = JobAddress.of_label("7")


def left(told: Allocation, **said: str) -> dict[str, str]:
    env = {f"SLURM_{name}": value for name, value in said.items()}
    return {name.removeprefix("SLURM_"): value for name, value in not_contradicted(env, told, 2).items()}


# As 22.05.8 told of jobs of two nodes: nodes, tasks, tasks per node, CPUs per task; then what the job's own
# environment said.
@pytest.mark.parametrize(
    ("told", "own"),
    [
        ((2, 2, 0, 1), {"NTASKS": "2", "NPROCS": "2"}),
        ((2, 5, 0, 2), {"NTASKS": "5", "NPROCS": "5", "CPUS_PER_TASK": "2"}),
        ((2, 4, 2, 1), {"NTASKS": "4", "NPROCS": "4", "NTASKS_PER_NODE": "2"}),
        ((2, 4, 2, 1), {"NTASKS": "3", "NPROCS": "3", "NTASKS_PER_NODE": "2"}),
        ((2, 2, 1, 1), {"NTASKS": "2", "NTASKS_PER_NODE": "1"}),
        ((2, 2, 0, 2), {"CPUS_PER_TASK": "2"}),
        ((1, 1, 0, 1), {"NTASKS": "5"}),  # one node of two was lost
        ((2, 0, 0, 0), {"NTASKS": "5", "CPUS_PER_TASK": "3"}),  # as where Slurm says N/A
    ],
)
def test_what_the_job_itself_was_given_stays(told: tuple[int, int, int, int], own: dict[str, str]) -> None:
    nodes, tasks, per_node, cpus = told
    allocation = Allocation(address=ADDRESS, nodes=nodes, tasks=tasks, tasks_per_node=per_node, cpus_per_task=cpus)
    assert left(allocation, JOB_ID="7", **own) == {"JOB_ID": "7", **own}


def test_what_the_record_contradicts_is_an_outer_jobs() -> None:
    plain = Allocation(address=ADDRESS, nodes=2, tasks=2, cpus_per_task=1, gpus_asked={"Node": 4})
    outer = {"NTASKS": "1", "NPROCS": "1", "NTASKS_PER_NODE": "1", "CPUS_PER_TASK": "8", "GPUS_PER_TASK": "1"}
    assert left(plain, **outer, RESTART_COUNT="1") == {}
    assert left(plain, GPUS_PER_NODE="4", TASKS_PER_NODE="1(x2)") == {
        "GPUS_PER_NODE": "4",
        "TASKS_PER_NODE": "1(x2)",
    }
    spread = Allocation(address=ADDRESS, nodes=2, tasks=4, tasks_per_node=2)
    assert left(spread, NTASKS="9", NTASKS_PER_NODE="2") == {"NTASKS_PER_NODE": "2"}


def test_the_environment_of_a_step_is_its_own() -> None:
    plain = Allocation(address=ADDRESS, nodes=2, tasks=2, cpus_per_task=1)
    step = {"STEP_ID": "0", "NTASKS": "1", "CPUS_PER_TASK": "8"}
    assert left(plain, **step) == step


def test_a_job_is_submitted_without_what_the_job_around_it_was_given() -> None:
    given = dict.fromkeys(LEFT_BEHIND, "3") | {"SBATCH_GPUS": "2", "SLURM_CONF": "/etc/slurm.conf", "HOME": "/h"}
    assert without_outer(given) == given, "the user's own words"
    inside = {**given, "SLURM_JOB_ID": "7"}
    assert set(without_outer(inside)) == {"SBATCH_GPUS", "SLURM_CONF", "HOME", "SLURM_JOB_ID"}
