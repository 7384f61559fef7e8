"""The canonical graph: nodes and what is in them, switches, and the cables between them seen from both ends; pure.

Every reader in `sources` makes this, and all else (drawing, checks, export, rank order) reads only this.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from deeplink.scheduler.topology.inside import Inside
    from deeplink.types import NodeName

_TIERS = ("leaf", "spine", "core")


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
    AGGREGATION = "aggregation"
    """The reduction engine inside a switch (SHARP), which poses as a host."""
    UNNAMED = "unnamed"
    """Nobody gave it a name, so it cannot be told which node it belongs to."""


@dataclass(frozen=True, slots=True)
class End:
    """One end of a cable, as the device there tells it.

    Attributes:
        port: the port's name on its device; empty where not told.
        gbps: the data rate this end reports, Gb/s; None where it reports none.
        told: whether this end was heard at all.
    """

    port: str = ""
    gbps: float | None = None
    told: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Cable:
    """One cable.

    Attributes:
        lower: its end towards the nodes.
        upper: its end away from them.
        usual_gbps: what cables of this kind carry here, Gb/s; None where that is not known.
        latency_us: one way, microseconds; None where not told.
        said: its health where the source itself says so; else it is judged by the rates.
        role: what a host's port is for; COMPUTE between switches.
    """

    lower: End = End()
    upper: End = End()
    usual_gbps: float | None = None
    latency_us: float | None = None
    said: DeviceHealth | None = None
    role: Role = Role.COMPUTE

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
    """All cables between two devices.

    Attributes:
        below: the node, or the switch of the lower level.
        above: the switch.
        host: whether `below` is a node; nodes and switches may share a name.
        cables: at least one.
    """

    below: str
    above: str
    host: bool
    cables: tuple[Cable, ...]

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
    """A switch.

    Attributes:
        level: 0 for a leaf, 1 for a spine, 2 for a core, more above.
        id: its hardware's own name (GUID); empty where not told.
        link_speed: Slurm's LinkSpeed, a number without a unit that Slurm does not use; kept for export.
    """

    name: str
    level: int
    id: str = ""
    link_speed: int | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """A compute node.

    Attributes:
        domain: the NVLink domain it shares with other nodes (a rack of NVL72, say); empty for none.
        health: as far as the source tells.
        inside: its GPUs and network cards; None where nobody told.
    """

    name: NodeName
    domain: str = ""
    health: DeviceHealth = DeviceHealth.UNKNOWN
    inside: Inside | None = None


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
    """The whole graph.

    Attributes:
        nodes: by name; those that no link names hang nowhere.
        switches: by name.
        links: one for each pair of devices that are connected.
        others: what is connected and is no compute node.
    """

    nodes: Mapping[NodeName, Node] = field(default_factory=dict)
    switches: Mapping[str, Switch] = field(default_factory=dict)
    links: tuple[FabricLink, ...] = ()
    others: tuple[Other, ...] = ()

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
