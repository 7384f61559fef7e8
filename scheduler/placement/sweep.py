"""Constants from timed all-reduces: which ranks to time, and what their times say; pure.

An all-reduce over two ranks takes two steps and sends the bytes once, whatever its algorithm: its time over the
bytes is a straight line, latency where it begins and bandwidth in its slope (Hockney, The communication challenge
for MPP, Parallel Computing 1994). Pairs at each distance give the levels of the fabric; one rank on each of three
nodes or more tells the ports of a node from the path between two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from math import inf, log2
from typing import TYPE_CHECKING

import numpy as np

from deeplink.core.errors import DeepLinkError
from deeplink.scheduler.placement.model import LinkSpeed, ReadSpeeds

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from deeplink.scheduler.placement.model import Constants
    from deeplink.scheduler.topology.graph import Path

_FEWEST_SIZES = 3
LIMITED = 0.8
"""Nodes that read less than this share of what they would, were each alone, share a limit of the source."""


class Reach(Enum):
    """How far apart the ranks of a sweep are."""

    GPU = "two ranks of one node"
    NIC = "two nodes below one leaf"
    LEAF = "two nodes below two leaves"
    SPINE = "two nodes farther apart"
    NODES = "one rank on each node"


_PAIRS_OF_NODES = (Reach.NIC, Reach.LEAF, Reach.SPINE)


class SweepError(DeepLinkError):
    """All-reduces that cannot be timed, or no line can be drawn through."""


def _no_line(reach: Reach, problem: str) -> SweepError:
    remedy = "Time them again while nothing else uses the nodes, with larger messages."
    return SweepError(f"all-reduces over {reach.value}: {problem}", remedy=remedy)


@dataclass(frozen=True, slots=True)
class RankLocation:
    """A rank, the number of its node, and the switches above that."""

    rank: int
    node: int
    path: Path = ()


@dataclass(frozen=True, slots=True)
class AllReduceTiming:
    """One all-reduce: bytes of each rank's buffer, seconds."""

    size: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Sweep:
    """Timed all-reduces of many sizes over the same ranks, each on a node of its own but for `Reach.GPU`."""

    reach: Reach
    ranks: int
    timings: tuple[AllReduceTiming, ...]


def to_time(seats: Iterable[RankLocation]) -> dict[Reach, tuple[int, ...]]:
    """Return the ranks to time an all-reduce over, for each distance there is; the same on every rank."""
    ordered = sorted(seats, key=lambda seat: seat.rank)
    if len(ordered) < 2:  # noqa: PLR2004 (a pair)
        remedy = "Start at least two ranks, better one on each of three nodes."
        raise SweepError("one rank alone sends nothing", remedy=remedy, exit_code=2)
    firsts = list({seat.node: seat for seat in reversed(ordered)}.values())[::-1]
    found: dict[Reach, tuple[int, ...]] = {}
    for first in firsts:
        beside = [seat.rank for seat in ordered if seat.node == first.node]
        if len(beside) > 1:
            found[Reach.GPU] = (beside[0], beside[1])
            break
    # Beyond the first two nodes below a leaf none makes a pair that these do not make sooner.
    below: dict[Path, list[RankLocation]] = {}
    for seat in firsts:
        below.setdefault(seat.path, []).append(seat)
    few = sorted((seat for seats in below.values() for seat in seats[:2]), key=lambda seat: seat.rank)
    for place, one in enumerate(few):
        for other in few[place + 1 :]:
            found.setdefault(_apart(one.path, other.path), (one.rank, other.rank))
    if len(firsts) > 2:  # noqa: PLR2004 (two nodes are a pair)
        found[Reach.NODES] = tuple(seat.rank for seat in firsts)
    return {reach: found[reach] for reach in Reach if reach in found}


def _apart(one: Path, other: Path) -> Reach:
    if one == other:
        return Reach.NIC
    return Reach.LEAF if one[:-1] == other[:-1] else Reach.SPINE


def line(sweep: Sweep) -> LinkSpeed:
    """Return bandwidth and latency of a step, by least squares of the relative error."""
    if len({timing.size for timing in sweep.timings}) < _FEWEST_SIZES:
        raise _no_line(sweep.reach, f"fewer than {_FEWEST_SIZES} sizes were timed")
    seconds = np.array([timing.seconds for timing in sweep.timings])
    if not (seconds > 0).all():
        raise _no_line(sweep.reach, "one took no time")
    sent = np.array([timing.size for timing in sweep.timings]) * 2 * (sweep.ranks - 1) / sweep.ranks
    steps = np.full(len(seconds), 2.0 * (sweep.ranks - 1))
    columns = np.stack([steps, sent], axis=1) / seconds[:, None]
    (latency, per_byte), *_ = np.linalg.lstsq(columns, np.ones(len(seconds)), rcond=None)
    if latency < 0:  # nothing is faster than no time: a line through the origin
        latency = 0.0
        per_byte = float(columns[:, 1].sum() / (columns[:, 1] ** 2).sum())
    if per_byte <= 0:
        raise _no_line(sweep.reach, "large ones take no longer than small ones")
    return LinkSpeed(1 / float(per_byte), float(latency))


