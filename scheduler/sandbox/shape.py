"""The shape of a cluster: nodes, the switches they hang on, addresses. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from typing_extensions import override

from deeplink.scheduler.sandbox.errors import NotMachineError, ShapeError, UnknownPartError
from deeplink.types import NodeName

CTL = NodeName("ctl")
"""The control and login host: slurmctld runs there, users submit from there."""
NETWORK = "10.77.0"
"""The same in every sandbox: each has a network of its own, of which neither the host nor another one knows."""
_FIRST_NODE = 10
MOST_NODES = 240


@dataclass(frozen=True, slots=True)
class SandboxSwitch:
    """One switch: what hangs below it (nodes or switches), and the switch above; the core has none above."""

    name: str
    up: str
    nodes: tuple[NodeName, ...] = ()
    switches: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A tree of switches with nodes at its leaves: core, spines, leaves per spine, nodes per leaf.

    Attributes:
        total: how many nodes there are; 0: as many as fit. Fewer leave the last leaves with fewer nodes.
        interleave: deal nodes to leaves round robin, so that names do not follow the fabric (as with cloud names).
        cpus: of each node, as Slurm believes.
        gpus: of each node, as Slurm believes; null devices stand in for them.
    """

    spines: int = 1
    leaves: int = 2
    nodes_per_leaf: int = 4
    total: int = 0
    interleave: bool = False
    cpus: int = 4
    gpus: int = 2

    def __post_init__(self) -> None:
        if min(self.spines, self.leaves, self.nodes_per_leaf) < 1 or min(self.total, self.gpus) < 0:
            raise ShapeError(str(self), "every number must be positive")
        if self.cpus < 1:
            raise ShapeError(str(self), "a node needs at least one CPU")
        room = self.leaf_count * self.nodes_per_leaf
        if self.total > room:
            raise ShapeError(str(self), f"there is room for {room} nodes, not for {self.total}")
        if self.node_count > MOST_NODES:
            raise ShapeError(str(self), f"at most {MOST_NODES} nodes have an address here")
        full = self.leaf_count if self.interleave else (self.leaf_count - 1) * self.nodes_per_leaf + 1
        if self.node_count < full:
            raise ShapeError(str(self), f"{self.node_count} nodes leave a leaf without a node")

    @classmethod
    def parse(cls, text: str, **more: int) -> Self:
        """Read `1x2x4`; `more` are the other attributes.

        >>> Shape.parse("1x2x4").node_count
        8

        Raises:
            ShapeError: it is not three positive numbers, or no cluster can look so.
        """
        parts = text.split("x")
        if len(parts) != 3 or not all(part.isascii() and part.isdigit() for part in parts):  # noqa: PLR2004
            raise ShapeError(text, "expected three whole numbers")
        spines, leaves, nodes = (int(part) for part in parts)
        return cls(spines=spines, leaves=leaves, nodes_per_leaf=nodes, **more)  # type: ignore[arg-type]  # bool is int

    @classmethod
    def of(cls, nodes: int, **more: int) -> Self:
        """Return a small shape with so many nodes: two leaves on one spine, one leaf for a single node.

        >>> str(Shape.of(5))
        '1x2x3 (5 nodes)'

        Raises:
            ShapeError: there is none.
        """
        leaves = 2 if nodes > 1 else 1
        return cls(leaves=leaves, nodes_per_leaf=math.ceil(nodes / leaves), total=nodes, **more)  # type: ignore[arg-type]

    @override
    def __str__(self) -> str:
        text = f"{self.spines}x{self.leaves}x{self.nodes_per_leaf}"
        return f"{text} ({self.total} nodes)" if self.total else text

    @property
    def leaf_count(self) -> int:
        """Leaves of the whole cluster."""
        return self.spines * self.leaves

    @property
    def node_count(self) -> int:
        """Nodes of the whole cluster."""
        return self.total or self.leaf_count * self.nodes_per_leaf

    @property
    def nodes(self) -> tuple[NodeName, ...]:
        """Names of the nodes, n0 first."""
        return tuple(NodeName(f"n{i}") for i in range(self.node_count))

    @property
    def machines(self) -> tuple[NodeName, ...]:
        """The control host and the nodes."""
        return (CTL, *self.nodes)

    @property
    def switches(self) -> tuple[SandboxSwitch, ...]:
        """Every switch, the core first, so that each comes after the one above it."""
        spines = tuple(f"spine{s}" for s in range(self.spines))
        leaves = tuple(f"leaf{x}" for x in range(self.leaf_count))
        below = {spine: leaves[s * self.leaves : (s + 1) * self.leaves] for s, spine in enumerate(spines)}
        tree = [SandboxSwitch("core", up="", switches=spines)]
        tree += [SandboxSwitch(spine, up="core", switches=below[spine]) for spine in spines]
        for x, leaf in enumerate(leaves):
            nodes = tuple(node for i, node in enumerate(self.nodes) if self._leaf(i) == x)
            tree.append(SandboxSwitch(leaf, up=spines[x // self.leaves], nodes=nodes))
        return tuple(tree)

    def _leaf(self, index: int) -> int:
        return index % self.leaf_count if self.interleave else index // self.nodes_per_leaf

    def above(self, machine: str) -> str:
        """Return the switch a machine's cable goes to.

        Raises:
            UnknownPartError: no such machine.
        """
        if machine == CTL:
            return "core"
        return f"leaf{self._leaf(self.nodes.index(self.node(machine)))}"

    def address(self, machine: str) -> str:
        """Return a machine's IPv4 address.

        >>> Shape().address("n3")
        '10.77.0.13'

        Raises:
            UnknownPartError: no such machine.
        """
        if machine == CTL:
            return f"{NETWORK}.1"
        return f"{NETWORK}.{_FIRST_NODE + self.nodes.index(self.node(machine))}"

    def node(self, name: str) -> NodeName:
        """Return the node of that name.

        Raises:
            UnknownPartError: no such node.
        """
        if name not in self.nodes:
            raise UnknownPartError(name, self.nodes)
        return NodeName(name)

    def machine(self, name: str) -> NodeName:
        """Return the node, or the control host, of that name.

        Raises:
            UnknownPartError: no such machine.
            NotMachineError: it is a switch.
        """
        if name not in self.machines:
            if any(switch.name == name and switch.up for switch in self.switches):
                raise NotMachineError(name, self.machines)
            raise UnknownPartError(name, self.machines)
        return NodeName(name)

    def cuttable(self, name: str) -> str:
        """Return a machine, leaf or spine whose cable to the switch above can be cut.

        Raises:
            UnknownPartError: no such part, or nothing lies above it.
        """
        parts = (*self.machines, *(switch.name for switch in self.switches if switch.up))
        if name not in parts:
            raise UnknownPartError(name, parts)
        return name
