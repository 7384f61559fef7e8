"""What measurements on the same nodes say beyond the model; pure.

Two placements of one shape differ. In four of the six measured jobs of Pollux (OSDI 2021) what the model leaves
over is alike on the same nodes from one batch size to the next (correlation 0.41 to 0.57), and hardly on other
nodes in the same shape (0.03 to 0.17). So it is the nodes': an effect of the allocation, drawn once, with a noise
of each measurement on top (a random-effects model). Its best linear prediction is the mean of what was left over,
shrunk by how much of it is noise (Robinson, That BLUP Is a Good Thing, Statistical Science 1991); with nothing
measured there it is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deeplink.scheduler.model.arrays import Floats


@dataclass(frozen=True, slots=True)
class Scatter:
    """How much of what the model leaves over is whose: variances of log step time.

    Attributes:
        between: of the allocations' effects.
        within: of single measurements on one allocation.
    """

    between: float
    within: float

    def effect(self, left_over: Sequence[float] | Floats) -> float:
        """Return the effect of an allocation, as a difference of log step time.

        Args:
            left_over: log(measured / predicted) of what was measured there; may be empty.
        """
        if len(left_over) == 0 or self.between <= 0:
            return 0.0
        return float(self.between * np.sum(left_over) / (self.between * len(left_over) + self.within))


def scatter(left_over: Floats, allocations: np.ndarray[tuple[int], np.dtype[np.intp]]) -> Scatter:
    """Return the two variances, estimated by analysis of variance.

    Searle, Casella and McCulloch, Variance Components, 1992, for one random factor of unequal numbers.

    Args:
        left_over: log(measured / predicted) of each measurement.
        allocations: the number of the allocation that each was made on.
    """
    _, inverse, counts = np.unique(allocations, return_inverse=True, return_counts=True)
    groups, total = len(counts), len(left_over)
    if groups < 2 or total <= groups:  # noqa: PLR2004 (with one group, or one measurement each, nobody can tell)
        return Scatter(0.0, float(np.var(left_over)) if total else 0.0)
    means = np.bincount(inverse, weights=left_over) / counts
    within = float(((left_over - means[inverse]) ** 2).sum() / (total - groups))
    typical = (total - (counts**2).sum() / total) / (groups - 1)
    across = float((counts * (means - left_over.mean()) ** 2).sum() / (groups - 1))
    return Scatter(max((across - within) / float(typical), 0.0), within)
