"""What a choice of nodes is like, in numbers, and what that costs; pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

UNUSED = inf
"""Stands for the lowest share of full speed where there is no link whose speed matters."""


@dataclass(frozen=True, slots=True)
class Traits:
    """All that a cost may depend on: two choices of nodes with the same traits cost the same.

    Attributes:
        per_leaf: nodes on each leaf that is touched, the most first.
        switches: switches above the leaves that its nodes hang below, those above them all too.
        degraded: its nodes that are slow, and slow links between switches that its ring uses.
        ports: the lowest share of full speed among its nodes' own links; 1.0 where all are sound.
        leaf_links: the same among the links up from leaves that its ring uses; `UNUSED` where it uses none.
        upper_links: the same among the links up from the switches above these.
        local: share of the job's data that its nodes hold, at most 1.0 (copies on two of them count twice);
            1.0 for a job without data.
        broken: leaves of which all nodes were idle, and of which it takes a part.
        opened: idle nodes of which it takes a part, where a node that is in use would have had the room.
        stranded: nodes it could have had, and leaves over, on the leaves that it touches.
    """

    per_leaf: tuple[int, ...]
    switches: int
    degraded: int
    ports: float
    leaf_links: float
    upper_links: float
    local: float
    broken: int
    opened: int
    stranded: int

    @property
    def nodes(self) -> int:
        """Nodes in all."""
        return sum(self.per_leaf)

    @property
    def leaves(self) -> int:
        """Leaf spread."""
        return len(self.per_leaf)

    @property
    def slowest(self) -> float:
        """The lowest share of full speed among all of these: a ring goes as fast as its slowest hop."""
        return min(self.ports, self.leaf_links, self.upper_links)

    @property
    def crossings(self) -> int:
        """Leaf-to-leaf hops of the ring over its nodes in the best order: one for each leaf, none on one alone."""
        return self.leaves if self.leaves > 1 else 0


Cost = Callable[[Traits], float]
"""What a choice costs; less is better. Must not depend on anything but its argument."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The cost where no model of the step time is at hand: a weighted sum, in crossings of a ring of eight nodes.

    The weights are a choice, and say what is traded for what; they are not measured. A ring over one leaf more
    crosses once more (1) and reaches one leaf more (0.5: a tree all-reduce and all barriers feel it). A link of
    half the speed halves that of the whole ring: as bad as eight crossings. To hold none of the data is as bad as
    four. To break up a whole leaf that a greater job could have had is better than one more leaf. What is counted
    by leaf, switch or node weighs less in a job of more than eight nodes, in proportion: what one of many hops is
    worth shrinks with their number, what all of the data is worth does not.

    Attributes:
        crossing: for each crossing.
        leaf: for each leaf but the first.
        switch: for each switch above the leaves.
        degraded: for each slow node or link.
        broken: for each whole leaf broken up.
        opened: for each idle node of which a part is taken.
        slow: for the slowest hop, times (1 / its share of full speed - 1).
        remote: for all of the data not being held; in proportion.
        reference: up to so many nodes, the first six count in full.
    """

    crossing: float = 1.0
    leaf: float = 0.5
    switch: float = 0.25
    degraded: float = 0.5
    broken: float = 0.75
    opened: float = 0.1
    slow: float = 8.0
    remote: float = 4.0
    reference: int = 8

    def __call__(self, traits: Traits) -> float:
        """Return the cost."""
        counted = (
            self.crossing * traits.crossings
            + self.leaf * (traits.leaves - 1)
            + self.switch * traits.switches
            + self.degraded * traits.degraded
            + self.broken * traits.broken
            + self.opened * traits.opened
        )
        share = min(self.reference / traits.nodes, 1.0)
        return share * counted + self.slow * (1.0 / traits.slowest - 1.0) + self.remote * (1.0 - traits.local)


DEFAULT_COST: Cost = Weights()
