"""The cluster that a trace is replayed on: a real topology, or a generated tree; pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.simulate.errors import SimulationValueError
from benchmarks.simulate.floor import Floor
from deeplink.core.text import counted
from deeplink.core.types import NodeName
from deeplink.scheduler.topology.graph import Fabric, fabric_of

if TYPE_CHECKING:
    from deeplink.scheduler.topology.network import Network

MOST_NODES = 4096
DEFAULT_GPUS = 8
"""GPUs of a node where nobody tells."""


@dataclass(frozen=True, slots=True)
class SimulatedCluster:
    """A cluster.

    Attributes:
        floor: its nodes and switches.
        gpus: GPUs of each node, by its bit.
        words: what it is, for people.
    """

    floor: Floor
    gpus: tuple[int, ...]
    words: str

    @property
    def per_node(self) -> int:
        """GPUs of a node: what most nodes have, the greater number where two are as frequent."""
        return max(set(self.gpus), key=lambda count: (self.gpus.count(count), count))


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTree:
    """A generated tree: nodes on leaves, leaves below spines, one core above.

    Attributes:
        nodes: how many.
        per_leaf: nodes of a leaf.
        leaves: leaves of a spine.
        gpus: GPUs of a node.
        dealt: whether names are dealt over the leaves, one each in turn; else they follow the leaves.
    """

    nodes: int
    per_leaf: int = 16
    leaves: int = 8
    gpus: int = DEFAULT_GPUS
    dealt: bool = False


def generated(tree: SimulatedTree) -> SimulatedCluster:
    """Return a generated cluster.

    Raises:
        SimulationValueError: it is too great, or has nothing of something.
    """
    _check(tree.nodes)
    for what, count in (
        ("nodes of a leaf", tree.per_leaf),
        ("leaves of a spine", tree.leaves),
        ("GPUs", tree.gpus),
    ):
        if count < 1:
            raise SimulationValueError(f"{count} {what}", "Ask for at least 1.")
    leaves = -(-tree.nodes // tree.per_leaf)
    paths = {}
    for number in range(tree.nodes):
        leaf = number % leaves if tree.dealt else number // tree.per_leaf
        paths[NodeName(f"n{number}")] = ("core", f"spine{leaf // tree.leaves}", f"leaf{leaf}")
    fabric = Fabric(paths)
    names = "dealt over them" if tree.dealt else "as their names go"
    words = (
        f"{counted(tree.nodes, 'node')} of {counted(tree.gpus, 'GPU')} on {counted(leaves, 'leaf')} "
        f"of {tree.per_leaf}, {names}; {counted(tree.leaves, 'leaf')} below a spine"
    )
    return SimulatedCluster(Floor(paths, fabric), (tree.gpus,) * tree.nodes, words)


def site_of(network: Network, gpus: int | None, source: str) -> SimulatedCluster:
    """Return the cluster of a topology.

    Args:
        network: the topology.
        gpus: GPUs of every node; what the topology tells, else `DEFAULT_GPUS`, when None.
        source: what to call it.

    Raises:
        SimulationValueError: it has no node, or too many.
    """
    _check(len(network.nodes))
    fabric = fabric_of(network)
    floor = Floor(network.nodes, fabric)
    each = []
    for node in floor.nodes:
        inside = network.nodes[node].inside
        told = len(inside.gpus) if inside is not None else 0
        each.append(gpus or told or DEFAULT_GPUS)
    leaves = counted(len(floor.leaves), "leaf")
    words = f"{counted(len(each), 'node')} of {source} on {leaves}, {counted(sum(each), 'GPU')}"
    return SimulatedCluster(floor, tuple(each), words)


def _check(nodes: int) -> None:
    if not 1 <= nodes <= MOST_NODES:
        raise SimulationValueError(f"a cluster of {nodes:,} nodes", f"Take one of 1 to {MOST_NODES:,} nodes.")
