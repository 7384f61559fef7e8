"""What to run, and its layout over the nodes. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from typing_extensions import override

from deeplink.scheduler.launch.environment import Launch, NodeFacts
from deeplink.scheduler.launch.recipes import DEFAULT
from deeplink.scheduler.topology.graph import fabric_from_addresses
from deeplink.scheduler.topology.groups import Groups
from deeplink.scheduler.topology.order import choose_active, rank_order, ring_crossings, stock_order
from deeplink.text import counted

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from deeplink.scheduler.launch.container import Container
    from deeplink.scheduler.topology.graph import Fabric
    from deeplink.scheduler.topology.order import Cut
    from deeplink.types import Attempt, NodeName


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """What is to be run.

    Attributes:
        command: each rank's command.
        per_node: ranks on each node, but for those in `each`.
        count: nodes that run ranks.
        elastic: nodes that are enough where no more are left; 0: all of `count`, or none.
        hold: whether the job is to be held, not ended, when it fails by its own fault; None: where there is
            something to go on from.
        step_timeout_s: without a newer step for so long the ranks are started again; 0: never; None: as the job's
            own history tells, and what its processes do.
        replace_stragglers: start the ranks again without a slow one's node, where a spare is left.
        margin_s: how long before the time limit the ranks are to save; None: learned.
        strand_timeout_s: how long to wait for a rescue when too few nodes are left.
        passed_on: settings every rank gets in its environment.
        group_sizes: ranks that are to stay together, as `Groups` has them.
        recipe_name: which framework the ranks are of.
        container: what they run in; None for the nodes themselves.
        fabric: where the nodes hang; what their agents say where None.
        folder: where the attempts' host files lie; None for nowhere.
        each: ranks of nodes, where they differ.
    """

    command: tuple[str, ...]
    per_node: int
    count: int
    elastic: int = 0
    hold: bool | None = None
    step_timeout_s: float | None = 0.0
    replace_stragglers: bool = False
    margin_s: float | None = None
    strand_timeout_s: float = 900.0
    passed_on: Mapping[str, str] = field(default_factory=dict)
    group_sizes: tuple[int, ...] = ()
    recipe_name: str = DEFAULT
    container: Container | None = None
    fabric: Fabric | None = None
    folder: Path | None = None
    each: Mapping[NodeName, int] = field(default_factory=dict)

    @property
    def groups(self) -> Groups:
        """What is to stay together.

        Raises:
            GroupSizeError: the sizes do not divide each other.
        """
        return Groups(self.group_sizes, self.per_node)

    def count_for(self, nodes: int) -> int:
        """Return on how many of so many nodes the ranks can run; 0 where they cannot.

        >>> LaunchSpec(command=(), per_node=2, count=8, elastic=2, group_sizes=(4,)).count_for(7)
        6
        """
        if nodes >= self.count:
            return self.count
        return next((size for size in range(nodes, self._least - 1, -1) if self._divides(size)), 0)

    @property
    def fewest(self) -> int | None:
        """The smallest number of nodes that is enough; None where only all are."""
        return next((size for size in range(self._least, self.count) if self._divides(size)), None)

    @property
    def _least(self) -> int:
        return self.elastic or self.count

    def _divides(self, nodes: int) -> bool:
        return all(nodes * self.per_node % size == 0 for size in self.group_sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """A launch, and what its order of nodes is worth.

    Attributes:
        crossings: leaf-to-leaf hops of the ring over the ranks.
        crossings_stock: the same on the same nodes in the order Slurm would have used.
        groups: what was to stay together.
        cut: the groups that do not.
        unknown: nodes of the ranks of which nobody knows where they hang: they were taken for neighbours.
    """

    launch: Launch
    crossings: int
    crossings_stock: int
    groups: Groups = field(default_factory=Groups)
    cut: tuple[Cut, ...] = ()
    unknown: int = 0

    @override
    def __str__(self) -> str:
        resting = f"; resting: {', '.join(self.resting)}" if self.resting else ""
        said = f"{counted(self.launch.world_size, 'rank')} on {', '.join(self.active)}{resting}; {self.ring}"
        return "; ".join((said, *self.together))

    @property
    def ring(self) -> str:
        """How the ring over the ranks lies on the fabric, for people."""
        if not self.crossings:
            return "the ring stays on one leaf"
        return f"the ring crosses leaves {self.crossings} times (in Slurm's own order {self.crossings_stock})"

    @property
    def together(self) -> tuple[str, ...]:
        """How each size of groups lies on the fabric, for people."""
        said = []
        for size in self.groups.sizes:
            cut = [one for one in self.cut if one.size == size]
            count = self.launch.world_size // size
            if not cut:
                said.append(f"{counted(count, 'group')} of {size} ranks within a {self._within(size)}")
            else:
                said.append(f"{len(cut)} of {counted(count, 'group')} of {size} ranks cut ({cut[0]})")
        return tuple(said)

    @property
    def cut_by_size(self) -> dict[int, int]:
        """How many groups of each size do not stay together."""
        return {size: sum(one.size == size for one in self.cut) for size in self.groups.sizes}

    def _within(self, size: int) -> str:
        if self.groups.span(size) == 1:
            return "node each"
        if self.unknown < 2:  # noqa: PLR2004 - one node is its own neighbour at most
            return "leaf each"
        return f"leaf each, if the {self.unknown} nodes that no topology is known of share one"

    @property
    def active(self) -> tuple[NodeName, ...]:
        """Nodes of the ranks, in rank order."""
        return tuple(facts.name for facts in self.launch.nodes)

    @property
    def resting(self) -> tuple[NodeName, ...]:
        """Nodes that run no ranks."""
        return tuple(facts.name for facts in self.launch.spares)


def lay_out(
    order: LaunchSpec,
    attempt: Attempt,
    facts: Mapping[NodeName, NodeFacts],
    *,
    port: int,
    before: Collection[NodeName] = (),
    restarts: int = 0,
    max_restarts: int = 0,
) -> RankLayout:
    """Choose the nodes of an attempt and put its ranks in order.

    Args:
        order: what to run.
        attempt: which attempt it is.
        facts: the nodes that can be used.
        port: for rank 0.
        before: the nodes of the attempt before, to be preferred among equals: they hold data already.
        restarts: how often the job's ranks were started before.
        max_restarts: how often they may be.

    Raises:
        TooFewNodesError: there are fewer nodes than the order wants.
        GroupSizeError: the order's groups do not divide its ranks.
    """
    fabric = order.fabric
    if fabric is None:
        fabric = fabric_from_addresses({node: one.topology_address for node, one in facts.items()})
    choice = choose_active(list(facts), order.count, fabric, before, order.groups)
    ranks = rank_order(choice.active, fabric, order.groups)
    launch = Launch(
        attempt=attempt,
        nodes=tuple(facts[node] for node in ranks.nodes),
        spares=tuple(facts[node] for node in choice.spares),
        ranks=tuple(order.each.get(node, order.per_node) for node in ranks.nodes),
        restarts=restarts,
        max_restarts=max_restarts,
        master_port=port,
        passed_on=order.passed_on,
        recipe_name=order.recipe_name,
        host_file="" if order.folder is None else str(order.folder / f"hostfile.{attempt}"),
        container=order.container,
    )
    return RankLayout(
        launch=launch,
        crossings=ranks.crossings,
        crossings_stock=ring_crossings(stock_order(ranks.nodes), fabric.leaf),
        groups=order.groups,
        cut=ranks.cut,
        unknown=sum(not fabric.path(node) for node in ranks.nodes),
    )
