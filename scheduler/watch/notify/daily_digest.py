"""The day in one message: what happened, what healed by itself, what is still open, whom it cost. Pure."""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING

from deeplink.core.text import counted
from deeplink.scheduler.journal.incident_json import IncidentNews, totals
from deeplink.scheduler.recovery.records import IncidentOutcome
from deeplink.scheduler.watch.notify.delivery import NewsContext, Notification, line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deeplink.scheduler.recovery.records import Incident

DAY_S = 86_400.0
MOST_OF_EACH = 8


def latest(at: tuple[int, int], unix: float) -> float:
    """Return when it was last `at` hour and minute of the day, local time; both in Unix seconds."""
    for before in (0, 1):
        now = time.localtime(unix)
        due = time.mktime((now.tm_year, now.tm_mon, now.tm_mday - before, *at, 0, 0, 0, -1))
        if due <= unix:
            return due
    return unix


def digest(
    incidents: Sequence[Incident], host: str, known: NewsContext, since_unix: float, until_unix: float
) -> Notification:
    """Return the message of all incidents between two times; there is at least one."""
    begun, ended = (time.strftime("%Y-%m-%d %H:%M", time.localtime(unix)) for unix in (since_unix, until_unix))
    where = f" {known.cluster}" if known.cluster else ""
    (whole,) = totals(incidents, lambda _incident: "all")
    healed = whole.incidents - whole.failed - whole.open
    cost = f", {whole.lost_h:,.2f} rank-hours lost" + (f" ({whole.unknown} not known)" if whole.unknown else "")
    states = f"{healed} recovered, {whole.failed} failed, {whole.open} open"
    said = f"{counted(whole.incidents, 'incident')}: {states}{cost}"
    lines = [f"{begun} to {ended}, {said}"]
    parts: tuple[tuple[str, Callable[[Incident], str]], ...] = (
        ("By kind", lambda one: str(one.kind)),
        ("By node", lambda one: str(one.node or "")),
        ("By job", lambda one: f"{one.job} ({known.owner(one)})" if known.owner(one) else one.job),
    )
    for title, name in parts:
        found = [total for total in totals(incidents, name) if total.name]
        lines += [
            f"{title}: {total.name}: {total.incidents}, {total.lost_h:,.2f} rank-hours"
            for total in found[:MOST_OF_EACH]
        ]
        if len(found) > MOST_OF_EACH:
            lines.append(f"{title}: and {len(found) - MOST_OF_EACH} more")
    opened = [one for one in incidents if one.outcome is IncidentOutcome.OPEN]
    lines += [f"Still open: {line(IncidentNews(one), known)}" for one in opened[:MOST_OF_EACH]]
    text = "\n".join(lines)
    name_of_it = hashlib.sha256(f"digest {host} {since_unix} {until_unix}".encode()).hexdigest()[:32]
    told = {
        "id": name_of_it,
        "text": text,
        "host": host,
        "cluster": known.cluster,
        "test": False,
        "digest": {
            "since": since_unix,
            "until": until_unix,
            "incidents": whole.incidents,
            "recovered": healed,
            "failed": whole.failed,
            "open": whole.open,
            "lost_rank_hours": whole.lost_h,
            "cost_unknown": whole.unknown,
        },
        "incidents": [],
        "incidents_left_out": whole.incidents,
    }
    return Notification(name_of_it, f"DeepLink{where}: the day: {said}", text, told)
