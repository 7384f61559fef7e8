"""Every Prometheus metric DeepLink has, in one table for each daemon: what it exports, and no other's.

Counters end in `_total`, units are base units (seconds, bytes). docs/metrics.md is written from these tables, and
alerts and dashboards are held against them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric: its name as Prometheus has it, its kind, what it means, its labels."""

    name: str
    kind: str  # counter, gauge, histogram, info
    means: str
    labels: tuple[str, ...]


class MetricTable:
    """The metrics of one kind of daemon, in a registry of their own."""

    def __init__(self, daemon: str, registry: CollectorRegistry | None = None) -> None:
        self.daemon = daemon
        self.registry = registry or CollectorRegistry()
        self.rows: list[MetricRow] = []
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def counter(self, name: str, means: str, *labels: str) -> Counter:
        """Add a counter, of a name without its `_total`."""
        self.row(f"{name}_total", "counter", means, labels)
        return Counter(name, means, labels, registry=self.registry)

    def gauge(self, name: str, means: str, *labels: str) -> Gauge:
        """Add a gauge."""
        self.row(name, "gauge", means, labels)
        return Gauge(name, means, labels, registry=self.registry)

    def histogram(
        self, name: str, means: str, *labels: str, buckets: Sequence[float] = Histogram.DEFAULT_BUCKETS
    ) -> Histogram:
        """Add a histogram."""
        self.row(name, "histogram", means, labels)
        return Histogram(name, means, labels, buckets=buckets, registry=self.registry)

    def info(self, name: str, means: str) -> Info:
        """Add facts that never change, as labels of a 1; of a name without its `_info`."""
        self.row(f"{name}_info", "info", means, ())
        return Info(name, means, registry=self.registry)

    def row(self, name: str, kind: str, means: str, labels: Sequence[str] = ()) -> MetricRow:
        """Add a row alone: of a metric that a collector of its own fills at each scrape."""
        self.rows.append(MetricRow(name, kind, means, tuple(labels)))
        return self.rows[-1]


# The node agent.
AGENT = MetricTable("node agent")
NODE_INFO = AGENT.info("deeplink_node", "This node agent: its member name and version.")
NODE_REPORTS = AGENT.counter("deeplink_node_reports", "Progress reports received from ranks.", "answer")
NODE_HEARTBEATS = AGENT.counter("deeplink_node_heartbeats", "Heartbeats answered.")

# The node's own checks.
HEALTH_FINDINGS = AGENT.gauge("deeplink_health_findings", "What a check finds wrong now.", "check", "severity")
HEALTH_LOOKS = AGENT.counter("deeplink_health_looks", "Looks of a check, by what was seen.", "check", "answer")
HEALTH_LOOK_SECONDS = AGENT.gauge("deeplink_health_look_seconds", "Time the last look of a check took.", "check")
HEALTH_ATTENDED = AGENT.gauge(
    "deeplink_health_attended_time_seconds", "When the watchdog last heard of this node, Unix time."
)

# What its store holds; the agent sets the functions that read them at each scrape.
STORE_SHARDS = AGENT.gauge("deeplink_store_shards", "Sealed shards in this node's store.")
STORE_BYTES = AGENT.gauge("deeplink_store_bytes", "Bytes of the sealed shards in this node's store.")
STORE_FREE_BYTES = AGENT.gauge("deeplink_store_free_bytes", "Free bytes of the file system the store is on.")
STORE_VERIFIED_SHARDS = AGENT.gauge(
    "deeplink_store_verified_shards", "Shards that were read whole and found right here."
)
STORE_VERIFIED_BYTES = AGENT.gauge("deeplink_store_verified_bytes", "Bytes of the verified shards.")
STORE_BUDGET_BYTES = AGENT.gauge("deeplink_store_budget_bytes", "Most bytes of shards this node's store may hold.")
STORE_HEALTHY = AGENT.gauge(
    "deeplink_store_healthy", "1 while the store's disk takes writes and can be listed, else 0."
)
STORE_WIPED = AGENT.gauge(
    "deeplink_store_wiped", "1 if the store was found empty at the start and held shards before."
)
STORE_EVICTED_SHARDS = AGENT.counter("deeplink_store_evicted_shards", "Shards dropped.", "reason")
STORE_FILLED_SHARDS = AGENT.counter(
    "deeplink_store_filled_shards", "Shards brought or given up, by outcome.", "outcome"
)
STORE_FILLED_BYTES = AGENT.counter("deeplink_store_filled_bytes", "Bytes of shards brought, by origin.", "origin")
STORE_FILLING_SHARDS = AGENT.gauge(
    "deeplink_store_filling_shards", "Shards that are being brought, or wait for it."
)
SCRUB_SHARDS = AGENT.counter("deeplink_scrub_shards", "Shards read again as a whole, by what was found.", "result")
SCRUB_BYTES = AGENT.counter("deeplink_scrub_bytes", "Bytes of shards read again as a whole.")
SCRUB_OLDEST_SECONDS = AGENT.gauge(
    "deeplink_scrub_oldest_seconds", "Time since the shard verified longest ago was."
)
SOURCE_BYTES = AGENT.counter("deeplink_source_bytes", "Bytes read from sources to bring shards.")
SOURCE_REQUESTS = AGENT.counter("deeplink_source_requests", "Files and ranges read from sources to bring shards.")
SOURCE_WAIT_SECONDS = AGENT.counter("deeplink_source_wait_seconds", "Time that the cap on source load has cost.")

