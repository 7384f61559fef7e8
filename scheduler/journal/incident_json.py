"""What an incident cost, how grave it is, the news of it, and its JSON document. Pure."""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from deeplink.scheduler.recovery.records import Action, IncidentKind, IncidentOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from deeplink.scheduler.recovery.records import ActionRecord, Incident, RankStack

HOUR_S = 3600.0

GOES_ON = frozenset(
    {
        IncidentKind.STRAGGLER,
        IncidentKind.LAUNCHER_RESTARTED,
        IncidentKind.NODE_SICK,
        IncidentKind.SLURMD_LOST,
        IncidentKind.STORAGE_FROZEN,
        IncidentKind.AGENTS_SILENT,
    }
)
"""Kinds at which ranks go on."""
_STOPS_NOTHING = frozenset({Action.NONE, Action.COMMENT, Action.DRAIN})
_CRITICAL = frozenset(
    {
        IncidentKind.JOB_STRANDED,
        IncidentKind.SWITCH_SUSPECT,
        IncidentKind.WATCHDOG_PARTITIONED,
        IncidentKind.APPLICATION_FAILED,
        IncidentKind.STORAGE_FROZEN,
    }
)
_INFO = frozenset(
    {IncidentKind.NODE_BACK, IncidentKind.REQUEUE_HELD, IncidentKind.PREEMPTED, IncidentKind.TIME_LIMIT}
)


class Gravity(Enum):
    """How much an incident should disturb people."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"

    def __ge__(self, other: Gravity) -> bool:
        """Whether this is at least as grave.

        >>> Gravity.CRITICAL >= Gravity.WARNING, Gravity.INFO >= Gravity.WARNING
        (True, False)
        """
        order = list(Gravity)
        return order.index(self) >= order.index(other)


def gravity(incident: Incident) -> Gravity:
    """Return how grave an incident is: critical where a job is lost or people must look, info where not."""
    if incident.outcome is IncidentOutcome.FAILED or incident.kind in _CRITICAL:
        return Gravity.CRITICAL
    return Gravity.INFO if incident.kind in _INFO else Gravity.WARNING


@dataclass(frozen=True, slots=True)
class IncidentNews:
    """One incident in one state (its outcome) that a channel was not told about."""

    incident: Incident
    opened_told: bool = False  # the channel was told about it while it was open

    @property
    def key(self) -> tuple[str, str]:
        """What it is noted under once it was told: the incident's id and state."""
        return self.incident.id, self.incident.outcome.value

    @override
    def __str__(self) -> str:
        return f"{self.incident.id} {self.incident.outcome.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NewsFilter:
    """Which news a channel wants."""

    kinds: frozenset[str] = frozenset()  # of incidents; empty: all
    severity: Gravity = Gravity.INFO  # at least so grave
    opened: bool = True  # that one began
    closed: bool = True  # how it ended

    def grave(self, incident: Incident) -> bool:
        """Whether it is of a kind and severity that the channel is told of."""
        return (not self.kinds or incident.kind in self.kinds) and gravity(incident) >= self.severity

    def wants(self, news: IncidentNews) -> bool:
        """Whether the channel is to be told."""
        # An incident that was over before anybody was told that it began is told once, whichever is wanted.
        incident = news.incident
        if not self.grave(incident):
            return False
        if incident.outcome is IncidentOutcome.OPEN:
            return self.opened
        return self.closed or not news.opened_told


# Cost: rank-hours (one hour of one rank, on one GPU) that brought the training no further.


@dataclass(frozen=True, slots=True)
class Cost:
    """What one incident cost, in rank-hours; None where it is not known."""

    standing_h: float | None  # while the ranks stood still
    repeated_h: float | None  # for steps done again

    @property
    def total_h(self) -> float | None:
        """Both together.

        >>> Cost(1.5, 0.5).total_h, Cost(1.5, None).total_h
        (2.0, None)
        """
        return None if self.standing_h is None or self.repeated_h is None else self.standing_h + self.repeated_h


NOTHING = Cost(0.0, 0.0)


def cost(incident: Incident) -> Cost:
    """Return what an incident cost (docs/incidents.md); nothing if it was about no job.

    >>> from deeplink.core.types import Attempt
    >>> from deeplink.scheduler.recovery.records import Incident
    >>> cost(Incident(id="i", kind="node-dead", attempt=Attempt(17, 0, 0), began_unix=100.0, detected_unix=103.0,
    ...     recovered_unix=110.0, steps_repeated=20, ranks=720, step_s=0.5))
    Cost(standing_h=2.0, repeated_h=2.0)
    """
    if incident.attempt is None:
        return NOTHING
    return Cost(_standing_h(incident), _repeated_h(incident))


def _standing_h(incident: Incident) -> float | None:
    if incident.kind in GOES_ON and incident.action in _STOPS_NOTHING:
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
    """Return the cost of each incident by its id, so that they may be added up."""
    # An attempt stands still once, whatever was recorded of it: the dearest of its incidents has the cost, the
    # others have none.
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
    """What the incidents with something in common cost together."""

    name: str  # what they have in common: a kind, a node, a week
    incidents: int  # how many
    open: int  # those without an end
    failed: int  # those that ended their job
    lost_h: float  # rank-hours that the others are known to have cost
    unknown: int  # those whose cost is not known, or not wholly


def totals(incidents: Sequence[Incident], name: Callable[[Incident], str]) -> tuple[Total, ...]:
    """Return the totals of all incidents by `name`, the dearest first."""
    costs = charged(incidents)
    groups: defaultdict[str, list[Incident]] = defaultdict(list)
    for incident in incidents:
        groups[name(incident)].append(incident)
    made = [
        Total(
            name=key,
            incidents=len(group),
            open=sum(incident.outcome is IncidentOutcome.OPEN for incident in group),
            failed=sum(incident.outcome is IncidentOutcome.FAILED for incident in group),
            lost_h=sum((costs[each.id].standing_h or 0.0) + (costs[each.id].repeated_h or 0.0) for each in group),
            unknown=sum(costs[each.id].total_h is None for each in group),
        )
        for key, group in groups.items()
    ]
    return tuple(sorted(made, key=lambda total: (-total.lost_h, -total.incidents, total.name)))


def week_of(incident: Incident) -> str:
    """Return the ISO week an incident began in, in local time, such as 2026-W47; empty where that is not known."""
    return time.strftime("%G-W%V", time.localtime(incident.began_unix)) if incident.began_unix else ""


def document(incident: Incident) -> dict[str, Any]:
    """Return an incident with its timeline and cost; without its stacks, which are not read with it."""
    told = dataclasses.asdict(dataclasses.replace(incident, stacks=()))
    del told["stacks"]
    told["attempt"] = str(incident.attempt) if incident.attempt else None
    told["outcome"] = incident.outcome.value
    spent = cost(incident)
    told["cost"] = {
        "rank_hours": spent.total_h,
        "standing_rank_hours": spent.standing_h,
        "repeated_rank_hours": spent.repeated_h,
    }
    return told


def whole_document(
    incident: Incident, actions: Iterable[ActionRecord], stacks: Iterable[RankStack]
) -> dict[str, Any]:
    """Return all that is on record of an incident."""
    done = [
        {**dataclasses.asdict(action), "attempt": str(action.attempt) if action.attempt else None}
        for action in actions
    ]
    return {**document(incident), "actions": done, "stacks": [dataclasses.asdict(stack) for stack in stacks]}
