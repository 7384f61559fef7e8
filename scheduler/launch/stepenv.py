"""Picks what a step of ours takes over of a batch script's environment; pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

# What Slurm puts into a batch script's environment and srun reads back as options (srun(1), INPUT ENVIRONMENT
# VARIABLES): they describe the script's own job or the user's other steps, and would bend the shape of ours.
_SHAPING = (
    "SLURM_HOSTFILE",
    "SLURM_DISTRIBUTION",
    "SLURM_NTASKS",
    "SLURM_NPROCS",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_NTASKS_PER_CORE",
    "SLURM_NTASKS_PER_SOCKET",
    "SLURM_NTASKS_PER_GPU",
    "SLURM_GPUS",  # in all: a step over named nodes is refused it
    "SLURM_NNODES",
    "SLURM_JOB_NUM_NODES",
    "SLURM_KILL_BAD_EXIT",
    "SLURM_NO_KILL",
    "SLURM_EXCLUSIVE",
    "SLURM_EXACT",
    "SLURM_OVERLAP",
    "SLURM_OVERCOMMIT",
    "SLURM_LABELIO",
    "SLURM_STDOUTMODE",
    "SLURM_STDERRMODE",
    "SLURM_STDINMODE",
    "SLURM_UNBUFFEREDIO",
    "SLURM_WAIT",
    "SLURM_EXPORT_ENV",
    "SLURM_MULTI_PROG",
)
_OF_TASKS = ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_TRES_BIND")
_RESOURCES = (
    *_OF_TASKS,
    "SLURM_GPUS_PER_NODE",
    "SLURM_GPUS_PER_SOCKET",
    "SLURM_GRES",
    "SLURM_GPU_BIND",
    "SLURM_CPUS_PER_GPU",
    "SLURM_CPUS_PER_TASK",
    "SRUN_CPUS_PER_TASK",
    "SLURM_MEM_PER_CPU",
    "SLURM_MEM_PER_GPU",
    "SLURM_MEM_PER_NODE",
    "SLURM_CPU_BIND",
    "SLURM_CPU_BIND_LIST",
    "SLURM_CPU_BIND_TYPE",
    "SLURM_CPU_BIND_VERBOSE",
    "SLURM_MEM_BIND",
    "SLURM_THREADS_PER_CORE",
    "SLURM_CORE_SPEC",
)


def step_environment(env: Mapping[str, str], *, resources: bool, tasks: bool = True) -> dict[str, str]:
    """Return `env` without what would bend a step of ours.

    Args:
        env: the batch script's environment.
        resources: keep what asks for GPUs, memory and binding (for ranks); agents take nothing of it.
        tasks: keep what asks for GPUs of each task, where a process of the step is one.
    """
    dropped = {*_SHAPING, *(() if resources else _RESOURCES), *(() if tasks else _OF_TASKS)}
    return {name: value for name, value in env.items() if name not in dropped}
