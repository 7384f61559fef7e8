"""How much of a cluster's idle room a big job can still have by whole leaves; pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deeplink.core.types import NodeName
    from deeplink.scheduler.placement.request import NodeCapacity
    from deeplink.scheduler.topology.graph import Fabric, Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragmentation:
    """How idle nodes lie on leaves.

    Attributes:
        idle: idle nodes.
        leaves: leaves, those without an idle node too.
        whole: leaves of which all nodes, and more than one, are idle.
        on_whole: idle nodes on these.
        largest: the most idle nodes of one leaf: the greatest job whose ring crosses nothing.
    """

    idle: int
    leaves: int
    whole: int
    on_whole: int
    largest: int

    @property
    def scattered(self) -> float:
        """Share of the idle nodes that are not on a whole leaf: 0 is best, and said of a full cluster too."""
        return (self.idle - self.on_whole) / self.idle if self.idle else 0.0


def fragmentation(fabric: Fabric, rooms: Mapping[NodeName, NodeCapacity]) -> Fragmentation:
    """Return how the idle nodes lie; those that the fabric does not know are on no leaf.

    Args:
        fabric: where nodes hang.
        rooms: the nodes that jobs may have, busy ones too.
    """
    leaves: dict[Path, list[bool]] = {}
    for node, room in rooms.items():
        leaves.setdefault(fabric.leaf(node), []).append(room.idle)
    idle = sum(map(sum, leaves.values()))
    leaves.pop((), None)
    whole = [len(nodes) for nodes in leaves.values() if len(nodes) > 1 and all(nodes)]
    return Fragmentation(
        idle=idle,
        leaves=len(leaves),
        whole=len(whole),
        on_whole=sum(whole),
        largest=max(map(sum, leaves.values()), default=0),
    )
