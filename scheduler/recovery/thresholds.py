"""How much evidence is enough: the thresholds of launcher and watchdog alike, and how a site changes them."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TypeVar

from deeplink.core.config import ConfigError
from deeplink.core.text import nearest

REMEDY = 'docs/verdicts.md, thresholds, lists them; `recovery = "silence_s=5 brake_s=120"` sets two.'


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
            raise ConfigError("configuration", "recovery", problem, REMEDY)
        try:
            values[name] = _KINDS[name](number)
        except ValueError:
            values[name] = math.nan
        if not 0 < values[name] < math.inf:
            raise ConfigError("configuration", "recovery", f"{name}={number}: a positive number is needed", REMEDY)
    return replace(policy, **values)  # type: ignore[arg-type] # each by its own kind
