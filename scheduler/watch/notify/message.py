"""News in words, and as JSON. Pure."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deeplink.scheduler.watch.costs import cost
from deeplink.scheduler.watch.incident_json import document
from deeplink.scheduler.watch.notify.news import gravity
from deeplink.scheduler.watch.records import IncidentOutcome
from deeplink.text import counted, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deeplink.scheduler.watch.notify.news import IncidentNews

MOST_LINES = 20
MOST_DOCUMENTS = 100
LONGEST_EVIDENCE = 400


@dataclass(frozen=True, slots=True)
class Notification:
    """What a channel sends.

    Attributes:
        id: the same for the same news: whoever gets it twice can tell.
        subject: in one line.
        text: in full.
        document: for programs; `text` is in it, which is what Slack and its like show.
    """

    id: str
    subject: str
    text: str
    document: dict[str, Any]


def message(batch: Sequence[IncidentNews], host: str) -> Notification:
    """Return one message about all news of a batch, told by the watchdog on `host`."""
    name = hashlib.sha256("\n".join(str(news) for news in batch).encode()).hexdigest()[:32]
    subject = f"DeepLink: {_subject(batch)}"
    lines = [_line(news) for news in batch[:MOST_LINES]]
    if len(batch) > MOST_LINES:
        lines.append(f"and {len(batch) - MOST_LINES} more: deeplink incidents")
    text = "\n".join(lines if len(batch) == 1 else [_subject(batch), *lines])
    told = {
        "id": name,
        "text": text,
        "host": host,
        "test": False,
        "incidents": [
            {**document(news.incident), "severity": gravity(news.incident).value}
            for news in batch[:MOST_DOCUMENTS]
        ],
        "incidents_left_out": max(0, len(batch) - MOST_DOCUMENTS),
    }
    return Notification(name, subject, text, told)


def trial(host: str, unix: float) -> Notification:
    """Return a message that says it is a test, of the watchdog on `host`."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix))
    name = hashlib.sha256(f"test {host} {unix}".encode()).hexdigest()[:32]
    text = f"This is a test of notifications by `deeplink watch` on {host}, {when}. Nothing is wrong."
    told = {"id": name, "text": text, "host": host, "test": True, "incidents": [], "incidents_left_out": 0}
    return Notification(name, "DeepLink: a test of notifications", text, told)


def _subject(batch: Sequence[IncidentNews]) -> str:
    if len(batch) == 1:
        return _title(batch[0])
    kinds = Counter(news.incident.kind for news in batch).most_common(3)
    states = Counter(news.incident.outcome.value for news in batch)
    nodes = sorted({news.incident.node for news in batch if news.incident.node})
    where = f" on {', '.join(nodes[:4])}{' and others' if len(nodes) > 4 else ''}" if nodes else ""  # noqa: PLR2004 - names in a title
    of = ", ".join(f"{count} {kind}" for kind, count in kinds)
    how = ", ".join(f"{count} {state}" for state, count in states.items())
    return f"{counted(len(batch), 'incident')} ({of}){where}: {how}"


def _title(news: IncidentNews) -> str:
    incident = news.incident
    about = [incident.kind]
    if incident.node:
        about.append(f"on {incident.node}")
    if incident.attempt:
        about.append(f"job {incident.job}")
    return f"{' '.join(about)}: {incident.outcome.value}"


def _line(news: IncidentNews) -> str:
    incident = news.incident
    words = [_title(news)]
    if incident.recovered_unix:
        words.append(f"after {max(0.0, incident.recovered_unix - incident.began_unix):.1f} s")
    if incident.action != "none":
        words.append(f"by {incident.action}")
    lost = cost(incident).total_h
    if incident.outcome is not IncidentOutcome.OPEN and lost:
        words.append(f"at {lost:,.2f} GPU-hours")
    evidence = printable(incident.evidence)[:LONGEST_EVIDENCE]
    return f"{' '.join(words)}{f'. {evidence}' if evidence else ''} (deeplink incident {incident.number})"