# Reads over the wire and what became of shards.
CACHE_SERVED_SAMPLES = AGENT.counter("deeplink_cache_served_samples", "Samples sent to other nodes.")
CACHE_SERVED_BYTES = AGENT.counter("deeplink_cache_served_bytes", "Bytes of samples sent to other nodes.")
CACHE_REFUSED_SAMPLES = AGENT.counter(
    "deeplink_cache_refused_samples", "Samples asked for that could not be sent."
)
CACHE_DAMAGED_SHARDS = AGENT.counter(
    "deeplink_cache_damaged_shards", "Shards found damaged and put into quarantine."
)
CACHE_REFUSED_CALLS = AGENT.counter(
    "deeplink_cache_refused_calls",
    "Calls and connections of our own clients refused: too many, or out of bounds.",
)
CACHE_READ_SECONDS = AGENT.histogram("deeplink_cache_read_seconds", "Time to answer a batch of samples.")

# The operator console.
CONSOLE = MetricTable("console")
CONSOLE_STREAMS = CONSOLE.gauge("deeplink_console_streams", "Event streams that are open.")
CONSOLE_DROPPED = CONSOLE.counter(
    "deeplink_console_streams_dropped", "Event streams ended because the browser did not read."
)
CONSOLE_UP = CONSOLE.gauge(
    "deeplink_console_source_up", "1 if the last question to this source was answered.", "source"
)
CONSOLE_READ = CONSOLE.gauge(
    "deeplink_console_source_read_time_seconds", "When the source last answered, Unix time.", "source"
)
CONSOLE_QUERIES = CONSOLE.counter("deeplink_console_queries", "Questions asked of a source.", "source", "answer")
CONSOLE_QUERY_SECONDS = CONSOLE.histogram(
    "deeplink_console_query_seconds", "Time a source took to answer.", "source"
)
CONSOLE_NODES = CONSOLE.gauge("deeplink_console_nodes", "Nodes by health, as the console shows them.", "health")
CONSOLE_INCIDENTS = CONSOLE.gauge("deeplink_console_incidents", "Incidents on the page, by outcome.", "outcome")


CONSOLE_JOBS = CONSOLE.row(
    "deeplink_console_jobs", "gauge", "Jobs by state, as the console shows them.", ("state",)
)
CONSOLE_JOBS_LEFT_OUT = CONSOLE.gauge(
    "deeplink_console_jobs_left_out", "Running or held jobs too many to have series of their own."
)

