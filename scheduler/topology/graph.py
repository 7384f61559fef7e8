"""The canonical fabric: for each node the switches above it, from the root down to its leaf; pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from deeplink.scheduler.slurm.parse import SwitchRow
    from deeplink.types import NodeName

Path = tuple[str, ...]
"""Switch names from the root of the fabric to a leaf; empty where nobody knows."""
_PARTS = re.compile(r"[0-9]{1,18}|[^0-9]+")


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a key that sorts names as people do.

    >>> sorted(["n10", "n9", "n1"], key=natural)
    ['n1', 'n9', 'n10']
    """
    # Numbers in pieces: Python makes no number of more than 4,300 digits, and a port may be called anything.
    parts = _PARTS.findall(name)
    return tuple((0, int(part), part) if part[0] in "0123456789" else (1, 0, part) for part in parts)


@dataclass(frozen=True, slots=True)
class Fabric:
    """Where each node hangs.

    Attributes:
        paths: the switches above each node. A node without an entry hangs nowhere known; all such nodes count as
            neighbours of each other, since nothing is known that parts them.
    """

    paths: Mapping[NodeName, Path]

    def path(self, node: NodeName) -> Path:
        """Return the switches above a node, root first; empty where unknown."""
        return self.paths.get(node, ())

    def leaf(self, node: NodeName) -> Path:
        """Return what identifies the node's leaf switch: two nodes share a leaf if and only if these are equal."""
        return self.path(node)

    def sort_key(self, node: NodeName) -> tuple[object, ...]:
        """Return a key that sorts nodes along the tree, and by natural name below one leaf."""
        return (tuple(natural(switch) for switch in self.path(node)), natural(node))


def fabric_from_addresses(addresses: Mapping[NodeName, str]) -> Fabric:
    """Build the fabric from each node's SLURM_TOPOLOGY_ADDR.

    >>> fabric_from_addresses({"n3": "core.spine0.leaf1.n3", "n9": ""}).paths
    {'n3': ('core', 'spine0', 'leaf1')}
    """
    paths = {}
    for node, address in addresses.items():
        switches = address.removesuffix(node).rstrip(".")
        if switches:
            paths[node] = tuple(switches.split("."))
    return Fabric(paths)


def fabric_from_switches(switches: Iterable[SwitchRow]) -> Fabric:
    """Build the fabric from what `scontrol show topology` says."""
    from deeplink.scheduler.topology.sources.slurm import read_switches  # noqa: PLC0415 - it reads into what is above
    from deeplink.scheduler.topology.tree import fabric_of  # noqa: PLC0415

    return fabric_of(read_switches(switches, "scontrol show topology").network)
