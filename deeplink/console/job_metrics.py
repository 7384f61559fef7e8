"""The console's metrics of what it shows: nodes, incidents, and each job that has not ended, a bounded number."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector
from typing_extensions import override

from deeplink.console.nodes import ShownHealth
from deeplink.core import metrics
from deeplink.core.text import printable
from deeplink.scheduler.jobs.picture import pace
from deeplink.scheduler.recovery.records import IncidentOutcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client.metrics_core import Metric

    from deeplink.console.collect import Readings
    from deeplink.console.jobs import JobView
    from deeplink.console.snapshot import ConsoleSnapshot
    from deeplink.core.metrics import MetricRow

MOST_SERIES = 500
"""Jobs that have series of their own, those that need a hand first."""
LONGEST_NAME = 64

Sample = tuple["MetricRow", tuple[str, ...], float]
"""A metric, the values of its labels, its value."""


def samples(job: JobView, readings: Readings) -> Iterator[Sample]:
    """Yield what is known of one job; what is not known is left out."""
    key = str(job.id)
    yield metrics.JOB_INFO, (key, *(printable(text)[:LONGEST_NAME] for text in (job.label, job.name, job.user))), 1
    yield metrics.JOB_STATE, (key, job.word), 1
    if not job.watched:
        return
    steps = [each.last_step for each in job.attempts if each.last_step is not None]
    rates = pace([point for point in readings.journal.reports.get(job.id, ()) if point.rank == 0])
    known: dict[MetricRow, float | None] = {
        metrics.JOB_RANKS: job.world_size,
        metrics.JOB_ATTEMPTS: len(job.attempts),
        metrics.JOB_STEP: job.step,
        metrics.JOB_HIGHEST_STEP: max(steps, default=None),
        metrics.JOB_REPEATED_STEPS: job.repeated_steps,
        metrics.JOB_REPORT_TIME: rates.unix,
        metrics.JOB_STEPS_PER_SECOND: job.rate,
        metrics.JOB_READ_WAIT: rates.reads.waited_s if rates.reads else None,
        metrics.JOB_CHECKPOINT_TIME: rates.saved.unix if rates.saved else None,
    }
    for row, value in known.items():
        if value is not None:
            yield row, (key,), value
    if rates.reads:
        for place in ("local", "peer", "home", "source"):
            yield metrics.JOB_SAMPLES, (key, place), getattr(rates.reads, place)


@dataclass(slots=True, eq=False)  # a registry tells collectors apart
class JobCollector(Collector):
    """Gives the samples of the newest look at a scrape."""

    newest: tuple[Sample, ...] = ()

    @override
    def collect(self) -> Iterable[Metric]:
        """Return a family for each metric of which there is a sample."""
        families: dict[str, Metric] = {}
        for row, labels, value in self.newest:
            family = families.setdefault(row.name, _family(row))
            suffix = {"counter": "_total", "info": "_info"}.get(row.kind, "")
            family.add_sample(family.name + suffix, dict(zip(row.labels, labels, strict=True)), value)
        return families.values()


def _family(row: MetricRow) -> Metric:
    kinds = {"counter": CounterMetricFamily, "info": InfoMetricFamily}
    name = row.name.removesuffix("_total").removesuffix("_info")
    family: Metric = kinds.get(row.kind, GaugeMetricFamily)(name, row.means, labels=row.labels)
    return family


def _has_series(job: JobView) -> bool:
    # A job that its user holds, and that nobody watches, is its user's affair.
    return not job.over if job.watched else bool(job.remedy) and not job.pending_reason.startswith("JobHeldUser")


_jobs = JobCollector()
metrics.CONSOLE.registry.register(_jobs)


def measure(snapshot: ConsoleSnapshot, readings: Readings) -> None:
    """Put what the page shows into the metrics."""
    nodes = Counter(node.health for node in snapshot.nodes)
    for health in ShownHealth:
        metrics.CONSOLE_NODES.labels(health.value).set(nodes[health])
    incidents = Counter(each.outcome for each in snapshot.incidents)
    for outcome in IncidentOutcome:
        metrics.CONSOLE_INCIDENTS.labels(outcome.value).set(incidents[outcome])
    told = [job for job in snapshot.jobs if _has_series(job)]
    metrics.CONSOLE_JOBS_LEFT_OUT.set(max(0, len(told) - MOST_SERIES))
    states = Counter(job.word for job in snapshot.jobs)
    counted: list[Sample] = [(metrics.CONSOLE_JOBS, (word,), count) for word, count in states.items()]
    # In one step: a scrape in between sees the series of the look before, or of this one.
    _jobs.newest = (*counted, *(sample for job in told[:MOST_SERIES] for sample in samples(job, readings)))
