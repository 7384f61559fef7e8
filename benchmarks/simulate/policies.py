"""Who chooses the nodes, and in which order the ranks run on them."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from benchmarks.simulate.floor import bits, first
from benchmarks.simulate.slurm_tree import slurm_choice
from deeplink.scheduler.placement.candidate_leaves import Terrain
from deeplink.scheduler.placement.request import PlacementCluster, PlacementRequest
from deeplink.scheduler.placement.search import place
from deeplink.scheduler.topology.rank_order import rank_order, stock_order

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from benchmarks.simulate.floor import Floor
    from benchmarks.simulate.state import FreeGpuState, JobShape
    from deeplink.core.types import NodeName


class SchedulingPolicy(StrEnum):
    """The policies there are."""

    SLURM_TREE = "slurm-tree"
    """What Slurm 22.05 chooses with topology/tree, as measured; ranks by node name."""
    PACK = "pack"
    """The fullest nodes that have the room, the first by name; ranks by node name."""
    RANDOM = "random"
    """Any nodes that have the room; ranks by node name."""
    DEEPLINK = "deeplink"
    """`deeplink.scheduler.placement.search`, with the ranks along the fabric."""


class Chooser(Protocol):
    """One policy."""

    def choose(self, state: FreeGpuState, shape: JobShape, shut: int) -> int | None:
        """Return the nodes for a job, or None where it cannot run now.

        Args:
            state: the cluster.
            shape: what it asks for.
            shut: nodes that it must not have.
        """

    def order(self, floor: Floor, chosen: int) -> Sequence[NodeName]:
        """Return the nodes in the order in which the ranks run on them."""


class _ByName:
    """Ranks as plain srun numbers them."""

    def order(self, floor: Floor, chosen: int) -> Sequence[NodeName]:
        return stock_order(floor.names(chosen))


class SlurmTree(_ByName):
    """Slurm's choice."""

    def choose(self, state: FreeGpuState, shape: JobShape, shut: int) -> int | None:
        """As the protocol says."""
        return slurm_choice(state.floor, state.able(shape) & ~shut, shape.nodes)


class Pack(_ByName):
    """The fullest nodes."""

    def choose(self, state: FreeGpuState, shape: JobShape, shut: int) -> int | None:
        """As the protocol says."""
        able = state.able(shape) & ~shut
        if able.bit_count() < shape.nodes:
            return None
        if shape.whole:
            return first(able, shape.nodes)
        fullest = next(nodes & able for nodes in state.levels() if nodes & able)
        return first(fullest, 1)


class AnyNodes(_ByName):
    """Nodes drawn by chance."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw

    def choose(self, state: FreeGpuState, shape: JobShape, shut: int) -> int | None:
        """As the protocol says."""
        able = state.able(shape) & ~shut
        if able.bit_count() < shape.nodes:
            return None
        return sum(1 << bit for bit in self._draw.sample(list(bits(able)), shape.nodes))


class DeepLink:
    """What `deeplink sbatch` would hint at, and `deeplink run` makes of it."""

    def __init__(self) -> None:
        self._terrain: Terrain | None = None
        self._shut: tuple[int, frozenset[NodeName]] = (0, frozenset())

    def choose(self, state: FreeGpuState, shape: JobShape, shut: int) -> int | None:
        """As the protocol says."""
        floor = state.floor
        if (state.able(shape) & ~shut).bit_count() < shape.nodes:
            return None
        cluster = PlacementCluster(fabric=floor.fabric, rooms=state.rooms)
        if self._terrain is None:
            self._terrain = Terrain(floor.fabric, floor.nodes)
        if shut != self._shut[0]:
            self._shut = (shut, frozenset(floor.names(shut)))
        excluded = self._shut[1]
        request = PlacementRequest(
            nodes=shape.nodes, gpus_per_node=shape.gpus, exclusive=shape.whole, excluded=excluded
        )
        return floor.chosen(place(cluster, request, most=1, terrain=self._terrain)[0].nodes)

    def order(self, floor: Floor, chosen: int) -> Sequence[NodeName]:
        """As the protocol says."""
        return rank_order(floor.names(chosen), floor.fabric).nodes


def chooser(policy: SchedulingPolicy, draw: random.Random) -> Chooser:
    """Return who chooses.

    Args:
        policy: by name.
        draw: where chance comes from, if it has a part.
    """
    makers: dict[SchedulingPolicy, Callable[[], Chooser]] = {
        SchedulingPolicy.SLURM_TREE: SlurmTree,
        SchedulingPolicy.PACK: Pack,
        SchedulingPolicy.RANDOM: lambda: AnyNodes(draw),
        SchedulingPolicy.DEEPLINK: DeepLink,
    }
    return makers[policy]()
