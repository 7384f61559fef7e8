"""The predicted step as the cost of a choice of nodes: the one part of placement that imports numpy; pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from deeplink.scheduler.model.reading import reads_of
from deeplink.scheduler.model.step import Demands, predict_one, reading
from deeplink.scheduler.placement.cost import DEFAULT_COST

if TYPE_CHECKING:
    from deeplink.scheduler.model.constants import Constants
    from deeplink.scheduler.model.job import Job
    from deeplink.scheduler.model.step import ReadTime, StepTime
    from deeplink.scheduler.placement.cost import Cost, Traits

TIES = 0.01
"""What else a choice costs is worth less than this share of its step, and so decides between steps that are as
good as equal: of less the model is not sure (on measured steps it is 2 to 5 % off)."""


class Predicted:
    """Costs in seconds: the predicted step, and up to `TIES` of it by the default weights.

    The ranks are taken to be numbered along the tree, as `deeplink run` does: the ring leaves each switch once.

    Args:
        job: what is computed, summed and read.
        constants: what the machines do; reading counts where they tell of it, and the job does.
        ranks_per_node: ranks on each node.
        ties: what else a choice costs.
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
