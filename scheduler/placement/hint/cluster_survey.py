"""The cluster at one moment: nodes and partitions as one sinfo tells them, waiting jobs as one squeue does; pure.

Nodes that are named bind a job, also when it is queued again, and Slurm lets no one change them while it runs.
The mark `deeplink-wish=NODES` in its comment says that they are a hint: so they can be taken off a job that waits,
whatever became of the process that named them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self

from deeplink.core.errors import DeepLinkError
from deeplink.core.text import counted
from deeplink.core.types import JobId, NodeName
from deeplink.scheduler.placement.hint.ask import FIELDS, SEPARATOR, seconds_of
from deeplink.scheduler.placement.request import NodeCapacity, NoPlacementError, PlacementRequest, Speeds
from deeplink.scheduler.slurm.nodeset import fold, unfold
from deeplink.scheduler.slurm.parse import JobAddress, fresh_separator, names_of, rows_of
from deeplink.scheduler.slurm.states import (
    LASTING_FLAGS,
    JobState,
    NodeFlag,
    NodeState,
    SlurmTextError,
    SlurmValueError,
    gpus_in,
    gpus_used,
    parse_node_state,
)
from deeplink.scheduler.topology.graph import Fabric

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from deeplink.scheduler.placement.hint.decision import Ask

WAIT_S = 5.0
"""How long a job may wait with nodes named. Slurm's main scheduler comes by within 2.6 s (measured)."""
_MARK = "deeplink-wish="
_JOINT = " | "
_OURS = re.compile(rf"^{_MARK}(\S+)(?: \| |\Z)")
# Slurm has not come to such jobs since they were last changed. Measured with 22.05; docs/decisions/0016.
_UNSEEN = frozenset({"", "None", "Priority", "BeginTime"})
# Slurm looks at these jobs whenever nodes become free. Measured with 22.05; docs/decisions/0016.
_WAITS = frozenset({"", "None", "Resources", "Priority"})
_NODES_BEGIN = ("ReqNodeNotAvail", "Nodes required for job are DOWN", "Nodes_required_for_job_are_DOWN")
_FORMAT = ("%A", "%i", "%T", "%r", "%u", "%P", "%D", "%Q", "%n", "%x", "%Y", "%v", "%k")
_NOTHING = frozenset({"", "(null)", "N/A", "n/a"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One job, or all tasks of an array that wait together."""

    id: JobId  # its raw id
    label: str  # what people call it: `7`, `7_[2-9]` for tasks of an array, `7+1` for a component
    state: JobState
    reason: str
    user: str
    partitions: tuple[str, ...]  # those it may start in
    nodes: int  # how many it asks for; 0 where that cannot be told
    priority: int  # higher is looked at first
    required: frozenset[NodeName]  # nodes it must have (in part or whole), and must not have
    excluded: frozenset[NodeName]
    planned: frozenset[NodeName]  # those that the backfill scheduler keeps for it; empty where it has made no plan
    reservation: str  # whose nodes it is to run on; empty for none
    comment: str = ""  # what its user wrote about it, and we

    @property
    def address(self) -> JobAddress:
        """How commands that change it name it."""
        return JobAddress.of_label(self.label)

    @property
    def waits(self) -> bool:
        """Whether it has not been given nodes."""
        return self.state is JobState.PENDING

    @property
    def record_id(self) -> str:
        """Which job's folder holds its record: of a task or component that of the whole."""
        return self.label.partition("_")[0].partition("+")[0]

    @property
    def single(self) -> bool:
        """Whether it is one job, and no part of an array or of several components."""
        return self.label.isdigit()

    @property
    def wished(self) -> bool:
        """Whether the nodes that it requires were named for it: no one else named them."""
        return is_wish(self.comment, self.required)


def parse_queue(text: str, separator: str) -> list[Row]:
    """Read what the command of `read_queue` wrote."""
    return [_row([part.strip() for part in fields]) for fields in rows_of(text, separator, len(_FORMAT))]


def _row(fields: list[str]) -> Row:
    number, label, state, reason, user, partitions, nodes, *fields = fields
    priority, required, excluded, planned, kept, comment = fields
    if not (number.isascii() and number.isdigit() and priority.isascii() and priority.isdigit()):
        raise SlurmTextError("squeue", "|".join(fields))
    return Row(
        id=JobId(int(number)),
        label=label,
        state=JobState.parse(state),
        reason="" if reason == "None" else reason,
        user=user,
        partitions=tuple(partitions.split(",")),
        nodes=int(nodes) if nodes.isascii() and nodes.isdigit() else 0,
        priority=int(priority),
        required=_names(required),
        excluded=_names(excluded),
        planned=_names(planned),
        reservation="" if kept in _NOTHING else kept,
        comment="" if comment in _NOTHING else comment,
    )


def _names(text: str) -> frozenset[NodeName]:
    return frozenset() if text in _NOTHING else frozenset(names_of(text, "squeue"))


def in_order(rows: list[Row]) -> list[Row]:
    """Return those that wait as Slurm looks at them: higher priority first, of equal ones the older job.

    The tier of a partition counts before it, which squeue does not tell: see `reconcile.before`.
    """
    return sorted((row for row in rows if row.waits), key=lambda row: (-row.priority, row.id))


def read_queue(run: Callable[[list[str]], str]) -> list[Row]:
    """Return all jobs that wait, of all users, in one question."""
    separator = fresh_separator()
    layout = "".join(f"{field}{separator}" for field in _FORMAT)
    return parse_queue(run(["squeue", "-h", "-a", "--states=PENDING", "-o", layout]), separator)


def stopped(reason: str) -> str:
    """Return why no node that became free would start a job; empty where one could.

    Words that are not known here stop it too: dependencies, limits of accounts, licences, holds all do.
    """
    return "" if reason in _WAITS or reason.startswith(_NODES_BEGIN) else reason


def marked(comment: str, nodes: Iterable[NodeName]) -> str:
    """Return a job's comment with the mark of these nodes.

    >>> marked("mine", ("n0", "n1")), unmarked("deeplink-wish=n[0-1] | mine")
    ('deeplink-wish=n[0-1] | mine', 'mine')
    """
    return _JOINT.join(filter(None, (f"{_MARK}{fold(nodes)}", unmarked(comment))))


def unmarked(comment: str) -> str:
    """Return a job's comment without a mark."""
    return _OURS.sub("", comment)


def is_wish(comment: str, required: Collection[NodeName]) -> bool:
    """Whether the nodes that a job requires are those of its mark: no one else has named any since."""
    found = _OURS.search(comment)
    try:
        return found is not None and bool(required) and {*unfold(found[1])} == {*required}
    except DeepLinkError:
        return False


def is_due(reason: str, waited_s: float) -> bool:
    """Whether the nodes are to be taken off a waiting job: Slurm looked and did not start it, or it waits long."""
    return reason not in _UNSEEN or waited_s >= WAIT_S


def taking_back(comment: str) -> dict[str, str]:
    """Return what to change about a job so that it may start anywhere, in scontrol's words."""
    return {"ReqNodeList": "", "Comment": unmarked(comment)}


def naming(comment: str, nodes: Iterable[NodeName]) -> dict[str, str]:
    """Return what to change about a job so that it is to start on these nodes, in scontrol's words."""
    listed = tuple(nodes)
    return {"ReqNodeList": fold(listed), "Comment": marked(comment, listed)}


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
FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """One partition."""

    name: str
    up: bool  # whether jobs in it are started
    limit_s: int  # the longest a job may run
    whole: bool  # whether its jobs get whole nodes, whatever they ask for
    shares: bool  # whether jobs in it may be put on the same CPUs
    nodes: tuple[NodeName, ...]  # in sinfo's order


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNow:
    """One node."""

    dead: bool  # whether it takes no jobs until somebody or something heals it
    ready: bool  # whether a job could start on it now, as far as there is room
    idle: bool  # whether no job is on it
    features: frozenset[str]  # that are active
    gres: str  # in Slurm's words
    gres_used: str
    cpus: int  # in all, and those that no job has
    free_cpus: int
    memory_mib: int  # in all, and what no job has
    free_mib: int

    def gpus(self, kind: str = "") -> int | None:
        """How many GPUs it has, of one type or of all; None where Slurm's word on it is not understood."""
        return _gpus(self.gres, "", kind)[0]

    def free_gpus(self, kind: str = "") -> int | None:
        """How many of them no job has; None where Slurm's word on it is not understood."""
        return _gpus(self.gres, self.gres_used, kind)[1]


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The cluster."""

    partitions: Mapping[str, Partition] = field(default_factory=dict)  # by name
    nodes: Mapping[NodeName, NodeNow] = field(default_factory=dict)  # by name
    default: str = ""  # the partition of jobs that name none; empty where there is none


def parse(text: str) -> ClusterState:
    """Read what the command of `ask.ARGUMENTS` wrote."""
    nodes: dict[NodeName, NodeNow] = {}
    members: dict[str, list[NodeName]] = {}
    said: dict[str, tuple[str, str, str]] = {}
    default = ""
    for line in filter(None, text.splitlines()):
        fields = [part.strip() for part in line.split(SEPARATOR)]
        if len(fields) != len(FIELDS) + 1 or fields.pop() or not fields[0]:
            raise SlurmTextError("sinfo", line)
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
    except SlurmValueError:
        raise SlurmTextError("sinfo", limit) from None
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
    except SlurmValueError:
        return None, None
    try:
        return there, max(0, there - gpus_used(used, kind))
    except SlurmValueError:
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
        raise SlurmTextError("sinfo", line) from None
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


@dataclass(frozen=True, slots=True)
class Rooms:
    """What the cluster has for a job."""

    # of all nodes that could run it, busy ones too; idle: whether it has the room now
    rooms: Mapping[NodeName, NodeCapacity]
    request: PlacementRequest  # the job, as placement wants it
    able: int  # how many of them live
    free: int  # how many have the room now
    # nodes of which Slurm's word on their GPUs is not understood, where the job wants GPUs: they count as busy
    unread: tuple[NodeName, ...] = ()


def partition_of(ask: Ask, now: ClusterState) -> Partition:
    """Return the partition that a job goes to."""
    name = ask.partition or now.default
    if name in now.partitions:
        return now.partitions[name]
    raise NoPlacementError(
        f"there is no partition {name}" if name else "no partition is named, and none is the default"
    )


def rooms_of(
    ask: Ask, now: ClusterState, *, dead: Collection[NodeName] = (), taken: Collection[NodeName] = ()
) -> Rooms:
    """Return what the cluster has for a job."""
    partition = partition_of(ask, now)
    if ask.limit_s > partition.limit_s:
        raise NoPlacementError(f"its time limit is longer than jobs may run in partition {partition.name}")
    whole = ask.exclusive or partition.whole
    able = _able(ask, partition, now.nodes)
    living = {name: node for name, node in able.items() if not node.dead and name not in dead}
    rooms = {
        name: _room(ask, node, whole=whole, now=node.ready and name not in taken) for name, node in living.items()
    }
    # Where no GPU tells whether there is room, `idle` does.
    by_gpus = bool(ask.gpus) and not whole
    request = PlacementRequest(nodes=ask.nodes, gpus_per_node=ask.gpus, exclusive=not by_gpus)
    free = sum(room.free_gpus >= ask.gpus if by_gpus else room.idle for room in rooms.values())
    unread = tuple(name for name, node in living.items() if ask.gpus and node.free_gpus(ask.gpu_type) is None)
    return Rooms(rooms, request, len(living), free, unread)


def _able(ask: Ask, partition: Partition, nodes: Mapping[NodeName, NodeNow]) -> dict[NodeName, NodeNow]:
    """Return the nodes that could run it, were they idle and well."""
    left = {name: nodes[name] for name in partition.nodes}
    _check(ask, left, f"partition {partition.name} has")
    excluded, features = frozenset(ask.excluded), frozenset(ask.features)
    left = {name: node for name, node in left.items() if name not in excluded}
    _check(ask, left, "without the excluded ones there are")
    left = {name: node for name, node in left.items() if features <= node.features}
    _check(ask, left, f"with {'&'.join(ask.features)} there are")
    left = {name: node for name, node in left.items() if _may_have(node.gpus(ask.gpu_type), ask.gpus)}
    kind = f"{ask.gpu_type} GPU" if ask.gpu_type else "GPU"
    _check(ask, left, f"with {counted(ask.gpus, kind)} each there are")
    left = {
        name: node for name, node in left.items() if node.cpus >= ask.cpus and node.memory_mib >= ask.memory_mib
    }
    memory = f" and {ask.memory_mib:,} MiB" if ask.memory_mib else ""
    _check(ask, left, f"with {counted(ask.cpus, 'CPU')}{memory} each there are")
    return left


def _check(ask: Ask, left: Collection[NodeName], why: str) -> None:
    if len(left) < ask.nodes:
        raise NoPlacementError(f"{counted(ask.nodes, 'node')} wanted; {why} {len(left):,}")


def _may_have(there: int | None, wanted: int) -> bool:
    return there is None or there >= wanted


def _room(ask: Ask, node: NodeNow, *, whole: bool, now: bool) -> NodeCapacity:
    free = node.free_gpus(ask.gpu_type) or 0  # what is not known is not called free
    if whole:
        fits = now and node.idle
    else:
        fits = (
            now
            and node.free_cpus >= ask.cpus
            and (not ask.memory_mib or node.free_mib >= ask.memory_mib)
            and free >= ask.gpus
        )
    gpus = node.gpus(ask.gpu_type)
    if gpus is None:
        gpus = ask.gpus
    if ask.gpus and not whole:
        return NodeCapacity(gpus=gpus, free_gpus=free if fits else 0, idle=node.idle and fits)
    return NodeCapacity(gpus=gpus, free_gpus=gpus if fits else 0, idle=fits)


@dataclass(frozen=True, slots=True)
class Ties:
    """Where nodes hang, and what is slow there."""

    fabric: Fabric = field(default_factory=lambda: Fabric({}))  # the switches above each node
    speeds: Speeds = field(default_factory=Speeds)  # nodes and links below full speed
    dead: frozenset[NodeName] = frozenset()  # nodes without a link that works

    def document(self) -> dict[str, Any]:
        """Return what `parse` reads, for `json.dumps`: each path once, with its nodes."""
        below: dict[tuple[str, ...], list[NodeName]] = {}
        for node, path in self.fabric.paths.items():
            below.setdefault(path, []).append(node)
        return {
            "format": FORMAT,
            "leaves": [[list(path), nodes] for path, nodes in below.items()],
            "nodes": dict(self.speeds.nodes),
            "links": [[list(path), share] for path, share in self.speeds.links.items()],
            "dead": sorted(self.dead),
        }

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> Self:
        """Read what `document` gave."""
        try:
            if document["format"] != FORMAT:
                raise ValueError(f"format {document['format']}")  # noqa: TRY301 - as all that is wrong with it
            paths = {NodeName(node): tuple(path) for path, nodes in document["leaves"] for node in nodes}
            links = {tuple(path): float(share) for path, share in document["links"]}
            nodes = {NodeName(node): float(share) for node, share in document["nodes"].items()}
            return cls(Fabric(paths), Speeds(nodes, links), frozenset(map(NodeName, document["dead"])))
        except (KeyError, TypeError, ValueError, AttributeError, DeepLinkError) as problem:
            raise ValueError(f"{type(problem).__name__}: {problem}") from problem


@dataclass(frozen=True, slots=True)
class KnownFabric:
    """All that is known of a site's fabric."""

    ties: Ties = field(default_factory=Ties)  # by which placement weighs nodes
    # what Slurm itself knows: `--switches` counts its leaves
    slurm: Fabric = field(default_factory=lambda: Fabric({}))
    notes: tuple[str, ...] = ()  # what could not be had
