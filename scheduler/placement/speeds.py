"""What is slow in a graph, as placement wants it: shares of full speed; pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.scheduler.placement.request import Speeds
from deeplink.scheduler.topology.network import DeviceHealth, Role
from deeplink.scheduler.topology.tree import tree_of
from deeplink.types import NodeName

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deeplink.scheduler.topology.graph import Path
    from deeplink.scheduler.topology.network import Cable, Network
    from deeplink.scheduler.topology.tree import Branch

SAID_SLOW = 0.5
"""The share of full speed of what its source calls degraded and tells no rate of: a choice, not measured."""


@dataclass(frozen=True, slots=True)
class Slow:
    """What is slow or dead.

    Attributes:
        speeds: what is slower than it should be, and works.
        dead: nodes that are down, or of which no link for ranks works: they have no room to offer.
    """

    speeds: Speeds
    dead: frozenset[NodeName]


def slow_of(network: Network) -> Slow:
    """Return what a graph says is slow.

    A node's share is that of all its links for ranks together; a branch's that of all cables from it upwards.
    Cables whose rate or usual rate nobody knows count as sound, unless their source calls them degraded or down.
    """
    nodes: dict[NodeName, float] = {}
    dead = {name for name, node in network.nodes.items() if node.health is DeviceHealth.DOWN}
    cables: dict[NodeName, list[Cable]] = {}
    for link in network.host_links():
        if link.below in network.nodes:
            mine = (cable for cable in link.cables if cable.role is Role.COMPUTE)
            cables.setdefault(NodeName(link.below), []).extend(mine)
    for name, node in network.nodes.items():
        share = _share(cables.get(name, ()))
        if node.health is DeviceHealth.DEGRADED:
            share = min(share, SAID_SLOW)
        if share <= 0:
            dead.add(name)
        elif share < 1 and name not in dead:
            nodes[name] = share
    return Slow(Speeds(nodes, _links(network)), frozenset(dead))


def _links(network: Network) -> dict[Path, float]:
    levels = {name: switch.level for name, switch in network.switches.items()}
    upwards: dict[str, list[Cable]] = {}
    for link in network.trunks():
        if levels[link.below] < levels[link.above]:
            upwards.setdefault(link.below, []).extend(link.cables)
    found: dict[Path, float] = {}
    waiting: list[tuple[Branch, Path]] = [(root, ()) for root in tree_of(network).roots]
    while waiting:
        branch, above = waiting.pop()
        path = (*above, branch.name)
        share = _share([cable for switch in branch.switches for cable in upwards.get(switch, ())])
        # A branch whose cables are all dead is told by the tree already: nothing joins it with the others.
        if above and 0 < share < 1:
            found[path] = share
        waiting.extend((below, path) for below in branch.below)
    return found


def _share(cables: Iterable[Cable]) -> float:
    """Return what cables carry together, of what they should; 1.0 where there are none."""
    carried = usual = 0.0
    for cable in cables:
        full = cable.usual_gbps or max((end.gbps or 0.0 for end in (cable.lower, cable.upper)), default=0.0) or 1.0
        usual += full
        carried += full * _speed(cable, full)
    return carried / usual if usual else 1.0


def _speed(cable: Cable, full: float) -> float:
    if cable.health is DeviceHealth.DOWN:
        return 0.0
    if cable.health is not DeviceHealth.DEGRADED:
        return 1.0
    rate = cable.gbps
    return min(rate / full, 1.0) if rate and rate < full else SAID_SLOW
