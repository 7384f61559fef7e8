"""Decides when srun or torchrun in an unchanged script becomes `deeplink run`; pure.

Left alone is whatever is not plainly the start of a training over the job's nodes: helper commands, parts of the
nodes, options that are not known to mean the same in a step of ours.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from deeplink.errors import DeepLinkError
from deeplink.scheduler.slurm.options import SRUN, CommandLine, names
from deeplink.scheduler.slurm.submission import SPARES_VARIABLE
from deeplink.scheduler.slurm.within import is_in_step

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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


class RendezvousError(DeepLinkError):
    """torchrun is started in a way that cannot be given this attempt's nodes."""

    exit_code = 2

    def __init__(self, problem: str) -> None:
        super().__init__(
            f"torchrun: {problem}",
            remedy="Start torchrun once per node (--ntasks-per-node=1), or use `deeplink run -- python train.py`.",
        )
        self.problem = problem


@dataclass(frozen=True, slots=True)
class LeftAlone:
    """The real program is to run, for this reason."""

    because: str


@dataclass(frozen=True, slots=True)
class BecomesRun:
    """`deeplink run` with these arguments is to run instead."""

    arguments: tuple[str, ...]


def in_rank(env: Mapping[str, str]) -> bool:
    """Whether we are a rank of `deeplink run`, or one of its descendants."""
    return "DEEPLINK_ATTEMPT" in env


def _in_batch_script(env: Mapping[str, str]) -> bool:
    return "SLURM_JOB_ID" in env and not is_in_step(env) and not in_rank(env)


def srun_becomes(
    words: Sequence[str], env: Mapping[str, str], read: Callable[[str], str]
) -> LeftAlone | BecomesRun:
    """Say what an srun of a script shall be.

    Args:
        words: its arguments.
        env: its environment.
        read: returns the beginning of a script by its name, or an empty text.
    """
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
    arguments = [
        f"--nnodes={count}",
        *([f"--nproc-per-node={per_node}"] if per_node else []),
        *(f"--srun-option={word}" for word in handed),
    ]
    return BecomesRun((*arguments, "--", *line.rest))


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
    """Return how many nodes and how many ranks on each an srun asks for, if it is all nodes but the spares.

    0 ranks: on each node the tasks that Slurm gave it.
    """
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


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


# torchrun's options about who takes part, all of which this attempt answers.
_RENDEZVOUS = names(
    "nnodes node-rank master-addr master-port rdzv-backend rdzv-endpoint rdzv-id rdzv-conf local-addr"
)


def torchrun_becomes(words: Sequence[str], env: Mapping[str, str]) -> LeftAlone | BecomesRun:
    """Say what a torchrun of a batch script shall be: one torchrun on every node."""
    if not _in_batch_script(env):
        return LeftAlone("not called by a batch script")
    given = dict(_torchrun_options(words))
    if "standalone" in given or given.get("nnodes") in {"1", "1:1"}:
        return LeftAlone("it is for this node alone")
    each = given.get("nproc-per-node", env.get("PET_NPROC_PER_NODE", "1"))
    # Words of torchrun's ("cpu") it resolves itself, on each node; until then nobody knows how many ranks that is.
    per_node = each if each.isdigit() and int(each) else "auto" if each in {"gpu", "auto"} else "1"
    return BecomesRun(("--recipe=torchrun", f"--nproc-per-node={per_node}", "--", "torchrun", *words))


def torchrun_in_rank(words: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Return torchrun's arguments inside a rank: its own, with this attempt's nodes in this attempt's order.

    The static rendezvous is used: only it numbers the nodes as told, where c10d sorts them by host name.

    Raises:
        RendezvousError: several torchruns were started on one node.
    """
    if env.get("LOCAL_WORLD_SIZE", "1") != "1":
        raise RendezvousError(
            f"{env['LOCAL_WORLD_SIZE']} of it on one node would each start all of the node's ranks"
        )
    kept: list[str] = []
    place = 0
    while place < len(words) and words[place].startswith("-"):
        name, _, value = words[place].lstrip("-").partition("=")
        width = 1 if value or _canonical(name) in _TORCHRUN_FLAGS else 2
        if _canonical(name) not in _RENDEZVOUS | {"standalone"}:
            kept += words[place : place + width]
        place += width
    here = [f"--nnodes={env['GROUP_WORLD_SIZE']}", f"--node-rank={env['GROUP_RANK']}"]
    there = [f"--master-addr={env['MASTER_ADDR']}", f"--master-port={env['MASTER_PORT']}"]
    return [*here, *there, f"--rdzv-id={env['DEEPLINK_ATTEMPT']}", *kept, *words[place:]]


_TORCHRUN_FLAGS = names("standalone module no-python run-path virtual-local-rank help m h")


def _canonical(name: str) -> str:
    return name.replace("_", "-")


def _torchrun_options(words: Sequence[str]) -> list[tuple[str, str]]:
    found = []
    place = 0
    while place < len(words) and words[place].startswith("-"):
        name, equals, value = words[place].lstrip("-").partition("=")
        name = _canonical(name)
        if not equals and name not in _TORCHRUN_FLAGS:
            place += 1
            value = words[place] if place < len(words) else ""
        found.append((name, value))
        place += 1
    return found
