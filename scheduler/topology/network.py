"""The canonical graph: nodes and what is in them, switches, and the cables between them seen from both ends; pure.

Every reader in `sources` makes this, and all else (drawing, checks, export, rank order) reads only this.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Self

from typing_extensions import override

from deeplink.core.finding import Finding, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from deeplink.core.types import NodeName

_TIERS = ("leaf", "spine", "core")
_NVLINKS = re.compile(r"NV(\d{1,3})", re.ASCII)


def tier(level: int) -> str:
    """Return what switches of a level are called.

    >>> [tier(level) for level in range(4)]
    ['leaf', 'spine', 'core', 'core']
    """
    return _TIERS[max(0, min(level, len(_TIERS) - 1))]


class DeviceHealth(Enum):
    """How a thing is; in the order of badness."""

    OK = "ok"
    UNKNOWN = "unknown"
    DEGRADED = "degraded"
    DOWN = "down"


_BADNESS = {health: place for place, health in enumerate(DeviceHealth)}


class Role(Enum):
    """What a host's port, or a host, is for."""

    COMPUTE = "compute"
    STORAGE = "storage"
    MANAGEMENT = "management"
    AGGREGATION = "aggregation"  # the reduction engine inside a switch (SHARP), which poses as a host
    UNNAMED = "unnamed"  # without a name it cannot be told which node it belongs to


@dataclass(frozen=True, slots=True)
class End:
    """One end of a cable, as the device there tells it."""

    port: str = ""  # the port's name on its device; empty where not told
    gbps: float | None = None  # the data rate this end reports, Gb/s; None where it reports none
    told: bool = True  # whether this end was listed at all


@dataclass(frozen=True, slots=True, kw_only=True)
class Cable:
    """One cable."""

    lower: End = End()  # its end towards the nodes
    upper: End = End()  # its end away from them
    usual_gbps: float | None = None  # what cables of this kind carry here, Gb/s; None where that is not known
    latency_us: float | None = None  # one way, microseconds; None where not told
    said: DeviceHealth | None = None  # its health where the source itself says so; else it is judged by the rates
    role: Role = Role.COMPUTE  # what a host's port is for; COMPUTE between switches

    @property
    def gbps(self) -> float | None:
        """The data rate, Gb/s: the lesser of what the two ends tell; None where neither tells."""
        return min((end.gbps for end in (self.lower, self.upper) if end.gbps is not None), default=None)

    @property
    def health(self) -> DeviceHealth:
        """Degraded when slower than usual, or when the two ends tell different rates; down at rate 0."""
        if self.said is not None:
            return self.said
        if self.gbps is None:
            return DeviceHealth.UNKNOWN
        if self.gbps <= 0:
            return DeviceHealth.DOWN
        unlike = None not in {self.lower.gbps, self.upper.gbps} and self.lower.gbps != self.upper.gbps
        slow = self.usual_gbps is not None and self.gbps < self.usual_gbps
        return DeviceHealth.DEGRADED if unlike or slow else DeviceHealth.OK


@dataclass(frozen=True, slots=True)
class FabricLink:
    """All cables between two devices."""

    below: str  # the node, or the switch of the lower level
    above: str  # the switch
    host: bool  # whether `below` is a node; nodes and switches may share a name
    cables: tuple[Cable, ...]  # at least one

    @property
    def gbps(self) -> float | None:
        """What all cables carry together, Gb/s; None where no cable tells."""
        told = [cable.gbps for cable in self.cables if cable.gbps is not None]
        return sum(told) if told else None

    @property
    def latency_us(self) -> float | None:
        """The least latency of its cables, microseconds; None where no cable tells."""
        return min((cable.latency_us for cable in self.cables if cable.latency_us is not None), default=None)

    @property
    def health(self) -> DeviceHealth:
        """That of the worst cable."""
        return max((cable.health for cable in self.cables), key=_BADNESS.__getitem__)

    @property
    def compute(self) -> bool:
        """Whether ranks talk over it: any cable is for that."""
        return any(cable.role is Role.COMPUTE for cable in self.cables)


@dataclass(frozen=True, slots=True)
class Switch:
    """A switch."""

    name: str
    level: int  # 0 for a leaf, 1 for a spine, 2 for a core, more above
    id: str = ""  # its hardware's own name (GUID); empty where not told
    # Slurm's LinkSpeed, a number without a unit that Slurm does not use; kept for export
    link_speed: int | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """A compute node."""

    name: NodeName
    domain: str = ""  # the NVLink domain it shares with other nodes (a rack of NVL72, say); empty for none
    health: DeviceHealth = DeviceHealth.UNKNOWN  # as far as the source tells
    inside: Inside | None = None  # its GPUs and network cards; None where not told


@dataclass(frozen=True, slots=True)
class Other:
    """A host's port that is no compute node's: storage, management, aggregation, or without a name."""

    name: str
    role: Role
    switch: str
    port: str = ""
    gbps: float | None = None


