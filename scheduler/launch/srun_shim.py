"""Translates command lines of srun and torchrun; pure.

- In an unchanged script (`deeplink shim`) they become `deeplink run`. Left alone is whatever is not plainly the
  start of a training over the job's nodes: helper commands, parts of the nodes, options that are not known to mean
  the same in a step of ours.
- `deeplink srun` is srun with the ranks of its step in the fabric's order. srun numbers ranks by node name. With
  `--distribution=arbitrary` it numbers them by the order of `--nodelist` (measured), so the order is part of the
  command line, and nothing is left in the environment of the tasks. Outside of an allocation the nodes are not
  known beforehand: then salloc makes one around the same step. Whatever is not plainly a step over all nodes of an
  allocation is left to srun as it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from deeplink.scheduler.launch.backend import LaunchError
from deeplink.scheduler.slurm.nodeset import NodeSetError, in_order, unfold, unfold_counts
from deeplink.scheduler.slurm.sbatch_options import SRUN, CommandLine, Grammar, names
from deeplink.scheduler.slurm.submission import SPARES_VARIABLE, is_in_step
from deeplink.scheduler.topology.rank_order import rank_order, ring_crossings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from deeplink.scheduler.topology.graph import Fabric

_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh"})
_TRAINERS = re.compile(r"(?<![\w.-])(python[0-9.]*|torchrun|accelerate|deepspeed)(?![\w-])")

# Options of srun that a rank step takes over as they are.
_TAKEN_OVER = names(
    """acctg-freq bcast chdir compress cpu-bind cpu-freq cpus-per-gpu cpus-per-task error gpu-bind gpu-freq
    gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint input label mem mem-bind mem-per-cpu
    mem-per-gpu mpi open-mode output profile propagate quiet task-epilog task-prolog threads-per-core time
    tres-per-task unbuffered verbose wait"""
)
# Those that say what a rank step does anyway, or how it is laid out, which is ours to say.
_ANSWERED = names("gpus job-name kill-on-bad-exit no-kill nodes ntasks ntasks-per-node overcommit overlap")


# torchrun's options about who takes part, all of which this attempt answers.
_RENDEZVOUS = names(
    """nnodes node-rank master-addr master-port rdzv-backend rdzv-endpoint rdzv-id rdzv-conf local-addr
    standalone"""
)
_TORCHRUN_FLAGS = names("standalone module no-python run-path virtual-local-rank help m h")

# The rest is of `deeplink srun`.
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
LONGEST_LIST = 100_000  # Characters; Linux takes 128 KiB in one argument


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


@dataclass(frozen=True, slots=True)
class LeftAlone:
    """The real program is to run, for this reason."""

    because: str


def in_rank(env: Mapping[str, str]) -> bool:
    """Whether we are a rank of `deeplink run`, or one of its descendants."""
    return "DEEPLINK_ATTEMPT" in env


def _in_batch_script(env: Mapping[str, str]) -> bool:
    return "SLURM_JOB_ID" in env and not is_in_step(env) and not in_rank(env)


def srun_becomes(
    words: Sequence[str], env: Mapping[str, str], read: Callable[[str], str]
) -> LeftAlone | tuple[str, ...]:
    """Return what `deeplink run` is to be called with in place of an srun of a script."""
    if not _in_batch_script(env):
        return LeftAlone("not called by a batch script")
    line = SRUN.parse(words)
    for option in line.options:
        if option.name == "export" and (option.value or "").split(",")[0].upper() == "ALL":
            continue
        if not option.known or option.name not in _TAKEN_OVER | _ANSWERED:
            return LeftAlone(f"--{option.name} is not one a rank step takes over")
        if option.name == "gpus" and option.value != env.get("SLURM_GPUS"):
            return LeftAlone("it is for a part of the GPUs")
    if not trains(line.rest, read):
        return LeftAlone("the command is no training")
    shape = _shape(line, env)
    if isinstance(shape, LeftAlone):
        return shape
    count, per_node = shape
    handed = [
        word
        for option in line.options
        if option.name not in _ANSWERED
        for word in ((f"--{option.name}",) if option.value is None else (f"--{option.name}={option.value}",))
    ]
    shaped = [f"--nnodes={count}", *([f"--nproc-per-node={per_node}"] if per_node else [])]
    return (*shaped, *(f"--srun-option={word}" for word in handed), "--", *line.rest)


def trains(command: Sequence[str], read: Callable[[str], str]) -> bool:
    """Tell whether a command starts Python, itself or from a shell.

    >>> trains(["bash", "-c", "torchrun train.py"], lambda name: ""), trains(["hostname"], lambda name: "")
    (True, False)
    """
    if not command:
        return False
    name = PurePath(command[0]).name
    if _TRAINERS.fullmatch(name) or name.endswith(".py"):
        return True
    if name in _SHELLS:
        inline = next(
            (index for index, word in enumerate(command) if word.startswith("-") and word.endswith("c")), None
        )
        if inline is not None:
            return any(_TRAINERS.search(word) for word in command[inline + 1 : inline + 2])
        scripts = [word for word in command[1:] if not word.startswith("-")]
        return bool(scripts) and _TRAINERS.search(read(scripts[0])) is not None
    text = read(command[0])
    return text.startswith("#!") and _TRAINERS.search(text) is not None


def _shape(line: CommandLine, env: Mapping[str, str]) -> LeftAlone | tuple[int, int]:
    """Return how many nodes and how many ranks on each an srun asks for, if it is all nodes but the spares."""
    # 0 ranks: on each node the tasks that Slurm gave it.
    allocated = _number(env.get("SLURM_JOB_NUM_NODES")) or 1
    spares = _number(env.get(SPARES_VARIABLE)) or 0
    most = allocated - spares
    nodes = line.last("nodes")
    count = _number(nodes.value) if nodes else most
    if count is None or count not in {most, allocated}:
        return LeftAlone("it is for a part of the nodes")
    count = most
    each, tasks = line.last("ntasks-per-node"), line.last("ntasks")
    of_job = _number(env.get("SLURM_NTASKS")) or _number(env.get("SLURM_NTASKS_PER_NODE"))
    if each is not None:
        per_node = _number(each.value)
    elif tasks is None:
        return count, 0 if of_job else 1
    elif tasks.value == env.get("SLURM_NTASKS"):
        return count, 0
    else:
        wanted = _number(tasks.value) or 0
        per_node = wanted // count if wanted % count == 0 else None
    if not per_node:
        return LeftAlone("its tasks do not spread evenly over the nodes")
    return count, per_node


def torchrun_becomes(words: Sequence[str], env: Mapping[str, str]) -> LeftAlone | tuple[str, ...]:
    """Return the same for a torchrun of a batch script: one torchrun on every node."""
    if not _in_batch_script(env):
        return LeftAlone("not called by a batch script")
    given = {name: value for name, value, _ in _torchrun_options(words)}
    if "standalone" in given or given.get("nnodes") in {"1", "1:1"}:
        return LeftAlone("it is for this node alone")
    each = given.get("nproc-per-node", env.get("PET_NPROC_PER_NODE", "1"))
    # Words of torchrun's ("cpu") it resolves itself, on each node; until then nobody knows how many ranks that is.
    per_node = each if each.isdigit() and int(each) else "auto" if each in {"gpu", "auto"} else "1"
    return ("--recipe=torchrun", f"--nproc-per-node={per_node}", "--", "torchrun", *words)


def torchrun_in_rank(words: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Return torchrun's arguments inside a rank: its own, with this attempt's nodes in this attempt's order."""
    # The static rendezvous is used: only it numbers the nodes as told, where c10d sorts them by host name.
    if env.get("LOCAL_WORLD_SIZE", "1") != "1":
        raise LaunchError(
            f"torchrun: {env['LOCAL_WORLD_SIZE']} of it on one node would each start all of the node's ranks",
            "Start torchrun once per node (--ntasks-per-node=1), or use `deeplink run -- python train.py`.",
        )
    options = list(_torchrun_options(words))
    kept = [word for name, _, option in options if name not in _RENDEZVOUS for word in option]
    rest = words[sum(len(option) for *_, option in options) :]
    here = [f"--nnodes={env['GROUP_WORLD_SIZE']}", f"--node-rank={env['GROUP_RANK']}"]
    there = [f"--master-addr={env['MASTER_ADDR']}", f"--master-port={env['MASTER_PORT']}"]
    return [*here, *there, f"--rdzv-id={env['DEEPLINK_ATTEMPT']}", *kept, *rest]


