"""Counts the ranks and GPUs of each node of a job, by what the job asked of Slurm; pure.

The rule, in this order: `--nproc-per-node`; the tasks that the job asked for, on each node as many as Slurm gave
it; a rank for each GPU; one rank. Below torchrun a task is a torchrun: there GPUs go before tasks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deeplink.errors import DeepLinkError
from deeplink.scheduler.slurm.nodeset import in_order, unfold_counts
from deeplink.scheduler.slurm.options import SRUN
from deeplink.scheduler.slurm.within import is_in_step
from deeplink.text import counted, listed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deeplink.scheduler.slurm.allocation import Allocation
    from deeplink.types import NodeName


class RankLayoutError(DeepLinkError):
    """The ranks that a job asks for cannot be started as it asks."""

    exit_code = 2

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem, remedy=remedy)
        self.problem = problem


_SAY_TASKS = "Say how many ranks each node runs: --ntasks-per-node in the job, or --nproc-per-node here."
_SAY_GPUS = "Ask for the same number on each node (--gpus-per-node), or for each task (--gpus-per-task)."


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """The resources of a job, node by node.

    Attributes:
        tasks: that the job asked for; None where it asked for none.
        gpus: of each node that Slurm has not taken from the job; empty where the job has none.
        cpus: of each node; empty where nobody says.
        asked: whether the job asked for GPUs; if not, it has them since it has all of its nodes.
        gpus_per_task: that the job asked for; 0 where it did not ask so.
        by_node: whether it asked for GPUs of each node or socket: then its steps get them as they are.
        tasks_per_gpu: that share a GPU, and no other is shown to them; 0 where it did not ask so.
        unclear: why the job's tasks cannot be told; empty where they can.
    """

    tasks: Mapping[NodeName, int] | None = None
    gpus: Mapping[NodeName, int] = field(default_factory=dict)
    cpus: Mapping[NodeName, int] = field(default_factory=dict)
    asked: bool = True
    gpus_per_task: int = 0
    by_node: bool = False
    tasks_per_gpu: int = 0
    unclear: str = ""


def granted_by(env: Mapping[str, str], allocation: Allocation) -> Granted:
    """Return what Slurm gave the job that we are in.

    Args:
        env: our environment, with nothing in it that the allocation contradicts.
        allocation: the job as slurmctld tells it.

    Raises:
        RankLayoutError: it is a job of several components.
    """
    if allocation.address.is_component:
        raise RankLayoutError(
            "this is a job of several components, and ranks would run on the first one alone",
            "Submit it as one component, or start its ranks with srun.",
        )
    nodes = in_order(env["SLURM_JOB_NODELIST"])
    tasks, unclear = _tasks(env, nodes, allocation)
    asked = allocation.gpus_asked
    cpus = unfold_counts(env.get("SLURM_JOB_CPUS_PER_NODE", ""))
    return Granted(
        tasks=tasks,
        unclear=unclear,
        gpus=allocation.gpus if any(allocation.gpus.values()) else {},
        cpus=dict(zip(nodes, cpus, strict=True)) if len(cpus) == len(nodes) else {},
        asked=bool(asked),
        gpus_per_task=asked.get("Task", 0),
        by_node="Node" in asked or "Socket" in asked,
        tasks_per_gpu=allocation.tasks_per_gpu,
    )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


def _tasks(
    env: Mapping[str, str], nodes: Sequence[NodeName], allocation: Allocation
) -> tuple[dict[NodeName, int] | None, str]:
    """Return the tasks of each node, None where the job asked for none, and why they cannot be told."""
    if is_in_step(env):
        return _tasks_in_step(nodes, allocation)
    said, per_node = _number(env.get("SLURM_NTASKS")), _number(env.get("SLURM_NTASKS_PER_NODE"))
    if said is None and not per_node:
        return None, ""
    told = unfold_counts(env.get("SLURM_TASKS_PER_NODE", ""))
    total = sum(told) if said is None else said
    if len(told) != len(nodes) or not len(nodes) <= total <= sum(told):
        words = env.get("SLURM_TASKS_PER_NODE", "nothing")
        return None, f"the job asks for {counted(total, 'task')}, and Slurm says {words} of its {len(nodes)} nodes"
    return dict(zip(nodes, _dealt(total, told), strict=True)), ""


def _tasks_in_step(nodes: Sequence[NodeName], allocation: Allocation) -> tuple[dict[NodeName, int] | None, str]:
    """Return the same inside an srun of the job, whose environment tells of itself alone."""
    if allocation.tasks_per_node:
        return dict.fromkeys(nodes, allocation.tasks_per_node), ""
    if allocation.tasks <= len(nodes):  # as many as of a job that asked for none
        return None, ""
    if len(nodes) == 1:
        return {nodes[0]: allocation.tasks}, ""
    where = f"the job's {allocation.tasks} tasks lie on its {len(nodes)} nodes"
    return None, f"inside a step Slurm does not say how {where}"


def _dealt(total: int, most: Sequence[int]) -> list[int]:
    """Deal tasks to nodes, one at a time: with `--ntasks` Slurm takes `--ntasks-per-node` for the most.

    >>> _dealt(5, [4, 1, 4]), _dealt(7, [4, 2, 1])
    ([2, 1, 2], [4, 2, 1])
    """
    dealt = [0] * len(most)
    while total:
        for place, limit in enumerate(most):
            if total and dealt[place] < limit:
                dealt[place] += 1
                total -= 1
    return dealt


def ranks_of(
    nodes: Sequence[NodeName], granted: Granted, wanted: int | None, *, starters: bool
) -> dict[NodeName, int]:
    """Return how many ranks each node is to run.

    Args:
        nodes: those of the job.
        granted: what it has.
        wanted: on each node, by the command line; None where it says nothing.
        starters: whether one process on each node starts its ranks (torchrun): then a task is such a process.

    Raises:
        RankLayoutError: that cannot be told.
    """
    if wanted:
        return dict.fromkeys(nodes, wanted)
    if granted.tasks is not None and not (starters and granted.gpus):
        return dict(granted.tasks)
    if granted.unclear and not (starters and granted.gpus):
        raise RankLayoutError(granted.unclear, _SAY_TASKS)
    if not granted.gpus:
        return dict.fromkeys(nodes, 1)
    without = [node for node, count in granted.gpus.items() if not count]
    if without:
        raise RankLayoutError(
            f"a rank for each GPU leaves {listed(without)} without one: no GPU is there", _SAY_TASKS
        )
    most = max(granted.gpus.values())
    return {node: granted.gpus.get(node, most) for node in nodes}


def check_spread(ranks: Mapping[NodeName, int], count: int, group_sizes: Sequence[int]) -> None:
    """Check that nodes that differ in their ranks all run, and have no groups.

    Args:
        ranks: of each node.
        count: nodes that are to run ranks.
        group_sizes: ranks that are to stay together.

    Raises:
        RankLayoutError: the number of ranks would hang on which nodes rest, or groups would begin anywhere.
    """
    if len(set(ranks.values())) < 2:  # noqa: PLR2004
        return
    spread = ", ".join(f"{node}: {number}" for node, number in list(ranks.items())[:8])
    if count < len(ranks):
        problem = f"the nodes differ in their ranks ({spread}), so who rests would change how many there are"
        raise RankLayoutError(problem, _SAY_TASKS)
    if group_sizes:
        problem = f"groups of ranks need the same number of ranks on each node; here they differ ({spread})"
        raise RankLayoutError(problem, _SAY_TASKS)


_OF_GPUS = frozenset({"gres", "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "tres-per-task"})


def gpu_options(
    granted: Granted, started: Mapping[NodeName, int], *, starters: bool, by_user: Sequence[str] = ()
) -> list[str]:
    """Return what srun must be told for the ranks' step to get the GPUs of its nodes.

    A step over named nodes is refused a total (`--gpus`; measured with 22.05), the job's own, too. So it asks for
    those of each node; where they differ, for as many for each process, which then sees no others.

    Args:
        granted: what the job has.
        started: processes on each node of the step.
        starters: whether each starts the ranks of its node, and is to have all GPUs.
        by_user: options for srun of the user's, who has the word where they ask for GPUs.

    Raises:
        RankLayoutError: Slurm has no words for them, or there are too few.
    """
    gpus = {node: granted.gpus[node] for node in started if node in granted.gpus}
    if not any(gpus.values()) or any(option.name in _OF_GPUS for option in SRUN.alone(by_user).options):
        return []
    if granted.gpus_per_task and not starters:
        for node, there in gpus.items():
            if started[node] * granted.gpus_per_task > there:
                raise RankLayoutError(
                    f"{counted(started[node], 'rank')} with {counted(granted.gpus_per_task, 'GPU')} each "
                    f"(--gpus-per-task) are to run on {node}, which has {there}",
                    "Ask for more tasks in the job, or start fewer ranks (--nproc-per-node).",
                )
        return []
    if granted.by_node and not granted.gpus_per_task:
        return []
    if len(set(gpus.values())) == 1:
        bound = [f"--gpu-bind=single:{granted.tasks_per_gpu}"] if granted.tasks_per_gpu and not starters else []
        return [f"--gres=gpu:{max(gpus.values())}", *bound]
    share, *others = sorted({there / started[node] for node, there in gpus.items()})
    if not granted.asked:
        return []  # as of srun's own step
    if others or share < 1 or share != int(share):
        spread = ", ".join(f"{node}: {number}" for node, number in list(gpus.items())[:8])
        raise RankLayoutError(
            f"Slurm cannot give a step the GPUs of nodes that differ in them ({spread})", _SAY_GPUS
        )
    return [f"--gpus-per-task={int(share)}"]
