"""What the journal is asked only when somebody looks: one incident, one job's curve, incidents of long ago.

Each question has a connection of its own: it must not wait for, nor hold up, what every page shows.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deeplink.console.jobs import drawn, finite
from deeplink.console.query import Query, paged
from deeplink.console.snapshot import incident_row
from deeplink.console.timeline import NodeEvent, kept, measurements, timeline
from deeplink.scheduler.journal.incident_json import cost, whole_document
from deeplink.scheduler.journal.journal import Journal, JournalMissingError
from deeplink.scheduler.recovery.records import IncidentOutcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from deeplink.scheduler.recovery.records import Incident

MOST_AGAIN = 8  # nodes that are named because they failed again and again
MOST_WEEKS = 26
WEEK_S, MONDAY_UNIX = 7 * 86_400.0, 4 * 86_400.0  # the first Monday of Unix time
MOST_FOUND = 2_000  # incidents that one question finds, the newest; a user and a text choose among these


@dataclass(frozen=True, slots=True)
class JournalQueries:
    """The journal at this path, asked from any thread; raises `JournalError` where it cannot be read."""

    journal: Path

    def incident(self, name: str) -> dict[str, Any] | None:
        """Return all that is on record of the incident of this number or id, or None."""
        with Journal(self.journal, read_only=True) as journal:
            hit = journal.incident(name)
            if hit is None:
                return None
            return whole_document(hit, journal.actions(incident=hit.id), journal.stacks(hit.id))

    def curve(self, job: int) -> dict[str, Any] | None:
        """Return the metric and the points of a job's curve, or None where nothing is on record of it."""
        try:
            with Journal(self.journal, read_only=True) as journal:
                record = journal.job(job)
                if record is None:
                    return None
                metric, points = drawn(journal.points(job))
        except JournalMissingError:  # nothing was ever watched
            return None
        thinned = kept(points, [each.attempt for each in record.attempts])
        return {
            "metric": metric,
            "points": [[point.step, finite(point.value), attempt] for point, attempt in thinned],
        }

    def timeline(self, job: int, asked: Query, found: Iterable[NodeEvent]) -> dict[str, Any] | None:
        """Return a job's course between two moments, or None where nothing is on record of it.

        `found`: what its nodes' own checks find now.
        """
        try:
            with Journal(self.journal, read_only=True) as journal:
                record = journal.job(job)
                if record is None:
                    return None
                points = journal.points(job, after_unix=asked.since)
                rank_times = journal.rank_times(job, after_unix=asked.since)
                mine = journal.incidents(job=job)
                began = record.attempts[0].began_unix
                others = journal.incidents(since_unix=began, limit=MOST_FOUND)
        except JournalMissingError:  # nothing was ever watched
            return None
        nodes = {name for each in record.attempts for name in (*each.nodes, *each.spares)}
        known = {each.id for each in mine}
        events = [
            NodeEvent(each.began_unix, str(each.node), each.kind, f"incidents/{each.number}")
            for each in others
            if each.node in nodes and each.id not in known
        ]
        events += [each for each in found if each.node in nodes and each.unix >= began]
        made = timeline(record, points, mine, events, since=asked.since, until=asked.until)
        return {**made, "measured": measurements(record, points, rank_times, asked.until)}

    def incidents(self, asked: Query, users: Mapping[int, str]) -> dict[str, Any]:
        """Return a page of the incidents of this kind, node, job, user and time, the newest first.

        `users`: whose job is which. Also: how many there are of each kind and week, what they cost whom, and which
        nodes failed again and again.
        """
        found: list[tuple[Incident, str]] = []
        with suppress(JournalMissingError), Journal(self.journal, read_only=True) as journal:
            for each in self._found(journal, asked):
                user = users.get(each.attempt.job, "") if each.attempt else ""
                if asked.user in {"", user} and _fits(each, asked):
                    found.append((each, user))
        nodes = Counter(each.node for each, _ in found if each.node)
        made = paged(found, asked.page, "incidents")
        return {
            **made,
            "incidents": [{**incident_row(each), "user": user} for each, user in made["incidents"]],
            "kinds": dict(Counter(each.kind for each, _ in found).most_common()),
            "again": [[node, count] for node, count in nodes.most_common(MOST_AGAIN) if count > 1],
            "weeks": _weeks(each for each, _ in found),
            "costs": _costs(found),
        }

    def _found(self, journal: Journal, asked: Query) -> tuple[Incident, ...]:
        job = int(asked.job) if _is_number(asked.job) else None
        return journal.incidents(
            job=job,
            kind=asked.kind or None,
            node=asked.node or None,
            since_unix=asked.since,
            until_unix=asked.until,
            outcome=asked.state if job is None else "",  # one that hit several may have ended for this job alone
            limit=MOST_FOUND,
        )


def _weeks(found: Iterable[Incident]) -> list[list[float]]:
    """Count the incidents of each week and those of them without a good end; by its Monday, oldest first."""
    every: Counter[float] = Counter()
    bad: Counter[float] = Counter()
    for each in found:
        monday = (each.began_unix - MONDAY_UNIX) // WEEK_S * WEEK_S + MONDAY_UNIX
        every[monday] += 1
        bad[monday] += each.outcome is not IncidentOutcome.RECOVERED
    return [[monday, every[monday], bad[monday]] for monday in sorted(every)[-MOST_WEEKS:]]


def _costs(found: Iterable[tuple[Incident, str]]) -> list[list[Any]]:
    """Return how many rank-hours each user lost, as far as that is known; who lost the most first."""
    hours: Counter[str] = Counter()
    for each, user in found:
        hours[user] += cost(each).total_h or 0.0  # type: ignore[assignment] # a Counter of hours
    return [[user, round(lost, 2)] for user, lost in hours.most_common() if lost > 0]


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 19  # noqa: PLR2004 - 63 bits


def _fits(each: Incident, asked: Query) -> bool:
    if asked.state not in {"", each.outcome.value}:
        return False
    if asked.job and not _is_number(asked.job) and each.job != asked.job:
        return False
    text = asked.text.lower()
    return not text or any(text in word.lower() for word in (each.kind, each.node or "", each.job, each.evidence))
