"""Who is dead: one table of witnesses, for the launcher and for the watchdog. Pure.

An agent that is heard clears its node, whatever else is said. Else Slurm's word alone is enough, and any two other
witnesses are. One alone is a doubt: nothing is done, and it is looked at again after a minute. The one brake is
for more silence at once than can be believed. `docs/verdicts.md` has the table for people.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

from deeplink.core.config import ConfigError
from deeplink.core.text import nearest

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


# How much evidence is enough, and how a site changes that.

_REMEDY = 'docs/verdicts.md, thresholds, lists them; `recovery = "silence_s=5 brake_s=120"` sets two.'


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """When evidence is enough, in seconds where the name ends so; docs/verdicts.md gives the reason of each."""

    silence_s: float = 2.5  # an agent, a machine or a batch host that is silent for so long is a witness
    doubt_s: float = 1.5  # a node silent for so long is in doubt; probes must have failed for so long
    away_probes: int = 3  # and so many of them
    settle_s: float = 0.5  # after ranks failed, every node must answer a question asked this much later
    tense_agent_s: float = 0.6  # an agent silent for so long makes the watchdog probe
    tense_beat_s: float = 2.2  # a launcher silent for so long does
    launcher_lost_s: float = 20.0  # a launcher silent for so long, though all its nodes answer, is lost
    help_itself_s: float = 5.0  # so long may a launcher take to begin its recovery from a known loss
    # The one brake: more at once than this, or than a tenth if that is more, are told and left alone for so long.
    most_at_once: int = 2
    brake_s: float = 60.0
    told_s: float = 20.0  # what a node's checks found counts for so long after it was told
    attend_s: float = 10.0  # an agent not heard for so long is silent
    resume_s: float = 10.0  # nodes that we drained are taken back once they have answered for so long
    resume_sick_s: float = 60.0  # the same where checks had drained it, and for a leaf, which may come and go


def is_braked(silent_s: Collection[float], of: int, policy: Thresholds) -> bool:
    """Whether so many of `of` are silent at once, the last one for less than `brake_s`, that it may be us.

    A tenth is believed, and `most_at_once` in any case: a small job loses one node, or two, like any other.

    >>> is_braked([3.0, 3.0], 4, Thresholds()), is_braked([3.0] * 3, 4, Thresholds())
    (False, True)
    >>> is_braked([61.0] * 3, 4, Thresholds()), is_braked([3.0] * 90, 1_000, Thresholds())
    (False, False)
    """
    return len(silent_s) > max(policy.most_at_once, of // 10) and min(silent_s) < policy.brake_s


T = TypeVar("T", bound=Thresholds)
_KINDS = {one.name: float if one.name.endswith("_s") else int for one in fields(Thresholds)}


def with_thresholds(policy: T, text: str) -> T:
    """Return a policy with the thresholds that a site sets, as `NAME=NUMBER NAME=NUMBER`, or raise ConfigError.

    >>> with_thresholds(Thresholds(), "silence_s=5 most_at_once=4").silence_s
    5.0
    """
    values = {}
    for word in text.replace(",", " ").split():
        name, _, number = word.partition("=")
        if name not in _KINDS:
            meant = nearest(name, _KINDS)
            problem = f"{name!r} is no threshold{meant and f'; is {meant} meant?'}"
            raise ConfigError("configuration", "recovery", problem, _REMEDY)
        try:
            values[name] = _KINDS[name](number)
        except ValueError:
            values[name] = math.nan
        if not 0 < values[name] < math.inf:
            raise ConfigError(
                "configuration", "recovery", f"{name}={number}: a positive number is needed", _REMEDY
            )
    return replace(policy, **values)  # type: ignore[arg-type] # each by its own kind
