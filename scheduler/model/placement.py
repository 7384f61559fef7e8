"""A placement as the model sees it: ranks per node, in rank order, and what their ring does to the switches."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deeplink.scheduler.model.errors import ModelInputError

if TYPE_CHECKING:
    from collections.abc import Mapping

Path = tuple[str, ...]
"""Switch names from the root of the fabric to a leaf; empty where nobody knows."""


@dataclass(frozen=True, slots=True)
class NodeShare:
    """What a job has of one node.

    Attributes:
        gpus: GPUs used, each by one rank.
        of: GPUs the node has.
        path: the switches above it, root first.
        health: the share of its ports' bandwidth that is left; 1 for a node in order.
    """

    gpus: int
    of: int
    path: Path = ()
    health: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.gpus <= self.of:
            raise ModelInputError("the number of GPUs used of a node", self.gpus, f"from 1 to its {self.of}")
        _check_health("a node's ports", self.health)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the ranks of a job run.

    Attributes:
        nodes: the nodes in rank order: ranks of one node are neighbours, the last node's neighbour is the first.
        uplink_health: the share of bandwidth left to what leads up from a switch (named by its path), where it is
            not all of it.
    """

    nodes: tuple[NodeShare, ...]
    uplink_health: Mapping[Path, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ModelInputError("the number of nodes", 0, "at least 1")
        for switch, health in self.uplink_health.items():
            _check_health(f"the uplinks of {'.'.join(switch)}", health)

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return sum(node.gpus for node in self.nodes)

    @property
    def busiest(self) -> int:
        """How many ranks the node with the most has."""
        return max(node.gpus for node in self.nodes)

    @property
    def neighbours(self) -> int:
        """How many other nodes a node exchanges gradients with, in a ring: 0, 1 or 2."""
        return min(len(self.nodes) - 1, 2)

    def port_load(self) -> float:
        """Return how many times the ring's bytes the weakest node's ports carry: 1 where all are in order."""
        if len(self.nodes) == 1:
            return 0.0
        return max(1 / node.health for node in self.nodes)

    def uplink_loads(self) -> tuple[float, float]:
        """Return how many flows the busiest uplinks carry: those of leaves, and those of switches above.

        The ring is a flow from each node to the next. It leaves each switch that has the one node below it and not
        the other; an uplink at half its health counts each flow twice.
        """
        flows: Counter[Path] = Counter()
        leaves = {node.path for node in self.nodes}
        for place, node in enumerate(self.nodes):
            previous = self.nodes[place - 1]
            for depth in range(1, len(previous.path) + 1):
                switch = previous.path[:depth]
                if node.path[:depth] != switch:
                    flows[switch] += 1
        loads = {switch: count / self.uplink_health.get(switch, 1.0) for switch, count in flows.items()}
        leaf = max((load for switch, load in loads.items() if switch in leaves), default=0.0)
        above = max((load for switch, load in loads.items() if switch not in leaves), default=0.0)
        return leaf, above


def _check_health(what: str, health: float) -> None:
    if not 0 < health <= 1:
        raise ModelInputError(f"the health of {what}", health, "above 0 and at most 1")
