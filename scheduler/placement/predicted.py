"""The predicted step as the cost of a choice of nodes: the one part of placement that imports numpy; pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from deeplink.core.types import NodeName
from deeplink.scheduler.placement.model.step import Demands, predict_one, reading, reads_of
from deeplink.scheduler.placement.request import DEFAULT_COST, Speeds
from deeplink.scheduler.topology.graph import tree_of
from deeplink.scheduler.topology.network import DeviceHealth, Role

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deeplink.scheduler.placement.model.constants import Constants
    from deeplink.scheduler.placement.model.job_profile import Job
    from deeplink.scheduler.placement.model.step import ReadTime, StepTime
    from deeplink.scheduler.placement.request import Cost, Traits
    from deeplink.scheduler.topology.graph import Branch, Path
    from deeplink.scheduler.topology.network import Cable, Network

TIES = 0.01
"""What else a choice costs is worth less than this share of its step, and so decides between steps that are as
good as equal: of less the model is not sure (on measured steps it is 2 to 5 % off)."""
SAID_SLOW = 0.5
"""The share of full speed of what its source calls degraded and tells no rate of: a choice, not measured."""


class Predicted:
    """Costs in seconds: the predicted step, and up to `TIES` of it by the default weights.

    The ranks are taken to be numbered along the tree, as `deeplink run` does: the ring leaves each switch once.
    """

    def __init__(self, job: Job, constants: Constants, ranks_per_node: int, ties: Cost = DEFAULT_COST) -> None:
        self._job, self._constants, self._each, self._ties = job, constants, ranks_per_node, ties
        self._steps: dict[tuple[float, ...], StepTime] = {}
        self._reads: dict[tuple[float, int], tuple[ReadTime, ...]] = {}

    def __call__(self, traits: Traits) -> float:
        """Return the cost."""
        read_s = sum(read.seconds for read in self._reading(traits))
        step_s = max(self._rest(traits).step_s, read_s)
        ties = self._ties(traits)
        return step_s * (1.0 + TIES * ties / (1.0 + ties))

    def step(self, traits: Traits) -> StepTime:
        """Return the predicted step, with its parts."""
        return self._rest(traits).with_reading(self._reading(traits))

    def _rest(self, traits: Traits) -> StepTime:
        """Return the step without reading: it depends on a few numbers that most choices have in common."""
        key = (traits.nodes, traits.ports, traits.leaf_links, traits.upper_links)
        if key not in self._steps:
            self._steps[key] = predict_one(self._job, self._constants, self._demands(traits))
        return self._steps[key]

    def _demands(self, traits: Traits) -> Demands:
        nodes = traits.nodes
        ranks = nodes * self._each
        # One flow over the weakest link of each level; none where `UNUSED` makes it one over infinity.
        asked = {
            "ranks": ranks,
            "nodes": nodes,
            "busiest": self._each,
            "neighbours": min(nodes - 1, 2),
            "batch": self._job.local_batch(ranks),
            "port_load": 1.0 / traits.ports if nodes > 1 else 0.0,
            "leaf_load": 1.0 / traits.leaf_links,
            "spine_load": 1.0 / traits.upper_links,
        }
        return Demands(**{name: np.array([value], float) for name, value in asked.items()})

    def _reading(self, traits: Traits) -> tuple[ReadTime, ...]:
        nodes, known = traits.nodes, (traits.local, traits.nodes)
        if known not in self._reads:
            ranks = nodes * self._each
            places = reads_of(self._constants.reads, traits.local, nodes) if self._job.sample_bytes else None
            size = self._job.sample_bytes * self._job.local_batch(ranks)
            self._reads[known] = reading(places or (), size, ranks, self._each)
        return self._reads[known]


@dataclass(frozen=True, slots=True)
class Slow:
    """What is slow or dead."""

    speeds: Speeds  # what is slower than it should be, and works
    # nodes that are down, or of which no link for ranks works: they have no room to offer
    dead: frozenset[NodeName]


def slow_of(network: Network) -> Slow:
    """Return what a graph says is slow.

    A node's share is that of all its links for ranks together; a branch's that of all cables from it upwards.
    Cables whose rate or usual rate no one knows count as sound, unless their source calls them degraded or down.
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
