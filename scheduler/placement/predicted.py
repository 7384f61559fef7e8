"""The predicted time of a training step on a choice of nodes, and that time as its cost; pure, and imports numpy.

The step is T_comp + T_comm, as the HPE Deep Learning Cookbook calls computing and communication, less what of the
one hides behind the other, plus what of reading the samples hides behind neither:

    T_comp   = (fixed + sample * batch) * (1 + host_contention * (1 - 1/g))
    T_comm   = bytes / bandwidth of each level (the slowest, or one after another), plus the steps' latency
    hidden   = min(overlap * T_comp, (1 - unhidden) * T_comm)
    T_read   = bytes of the busiest node's samples / bandwidth, summed over the places read from
    T_step   = max(T_comp + T_comm - hidden, T_read)

with p ranks on n nodes, g of them on the busiest. Each rank sends 2(p-1)/p times the bytes of its gradients: the
least an all-reduce can do (Patarasuk and Yuan, JPDC 2009), by a ring as by recursive halving and doubling (Thakur,
Rabenseifner and Gropp, IJHPCA 2005). The levels' bandwidth and latency are those of `constants`; between nodes

    bandwidth = min(ports, min(n-1, 2) * path) / (1 + nic_sharing * (g-1)) / (1 + straggling * log2(n))
    latency   = 2(n-1) steps between nodes and 2(p-n) inside (ring), 2 ceil(log2(n)) and 2(g-1) (tree)

the steps as NCCL counts them (src/graph/tuning.cc). Everything is in seconds and bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from deeplink.core.types import NodeName
from deeplink.scheduler.placement.model import Algorithm, Read, Schedule, check_reads
from deeplink.scheduler.placement.request import DEFAULT_COST, Speeds
from deeplink.scheduler.topology.graph import tree_of
from deeplink.scheduler.topology.network import DeviceHealth, Role

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from deeplink.scheduler.placement.model import Constants, Job, Placement, ReadSpeeds
    from deeplink.scheduler.placement.request import Cost, Traits
    from deeplink.scheduler.topology.graph import Branch, Path
    from deeplink.scheduler.topology.network import Cable, Network

LEVELS = ("gpu", "nic", "leaf", "spine")
Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LevelTime:
    """One level of the fabric in an all-reduce."""

    level: str  # `gpu`, `nic`, `leaf` or `spine`
    seconds: float  # how long its busiest link transfers; 0 where it is not used
    slowest: bool  # whether it sets the pace of the levels that work at the same time


@dataclass(frozen=True, slots=True)
class ReadTime:
    """One place that samples are read from: its name, and the seconds that reading its share takes."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """A predicted step. Seconds."""

    step_s: float  # the whole step
    compute_s: float  # forward and backward pass and what goes with them
    communication_s: float  # the all-reduce, if nothing hid it: `latency_s` and the levels' transfers
    hidden_s: float  # how much of it runs behind the backward pass
    latency_s: float  # how much of it is the latency of its steps
    levels: tuple[LevelTime, ...]  # its transfers, level by level
    read_s: float = 0.0  # reading the samples
    read_hidden_s: float = 0.0  # how much of that runs behind the rest of the step
    reads: tuple[ReadTime, ...] = ()  # the same, place by place

    def with_reading(self, reads: tuple[ReadTime, ...]) -> StepTime:
        """Return this step, of which no reading is known yet, with what reading takes."""
        read_s = sum(read.seconds for read in reads)
        hidden = min(self.step_s, read_s)
        return replace(self, step_s=max(self.step_s, read_s), read_s=read_s, read_hidden_s=hidden, reads=reads)

    def lines(self) -> list[str]:
        """Return the explanation, a line per part, in milliseconds."""
        exposed = self.communication_s - self.hidden_s
        of = f"{_ms(self.communication_s).strip()}, hidden {_ms(self.hidden_s).strip()}"
        shown = [
            f"step           {_ms(self.step_s)}",
            f"  computing    {_ms(self.compute_s)}",
            f"  all-reduce   {_ms(exposed)}  ({of})",
        ]
        shown += [
            f"    {level.level:<10} {_ms(level.seconds)}{'  sets the pace' if level.slowest else ''}"
            for level in self.levels
            if level.seconds > 0
        ]
        if self.communication_s > 0:
            shown.append(f"    latency    {_ms(self.latency_s)}")
        if self.reads:
            waited = self.read_s - self.read_hidden_s
            shown.append(f"  reading      {_ms(waited)}  ({_ms(self.read_s).strip()}, the rest hidden)")
            shown += [f"    {read.name:<10} {_ms(read.seconds)}" for read in self.reads]
        return shown


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:10.3f} ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class Demands:
    """What placements ask of the machines, a value per placement: what the formulas are computed from."""

    ranks: Floats  # GPUs used
    nodes: Floats  # nodes used
    busiest: Floats  # ranks of the node with the most
    neighbours: Floats  # other nodes that a node exchanges gradients with
    batch: Floats  # samples of one GPU
    port_load: Floats  # times the ring's bytes on the weakest node's ports; 0 on one node
    leaf_load: Floats  # flows on the busiest uplinks of a leaf
    spine_load: Floats  # the same above the leaves

    def rows(self, chosen: Floats | Sequence[int] | np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Demands:
        """Return the demands of some of the placements, chosen by index or by mask."""
        return Demands(**{name: getattr(self, name)[chosen] for name in self.__slots__})


def demands(placements: Sequence[Placement], batches: Sequence[float]) -> Demands:
    """Return what each placement asks, with so many samples on each of its GPUs."""
    uplinks = [placement.uplink_loads() for placement in placements]
    return Demands(
        ranks=np.array([placement.ranks for placement in placements], float),
        nodes=np.array([len(placement.nodes) for placement in placements], float),
        busiest=np.array([placement.busiest for placement in placements], float),
        neighbours=np.array([placement.neighbours for placement in placements], float),
        batch=np.array(batches, float),
        port_load=np.array([placement.port_load() for placement in placements], float),
        leaf_load=np.array([leaf for leaf, _ in uplinks], float),
        spine_load=np.array([spine for _, spine in uplinks], float),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """The parts of predicted steps without reading, in seconds, a value per placement; names as in `StepTime`."""

    compute: Floats
    latency: Floats
    transfers: tuple[Floats, Floats, Floats, Floats]
    communication: Floats
    hidden: Floats

    @property
    def step(self) -> Floats:
        """The whole steps."""
        # In this order the rounding cannot make a step shorter than what it computes.
        return self.compute + (self.communication - self.hidden)


def estimate(job: Job, constants: Constants, asked: Demands) -> Estimates:
    """Return the predicted steps of many placements at once; `asked` has the samples per GPU, and not the job."""
    compute = (job.fixed_s + job.sample_s * asked.batch) * (
        1 + constants.host_contention * (1 - 1 / asked.busiest)
    )
    transfers = _transfers(job, constants, asked)
    gpu, *between = transfers
    outside = np.maximum.reduce(between)
    together = np.maximum(gpu, outside) if job.schedule is Schedule.FLAT else gpu + outside
    latency = _latency(job, constants, asked)
    # Where there is nothing to sum, no rank waits for another.
    latency = np.where((asked.ranks > 1) & (job.gradient_bytes > 0), latency, 0.0)
    communication = together + latency
    hidden = np.minimum(job.overlap * compute, (1 - constants.unhidden) * communication)
    return Estimates(
        compute=compute, latency=latency, transfers=transfers, communication=communication, hidden=hidden
    )


def _transfers(job: Job, constants: Constants, asked: Demands) -> tuple[Floats, Floats, Floats, Floats]:
    flat = job.schedule is Schedule.FLAT
    inside = _sent(job.gradient_bytes, asked.ranks if flat else asked.busiest)
    outside = _sent(job.gradient_bytes, asked.ranks if flat else asked.nodes)
    several = asked.nodes > 1
    ports = constants.nic.bandwidth * constants.nics / np.where(several, asked.port_load, 1.0)
    paths = np.where(several, asked.neighbours, 1.0) * constants.path_bandwidth
    slowed = (1 + constants.nic_sharing * (asked.busiest - 1)) * (1 + constants.straggling * np.log2(asked.nodes))
    return (
        np.where(asked.busiest > 1, inside / constants.gpu.bandwidth, 0.0),
        np.where(several, outside / np.minimum(ports, paths) * slowed, 0.0),
        outside * asked.leaf_load / constants.leaf.bandwidth,
        outside * asked.spine_load / constants.spine.bandwidth,
    )


def _sent(gradient_bytes: float, ranks: Floats) -> Floats:
    return 2 * (ranks - 1) / ranks * gradient_bytes


def _latency(job: Job, constants: Constants, asked: Demands) -> Floats:
    far = np.maximum.reduce(
        [
            np.full_like(asked.nodes, constants.nic.latency_s),
            np.where(asked.leaf_load > 0, constants.leaf.latency_s, 0.0),
            np.where(asked.spine_load > 0, constants.spine.latency_s, 0.0),
        ]
    )
    between, inside = asked.nodes - 1, asked.busiest - 1
    if job.algorithm is Algorithm.TREE:
        between = np.ceil(np.log2(asked.nodes))
    elif job.schedule is Schedule.FLAT:
        inside = asked.ranks - asked.nodes
    latency: Floats = 2 * between * far + 2 * inside * constants.gpu.latency_s
    return latency


def predict(job: Job, placement: Placement, constants: Constants, reads: Sequence[Read] = ()) -> StepTime:
    """Return the predicted time of one step of a job on a placement, with its parts."""
    batch = job.local_batch(placement.ranks)
    rest = predict_one(job, constants, demands([placement], [batch]))
    rank_bytes = job.sample_bytes * batch
    return rest.with_reading(reading(reads, rank_bytes, placement.ranks, placement.busiest))


def predict_one(job: Job, constants: Constants, asked: Demands) -> StepTime:
    """Return the predicted step of the one placement that `asked` is of, without reading, with its parts."""
    parts = estimate(job, constants, asked)
    seconds = [float(part[0]) for part in parts.transfers]
    flat = job.schedule is Schedule.FLAT
    pace = max(seconds if flat else seconds[1:])
    levels = tuple(
        # One after another, what is inside the nodes has its time to itself.
        LevelTime(level, took, slowest=took > 0 and (took == pace or (level == "gpu" and not flat)))
        for level, took in zip(LEVELS, seconds, strict=True)
    )
    return StepTime(
        step_s=float(parts.step[0]),
        compute_s=float(parts.compute[0]),
        communication_s=float(parts.communication[0]),
        hidden_s=float(parts.hidden[0]),
        latency_s=float(parts.latency[0]),
        levels=levels,
    )


def reading(reads: Sequence[Read], rank_bytes: float, ranks: int, busiest: int) -> tuple[ReadTime, ...]:
    """Return how long the busiest node reads from each place."""
    check_reads(reads)
    return tuple(
        ReadTime(read.name, rank_bytes * (ranks if read.shared else busiest) * read.share / read.bandwidth)
        for read in reads
    )


def reads_of(known: ReadSpeeds, held: float, nodes: int) -> tuple[Read, ...] | None:
    """Return the places that a job's samples are read from, and the share of each.

    Samples are drawn evenly from all the data, and what the nodes hold is dealt over them evenly: a node holds one
    of `nodes` parts of it itself, and reads the others from its peers. What none of them holds comes from the
    source; so it is until the job has brought it.
    """
    if known.local is None or known.source is None or (known.peer is None and nodes > 1):
        return None
    # As fast as the slower limit of the two lets it.
    crowded = known.source_of_all / nodes < known.source
    source = Read(
        name="source",
        share=1.0 - held,
        bandwidth=known.source_of_all if crowded else known.source,
        shared=crowded,
    )
    mine = Read(name="local", share=held / nodes, bandwidth=known.local)
    if known.peer is None:
        return mine, source
    return mine, Read(name="peer", share=held - mine.share, bandwidth=known.peer), source


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
