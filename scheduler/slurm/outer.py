"""What a job that submits another one leaves behind in that one's environment; pure.

sbatch hands its environment on, and of these Slurm sets only what the new job itself asks for: the rest is the
outer job's (measured with 22.05.8). None of them is an input of sbatch's: those begin with SBATCH_.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.scheduler.slurm.within import is_in_step

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deeplink.scheduler.slurm.allocation import Allocation

_TASKS = ("SLURM_NTASKS", "SLURM_NPROCS")
_OF_GPUS = {
    "SLURM_GPUS": "Job",
    "SLURM_GPUS_PER_NODE": "Node",
    "SLURM_GPUS_PER_SOCKET": "Socket",
    "SLURM_GPUS_PER_TASK": "Task",
}
LEFT_BEHIND = frozenset(
    (
        "SLURM_RESTART_COUNT",
        *_TASKS,
        "SLURM_NTASKS_PER_NODE",
        "SLURM_NTASKS_PER_CORE",
        "SLURM_NTASKS_PER_SOCKET",
        "SLURM_NTASKS_PER_GPU",
        "SLURM_CPUS_PER_TASK",
        "SLURM_CPUS_PER_GPU",
        *_OF_GPUS,
        "SLURM_TRES_PER_TASK",
        "SLURM_GPU_BIND",
        "SLURM_TRES_BIND",
        "SLURM_MEM_PER_CPU",
        "SLURM_MEM_PER_GPU",
        "SLURM_MEM_PER_NODE",
        "SLURM_DISTRIBUTION",
        "SLURM_OVERCOMMIT",
        "SLURM_THREADS_PER_CORE",
    )
)


def without_outer(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment to submit a job with: inside of a job, without what that one would leave behind."""
    return {name: value for name, value in env.items() if name not in LEFT_BEHIND or "SLURM_JOB_ID" not in env}


def not_contradicted(env: Mapping[str, str], told: Allocation, nodes: int) -> dict[str, str]:
    """Return a job's environment without what Slurm's record of the job contradicts.

    What the record cannot tell from the job's own stays: one task of an outer job and one node, say.

    Args:
        env: of the batch script; that of a step is the step's own, and stays.
        told: the record.
        nodes: of the job, by its environment.
    """
    if is_in_step(env):
        return dict(env)
    tasks = _number(env, "SLURM_NTASKS")
    # With --ntasks-per-node it tells the most there may be. And of nodes that were lost their tasks are gone.
    fitting = {told.tasks, *range(nodes, nodes * told.tasks_per_node + 1)}
    stale = {name for name, kind in _OF_GPUS.items() if kind not in told.gpus_asked}
    if not told.restarts:  # Slurm sets any other count itself
        stale.add("SLURM_RESTART_COUNT")
    if told.tasks and told.nodes == nodes and tasks not in fitting:
        stale |= {*_TASKS}
    if told.cpus_per_task not in {0, _number(env, "SLURM_CPUS_PER_TASK")}:
        stale.add("SLURM_CPUS_PER_TASK")
    if told.tasks_per_node != _number(env, "SLURM_NTASKS_PER_NODE"):
        stale.add("SLURM_NTASKS_PER_NODE")
    return {name: value for name, value in env.items() if name not in stale}


def _number(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else None
