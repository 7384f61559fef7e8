"""What the journal is asked only when somebody looks: one incident, one job's curve, incidents of long ago.

Each question has a connection of its own: it must not wait for, nor hold up, what every page shows.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deeplink.console.curve import CurveView
from deeplink.console.query import Query, paged
from deeplink.console.snapshot import incident_row
from deeplink.scheduler.journal.incident_json import whole_document
from deeplink.scheduler.journal.journal import Journal, JournalMissingError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from deeplink.scheduler.recovery.records import Incident

MOST_AGAIN = 8  # nodes that are named because they failed again and again
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
                made = CurveView.of(journal.points(job), [each.attempt for each in record.attempts])
        except JournalMissingError:  # nothing was ever watched
            return None
        return {"metric": made.metric, "points": [list(point) for point in made.points]}

    def incidents(self, asked: Query, users: Mapping[int, str]) -> dict[str, Any]:
        """Return a page of the incidents of this kind, node, job, user and time, the newest first.

        `users`: whose job is which. Also: how many there are of each kind, and which nodes failed again and again.
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


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 19  # noqa: PLR2004 - 63 bits


def _fits(each: Incident, asked: Query) -> bool:
    if asked.state not in {"", each.outcome.value}:
        return False
    if asked.job and not _is_number(asked.job) and each.job != asked.job:
        return False
    text = asked.text.lower()
    return not text or any(text in word.lower() for word in (each.kind, each.node or "", each.job, each.evidence))