@dataclass(frozen=True, slots=True)
class Network:
    """The whole graph."""

    nodes: Mapping[NodeName, Node] = field(default_factory=dict)  # by name; those that no link names hang nowhere
    switches: Mapping[str, Switch] = field(default_factory=dict)  # by name
    links: tuple[FabricLink, ...] = ()  # one for each pair of devices that are connected
    others: tuple[Other, ...] = ()  # what is connected and is no compute node

    def host_links(self) -> Iterator[FabricLink]:
        """Yield the links of nodes that ranks talk over."""
        return (link for link in self.links if link.host and link.compute)

    def insides(self) -> list[tuple[Inside, list[NodeName]]]:
        """Return each inside that is told of, once, and the nodes that are so."""
        found: list[tuple[Inside, list[NodeName]]] = []
        for node in self.nodes.values():
            if node.inside is None:
                continue
            like = next((names for inside, names in found if inside == node.inside), None)
            if like is None:
                found.append((node.inside, [node.name]))
            else:
                like.append(node.name)
        return found

    def trunks(self) -> Iterator[FabricLink]:
        """Yield the links between switches."""
        return (link for link in self.links if not link.host)


class Join(Enum):
    """How two devices of a node are joined, nearest first; words and order are those of `nvidia-smi topo -m`."""

    NVLINK = "NV"
    PIX = "PIX"  # at most one PCIe bridge lies between
    PXB = "PXB"  # several PCIe bridges, no host bridge
    PHB = "PHB"  # a PCIe host bridge, typically the CPU
    NODE = "NODE"  # the way between the host bridges of one NUMA node
    SYS = "SYS"  # the way between NUMA nodes

    @property
    def distance(self) -> int:
        """0 for the nearest."""
        return _NEAREST_FIRST.index(self)


_NEAREST_FIRST = tuple(Join)


@dataclass(frozen=True, slots=True)
class Joined:
    """How one pair is joined; `nvlinks` is how many NVLinks are bonded, 0 for any other way."""

    join: Join
    nvlinks: int = 0

    @classmethod
    def of(cls, word: str) -> Self | None:
        """Return what `nvidia-smi topo -m` calls so, `str`'s inverse; None where it is no such word."""
        if found := _NVLINKS.fullmatch(word):
            return cls(Join.NVLINK, int(found[1]))
        return next((cls(join) for join in Join if join is not Join.NVLINK and join.value == word), None)

    @override
    def __str__(self) -> str:
        return f"NV{self.nvlinks}" if self.join is Join.NVLINK else self.join.value


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU; `cpus` are the CPUs near to it as a list (`0-23,48-71`), `numa` its NUMA node; as far as told."""

    name: str
    cpus: str = ""
    numa: int | None = None


@dataclass(frozen=True, slots=True)
class Nic:
    """One network card: its name in the matrix, and its device's (`mlx5_0`), often the same."""

    name: str
    device: str


@dataclass(frozen=True, slots=True)
class Inside:
    """What is in a node, and how it is joined."""

    gpus: tuple[Gpu, ...]
    nics: tuple[Nic, ...]
    # by the names of two devices in the order of `gpus` and then `nics`; a pair that is not told of is not there
    pairs: Mapping[tuple[str, str], Joined]

    def between(self, one: str, other: str) -> Joined | None:
        """Return how two devices are joined, whichever is named first; None where not told."""
        return self.pairs.get((one, other)) or self.pairs.get((other, one))

    def nearest_nics(self, gpu: str) -> tuple[Nic, ...]:
        """Return the network cards that a GPU should use: those that no other is nearer than."""
        distances = {
            nic.name: joined.join.distance for nic in self.nics if (joined := self.between(gpu, nic.name))
        }
        least = min(distances.values(), default=0)
        return tuple(nic for nic in self.nics if distances.get(nic.name) == least)

    def far_nics(self) -> tuple[Nic, ...]:
        """Return the cards that are not for the GPUs: none is nearest to them, though others are near some."""
        near = {nic.name for gpu in self.gpus for nic in self.nearest_nics(gpu.name)}
        return tuple(nic for nic in self.nics if nic.name not in near) if near else ()

    def nvlinks(self, gpu: str) -> int:
        """Count the NVLinks from a GPU to the other GPUs."""
        told = (self.between(gpu, other.name) for other in self.gpus if other.name != gpu)
        return sum(joined.nvlinks for joined in told if joined)


class TopologyCheck(StrEnum):
    """What a finding about a topology is about: the check of its `Finding`."""

    UNREADABLE = "unreadable"  # a line, or a part of it, was passed over
    DUPLICATE = "duplicate"
    MISSING = "missing"  # a node of the cluster is not in the topology
    UNKNOWN = "unknown"  # the topology names what is not there
    LOOSE = "loose"  # a node hangs on no switch, though others do
    DISCONNECTED = "disconnected"
    DEGRADED = "degraded"
    ONE_SIDED = "one-sided"  # only one end of a cable was listed
    NO_TOPOLOGY = "no topology"
    FLAT = "flat"
    UNNAMED = "unnamed"
    APART = "kept apart"
    UNEVEN = "uneven"
    EMPTY = "empty"
    TAKEN = "taken as"  # something was read as what it is not quite

    def finding(self, text: str, source: str = "", line: int = 0) -> Finding:
        """Return a finding; `source` is the file or command it was read from."""
        severity = Severity.NOTE if self in _NOTES else Severity.WARNING
        return Finding(severity, text, check=self, where=source, line=line)


_NOTES = {
    TopologyCheck.FLAT,
    TopologyCheck.UNNAMED,
    TopologyCheck.APART,
    TopologyCheck.UNEVEN,
    TopologyCheck.EMPTY,
    TopologyCheck.TAKEN,
}
