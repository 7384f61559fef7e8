"""Everything the page shows at one moment, as one frozen value made from what the sources said; pure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from deeplink.console.concerns import Concern, Headline, concerns, headline, listed
from deeplink.console.jobs import MOST_JOBS, JobView, job_views, seats
from deeplink.console.memo import Memo
from deeplink.console.nodes import NodeView, SwitchView, node_views, switch_views
from deeplink.scheduler.journal.incident_json import cost
from deeplink.scheduler.recovery.records import Incident, IncidentOutcome

if TYPE_CHECKING:
    from deeplink.console.collect import Readings
    from deeplink.console.datasets import DatasetView
    from deeplink.console.feed import Document
    from deeplink.console.sources import FactSource


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

    def document(self, memo: Memo | None = None) -> Document:
        """Return the snapshot as JSON has it: tables keyed by name or id, so that changes can be named.

        Where `memo` is that of the look before, rows that stayed as they were are the very same objects.
        """
        known = memo or Memo()
        return {
            "schema": 1,
            "unix": self.unix,
            "interval_s": self.interval_s,
            "cluster": self.cluster,
            "demo": self.demo,
            "jobs_known": len(self.jobs),
            "running": sum(job.word == "running" for job in self.jobs),
            "headline": _plain(self.headline),
            "concerns": {each.key: {**_plain(each), "order": order} for order, each in enumerate(self.concerns)},
            "sources": {each.name: {**_plain(each), "order": order} for order, each in enumerate(self.sources)},
            "switches": {each.name: _plain(each) for each in self.switches},
            "nodes": {each.name: known.of("node row", each.name, (each,), _plain) for each in self.nodes},
            "jobs": {
                str(each.id): known.of("job row", each.id, (each,), job_row) for each in self.jobs[:MOST_JOBS]
            },
            "incidents": {
                each.id: known.of("incident row", each.id, (each,), incident_row) for each in self.incidents
            },
            "datasets": {each.key: _plain(each) for each in self.datasets},
        }


def build(readings: Readings, memo: Memo | None = None) -> ConsoleSnapshot:
    """Return what the page shows for these readings; `memo`: what was made at the last look."""
    memo = memo or Memo()
    memo.look()
    jobs = job_views(readings, memo)
    switches = switch_views(readings)
    nodes = node_views(readings, seats(jobs), switches, memo)
    found = concerns(readings, nodes, jobs)
    opened = sum(each.outcome is IncidentOutcome.OPEN for each in readings.journal.incidents)
    return ConsoleSnapshot(
        unix=round(readings.unix, 3),
        interval_s=readings.interval_s,
        cluster=readings.slurm.cluster,
        headline=headline(found, nodes, jobs, opened),
        concerns=listed(found),
        sources=readings.sources,
        switches=switches,
        nodes=nodes,
        jobs=jobs,
        incidents=readings.journal.incidents,
        datasets=readings.datasets,
        demo=readings.demo,
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
