"""What placement is asked, what it knows, and what a choice of nodes costs: values; pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from deeplink.core.errors import DeepLinkError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from deeplink.core.types import NodeName
    from deeplink.scheduler.topology.graph import Fabric, Path

UNUSED = inf
"""Stands for the lowest share of full speed where there is no link whose speed matters."""


@dataclass(frozen=True, slots=True)
class Traits:
    """All that a cost may depend on: two choices of nodes with the same traits cost the same."""

    per_leaf: tuple[int, ...]  # nodes on each leaf that is touched, the most first
    switches: int  # switches above the leaves that its nodes hang below, those above them all too
    degraded: int  # its nodes that are slow, and slow links between switches that its ring uses
    ports: float  # the lowest share of full speed among its nodes' own links; 1.0 where all are sound
    leaf_links: float  # the same among the links up from leaves that its ring uses; `UNUSED` where it uses none
    upper_links: float  # the same among the links up from the switches above these
    # share of the job's data that its nodes hold, at most 1.0 (copies on two of them count twice); 1.0 for a job
    # without data
    local: float
    broken: int  # leaves of which all nodes were idle, and of which it takes a part
    opened: int  # idle nodes of which it takes a part, where a node that is in use would have had the room
    stranded: int  # nodes it could have had, and leaves over, on the leaves that it touches

    @property
    def nodes(self) -> int:
        """Nodes in all."""
        return sum(self.per_leaf)

    @property
    def leaves(self) -> int:
        """Leaf spread."""
        return len(self.per_leaf)

    @property
    def slowest(self) -> float:
        """The lowest share of full speed among all of these: a ring goes as fast as its slowest hop."""
        return min(self.ports, self.leaf_links, self.upper_links)

    @property
    def crossings(self) -> int:
        """Leaf-to-leaf hops of the ring over its nodes in the best order: one for each leaf, none on one alone."""
        return self.leaves if self.leaves > 1 else 0


Cost = Callable[[Traits], float]
"""What a choice costs; less is better. Must not depend on anything but its argument."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The cost where no model of the step time is at hand: a weighted sum, in crossings of a ring of eight nodes.

    The weights are a choice and not measured. A ring over one leaf more crosses once more and reaches one leaf
    more; a link of half the speed halves that of the whole ring; to hold none of the data is as bad as four
    crossings. What is counted by leaf, switch or node weighs less in jobs of more than eight nodes, in proportion.
    """

    crossing: float = 1.0  # for each crossing
    leaf: float = 0.5  # for each leaf but the first
    switch: float = 0.25  # for each switch above the leaves
    degraded: float = 0.5  # for each slow node or link
    broken: float = 0.75  # for each whole leaf broken up
    opened: float = 0.1  # for each idle node of which a part is taken
    slow: float = 8.0  # for the slowest hop, times (1 / its share of full speed - 1)
    remote: float = 4.0  # for all of the data not being held; in proportion
    reference: int = 8  # up to so many nodes, the first six count in full

    def __call__(self, traits: Traits) -> float:
        """Return the cost."""
        counted = (
            self.crossing * traits.crossings
            + self.leaf * (traits.leaves - 1)
            + self.switch * traits.switches
            + self.degraded * traits.degraded
            + self.broken * traits.broken
            + self.opened * traits.opened
        )
        share = min(self.reference / traits.nodes, 1.0)
        return share * counted + self.slow * (1.0 / traits.slowest - 1.0) + self.remote * (1.0 - traits.local)


DEFAULT_COST: Cost = Weights()


class NoPlacementError(DeepLinkError):
    """No choice of nodes can meet what a job asks, as far as this cluster is known."""

    exit_code = 2


def impossible(problem: str) -> DeepLinkError:
    """Return the error of what cannot be so: a negative number, a share above one."""
    remedy = "Look at what the cluster's state and the request were read from."
    return DeepLinkError(problem, remedy=remedy, exit_code=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCapacity:
    """What one node has to give."""

    gpus: int = 0  # its GPUs
    free_gpus: int = 0  # those that no job has
    idle: bool = True  # whether no job is on it at all

    def __post_init__(self) -> None:
        if not 0 <= self.free_gpus <= self.gpus:
            raise impossible(f"{self.free_gpus} of a node's {self.gpus} GPUs cannot be free")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """What a job asks for."""

    nodes: int  # how many
    gpus_per_node: int = 0  # GPUs on each; 0 for none
    exclusive: bool = True  # whether it wants whole nodes, with no other job on them
    excluded: frozenset[NodeName] = frozenset()  # nodes it must not have

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.gpus_per_node < 0:
            raise impossible("a job has at least one node, and no fewer than 0 GPUs on each")


@dataclass(frozen=True, slots=True)
class Speeds:
    """What is slower than it should be, as shares of full speed; what is dead has no room instead."""

    # by name, for their own link (or a GPU, or an SSD)
    nodes: Mapping[NodeName, float] = field(default_factory=dict)
    # by the path of a switch, for the links from it to the switch above
    links: Mapping[Path, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, share in (*self.nodes.items(), *self.links.items()):
            if not 0.0 < share <= 1.0:
                raise impossible(f"{name}: {share:g} is not a share of full speed (above 0, up to 1)")


@dataclass(frozen=True, slots=True)
class DataResidency:
    """Where the job's data lies, in bytes; or in percent, with a total of 100."""

    held: Mapping[NodeName, int] = field(default_factory=dict)  # how much of it is on each node's SSD
    total: int = 0  # how much it is; 0 for a job without

    def __post_init__(self) -> None:
        if self.total < 0 or any(held < 0 for held in self.held.values()):
            raise impossible("data cannot be fewer than 0 bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementCluster:
    """The state of things at one moment."""

    fabric: Fabric  # where nodes hang
    # the nodes that jobs may have now or later, busy ones too: with them a leaf is known to be whole
    rooms: Mapping[NodeName, NodeCapacity]
    speeds: Speeds = field(default_factory=Speeds)  # what is slow
    residency: DataResidency = field(default_factory=DataResidency)  # where the job's data lies


def eligible(rooms: Iterable[tuple[NodeName, NodeCapacity]], request: PlacementRequest) -> list[NodeName]:
    """Return those of some nodes that the job could have now."""
    excluded, gpus = request.excluded, request.gpus_per_node
    return [
        node
        for node, room in rooms
        if (room.idle if request.exclusive else room.free_gpus >= gpus)
        and room.gpus >= gpus
        and node not in excluded
    ]
