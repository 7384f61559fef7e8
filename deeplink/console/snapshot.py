"""Everything the page shows at one moment, as one frozen value made from what the sources said; pure."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from deeplink.console.concerns import Concern, Headline, concerns, headline, listed
from deeplink.console.jobs import MOST_JOBS, JobView, job_views, seats
from deeplink.console.nodes import NodeView, SwitchView, node_views, switch_views
from deeplink.scheduler.journal.incident_json import cost
from deeplink.scheduler.recovery.records import Incident, IncidentOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from deeplink.console.collect import DatasetView, FactSource, Readings
    from deeplink.console.feed import Document

Made = TypeVar("Made")
Parts = tuple[object, ...]


@dataclass(slots=True)
class Memo:
    """What was made last and from which parts: most nodes and jobs stay as they are. One thread only."""

    _made: dict[str, tuple[Parts, Any]] = field(default_factory=dict)
    _rows: dict[str, dict[Any, tuple[Parts, Any]]] = field(default_factory=dict)

    def of(self, kind: str, parts: Parts, make: Callable[..., Made]) -> Made:
        """Return `make(*parts)`; the very object that it was where the parts are equal to the last ones."""
        have = self._made.get(kind)
        if have is None or have[0] != parts:
            have = self._made[kind] = (parts, make(*parts))
        made: Made = have[1]
        return made

    def rows(self, kind: str, parts: Mapping[Any, Parts], make: Callable[..., Made]) -> dict[Any, Made]:
        """Return the same for each key; rows whose keys are not there any more are forgotten."""
        had, now = self._rows.get(kind, {}), {}
        for key, mine in parts.items():
            have = had.get(key)
            now[key] = have if have is not None and have[0] == mine else (mine, make(*mine))
        self._rows[kind] = now
        return {key: made for key, (_, made) in now.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleSnapshot:
    """Contents of the page; of the jobs all, of which the document has the first `MOST_JOBS`."""

    unix: float
    interval_s: float
    cluster: str
    headline: Headline
    concerns: tuple[Concern, ...]
    sources: tuple[FactSource, ...]
    switches: tuple[SwitchView, ...]
    nodes: tuple[NodeView, ...]
    jobs: tuple[JobView, ...]
    incidents: tuple[Incident, ...]
    datasets: tuple[DatasetView, ...]
    demo: bool = False

    words: Counter[str]  # how many jobs are in which state

    def document(self, memo: Memo | None = None) -> Document:
        """Return the snapshot as JSON has it: tables keyed by name or id, so that changes can be named.

        With the `memo` of the look before, tables and rows that stayed as they were are the very same objects.
        """
        known = memo or Memo()

        def table(kind: str, rows: tuple[Any, ...], key: str, plain: Callable[[Any], Any] = _plain) -> Document:
            def made(rows: tuple[Any, ...]) -> Document:
                return known.rows(kind, {str(getattr(each, key)): (each,) for each in rows}, plain)

            return known.of(f"table of {kind}", (rows,), made)

        return {
            "schema": 1,
            "unix": self.unix,
            "interval_s": self.interval_s,
            "cluster": self.cluster,
            "demo": self.demo,
            "jobs_known": len(self.jobs),
            "running": self.words["running"],
            "headline": _plain(self.headline),
            "concerns": {each.key: {**_plain(each), "order": order} for order, each in enumerate(self.concerns)},
            "sources": {each.name: {**_plain(each), "order": order} for order, each in enumerate(self.sources)},
            "switches": table("switches", self.switches, "name"),
            "nodes": table("nodes", self.nodes, "name"),
            "jobs": table("jobs", self.jobs[:MOST_JOBS], "id", job_row),
            "incidents": table("incidents", self.incidents, "id", incident_row),
            "datasets": table("datasets", self.datasets, "key"),
        }


def build(readings: Readings, memo: Memo | None = None) -> ConsoleSnapshot:
    """Return what the page shows for these readings; `memo`: what was made at the last look."""
    memo = memo or Memo()
    jobs = job_views(readings, memo)
    switches = switch_views(readings, memo)
    nodes = node_views(readings, memo.of("seats", (jobs,), seats), switches, memo)
    words = memo.of("words", (jobs,), lambda jobs: Counter(job.word for job in jobs))
    found = concerns(readings, nodes, jobs, memo)
    opened = sum(each.outcome is IncidentOutcome.OPEN for each in readings.journal.incidents)
    return ConsoleSnapshot(
        unix=round(readings.unix, 3),
        interval_s=readings.interval_s,
        cluster=readings.slurm.cluster,
        headline=headline(found, len(nodes), words, opened),
        concerns=listed(found),
        sources=readings.sources,
        switches=switches,
        nodes=nodes,
        jobs=jobs,
        incidents=readings.journal.incidents,
        datasets=readings.datasets,
        demo=readings.demo,
        words=words,
    )


def job_row(each: JobView) -> dict[str, Any]:
    """Return a job as lists have it: without its attempts, which name their nodes again and again."""
    row = job_document(each)
    del row["attempts"]
    return row


def job_document(each: JobView) -> dict[str, Any]:
    """Return all that is known of a job, as JSON has it."""
    return _plain(each)


def incident_row(each: Incident) -> dict[str, Any]:
    """Return an incident as lists have it: without its timeline and its stacks."""
    plain = _plain(dataclasses.replace(each, timeline=(), stacks=()))
    attempt = each.attempt
    # Its timeline and its stacks are asked for when somebody opens it, and again when there are more moments.
    del plain["timeline"], plain["stacks"]
    return {
        **plain,
        "attempt": each.attempt_name,
        "job_label": each.job,
        "job": attempt.job if attempt else None,
        "moments": len(each.timeline),
        "rank_hours": cost(each).total_h,
    }


_SIMPLE = (str, int, float)


def _plain(value: Any) -> dict[str, Any]:
    return {name: _json(getattr(value, name)) for name in value.__dataclass_fields__}


def _json(value: Any) -> Any:
    if value is None or isinstance(value, _SIMPLE):
        return value
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [_json(each) for each in value]
    if dataclasses.is_dataclass(value):
        return _plain(value)
    return value