def usable(sweeps: Sequence[Sweep]) -> tuple[list[Sweep], list[SweepError]]:
    """Return the sweeps that a line can be drawn through, and what is wrong with the others."""
    good, wrong = [], []
    for sweep in sweeps:
        try:
            line(sweep)
        except SweepError as problem:
            wrong.append(problem)
        else:
            good.append(sweep)
    if wrong and not good:
        raise wrong[0]
    return good, wrong


def calibrated(sweeps: Sequence[Sweep], default: Constants) -> Constants:
    """Return the constants with which the model takes as long as these sweeps did.

    What no sweep shows stays as in `default`: sharing, contention, straggling, levels that no pair was across.
    With two nodes alone the ports cannot be told from the path between them: they get what the path has.
    """
    lines = {sweep.reach: line(sweep) for sweep in sweeps}
    known = default
    if Reach.GPU in lines:
        known = replace(known, gpu=lines[Reach.GPU])
    nearest = next((lines[reach] for reach in _PAIRS_OF_NODES if reach in lines), None)
    if nearest is not None:
        # The model slows what goes between nodes by straggling: as much again, for both to come out right.
        path = nearest.bandwidth * _slowed(2, default)
        known = replace(known, nics=1, nic=LinkSpeed(path, nearest.latency_s), path_bandwidth=inf)
        over_all = next((sweep for sweep in sweeps if sweep.reach is Reach.NODES), None)
        if over_all is not None:
            ports = lines[Reach.NODES].bandwidth * _slowed(over_all.ranks, default)
            # More than two paths' worth cannot be seen, less than one not be: the pair had it.
            ports = min(max(ports, path), 2 * path)
            known = replace(known, nic=LinkSpeed(ports, nearest.latency_s), path_bandwidth=path)
    spine = lines.get(Reach.SPINE, known.spine)
    leaf = lines.get(Reach.LEAF, known.leaf)
    if Reach.SPINE in lines and Reach.LEAF not in lines:  # that pair went through leaves' uplinks too
        leaf = LinkSpeed(max(leaf.bandwidth, spine.bandwidth), min(leaf.latency_s, spine.latency_s))
    return replace(known, leaf=leaf, spine=spine)


def _slowed(nodes: int, known: Constants) -> float:
    return 1 + known.straggling * log2(nodes)


class ReadPlace(StrEnum):
    """Where samples are read from, and by whom at once."""

    LOCAL = "local"  # each node from its own store
    PEER = "peer"  # each node from the others'
    SOURCE = "source"  # one node alone
    TOGETHER = "source, all nodes"


@dataclass(frozen=True, slots=True)
class MeasuredRead:
    """What one rank read from a place."""

    node: int  # the number of its node
    bytes: int = 0  # of the batches that came from there alone
    seconds: float = 0.0
    problem: str = ""  # why there were none

    @property
    def rate(self) -> float:
        """Bytes a second; 0 where nothing was read."""
        return self.bytes / self.seconds if self.bytes and self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class ReadSweep:
    """What all ranks that took part read from a place, at the same time."""

    place: ReadPlace
    told: tuple[MeasuredRead, ...]

    def per_node(self) -> dict[int, float]:
        """Return the bytes a second of each node that could read anything, its ranks together."""
        found: dict[int, float] = {}
        for one in self.told:
            if one.rate:
                found[one.node] = found.get(one.node, 0.0) + one.rate
        return found

    @property
    def bandwidth(self) -> float | None:
        """What the slowest node read, in bytes a second: a step waits for it; None where nothing could be."""
        return min(self.per_node().values(), default=None)

    @property
    def problem(self) -> str:
        """Why nothing was read; empty where something was."""
        said = (one.problem for one in self.told if one.problem)
        return "" if self.per_node() else next(said, "there was nothing to read")


def reads_from(sweeps: Sequence[ReadSweep]) -> ReadSpeeds:
    """Return how fast each place is; None for those that nothing was read from."""
    found = {sweep.place: sweep for sweep in sweeps}
    alone = {place: found[place].bandwidth if place in found else None for place in ReadPlace}
    together, one = found.get(ReadPlace.TOGETHER), alone[ReadPlace.SOURCE]
    limit = inf
    if together is not None and one is not None:
        rates = together.per_node()
        total = sum(rates.values())
        if len(rates) > 1 and total < LIMITED * len(rates) * one:
            limit = total
    return ReadSpeeds(local=alone[ReadPlace.LOCAL], peer=alone[ReadPlace.PEER], source=one, source_of_all=limit)
