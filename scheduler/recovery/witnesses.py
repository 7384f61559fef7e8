"""Who is dead: one table of witnesses, for the launcher and for the watchdog. Pure.

An agent that is heard clears its node, whatever else is said. Else Slurm's word alone is enough, and any two other
witnesses are. One alone is a doubt: nothing is done, and it is looked at again after a minute. The one brake is
for more silence at once than can be believed. `docs/verdicts.md` has the table for people.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection


class NodeWitness(Enum):
    """Who says that a node is gone."""

    SLURM = "Slurm calls it down"
    CONTROLLER = "slurmctld misses it too"
    AGENT = "no agent on it is heard"
    MACHINE = "its machine does not answer"
    RANKS = "its ranks make no steps"


def is_proved(said: Collection[NodeWitness]) -> bool:
    """Whether these witnesses end all doubt of a node that no one hears.

    >>> is_proved({NodeWitness.AGENT}), is_proved({NodeWitness.AGENT, NodeWitness.MACHINE})
    (False, True)
    >>> is_proved({NodeWitness.SLURM})
    True
    """
    return NodeWitness.SLURM in said or len(set(said)) > 1


def is_braked(silent_s: Collection[float], of: int, *, most: int, brake_s: float) -> bool:
    """Whether so many of `of` are silent at once, the last one for less than `brake_s`, that it may be us.

    A tenth is believed, and `most` in any case: a small job or cluster loses one node, or two, like any other.

    >>> is_braked([3.0, 3.0], 4, most=2, brake_s=60.0), is_braked([3.0] * 3, 4, most=2, brake_s=60.0)
    (False, True)
    >>> is_braked([61.0] * 3, 4, most=2, brake_s=60.0), is_braked([3.0] * 90, 1_000, most=2, brake_s=60.0)
    (False, False)
    """
    return len(silent_s) > max(most, of // 10) and min(silent_s) < brake_s
