"""The shape of a cluster: nodes, the switches they hang on, addresses. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from typing_extensions import override

from deeplink.core.types import NodeName
from deeplink.scheduler.testbed.errors import SandboxError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

CTL = NodeName("ctl")
"""The control and login host: slurmctld runs there, users submit from there."""
NETWORK = "10.77.0"
"""The same in every sandbox: each has a network of its own, of which neither the host nor another one knows."""
_FIRST_NODE = 10
MOST_NODES = 240
INTERFACE = "eth0"
"""The one interface of every machine."""


def _bad_shape(wanted: str, problem: str) -> SandboxError:
    remedy = "A shape is SPINESxLEAVESxNODES: spines, leaves per spine, nodes per leaf, as in 1x2x4."
    return SandboxError(f"no cluster of shape {wanted}: {problem}", remedy=remedy, exit_code=2)


def _unknown_part(part: str, known: Iterable[str]) -> SandboxError:
    return SandboxError(f"the sandbox has no {part!r}", remedy=f"It has: {' '.join(known)}.", exit_code=2)


@dataclass(frozen=True, slots=True)
class SandboxSwitch:
    """One switch: what hangs below it (nodes or switches), and the switch above; the core has none above."""

    name: str
    up: str
    nodes: tuple[NodeName, ...] = ()
    switches: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A tree of switches with nodes at its leaves: core, spines, leaves per spine, nodes per leaf."""

    spines: int = 1
    leaves: int = 2
    nodes_per_leaf: int = 4
    total: int = 0  # how many nodes there are; 0: as many as fit. Fewer leave the last leaves with fewer nodes.
    # deal nodes to leaves round robin, so that names do not follow the fabric (as with cloud names)
    interleave: bool = False
    cpus: int = 4  # of each node, as Slurm believes
    gpus: int = 2  # of each node, as Slurm believes; null devices stand in for them

    def __post_init__(self) -> None:
        if min(self.spines, self.leaves, self.nodes_per_leaf) < 1 or min(self.total, self.gpus) < 0:
            raise _bad_shape(str(self), "every number must be positive")
        if self.cpus < 1:
            raise _bad_shape(str(self), "a node needs at least one CPU")
        room = self.leaf_count * self.nodes_per_leaf
        if self.total > room:
            raise _bad_shape(str(self), f"there is room for {room} nodes, not for {self.total}")
        if self.node_count > MOST_NODES:
            raise _bad_shape(str(self), f"at most {MOST_NODES} nodes have an address here")
        full = self.leaf_count if self.interleave else (self.leaf_count - 1) * self.nodes_per_leaf + 1
        if self.node_count < full:
            raise _bad_shape(str(self), f"{self.node_count} nodes leave a leaf without a node")

    @classmethod
    def parse(cls, text: str, **more: int) -> Self:
        """Read `1x2x4`; `more` are the other attributes.

        >>> Shape.parse("1x2x4").node_count
        8
        """
        parts = text.split("x")
        if len(parts) != 3 or not all(part.isascii() and part.isdigit() for part in parts):  # noqa: PLR2004
            raise _bad_shape(text, "expected three whole numbers")
        spines, leaves, nodes = (int(part) for part in parts)
        return cls(spines=spines, leaves=leaves, nodes_per_leaf=nodes, **more)  # type: ignore[arg-type]  # bool is int

    @classmethod
    def of(cls, nodes: int, **more: int) -> Self:
        """Return a small shape with so many nodes: two leaves on one spine, one leaf for a single node."""
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
        """Return the switch a machine's cable goes to."""
        if machine == CTL:
            return "core"
        return f"leaf{self._leaf(self.nodes.index(self.node(machine)))}"

    def address(self, machine: str) -> str:
        """Return a machine's IPv4 address."""
        if machine == CTL:
            return f"{NETWORK}.1"
        return f"{NETWORK}.{_FIRST_NODE + self.nodes.index(self.node(machine))}"

    def node(self, name: str) -> NodeName:
        """Return the node of that name."""
        if name not in self.nodes:
            raise _unknown_part(name, self.nodes)
        return NodeName(name)

    def machine(self, name: str) -> NodeName:
        """Return the node, or the control host, of that name."""
        if name not in self.machines:
            if any(switch.name == name and switch.up for switch in self.switches):
                raise SandboxError(
                    f"{name} is a switch, not a machine: it cannot crash or boot",
                    remedy=f"`deeplink sandbox cut {name}` cuts it off. Machines: {' '.join(self.machines)}.",
                    exit_code=2,
                )
            raise _unknown_part(name, self.machines)
        return NodeName(name)

    def cuttable(self, name: str) -> str:
        """Return a machine, leaf or spine whose cable to the switch above can be cut."""
        parts = (*self.machines, *(switch.name for switch in self.switches if switch.up))
        if name not in parts:
            raise _unknown_part(name, parts)
        return name


def cable(part: str) -> str:
    """Return the fabric's end of the cable from a machine, or from a switch, to the switch above."""
    return f"up-{part}"


def fabric(shape: Shape) -> list[str]:
    """Return `ip -batch` lines that make the switches and the cables between them."""
    lines = ["link set lo up"]
    for switch in shape.switches:
        lines += [f"link add {switch.name} type bridge", f"link set {switch.name} up"]
        if switch.up:
            lines += [
                f"link add {cable(switch.name)} type veth peer name dn-{switch.name}",
                f"link set {cable(switch.name)} master {switch.name} up",
                f"link set dn-{switch.name} master {switch.up} up",
            ]
    return lines


def plug(shape: Shape, machine: str, namespace: Path) -> list[str]:
    """Return `ip -batch` lines that lay the cable from a machine's network namespace to its switch.

    The hardware address follows the machine, so that peers know it again after it booted.
    """
    hardware = "02:00:" + ":".join(f"{int(part):02x}" for part in shape.address(machine).split("."))
    return [
        f"link add {cable(machine)} type veth peer name {INTERFACE} address {hardware} netns {namespace}",
        f"link set {cable(machine)} master {shape.above(machine)} up",
    ]


def interface(shape: Shape, machine: str) -> list[str]:
    """Return `ip -batch` lines, for inside a machine, that give it its address."""
    return [
        "link set lo up",
        f"addr add {shape.address(machine)}/24 dev {INTERFACE}",
        f"link set {INTERFACE} up",
    ]
