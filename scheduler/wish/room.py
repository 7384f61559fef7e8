"""Which nodes could run a job, ever and now, out of the cluster's state and what the job asks; pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.errors import DeepLinkError
from deeplink.scheduler.placement.request import NodeCapacity, PlacementRequest
from deeplink.text import counted

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from deeplink.scheduler.wish.decision import Ask
    from deeplink.scheduler.wish.state import ClusterState, NodeNow, Partition
    from deeplink.types import NodeName


class CannotRunError(DeepLinkError):
    """No choice of nodes can meet what a job asks, as far as this cluster is known.

    Attributes:
        limit: which limit it is: partition, time, nodes, excluded, features, gpus, size.
    """

    exit_code = 2

    def __init__(self, limit: str, problem: str) -> None:
        super().__init__(problem, remedy="Ask for less, or of another partition.")
        self.limit, self.problem = limit, problem


@dataclass(frozen=True, slots=True)
class Rooms:
    """What the cluster has for a job.

    Attributes:
        rooms: of all nodes that could run it, busy ones too; idle: whether it has the room now.
        request: the job, as placement wants it.
        able: how many of them live.
        free: how many have the room now.
        unread: nodes of which Slurm's word on their GPUs is not understood, where the job wants GPUs: they count
            as busy.
    """

    rooms: Mapping[NodeName, NodeCapacity]
    request: PlacementRequest
    able: int
    free: int
    unread: tuple[NodeName, ...] = ()


def partition_of(ask: Ask, now: ClusterState) -> Partition:
    """Return the partition that a job goes to.

    Raises:
        CannotRunError: there is none of this name, or none at all.
    """
    name = ask.partition or now.default
    if name in now.partitions:
        return now.partitions[name]
    raise CannotRunError(
        "partition", f"there is no partition {name}" if name else "no partition is named, and none is the default"
    )


def rooms_of(
    ask: Ask, now: ClusterState, *, dead: Collection[NodeName] = (), taken: Collection[NodeName] = ()
) -> Rooms:
    """Return what the cluster has for a job.

    Args:
        ask: what it asks.
        now: the cluster's nodes.
        dead: nodes that the fabric does not reach.
        taken: nodes that another job is about to get.

    Raises:
        CannotRunError: no choice of nodes can meet it, even when all are idle and well.
    """
    partition = partition_of(ask, now)
    if ask.limit_s > partition.limit_s:
        raise CannotRunError("time", f"its time limit is longer than jobs may run in partition {partition.name}")
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
    _check(ask, left, "nodes", f"partition {partition.name} has")
    excluded, features = frozenset(ask.excluded), frozenset(ask.features)
    left = {name: node for name, node in left.items() if name not in excluded}
    _check(ask, left, "excluded", "without the excluded ones there are")
    left = {name: node for name, node in left.items() if features <= node.features}
    _check(ask, left, "features", f"with {'&'.join(ask.features)} there are")
    left = {name: node for name, node in left.items() if _may_have(node.gpus(ask.gpu_type), ask.gpus)}
    kind = f"{ask.gpu_type} GPU" if ask.gpu_type else "GPU"
    _check(ask, left, "gpus", f"with {counted(ask.gpus, kind)} each there are")
    left = {
        name: node for name, node in left.items() if node.cpus >= ask.cpus and node.memory_mib >= ask.memory_mib
    }
    memory = f" and {ask.memory_mib:,} MiB" if ask.memory_mib else ""
    _check(ask, left, "size", f"with {counted(ask.cpus, 'CPU')}{memory} each there are")
    return left


def _check(ask: Ask, left: Collection[NodeName], limit: str, why: str) -> None:
    if len(left) < ask.nodes:
        raise CannotRunError(limit, f"{counted(ask.nodes, 'node')} wanted; {why} {len(left):,}")


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
