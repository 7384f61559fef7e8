"""What incidents cost: hours of ranks (one rank, one GPU) that brought the training no further. Pure.

    cost = ranks x (recovered - began) / 3600  +  ranks x steps repeated x seconds of a step / 3600

The first part is the standstill, from the first evidence to the first step of the next attempt; the second is what
was trained again because it came after the last checkpoint. Times are seconds of Unix time, the result is hours.
What is not known is None, never 0: an incident that has no end yet, or whose job ended with it; an attempt of
unknown size; repeated steps of unknown length; and one in which the ranks went on (a straggler, say), at a pace
that nobody measured.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.scheduler.watch.records import Action, IncidentKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from deeplink.scheduler.watch.records import Incident

HOUR_S = 3600.0

_GOES_ON = frozenset(
    {
        IncidentKind.STRAGGLER,
        IncidentKind.NODE_SICK,
        IncidentKind.SLURMD_LOST,
        IncidentKind.STORAGE_FROZEN,
        IncidentKind.AGENTS_SILENT,
        IncidentKind.GRES_LEAKED,
    }
)
_STOPS_NOTHING = frozenset({Action.NONE, Action.COMMENT, Action.DRAIN})


@dataclass(frozen=True, slots=True)
class Cost:
    """What one incident cost, in hours of ranks; None where it is not known.

    Attributes:
        standing_h: while the ranks stood still.
        repeated_h: for steps done again.
    """

    standing_h: float | None
    repeated_h: float | None

    @property
    def total_h(self) -> float | None:
        """Both together.

        >>> Cost(1.5, 0.5).total_h, Cost(1.5, None).total_h
        (2.0, None)
        """
        return None if self.standing_h is None or self.repeated_h is None else self.standing_h + self.repeated_h


NOTHING = Cost(0.0, 0.0)


def cost(incident: Incident) -> Cost:
    """Return what an incident cost, by the formula above; nothing if it was about no job.

    >>> from deeplink.types import Attempt
    >>> from deeplink.scheduler.watch.records import Incident
    >>> cost(Incident(id="i", kind="node-dead", attempt=Attempt(17, 0, 0), began_unix=100.0, detected_unix=103.0,
    ...     recovered_unix=110.0, steps_repeated=20, ranks=720, step_s=0.5))
    Cost(standing_h=2.0, repeated_h=2.0)
    """
    if incident.attempt is None:
        return NOTHING
    return Cost(_standing_h(incident), _repeated_h(incident))


def _standing_h(incident: Incident) -> float | None:
    if incident.kind in _GOES_ON and incident.action in _STOPS_NOTHING:
        return None
    if not incident.ranks or not incident.recovered_unix:
        return None
    return incident.ranks * max(0.0, incident.recovered_unix - incident.began_unix) / HOUR_S


def _repeated_h(incident: Incident) -> float | None:
    if not incident.recovered_unix:
        return None
    if not incident.steps_repeated:
        return 0.0
    known = incident.ranks and incident.step_s
    return incident.ranks * incident.steps_repeated * incident.step_s / HOUR_S if known else None


def charged(incidents: Iterable[Incident]) -> dict[str, Cost]:
    """Return the cost of each incident by its id, so that they may be added up.

    An attempt stands still once, whatever was recorded of it: the dearest of its incidents has the cost, the
    others have none.
    """
    by_attempt: defaultdict[object, list[Incident]] = defaultdict(list)
    for incident in incidents:
        by_attempt[incident.attempt or incident.id].append(incident)
    costs: dict[str, Cost] = {}
    for group in by_attempt.values():
        costs.update((incident.id, NOTHING) for incident in group)
        dearest = max(group, key=_dearness)
        costs[dearest.id] = cost(dearest)
    return costs


def _dearness(incident: Incident) -> tuple[float, float]:
    total = cost(incident).total_h
    return (-1.0 if total is None else total, -incident.began_unix)


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """What the incidents with something in common cost together.

    Attributes:
        name: what they have in common: a kind, a node, a week.
        incidents: how many.
        open: those without an end.
        failed: those that ended their job.
        lost_h: hours of ranks that the others are known to have cost.
        unknown: those whose cost is not known, or not wholly.
    """

    name: str
    incidents: int
    open: int
    failed: int
    lost_h: float
    unknown: int


def totals(incidents: Sequence[Incident], name: Callable[[Incident], str]) -> tuple[Total, ...]:
    """Return the totals of all incidents by `name`, the dearest first."""
    costs = charged(incidents)
    groups: defaultdict[str, list[Incident]] = defaultdict(list)
    for incident in incidents:
        groups[name(incident)].append(incident)
    made = [_total(key, group, costs) for key, group in groups.items()]
    return tuple(sorted(made, key=lambda total: (-total.lost_h, -total.incidents, total.name)))


def _total(name: str, group: Sequence[Incident], costs: Mapping[str, Cost]) -> Total:
    return Total(
        name=name,
        incidents=len(group),
        open=sum(incident.outcome.value == "open" for incident in group),
        failed=sum(incident.outcome.value == "failed" for incident in group),
        lost_h=sum((costs[hit.id].standing_h or 0.0) + (costs[hit.id].repeated_h or 0.0) for hit in group),
        unknown=sum(costs[incident.id].total_h is None for incident in group),
    )


def week_of(incident: Incident) -> str:
    """Return the ISO week an incident began in, in local time, such as 2026-W47; empty where that is not known."""
    return time.strftime("%G-W%V", time.localtime(incident.began_unix)) if incident.began_unix else ""
