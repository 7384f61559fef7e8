"""Constants from timed all-reduces: which ranks to time, and what their times say; pure.

An all-reduce over two ranks takes two steps and sends the bytes once, whatever its algorithm: its time over the
bytes is a straight line, latency where it begins and bandwidth in its slope (Hockney, The communication challenge
for MPP, Parallel Computing 1994). Pairs at each distance give the levels of the fabric; one rank on each of three
nodes or more tells the ports of a node from the path between two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from math import inf, log2
from typing import TYPE_CHECKING

import numpy as np

from deeplink.errors import DeepLinkError
from deeplink.scheduler.model.constants import LinkSpeed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from deeplink.scheduler.model.constants import Constants
    from deeplink.scheduler.model.placement import Path

_FEWEST_SIZES = 3


class Reach(Enum):
    """How far apart the ranks of a sweep are."""

    GPU = "two ranks of one node"
    NIC = "two nodes below one leaf"
    LEAF = "two nodes below two leaves"
    SPINE = "two nodes farther apart"
    NODES = "one rank on each node"


_PAIRS_OF_NODES = (Reach.NIC, Reach.LEAF, Reach.SPINE)


class SweepError(DeepLinkError):
    """Timed all-reduces that no line can be drawn through."""

    def __init__(self, reach: Reach, problem: str) -> None:
        super().__init__(
            f"all-reduces over {reach.value}: {problem}",
            remedy="Time them again while nothing else uses the nodes, with larger messages.",
        )
        self.reach, self.problem = reach, problem


class NoPairError(DeepLinkError):
    """There is one rank: nothing to time."""

    exit_code = 2

    def __init__(self) -> None:
        super().__init__(
            "one rank alone sends nothing", remedy="Start at least two ranks, better one on each of three nodes."
        )


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
    """Return the ranks to time an all-reduce over, for each distance there is.

    The same on every rank: the first that will do, by number.

    Raises:
        NoPairError: there are not two ranks.
    """
    ordered = sorted(seats, key=lambda seat: seat.rank)
    if len(ordered) < 2:  # noqa: PLR2004 (a pair)
        raise NoPairError
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
    """Return bandwidth and latency of a step, by least squares of the relative error.

    Raises:
        SweepError: there are too few sizes, or large messages take no longer than small ones.
    """
    if len({timing.size for timing in sweep.timings}) < _FEWEST_SIZES:
        raise SweepError(sweep.reach, f"fewer than {_FEWEST_SIZES} sizes were timed")
    seconds = np.array([timing.seconds for timing in sweep.timings])
    if not (seconds > 0).all():
        raise SweepError(sweep.reach, "one took no time")
    sent = np.array([timing.size for timing in sweep.timings]) * 2 * (sweep.ranks - 1) / sweep.ranks
    steps = np.full(len(seconds), 2.0 * (sweep.ranks - 1))
    columns = np.stack([steps, sent], axis=1) / seconds[:, None]
    (latency, per_byte), *_ = np.linalg.lstsq(columns, np.ones(len(seconds)), rcond=None)
    if latency < 0:  # nothing is faster than no time: a line through the origin
        latency = 0.0
        per_byte = float(columns[:, 1].sum() / (columns[:, 1] ** 2).sum())
    if per_byte <= 0:
        raise SweepError(sweep.reach, "large ones take no longer than small ones")
    return LinkSpeed(1 / float(per_byte), float(latency))


def usable(sweeps: Sequence[Sweep]) -> tuple[list[Sweep], list[SweepError]]:
    """Return the sweeps that a line can be drawn through, and what is wrong with the others.

    Raises:
        SweepError: there is none that will do.
    """
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

    Raises:
        SweepError: no line can be drawn through one.
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
