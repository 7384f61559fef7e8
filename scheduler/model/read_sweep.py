"""How fast samples are read, from what the ranks of a job timed; pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import TYPE_CHECKING

from deeplink.scheduler.model.constants import ReadSpeeds

if TYPE_CHECKING:
    from collections.abc import Sequence

LIMITED = 0.8
"""Nodes that read less than this share of what they would, were each alone, share a limit of the source."""


class ReadPlace(StrEnum):
    """Where samples are read from, and by whom at once."""

    LOCAL = "local"  # each node from its own store
    PEER = "peer"  # each node from the others'
    SOURCE = "source"  # one node alone
    TOGETHER = "source, all nodes"


@dataclass(frozen=True, slots=True)
class MeasuredRead:
    """What one rank read from a place.

    Attributes:
        node: the number of its node.
        bytes, seconds: of the batches that came from there alone.
        problem: why there were none.
    """

    node: int
    bytes: int = 0
    seconds: float = 0.0
    problem: str = ""

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
