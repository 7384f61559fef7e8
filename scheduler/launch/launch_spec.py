"""The ranks and GPUs of each node, by what the job asked of Slurm, and an attempt's layout; pure.

The ranks of a node, in this order: `--nproc-per-node`; the tasks that the job asked for, on each node as many as
Slurm gave it; a rank for each GPU; one rank. Below torchrun a task is a torchrun: there GPUs go before tasks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from typing_extensions import override

from deeplink.core.text import counted, listed
from deeplink.scheduler.launch.backend import LaunchError
from deeplink.scheduler.launch.environment import DEFAULT, Launch, NodeFacts
from deeplink.scheduler.slurm.nodeset import in_order, unfold_counts
from deeplink.scheduler.slurm.sbatch_options import SRUN
from deeplink.scheduler.slurm.submission import is_in_step
from deeplink.scheduler.topology.graph import fabric_from_addresses
from deeplink.scheduler.topology.rank_order import Groups, choose_active, rank_order, ring_crossings, stock_order

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from deeplink.core.types import Attempt, NodeName
    from deeplink.scheduler.launch.container import Container
    from deeplink.scheduler.slurm.client import Allocation
    from deeplink.scheduler.topology.graph import Fabric
    from deeplink.scheduler.topology.rank_order import Cut

_SAY_TASKS = "Say how many ranks each node runs: --ntasks-per-node in the job, or --nproc-per-node here."
_SAY_GPUS = "Ask for the same number on each node (--gpus-per-node), or for each task (--gpus-per-task)."
_OF_GPUS = frozenset({"gres", "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "tres-per-task"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """The resources of a job, node by node."""

    tasks: Mapping[NodeName, int] | None = None  # that the job asked for; None where it asked for none
    # of each node that Slurm has not taken from the job; empty where the job has none
    gpus: Mapping[NodeName, int] = field(default_factory=dict)
    cpus: Mapping[NodeName, int] = field(default_factory=dict)  # of each node; empty where nobody says
    asked: bool = True  # whether the job asked for GPUs; if not, it has them since it has all of its nodes
    gpus_per_task: int = 0  # that the job asked for; 0 where it did not ask so
    by_node: bool = False  # whether it asked for GPUs of each node or socket: then its steps get them as they are
    tasks_per_gpu: int = 0  # that share a GPU, and no other is shown to them; 0 where it did not ask so
    unclear: str = ""  # why the job's tasks cannot be told; empty where they can


def granted_by(env: Mapping[str, str], allocation: Allocation) -> Granted:
    """Return what Slurm gave the job that we are in."""
    if allocation.address.is_component:
        raise LaunchError(
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
    """Return how many ranks each node is to run."""
    if wanted:
        return dict.fromkeys(nodes, wanted)
    if granted.tasks is not None and not (starters and granted.gpus):
        return dict(granted.tasks)
    if granted.unclear and not (starters and granted.gpus):
        raise LaunchError(granted.unclear, _SAY_TASKS)
    if not granted.gpus:
        return dict.fromkeys(nodes, 1)
    without = [node for node, count in granted.gpus.items() if not count]
    if without:
        raise LaunchError(f"a rank for each GPU leaves {listed(without)} without one: no GPU is there", _SAY_TASKS)
    most = max(granted.gpus.values())
    return {node: granted.gpus.get(node, most) for node in nodes}


def check_spread(ranks: Mapping[NodeName, int], count: int, group_sizes: Sequence[int]) -> None:
    """Check that nodes that differ in their ranks all run, and have no groups."""
    if len(set(ranks.values())) < 2:  # noqa: PLR2004
        return
    if count < len(ranks):
        problem = (
            f"the nodes differ in their ranks ({_spread(ranks)}), so who rests would change how many there are"
        )
        raise LaunchError(problem, _SAY_TASKS)
    if group_sizes:
        problem = (
            f"groups of ranks need the same number of ranks on each node; here they differ ({_spread(ranks)})"
        )
        raise LaunchError(problem, _SAY_TASKS)


def _spread(numbers: Mapping[NodeName, int]) -> str:
    return ", ".join(f"{node}: {number}" for node, number in list(numbers.items())[:8])


def gpu_options(
    granted: Granted, started: Mapping[NodeName, int], *, starters: bool, by_user: Sequence[str] = ()
) -> list[str]:
    """Return what srun must be told for the ranks' step to get the GPUs of its nodes."""
    # A step over named nodes is refused a total (`--gpus`; measured with 22.05), the job's own, too. So it asks
    # for those of each node; where they differ, for as many for each process, which then sees no others.
    gpus = {node: granted.gpus[node] for node in started if node in granted.gpus}
    if not any(gpus.values()) or any(option.name in _OF_GPUS for option in SRUN.alone(by_user).options):
        return []
    if granted.gpus_per_task and not starters:
        for node, there in gpus.items():
            if started[node] * granted.gpus_per_task > there:
                raise LaunchError(
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
        problem = f"Slurm cannot give a step the GPUs of nodes that differ in them ({_spread(gpus)})"
        raise LaunchError(problem, _SAY_GPUS)
    return [f"--gpus-per-task={int(share)}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """The ranks to run."""

    command: tuple[str, ...]  # each rank's command
    per_node: int  # ranks on each node, but for those in `each`
    count: int  # nodes that run ranks
    elastic: int = 0  # nodes that are enough where no more are left; 0: all of `count`, or none
    # whether the job is to be held, not ended, when it fails by its own fault; None: where there is something to
    # go on from
    hold: bool | None = None
    # without a newer step for so long the ranks are started again; 0: never; None: as the job's own history
    # tells, and what its processes do
    step_timeout_s: float | None = 0.0
    replace_stragglers: bool = False  # start the ranks again without a slow one's node, where a spare is left
    margin_s: float | None = None  # how long before the time limit the ranks are to save; None: learned
    strand_timeout_s: float = 900.0  # how long to wait for a rescue when too few nodes are left
    passed_on: Mapping[str, str] = field(default_factory=dict)  # settings every rank gets in its environment
    group_sizes: tuple[int, ...] = ()  # ranks that are to stay together, as `Groups` has them
    recipe_name: str = DEFAULT  # which framework the ranks are of
    container: Container | None = None  # what they run in; None for the nodes themselves
    fabric: Fabric | None = None  # where the nodes hang; what their agents say where None
    folder: Path | None = None  # where the attempts' host files lie; None for nowhere
    each: Mapping[NodeName, int] = field(default_factory=dict)  # ranks of nodes, where they differ

    @property
    def groups(self) -> Groups:
        """The groups of ranks to keep together."""
        return Groups(self.group_sizes, self.per_node)

    def count_for(self, nodes: int) -> int:
        """Return on how many of so many nodes the ranks can run; 0 where they cannot.

        >>> LaunchSpec(command=(), per_node=2, count=8, elastic=2, group_sizes=(4,)).count_for(7)
        6
        """
        if nodes >= self.count:
            return self.count
        return next((size for size in range(nodes, self._least - 1, -1) if self._divides(size)), 0)

    @property
    def fewest(self) -> int | None:
        """The smallest number of nodes that is enough; None where only all are."""
        return next((size for size in range(self._least, self.count) if self._divides(size)), None)

    @property
    def _least(self) -> int:
        return self.elastic or self.count

    def _divides(self, nodes: int) -> bool:
        return all(nodes * self.per_node % size == 0 for size in self.group_sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """A launch, and what its order of nodes is worth."""

    launch: Launch
    crossings: int  # leaf-to-leaf hops of the ring over the ranks
    crossings_stock: int  # the same on the same nodes in the order Slurm would have used
    groups: Groups = field(default_factory=Groups)  # what was to stay together
    cut: tuple[Cut, ...] = ()  # the groups that do not
    unknown: int = 0  # nodes of the ranks of which nobody knows where they hang: they were taken for neighbours

    @override
    def __str__(self) -> str:
        resting = f"; resting: {', '.join(self.resting)}" if self.resting else ""
        said = f"{counted(self.launch.world_size, 'rank')} on {', '.join(self.active)}{resting}; {self.ring}"
        return "; ".join((said, *self.together))

    @property
    def ring(self) -> str:
        """The ring over the ranks on the fabric, for people."""
        if not self.crossings:
            return "the ring stays on one leaf"
        return f"the ring crosses leaves {self.crossings} times (in Slurm's own order {self.crossings_stock})"

    @property
    def together(self) -> tuple[str, ...]:
        """Each size of groups on the fabric, for people."""
        said = []
        for size in self.groups.sizes:
            cut = [one for one in self.cut if one.size == size]
            count = self.launch.world_size // size
            if not cut:
                said.append(f"{counted(count, 'group')} of {size} ranks within a {self._within(size)}")
            else:
                said.append(f"{len(cut)} of {counted(count, 'group')} of {size} ranks cut ({cut[0]})")
        return tuple(said)

    @property
    def cut_by_size(self) -> dict[int, int]:
        """The number of groups of each size that do not stay together."""
        return {size: sum(one.size == size for one in self.cut) for size in self.groups.sizes}

    def _within(self, size: int) -> str:
        if self.groups.span(size) == 1:
            return "node each"
        if self.unknown < 2:  # noqa: PLR2004 - one node is its own neighbour at most
            return "leaf each"
        return f"leaf each, if the {self.unknown} nodes that no topology is known of share one"

    @property
    def active(self) -> tuple[NodeName, ...]:
        """Nodes of the ranks, in rank order."""
        return tuple(facts.name for facts in self.launch.nodes)

    @property
    def resting(self) -> tuple[NodeName, ...]:
        """Nodes that run no ranks."""
        return tuple(facts.name for facts in self.launch.spares)


def lay_out(
    spec: LaunchSpec,
    attempt: Attempt,
    facts: Mapping[NodeName, NodeFacts],
    *,
    port: int,
    before: Collection[NodeName] = (),
    restarts: int = 0,
    max_restarts: int = 0,
) -> RankLayout:
    """Choose the nodes of an attempt and put its ranks in order."""
    fabric = spec.fabric
    if fabric is None:
        fabric = fabric_from_addresses({node: one.topology_address for node, one in facts.items()})
    choice = choose_active(list(facts), spec.count, fabric, before, spec.groups)
    ranks = rank_order(choice.active, fabric, spec.groups)
    launch = Launch(
        attempt=attempt,
        nodes=tuple(facts[node] for node in ranks.nodes),
        spares=tuple(facts[node] for node in choice.spares),
        ranks=tuple(spec.each.get(node, spec.per_node) for node in ranks.nodes),
        restarts=restarts,
        max_restarts=max_restarts,
        master_port=port,
        passed_on=spec.passed_on,
        recipe_name=spec.recipe_name,
        host_file="" if spec.folder is None else str(spec.folder / f"hostfile.{attempt}"),
        container=spec.container,
    )
    return RankLayout(
        launch=launch,
        crossings=ranks.crossings,
        crossings_stock=ring_crossings(stock_order(ranks.nodes), fabric.leaf),
        groups=spec.groups,
        cut=ranks.cut,
        unknown=sum(not fabric.path(node) for node in ranks.nodes),
    )
