"""Who has which GPUs of a simulated cluster at one moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.simulate.floor import bits
from deeplink.scheduler.placement.request import NodeCapacity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.simulate.floor import Floor
    from benchmarks.simulate.trace import TraceJob
    from deeplink.core.types import NodeName


@dataclass(frozen=True, slots=True)
class JobShape:
    """What a job asks for.

    Attributes:
        nodes: how many.
        gpus: GPUs on each.
        whole: whether it wants nodes with no other job on them.
    """

    nodes: int
    gpus: int
    whole: bool

    @property
    def all_gpus(self) -> int:
        """GPUs in all."""
        return self.nodes * self.gpus


def shape_of(job: TraceJob, per_node: int) -> JobShape:
    """Return how a job is spread over nodes: within one it shares it, beyond that it has whole ones.

    Args:
        job: of the trace; where that tells of nodes, it has as many, whole.
        per_node: GPUs of a node.
    """
    if job.nodes:
        return JobShape(job.nodes, per_node, whole=True)
    if job.gpus <= per_node:
        return JobShape(1, job.gpus, whole=False)
    return JobShape(-(-job.gpus // per_node), per_node, whole=True)


class FreeGpuState:
    """Free GPUs, node by node.

    Args:
        floor: the nodes.
        gpus: GPUs of each, by its bit.

    Attributes:
        rooms: the same as placement sees it, always up to date.
    """

    def __init__(self, floor: Floor, gpus: Sequence[int]) -> None:
        self.floor = floor
        self._gpus = tuple(gpus)
        self._free = list(gpus)
        most = max(gpus, default=0)
        self._with = [0] * (most + 1)  # the set of nodes with exactly so many GPUs free
        for bit, free in enumerate(self._free):
            self._with[free] |= 1 << bit
        self._of = [0] * (most + 1)  # the set of nodes that have at least so many
        for bit, owned in enumerate(self._gpus):
            for count in range(owned + 1):
                self._of[count] |= 1 << bit
        self._idle = floor.everyone
        self._rooms = {
            (owned, free): NodeCapacity(gpus=owned, free_gpus=free, idle=free == owned)
            for owned in set(gpus)
            for free in range(owned + 1)
        }
        self.rooms: dict[NodeName, NodeCapacity] = {
            node: self._rooms[owned, owned] for node, owned in zip(floor.nodes, gpus, strict=True)
        }
        self.used = 0

    @property
    def gpus(self) -> int:
        """GPUs of all nodes."""
        return sum(self._gpus)

    def owned(self, bit: int) -> int:
        """Return how many GPUs a node has, free or not."""
        return self._gpus[bit]

    def free(self, bit: int) -> int:
        """Return how many GPUs of a node are free."""
        return self._free[bit]

    def levels(self) -> Sequence[int]:
        """Return the sets of nodes with exactly 0, 1, ... GPUs free."""
        return self._with

    def able(self, shape: JobShape) -> int:
        """Return the set of nodes that could run one node's part of a job now."""
        if shape.gpus >= len(self._with):
            return 0
        if shape.whole:
            return self._idle & self._of[shape.gpus]
        found = 0
        for nodes in self._with[shape.gpus :]:
            found |= nodes
        return found

    def holds(self, shape: JobShape) -> bool:
        """Tell whether the job fits on the cluster when nothing else runs."""
        return shape.gpus < len(self._of) and self._of[shape.gpus].bit_count() >= shape.nodes

    def take(self, chosen: int, shape: JobShape) -> None:
        """Give nodes to a job."""
        for bit in bits(chosen):
            self._set(bit, 0 if shape.whole else self._free[bit] - shape.gpus)

    def give_back(self, chosen: int, shape: JobShape) -> None:
        """Take them back."""
        for bit in bits(chosen):
            self._set(bit, self._gpus[bit] if shape.whole else self._free[bit] + shape.gpus)

    def _set(self, bit: int, free: int) -> None:
        before, owned = self._free[bit], self._gpus[bit]
        if not 0 <= free <= owned:
            raise AssertionError(f"node {self.floor.nodes[bit]} of {owned} GPUs would have {free} free")
        one = 1 << bit
        self._with[before] &= ~one
        self._with[free] |= one
        self._idle = self._idle | one if free == owned else self._idle & ~one
        self._free[bit] = free
        self.used += before - free
        self.rooms[self.floor.nodes[bit]] = self._rooms[owned, free]