def _torchrun_options(words: Sequence[str]) -> Iterator[tuple[str, str, Sequence[str]]]:
    """Yield each option before the script: its name, its value, and its words."""
    place = 0
    while place < len(words) and words[place].startswith("-"):
        name, equals, value = words[place].lstrip("-").partition("=")
        name = name.replace("_", "-")
        option = words[place : place + 1 if equals or name in _TORCHRUN_FLAGS else place + 2]
        yield name, value if equals else "".join(option[1:]), option
        place += len(option)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interactive:
    """The command to execute."""

    argv: tuple[str, ...]  # the command
    because: str  # why it is as it is, one sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class SrunCommand:
    """A command line of `deeplink srun`, understood."""

    words: tuple[str, ...]  # srun's part of it
    line: CommandLine  # the same, parsed
    dry_run: bool  # whether to print and not to start


def understood(words: Sequence[str]) -> SrunCommand:
    """Read a command line."""
    line = _GRAMMAR.parse(words)
    dropped: set[int] = set()
    for option in line.options:
        if option.name in _OURS and option.value is None:
            dropped |= set(range(option.at, option.at + len(option.words)))
        elif option.name in _OURS or option.name.startswith("deeplink"):
            remedy = "Ours is --dry-run; all others are srun's own."
            raise LaunchError(f"there is no option {option.words[0]}", remedy)
    kept = tuple(word for place, word in enumerate(words) if place not in dropped)
    return SrunCommand(words=kept, line=SRUN.parse(kept), dry_run=bool(dropped))


def interactive(
    asked: SrunCommand, env: Mapping[str, str], fabric: Callable[[], Fabric], ourselves: Sequence[str]
) -> Interactive:
    """Return what to execute."""
    if not asked.line.rest:
        return _left(asked, "there is no command")
    if env.get("SLURM_JOB_ID"):
        return _inside(asked, env, fabric)
    return _outside(asked, env, fabric, ourselves)


def _left(asked: SrunCommand, because: str) -> Interactive:
    return Interactive(argv=("srun", *asked.words), because=f"srun's own order: {because}")


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
    """Return how many tasks each node of the allocation gets; None where Slurm alone knows."""
    # With a number of tasks srun fills nodes by the CPUs that the job has on each (measured: 8 tasks on 4 nodes
    # were 4, 2, 1 and 1); for the number that the job was made with, SLURM_TASKS_PER_NODE tells how.
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
        because="salloc makes the allocation, so that the ranks can be put in order inside it",
    )
