"""What `deeplink srun` makes of a command line: srun's own, the ranks of its step in the fabric's order; pure.

srun numbers ranks by node name. With `--distribution=arbitrary` it numbers them by the order of `--nodelist`
(measured), so the order is part of the command line, and nothing is left in the environment of the tasks. Outside
of an allocation nobody knows the nodes beforehand: then salloc makes one around the same step. Whatever is not
plainly a step over all nodes of an allocation is left to srun as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from deeplink.errors import DeepLinkError
from deeplink.scheduler.slurm.nodeset import NodeSetError, in_order, unfold, unfold_counts
from deeplink.scheduler.slurm.options import SRUN, CommandLine, Grammar, names
from deeplink.scheduler.topology.order import rank_order, ring_crossings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from deeplink.scheduler.topology.graph import Fabric
    from deeplink.types import NodeName

_OURS = frozenset({"dry-run", "deeplink-dry-run"})
_GRAMMAR = Grammar(valued=SRUN.valued, flags=SRUN.flags | _OURS, short=SRUN.short)

# Of the job as a whole: salloc takes them, and within its allocation they mean nothing more.
_OF_JOB = names(
    """account begin cluster-constraint comment constraint contiguous deadline delay-boot dependency exclude
    exclusive hold immediate licenses mail-type mail-user mcs-label mincpus nice oversubscribe partition
    priority qos reservation spread-job switches time-min tmp use-min-nodes wckey"""
)
# Of the job and of the step alike.
_OF_BOTH = names(
    """chdir cpus-per-gpu cpus-per-task gpu-freq gpus gpus-per-node gres gres-flags job-name mem mem-per-cpu
    mem-per-gpu nodes no-kill ntasks ntasks-per-node overcommit quiet threads-per-core time tres-per-task
    verbose"""
)
# Of the step alone.
_OF_STEP = names(
    """acctg-freq bcast compress cpu-bind cpu-freq disable-status error exact export gpu-bind gpus-per-task
    input kill-on-bad-exit label mem-bind mpi msg-timeout open-mode output overlap preserve-env profile propagate
    quit-on-interrupt task-epilog task-prolog unbuffered wait"""
)
# What describes the allocation we are in, or says nothing of the shape of a job: with anything else in the
# environment (srun(1), INPUT ENVIRONMENT VARIABLES) a job is shaped by it, and salloc reads other names.
_HARMLESS = frozenset({"SLURM_CONF", "SLURM_TIME_FORMAT", "SLURM_BITSTR_LEN", "SLURM_TOPOLOGY_ADDR"})
_TOTALS = frozenset({"gpus"})  # of the job: Slurm refuses them to a step over named nodes (measured with 22.05)
_BENDING = ("SLURM_GPUS", "SLURM_HOSTFILE", "SLURM_DISTRIBUTION", "SLURM_MULTI_PROG", "SLURM_RELATIVE")
LONGEST_LIST = 100_000
"""Characters; Linux takes 128 KiB in one argument."""


class InteractiveError(DeepLinkError):
    """The command line asks for something that cannot be done; nothing was started."""

    exit_code = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Interactive:
    """What is to be executed.

    Attributes:
        argv: the command.
        order: the nodes in rank order; empty where srun decides.
        because: why it is as it is, one sentence.
    """

    argv: tuple[str, ...]
    order: tuple[NodeName, ...]
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SrunCommand:
    """A command line of `deeplink srun`, understood.

    Attributes:
        words: srun's part of it.
        line: the same, parsed.
        dry_run: whether to print and not to start.
    """

    words: tuple[str, ...]
    line: CommandLine
    dry_run: bool


def understood(words: Sequence[str]) -> SrunCommand:
    """Read a command line.

    Raises:
        InteractiveError: an option of ours that does not exist, or with a value.
    """
    line = _GRAMMAR.parse(words)
    dropped: set[int] = set()
    for option in line.options:
        if option.name in _OURS and option.value is None:
            dropped |= set(range(option.at, option.at + len(option.words)))
        elif option.name in _OURS or option.name.startswith("deeplink"):
            raise InteractiveError(
                f"there is no option {option.words[0]}", remedy="Ours is --dry-run; all others are srun's own."
            )
    kept = tuple(word for place, word in enumerate(words) if place not in dropped)
    return SrunCommand(words=kept, line=SRUN.parse(kept), dry_run=bool(dropped))


def interactive(
    asked: SrunCommand, env: Mapping[str, str], fabric: Callable[[], Fabric], ourselves: Sequence[str]
) -> Interactive:
    """Return what to execute.

    Args:
        asked: the command line.
        env: our environment.
        fabric: tells where nodes hang; called only where that matters.
        ourselves: the command that is `deeplink srun`, for within an allocation that is to be made.
    """
    if not asked.line.rest:
        return _left(asked, "there is no command")
    if env.get("SLURM_JOB_ID"):
        return _inside(asked, env, fabric)
    return _outside(asked, env, fabric, ourselves)


def _left(asked: SrunCommand, because: str) -> Interactive:
    return Interactive(argv=("srun", *asked.words), order=(), because=f"srun's own order: {because}")


def _strange(line: CommandLine, known: frozenset[str]) -> str:
    """Return the first option that is not known to leave the order alone; empty where there is none."""
    return next((option.words[0] for option in line.options if not option.known or option.name not in known), "")


def _inside(asked: SrunCommand, env: Mapping[str, str], fabric: Callable[[], Fabric]) -> Interactive:
    because = _not_ours(asked, env)
    if because:
        return _left(asked, because)
    nodes = in_order(env["SLURM_JOB_NODELIST"])  # as SLURM_TASKS_PER_NODE has them
    counts = _tasks(asked.line, env, len(nodes))
    if counts is None:
        return _left(asked, "how many tasks each node gets is for Slurm to say")
    where = fabric()
    order, stock = rank_order(nodes, where), ring_crossings(nodes, where.leaf)
    if order.crossings == stock:
        return _left(asked, f"it crosses leaf switches {stock} times, and none does less")
    each = dict(zip(nodes, counts, strict=True))
    listed = ",".join(name for name in order.nodes for _ in range(each[name]))
    if len(listed) > LONGEST_LIST:
        return _left(asked, "it has too many ranks for a list of their nodes")
    shape = (f"--ntasks={sum(counts)}", "--distribution=arbitrary")
    # The list says on how many nodes: from Slurm 24.11 on srun refuses --nodes beside arbitrary.
    kept = [word for option in asked.line.options if option.name != "nodes" for word in option.words]
    return Interactive(
        argv=("srun", *shape, f"--nodelist={listed}", *kept, *asked.line.rest),
        order=order.nodes,
        because=f"the ring of ranks crosses leaf switches {order.crossings} times, and {stock} in order of names",
    )


def _not_ours(asked: SrunCommand, env: Mapping[str, str]) -> str:
    """Return why a step in an allocation is not to be put in order; empty where nothing is against it."""
    if strange := _strange(asked.line, (_OF_JOB | _OF_BOTH | _OF_STEP) - _TOTALS):
        return f"{strange} may say otherwise"
    if bent := next((name for name in _BENDING if env.get(name)), ""):
        return f"{bent} is set"
    if env.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        return "this is one of several tasks of a step"
    try:
        nodes = unfold(env.get("SLURM_JOB_NODELIST", ""))
    except NodeSetError as problem:
        return str(problem)
    wanted = asked.line.last("nodes")
    if wanted is not None and _number(wanted.value) != len(nodes):
        return "it is for a part of the nodes"
    return "" if len(nodes) > 1 else "the job has one node"


def _tasks(line: CommandLine, env: Mapping[str, str], count: int) -> list[int] | None:
    """Return how many tasks each node of the allocation gets; None where Slurm alone knows.

    With a number of tasks srun fills nodes by the CPUs that the job has on each (measured: 8 tasks on 4 nodes were
    4, 2, 1 and 1); for the number that the job was made with, SLURM_TASKS_PER_NODE tells how.
    """
    tasks, each = line.last("ntasks"), line.last("ntasks-per-node")
    if each is not None and tasks is None:
        per_node = _number(each.value)
        return [per_node] * count if per_node else None
    made_with = _number(env.get("SLURM_NTASKS"))
    total = _number(tasks.value) if tasks is not None else made_with or count
    if total == count:
        return [1] * count
    told = unfold_counts(env.get("SLURM_TASKS_PER_NODE", ""))
    alike = total is not None and total == made_with == sum(told) and len(told) == count
    return told if alike and each is None else None


def _outside(
    asked: SrunCommand, env: Mapping[str, str], fabric: Callable[[], Fabric], ourselves: Sequence[str]
) -> Interactive:
    nodes = asked.line.last("nodes")
    if nodes is None or (_number(nodes.value) or 0) < 2:  # noqa: PLR2004
        return _left(asked, "it asks for no more than one node, or does not say how many")
    strange = _strange(asked.line, _OF_JOB | _OF_BOTH | _OF_STEP)
    if strange:
        return _left(asked, f"{strange} may say otherwise")
    shaping = sorted(name for name in env if name.startswith("SLURM_") and name not in _HARMLESS and env[name])
    if shaping:
        return _left(asked, f"{shaping[0]} is set, which salloc does not read")
    if len({where for where in fabric().paths.values() if where}) < 2:  # noqa: PLR2004
        return _left(asked, "this cluster has one leaf switch, or tells none")
    job = [word for option in asked.line.options if option.name in _OF_JOB | _OF_BOTH for word in option.words]
    step = [word for option in asked.line.options if option.name in _OF_BOTH | _OF_STEP for word in option.words]
    if asked.line.last("job-name") is None:
        job = [f"--job-name={PurePath(asked.line.rest[0]).name}", *job]
    return Interactive(
        argv=("salloc", *job, *ourselves, *step, "--", *asked.line.rest),
        order=(),
        because="salloc makes the allocation, so that the ranks can be put in order inside it",
    )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None
