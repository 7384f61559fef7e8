"""The cluster's nodes and partitions at one moment, as one sinfo tells them; pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from deeplink.errors import DeepLinkError
from deeplink.scheduler.slurm.gres import GresTextError, gpus_in, gpus_used
from deeplink.scheduler.slurm.states import LASTING_FLAGS, NodeFlag, NodeState, parse_node_state
from deeplink.scheduler.wish.amounts import AmountError, seconds_of
from deeplink.scheduler.wish.columns import FIELDS, SEPARATOR
from deeplink.types import NodeName

if TYPE_CHECKING:
    from collections.abc import Mapping

_DEAD_STATES = frozenset({NodeState.DOWN, NodeState.ERROR, NodeState.FUTURE, NodeState.UNKNOWN, NodeState.INVALID})
_DEAD_FLAGS = frozenset(
    {
        NodeFlag.BLOCKED,
        NodeFlag.DRAIN,
        NodeFlag.FAIL,
        NodeFlag.INVALID_REG,
        NodeFlag.MAINTENANCE,
        NodeFlag.NOT_RESPONDING,
    }
)
# With any other flag a node is not to be had at this moment: it boots, is reserved, or planned for another job.
_HARMLESS_FLAGS = LASTING_FLAGS


class SurveyTextError(DeepLinkError):
    """Sinfo wrote something that this version cannot read."""

    def __init__(self, text: str) -> None:
        super().__init__(
            f"cannot read what `sinfo` wrote: {text[:200]!r}",
            remedy="Please report it together with `sinfo --version`.",
        )
        self.text = text


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """One partition.

    Attributes:
        up: whether jobs in it are started.
        limit_s: the longest a job may run.
        whole: whether its jobs get whole nodes, whatever they ask for.
        shares: whether jobs in it may be put on the same CPUs.
        nodes: in sinfo's order.
    """

    name: str
    up: bool
    limit_s: int
    whole: bool
    shares: bool
    nodes: tuple[NodeName, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNow:
    """One node.

    Attributes:
        dead: whether it takes no jobs until somebody or something heals it.
        ready: whether a job could start on it now, as far as there is room.
        idle: whether no job is on it.
        features: that are active.
        gres, gres_used: in Slurm's words.
        cpus, free_cpus: in all, and those that no job has.
        memory_mib, free_mib: in all, and what no job has.
    """

    dead: bool
    ready: bool
    idle: bool
    features: frozenset[str]
    gres: str
    gres_used: str
    cpus: int
    free_cpus: int
    memory_mib: int
    free_mib: int

    def gpus(self, kind: str = "") -> int | None:
        """How many GPUs it has, of one type or of all; None where Slurm's word on it is not understood."""
        return _gpus(self.gres, "", kind)[0]

    def free_gpus(self, kind: str = "") -> int | None:
        """How many of them no job has; None where Slurm's word on it is not understood."""
        return _gpus(self.gres, self.gres_used, kind)[1]


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The cluster.

    Attributes:
        partitions: by name.
        nodes: by name.
        default: the partition of jobs that name none; empty where there is none.
    """

    partitions: Mapping[str, Partition] = field(default_factory=dict)
    nodes: Mapping[NodeName, NodeNow] = field(default_factory=dict)
    default: str = ""


def parse(text: str) -> ClusterState:
    """Read what the command of `columns.ARGUMENTS` wrote.

    Raises:
        SurveyTextError: a line is not what was asked for.
        UnknownStateError: a node is in a state without a name here.
    """
    nodes: dict[NodeName, NodeNow] = {}
    members: dict[str, list[NodeName]] = {}
    said: dict[str, tuple[str, str, str]] = {}
    default = ""
    for line in filter(None, text.splitlines()):
        fields = [part.strip() for part in line.split(SEPARATOR)]
        if len(fields) != len(FIELDS) + 1 or fields.pop() or not fields[0]:
            raise SurveyTextError(line)
        name, partition = NodeName(fields[0]), fields[1].removesuffix("*")
        if partition != fields[1]:
            default = partition
        members.setdefault(partition, []).append(name)
        said[partition] = (fields[2], fields[3], fields[4])
        if name not in nodes:
            nodes[name] = _node(fields, line)
    partitions = {name: _partition(name, words, tuple(members[name])) for name, words in said.items()}
    return ClusterState(partitions, nodes, default)


def _partition(name: str, words: tuple[str, str, str], nodes: tuple[NodeName, ...]) -> Partition:
    available, limit, sharing = words
    try:
        limit_s = seconds_of(limit)
    except AmountError:
        raise SurveyTextError(limit) from None
    return Partition(
        name=name,
        up=available.lower() == "up",
        limit_s=limit_s,
        whole=sharing.upper() == "EXCLUSIVE",
        shares=sharing.upper().startswith("FORCE"),
        nodes=nodes,
    )


@lru_cache(maxsize=256)
def _gpus(gres: str, used: str, kind: str) -> tuple[int | None, int | None]:
    """Return how many GPUs there are, and how many are free; None for what cannot be told."""
    try:
        there = gpus_in(gres, kind)
    except GresTextError:
        return None, None
    try:
        return there, max(0, there - gpus_used(used, kind))
    except GresTextError:
        return there, None


@lru_cache(maxsize=256)
def _condition(state: str) -> tuple[bool, bool, bool]:
    """Return whether a node is dead, ready and idle."""
    base, flags = parse_node_state(state)
    dead = base in _DEAD_STATES or bool(flags & _DEAD_FLAGS)
    ready = not dead and flags <= _HARMLESS_FLAGS and base in {NodeState.IDLE, NodeState.MIXED}
    return dead, ready, base is NodeState.IDLE


@lru_cache(maxsize=256)
def _features(text: str) -> frozenset[str]:
    return frozenset(part for part in text.split(",") if part and part != "(null)")


def _node(fields: list[str], line: str) -> NodeNow:
    dead, ready, idle = _condition(fields[5])
    try:
        _allocated, free, _other, total = map(int, fields[9].split("/"))
        memory, used = int(fields[10]), int(fields[11])
    except ValueError:
        raise SurveyTextError(line) from None
    return NodeNow(
        dead=dead,
        ready=ready,
        idle=idle,
        features=_features(fields[6]),
        gres=fields[7],
        gres_used=fields[8],
        cpus=total,
        free_cpus=free,
        memory_mib=memory,
        free_mib=memory - used,
    )
