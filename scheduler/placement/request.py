"""What placement is asked, and what it knows: values; pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from deeplink.errors import DeepLinkError
from deeplink.text import counted, listed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from deeplink.scheduler.topology.graph import Fabric, Path
    from deeplink.types import NodeName


class PlacementValueError(DeepLinkError):
    """Something handed to placement cannot be so: a negative number, a share above one."""

    exit_code = 2

    def __init__(self, problem: str) -> None:
        super().__init__(problem, remedy="Look at what the cluster's state and the request were read from.")
        self.problem = problem


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCapacity:
    """What one node has to give.

    Attributes:
        gpus: its GPUs.
        free_gpus: those that no job has.
        idle: whether no job is on it at all.
    """

    gpus: int = 0
    free_gpus: int = 0
    idle: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.free_gpus <= self.gpus:
            raise PlacementValueError(f"{self.free_gpus} of a node's {self.gpus} GPUs cannot be free")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """What a job asks for.

    Attributes:
        nodes: how many.
        gpus_per_node: GPUs on each; 0 for none.
        exclusive: whether it wants whole nodes, with no other job on them.
        required: nodes it must have.
        excluded: nodes it must not have.
        candidates: the nodes that have the features it asks for and are in its partition; all when None.
    """

    nodes: int
    gpus_per_node: int = 0
    exclusive: bool = True
    required: frozenset[NodeName] = frozenset()
    excluded: frozenset[NodeName] = frozenset()
    candidates: frozenset[NodeName] | None = None

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.gpus_per_node < 0:
            raise PlacementValueError("a job has at least one node, and no fewer than 0 GPUs on each")


@dataclass(frozen=True, slots=True)
class Speeds:
    """What is slower than it should be: shares of full speed, above 0 and up to 1; 1 for who is not in here.

    What is dead has no place here: such a node has no room to offer.

    Attributes:
        nodes: by name, for their own link (or a GPU, or an SSD).
        links: by the path of a switch, for the links from it to the switch above.
    """

    nodes: Mapping[NodeName, float] = field(default_factory=dict)
    links: Mapping[Path, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, share in (*self.nodes.items(), *self.links.items()):
            if not 0.0 < share <= 1.0:
                raise PlacementValueError(f"{name}: {share:g} is not a share of full speed (above 0, up to 1)")


@dataclass(frozen=True, slots=True)
class DataResidency:
    """Where the job's data lies, in bytes; or in percent, with a total of 100.

    Attributes:
        held: how much of it is on each node's SSD.
        total: how much it is; 0 for a job without.
    """

    held: Mapping[NodeName, int] = field(default_factory=dict)
    total: int = 0

    def __post_init__(self) -> None:
        if self.total < 0 or any(held < 0 for held in self.held.values()):
            raise PlacementValueError("data cannot be fewer than 0 bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementCluster:
    """The state of things at one moment.

    Attributes:
        fabric: where nodes hang.
        rooms: the nodes that jobs may have now or later, busy ones too: with them a leaf is known to be whole.
        speeds: what is slow.
        residency: where the job's data lies.
    """

    fabric: Fabric
    rooms: Mapping[NodeName, NodeCapacity]
    speeds: Speeds = field(default_factory=Speeds)
    residency: DataResidency = field(default_factory=DataResidency)


class PlacementLimit(StrEnum):
    """What can be in a placement's way, in the order in which it is looked at."""

    NODES = "nodes"  # the cluster's
    EXCLUDED = "excluded"
    FEATURES = "features"  # and the partition
    GPUS = "gpus"  # of a node
    BUSY = "busy"
    REQUIRED = "required"  # a node by name, for one of these reasons


class NoPlacementError(DeepLinkError):
    """No placement can meet a request.

    Attributes:
        limit: which limit it is that is not met.
        wanted: nodes (for `required`: required ones).
        there: as many as are within that limit.
        later: whether the nodes would do if they were free: then waiting helps.
    """

    exit_code = 2

    def __init__(self, problem: str, *, limit: PlacementLimit, wanted: int, there: int, later: bool) -> None:
        remedy = "Wait until jobs end (Slurm queues it), or ask for less." if later else "Ask for less."
        super().__init__(problem, remedy=remedy)
        self.limit, self.wanted, self.there, self.later = limit, wanted, there, later


def eligible(rooms: Iterable[tuple[NodeName, NodeCapacity]], request: PlacementRequest) -> list[NodeName]:
    """Return those of some nodes that the job could have now."""
    excluded, candidates, gpus = request.excluded, request.candidates, request.gpus_per_node
    return [
        node
        for node, room in rooms
        if (room.idle if request.exclusive else room.free_gpus >= gpus)
        and room.gpus >= gpus
        and node not in excluded
        and (candidates is None or node in candidates)
    ]


def refuse(cluster: PlacementCluster, request: PlacementRequest) -> None:
    """Say why a request cannot be met: too few nodes could be had, or a required one could not.

    Raises:
        NoPlacementError: it names the first limit that no choice of nodes can meet.
    """
    left = frozenset(cluster.rooms)
    _check(request, left, limit=PlacementLimit.NODES, why="the cluster has")
    left -= request.excluded
    _check(request, left, limit=PlacementLimit.EXCLUDED, why="without the excluded ones there are")
    if request.candidates is not None:
        left &= request.candidates
        _check(
            request, left, limit=PlacementLimit.FEATURES, why="with the features and partition asked for there are"
        )
    left = frozenset(node for node in left if cluster.rooms[node].gpus >= request.gpus_per_node)
    why = f"with {counted(request.gpus_per_node, 'GPU')} each there are"
    _check(request, left, limit=PlacementLimit.GPUS, why=why)
    left = frozenset(eligible(cluster.rooms.items(), request))
    why = "of those that would do, idle are now" if request.exclusive else "of those that would do, free are now"
    _check(request, left, limit=PlacementLimit.BUSY, why=why)


def _check(request: PlacementRequest, left: frozenset[NodeName], *, limit: PlacementLimit, why: str) -> None:
    wanted, there, later = request.nodes, len(left), limit is PlacementLimit.BUSY
    if len(request.required) > wanted:
        problem = f"{counted(wanted, 'node')} wanted, and {len(request.required)} required by name"
        raise NoPlacementError(
            problem, limit=PlacementLimit.REQUIRED, wanted=len(request.required), there=wanted, later=False
        )
    if there < wanted:
        problem = f"{counted(wanted, 'node')} wanted; {why} {there:,}"
        raise NoPlacementError(problem, limit=limit, wanted=wanted, there=there, later=later)
    if missing := sorted(request.required - left):
        reason = {
            PlacementLimit.NODES: "not in the cluster",
            PlacementLimit.EXCLUDED: "excluded as well",
            PlacementLimit.FEATURES: "without the features or outside the partition asked for",
            PlacementLimit.GPUS: f"with fewer than {counted(request.gpus_per_node, 'GPU')}",
            PlacementLimit.BUSY: "not free now",
        }[limit]
        problem = f"required, but {reason}: {listed(missing)}"
        there = len(request.required & left)
        raise NoPlacementError(
            problem, limit=PlacementLimit.REQUIRED, wanted=len(request.required), there=there, later=later
        )