# Of each job that has not ended; `deeplink.console.job_metrics` fills them at a scrape, for a bounded number.
JOB_INFO = CONSOLE.row(
    "deeplink_job_info", "info", "What a job is called, to join by `job_id`.", ("job_id", "label", "name", "user")
)
JOB_STATE = CONSOLE.row("deeplink_job_state", "gauge", "1 for the job's state in a word.", ("job_id", "state"))
JOB_RANKS = CONSOLE.row("deeplink_job_ranks", "gauge", "Ranks of the job's newest attempt.", ("job_id",))
JOB_ATTEMPTS = CONSOLE.row(
    "deeplink_job_attempts_total",
    "counter",
    "Attempts of the job on record: all but the first are restarts.",
    ("job_id",),
)
JOB_STEP = CONSOLE.row("deeplink_job_step", "gauge", "Newest step that the job reported.", ("job_id",))
JOB_HIGHEST_STEP = CONSOLE.row(
    "deeplink_job_highest_step", "gauge", "Highest step that any attempt of the job reported.", ("job_id",)
)
JOB_REPEATED_STEPS = CONSOLE.row(
    "deeplink_job_repeated_steps", "gauge", "Steps of the job that were run again.", ("job_id",)
)
JOB_REPORT_TIME = CONSOLE.row(
    "deeplink_job_report_time_seconds", "gauge", "When the job last reported a step, Unix time.", ("job_id",)
)
JOB_STEPS_PER_SECOND = CONSOLE.row(
    "deeplink_job_steps_per_second", "gauge", "Steps per second by the job's newest reports.", ("job_id",)
)
JOB_SAMPLES = CONSOLE.row(
    "deeplink_job_samples_total",
    "counter",
    "Samples that rank 0 and its DataLoader workers read in the newest attempt, by place: local is a hit.",
    ("job_id", "place"),
)
JOB_READ_WAIT = CONSOLE.row(
    "deeplink_job_read_wait_seconds_total",
    "counter",
    "Time that reads of rank 0 and its workers waited for samples not on the node, all of them together.",
    ("job_id",),
)
JOB_CHECKPOINT_TIME = CONSOLE.row(
    "deeplink_job_checkpoint_time_seconds",
    "gauge",
    "When the job last saved a whole checkpoint, Unix time.",
    ("job_id",),
)

_TIMES_S = (0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1_800.0)


class WatchMetrics:
    """The watchdog's metrics, made anew for each watchdog."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        table = MetricTable("watchdog", registry)
        self.rows = table.rows
        self.loop_time = table.gauge(
            "deeplink_watch_loop_time_seconds",
            "When the watchdog's loop last came round, Unix time: a dead man's switch.",
        )
        self.loop_seconds = table.histogram(
            "deeplink_watch_loop_seconds", "Time one round of the watchdog's loop took."
        )
        self.leading = table.gauge("deeplink_watch_leading", "1 while this watchdog leads.")
        self.acting = table.gauge("deeplink_watch_acting", "1 if it may act, 0 if it only observes.")
        self.in_doubt = table.gauge(
            "deeplink_watch_in_doubt", "1 while the watchdog may be cut off itself and takes no action."
        )
        self.jobs = table.gauge("deeplink_watch_jobs", "Jobs that send heartbeats, by phase.", "phase")
        self.beats = table.counter("deeplink_watch_beats", "Heartbeats from launchers.", "answer")
        self.probes = table.counter("deeplink_watch_probes", "Probes of slurmd.", "answer")
        self.slurm_failures = table.counter(
            "deeplink_watch_slurm_failures", "Times Slurm did not answer a question."
        )
        self.verdicts = table.counter("deeplink_watch_verdicts", "Verdicts reached.", "kind")
        self.actions = table.counter("deeplink_watch_actions", "Actions ended.", "remedy", "result")
        self.incidents_open = table.gauge("deeplink_watch_incidents_open", "Incidents without an end.")
        self.journal_time = table.gauge(
            "deeplink_watch_journal_time_seconds", "When the journal last took a write, Unix time."
        )
        self.notify_time = table.gauge(
            "deeplink_watch_notify_time_seconds",
            "Unix time when the channel last had no failed notification.",
            "channel",
        )
        self.notify_waiting = table.gauge(
            "deeplink_watch_notify_waiting", "Incidents waiting to be sent.", "channel"
        )
        self.notify_messages = table.counter(
            "deeplink_watch_notify_messages", "Tries to send a message.", "channel", "result"
        )
        self.incidents_by_kind = table.gauge(
            "deeplink_watch_incidents_open_by_kind", "Incidents without an end, by kind.", "kind"
        )
        self.incidents_ended = table.counter(
            "deeplink_watch_incidents_ended", "Incidents that ended.", "kind", "outcome"
        )
        self.node_incidents = table.gauge(
            "deeplink_watch_node_incidents",
            "Incidents of the last seven days that blame this node; of nodes that have any.",
            "node",
        )
        self.detect_seconds = table.histogram(
            "deeplink_watch_detect_seconds",
            "Time from the first sign of an incident to the verdict.",
            "kind",
            buckets=_TIMES_S,
        )
        self.resume_seconds = table.histogram(
            "deeplink_watch_resume_seconds",
            "Time from the first sign of a recovered incident of a job to the next training step.",
            "kind",
            buckets=_TIMES_S,
        )
        self.lost_rank_seconds = table.counter(
            "deeplink_watch_lost_rank_seconds",
            "Time of ranks that ended incidents are known to have cost: standing still, or steps again.",
            "kind",
        )
