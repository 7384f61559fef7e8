"""Counts incidents in the metrics and writes a line for each: a channel that tells nobody else."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deeplink.scheduler.journal.incident_json import HOUR_S, Gravity, cost, gravity
from deeplink.scheduler.recovery.records import BLAMELESS, IncidentKind, IncidentOutcome
from deeplink.scheduler.watch.notify.delivery import line

if TYPE_CHECKING:
    from deeplink.core.clock import Clock
    from deeplink.core.metrics import WatchMetrics
    from deeplink.core.types import Attempt
    from deeplink.scheduler.journal.incident_json import IncidentNews
    from deeplink.scheduler.journal.journal import Journal
    from deeplink.scheduler.recovery.records import Incident

log = logging.getLogger(__name__)
log.setLevel(logging.INFO)  # every incident is a line, also where nobody asked for more

CHANNEL = "~metrics"
"""What the journal calls it: no name that a site's channel may have."""
LOOK_S = 10.0
NODES_S, LAST_S = 60.0, 7 * 86_400.0
MOST_NEWS, MOST_NODES, MOST_ATTEMPTS, MOST_READ = 500, 200, 1_000, 5_000
_LEVELS = {Gravity.INFO: logging.INFO, Gravity.WARNING: logging.WARNING, Gravity.CRITICAL: logging.ERROR}
_NOT_THE_NODE = BLAMELESS | {IncidentKind.SWITCH_SUSPECT, IncidentKind.AGENTS_SILENT, IncidentKind.NODE_BACK}
_KNOWN = frozenset(kind.value for kind in IncidentKind)


@dataclass(slots=True, kw_only=True)
class IncidentCounter:
    """Counts each state of an incident once, also over restarts of the watchdog. One thread only."""

    journal: Journal
    clock: Clock
    metrics: WatchMetrics
    name: str = CHANNEL
    _unnoted: dict[tuple[str, str], str] = field(default_factory=dict)
    _charged_s: dict[Attempt, float] = field(default_factory=dict)
    _nodes_at: float = float("-inf")

    def tell(self) -> float:
        """Count what is new; return in how many seconds to look again, unless there is news."""
        for news in self.journal.unsent(self.name, limit=MOST_NEWS):
            if news.key not in self._unnoted:
                self._unnoted[news.key] = "sent"
                self._count(news)
        if self._unnoted:
            self.journal.note_sent(self.name, dict(self._unnoted), self.clock.unix())
            self._unnoted.clear()
        opened = Counter(_kind(one) for one in self.journal.incidents(only_open=True, limit=MOST_READ))
        self.metrics.incidents_by_kind.clear()
        for kind, count in opened.items():
            self.metrics.incidents_by_kind.labels(kind).set(count)
        if self.clock.monotonic() - self._nodes_at >= NODES_S:
            self._nodes_at = self.clock.monotonic()
            self._count_nodes()
        return LOOK_S

    def _count(self, news: IncidentNews) -> None:
        incident, kind = news.incident, _kind(news.incident)
        log.log(_LEVELS[gravity(incident)], "incident: %s", line(news))
        exemplar = {"attempt": incident.attempt_name[:64]} if incident.attempt else None
        if not news.opened_told:
            seconds = max(0.0, incident.detected_unix - incident.began_unix)
            self.metrics.detect_seconds.labels(kind).observe(seconds, exemplar)
        if incident.outcome is IncidentOutcome.OPEN:
            return
        self.metrics.incidents_ended.labels(kind, incident.outcome.value).inc()
        if incident.attempt is None:
            return
        if incident.outcome is IncidentOutcome.RECOVERED and incident.recovered_unix:
            seconds = max(0.0, incident.recovered_unix - incident.began_unix)
            self.metrics.resume_seconds.labels(kind).observe(seconds, exemplar)
        # An attempt stands still once, whatever was recorded of it: of its incidents the dearest counts.
        spent = cost(incident)
        lost_s = ((spent.standing_h or 0.0) + (spent.repeated_h or 0.0)) * HOUR_S
        before = self._charged_s.pop(incident.attempt, 0.0)
        self._charged_s[incident.attempt] = max(before, lost_s)
        self.metrics.lost_rank_seconds.labels(kind).inc(max(0.0, lost_s - before))
        if len(self._charged_s) > MOST_ATTEMPTS:
            del self._charged_s[next(iter(self._charged_s))]

    def _count_nodes(self) -> None:
        since = self.clock.unix() - LAST_S
        found = self.journal.incidents(since_unix=since, limit=MOST_READ)
        counts = Counter(one.node for one in found if one.node and one.kind not in _NOT_THE_NODE)
        self.metrics.node_incidents.clear()
        for node, count in counts.most_common(MOST_NODES):
            self.metrics.node_incidents.labels(node).set(count)


def _kind(incident: Incident) -> str:
    return incident.kind if incident.kind in _KNOWN else "other"  # a launcher may be newer, and say anything
