"""The cluster as the planner sees it for one waiting job; pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from typing_extensions import override

from deeplink.scheduler.placement.request import DataResidency
from deeplink.scheduler.wish.decide import Surroundings, decide
from deeplink.scheduler.wish.decision import HintKind
from deeplink.scheduler.wish.room import CannotRunError, Rooms, rooms_of
from deeplink.scheduler.wish.scale import MachineSpeeds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from deeplink.scheduler.wish.decide import Weighed
    from deeplink.scheduler.wish.decision import Ask, Decision
    from deeplink.scheduler.wish.site import KnownFabric
    from deeplink.scheduler.wish.state import ClusterState
    from deeplink.types import NodeName


@dataclass(frozen=True, slots=True)
class Had:
    """What there is for one job.

    Attributes:
        free: nodes that it could start on now.
        possible: the same, and those that Slurm keeps for some job, maybe for this one.
        problem: why it can never run; empty where it can.
    """

    free: frozenset[NodeName] = frozenset()
    possible: frozenset[NodeName] = frozenset()
    problem: str = ""


class PlannerCluster(Protocol):
    """The cluster, as a round asks about it."""

    def had(self, ask: Ask, excluded: frozenset[NodeName]) -> Had:
        """Return what there is for a job."""
        ...

    def nodes_of(self, partitions: Iterable[str]) -> frozenset[NodeName]:
        """Return the nodes of partitions; all there are where one is not known."""
        ...

    def best(self, ask: Ask, kept: frozenset[NodeName]) -> Decision:
        """Return the decision for a job that may have any free node but those `kept` for others."""
        ...


@dataclass(frozen=True, slots=True)
class SurveyedCluster(PlannerCluster):
    """The cluster at one moment.

    Attributes:
        now: its nodes and partitions.
        site: where they hang.
        residency: where the data of a job lies, by the names of its datasets.
        machines: how fast they are.
        settle: holds a wish for a job that must not have these nodes against Slurm's own choice (`wish.settle`).
    """

    now: ClusterState
    site: KnownFabric
    settle: Callable[[Ask, Weighed, frozenset[NodeName]], Decision]
    residency: Mapping[tuple[str, ...], DataResidency] = field(default_factory=dict)
    machines: MachineSpeeds = field(default_factory=MachineSpeeds)

    @override
    def had(self, ask: Ask, excluded: frozenset[NodeName]) -> Had:
        try:
            free = self._free(self.now, ask, excluded)
            return Had(free, self._free(_unplanned(self.now), ask, excluded))
        except CannotRunError as limit:
            return Had(problem=limit.problem)

    @override
    def nodes_of(self, partitions: Iterable[str]) -> frozenset[NodeName]:
        found: frozenset[NodeName] = frozenset()
        for name in partitions:
            if name not in self.now.partitions:
                return frozenset(self.now.nodes)
            found |= frozenset(self.now.partitions[name].nodes)
        return found

    @override
    def best(self, ask: Ask, kept: frozenset[NodeName]) -> Decision:
        around = Surroundings(
            now=self.now,
            site=self.site,
            residency=self.residency.get(ask.data, DataResidency()),
            taken=kept,
            machines=self.machines,
        )
        return self.settle(ask, decide(ask, around), kept)

    def _free(self, now: ClusterState, ask: Ask, excluded: frozenset[NodeName]) -> frozenset[NodeName]:
        rooms = rooms_of(ask, now, dead=self.site.ties.dead, taken=excluded)
        return frozenset(name for name in rooms.rooms if _has_room(rooms, name))


def wishes_nodes(decision: Decision) -> bool:
    """Whether a decision is for nodes by name."""
    return decision.kind is HintKind.NODES and bool(decision.nodes)


def _has_room(rooms: Rooms, name: NodeName) -> bool:
    room, request = rooms.rooms[name], rooms.request
    return room.idle if request.exclusive else room.free_gpus >= request.gpus_per_node


def _unplanned(now: ClusterState) -> ClusterState:
    """Return the cluster with idle nodes free that Slurm keeps for some job, or for some time."""
    if all(node.ready or node.dead or not node.idle for node in now.nodes.values()):
        return now
    nodes = {
        name: replace(node, ready=True) if node.idle and not node.dead else node
        for name, node in now.nodes.items()
    }
    return replace(now, nodes=nodes)
