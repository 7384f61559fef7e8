"""What there is to tell of an incident, how grave it is, and whom it concerns. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from typing_extensions import override

from deeplink.scheduler.watch.records import Incident, IncidentKind, IncidentOutcome


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


def gravity(incident: Incident) -> Gravity:
    """Return how grave an incident is: critical where a job is lost or people must look, info where not."""
    if incident.outcome is IncidentOutcome.FAILED or incident.kind in _CRITICAL:
        return Gravity.CRITICAL
    return Gravity.INFO if incident.kind in _INFO else Gravity.WARNING


@dataclass(frozen=True, slots=True)
class IncidentNews:
    """One incident in one state (its outcome) that a channel was not told of.

    Attributes:
        opened_told: the channel was told of it while it was open.
    """

    incident: Incident
    opened_told: bool = False

    @property
    def key(self) -> tuple[str, str]:
        """What it is noted under once it was told: the incident's id and state."""
        return self.incident.id, self.incident.outcome.value

    @override
    def __str__(self) -> str:
        return f"{self.incident.id} {self.incident.outcome.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NewsFilter:
    """Which news a channel wants.

    Attributes:
        kinds: of incidents; empty: all.
        severity: at least so grave.
        opened: that one began.
        closed: how it ended.
    """

    kinds: frozenset[str] = frozenset()
    severity: Gravity = Gravity.INFO
    opened: bool = True
    closed: bool = True

    def wants(self, news: IncidentNews) -> bool:
        """Whether the channel is to be told.

        An incident that was over before anybody was told that it began is told once, whichever is wanted.
        """
        incident = news.incident
        if self.kinds and incident.kind not in self.kinds:
            return False
        if not gravity(incident) >= self.severity:
            return False
        if incident.outcome is IncidentOutcome.OPEN:
            return self.opened
        return self.closed or not news.opened_told
