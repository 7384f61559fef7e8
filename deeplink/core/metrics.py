"""Every Prometheus metric DeepLink has, so that names are found, and kept apart, in one place.

Counters end in `_total`, units are base units (seconds, bytes). Daemons serve them with `serve_metrics`.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import REGISTRY, Counter, Gauge, Histogram, Info, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer
from typing_extensions import override

from deeplink.core.admission import Admission, ConnectionBounds
from deeplink.core.clock import SystemClock
from deeplink.core.errors import DeepLinkError

if TYPE_CHECKING:
    from collections.abc import Callable

    from prometheus_client import CollectorRegistry

log = logging.getLogger(__name__)

PROOF_S = 10.0
"""Time for the request for metrics, and for the answer."""
_CONNECTIONS = 64

# The node agent.
NODE_INFO = Info("deeplink_node", "This node agent: its member name and version.")
NODE_REPORTS = Counter("deeplink_node_reports", "Progress reports received from ranks.", ["answer"])
NODE_HEARTBEATS = Counter("deeplink_node_heartbeats", "Heartbeats answered.")

# The node's own checks.
HEALTH_FINDINGS = Gauge("deeplink_health_findings", "What a check finds wrong now.", ["check", "severity"])
HEALTH_LOOKS = Counter("deeplink_health_looks", "Looks of a check, by what was seen.", ["check", "answer"])
HEALTH_LOOK_SECONDS = Gauge("deeplink_health_look_seconds", "Time the last look of a check took.", ["check"])
HEALTH_ATTENDED = Gauge(
    "deeplink_health_attended_time_seconds", "When the watchdog last heard of this node, Unix time."
)

# What its store holds; the agent sets the functions that read them at each scrape.
STORE_SHARDS = Gauge("deeplink_store_shards", "Sealed shards in this node's store.")
STORE_BYTES = Gauge("deeplink_store_bytes", "Bytes of the sealed shards in this node's store.")
STORE_FREE_BYTES = Gauge("deeplink_store_free_bytes", "Free bytes of the file system the store is on.")
STORE_VERIFIED_SHARDS = Gauge(
    "deeplink_store_verified_shards", "Shards that were read whole and found right here."
)
STORE_VERIFIED_BYTES = Gauge("deeplink_store_verified_bytes", "Bytes of the verified shards.")
STORE_BUDGET_BYTES = Gauge("deeplink_store_budget_bytes", "Most bytes of shards this node's store may hold.")
STORE_HEALTHY = Gauge("deeplink_store_healthy", "1 while the store's disk takes writes and can be listed, else 0.")
STORE_WIPED = Gauge("deeplink_store_wiped", "1 if the store was found empty at the start and held shards before.")
STORE_EVICTED_SHARDS = Counter("deeplink_store_evicted_shards", "Shards dropped.", ["reason"])
STORE_FILLED_SHARDS = Counter(
    "deeplink_store_filled_shards", "Shards brought or given up, by outcome.", ["outcome"]
)
STORE_FILLED_BYTES = Counter("deeplink_store_filled_bytes", "Bytes of shards brought, by origin.", ["origin"])
STORE_FILLING_SHARDS = Gauge("deeplink_store_filling_shards", "Shards that are being brought, or wait for it.")
SCRUB_SHARDS = Counter("deeplink_scrub_shards", "Shards read again as a whole, by what was found.", ["result"])
SCRUB_BYTES = Counter("deeplink_scrub_bytes", "Bytes of shards read again as a whole.")
SCRUB_OLDEST_SECONDS = Gauge("deeplink_scrub_oldest_seconds", "Time since the shard verified longest ago was.")
SOURCE_BYTES = Counter("deeplink_source_bytes", "Bytes read from sources to bring shards.")
SOURCE_REQUESTS = Counter("deeplink_source_requests", "Files and ranges read from sources to bring shards.")
SOURCE_WAIT_SECONDS = Counter("deeplink_source_wait_seconds", "Time that the cap on source load has cost.")

# Reads over the wire and what became of shards.
CACHE_SERVED_SAMPLES = Counter("deeplink_cache_served_samples", "Samples sent to other nodes.")
CACHE_SERVED_BYTES = Counter("deeplink_cache_served_bytes", "Bytes of samples sent to other nodes.")
CACHE_REFUSED_SAMPLES = Counter("deeplink_cache_refused_samples", "Samples asked for that could not be sent.")
CACHE_DAMAGED_SHARDS = Counter("deeplink_cache_damaged_shards", "Shards found damaged and put into quarantine.")
CACHE_REFUSED_CALLS = Counter(
    "deeplink_cache_refused_calls",
    "Calls and connections of our own clients refused: too many, or out of bounds.",
)
CACHE_READ_SECONDS = Histogram("deeplink_cache_read_seconds", "Time to answer a batch of samples.")

# The operator console.
CONSOLE_STREAMS = Gauge("deeplink_console_streams", "Event streams that are open.")
CONSOLE_DROPPED = Counter(
    "deeplink_console_streams_dropped", "Event streams ended because the browser did not read."
)
CONSOLE_UP = Gauge("deeplink_console_source_up", "1 if the last question to this source was answered.", ["source"])
CONSOLE_READ = Gauge(
    "deeplink_console_source_read_time_seconds", "When the source last answered, Unix time.", ["source"]
)
CONSOLE_QUERIES = Counter("deeplink_console_queries", "Questions asked of a source.", ["source", "answer"])
CONSOLE_QUERY_SECONDS = Histogram("deeplink_console_query_seconds", "Time a source took to answer.", ["source"])
CONSOLE_NODES = Gauge("deeplink_console_nodes", "Nodes by health, as the console shows them.", ["health"])
CONSOLE_INCIDENTS = Gauge("deeplink_console_incidents", "Incidents on the page, by outcome.", ["outcome"])


class WatchMetrics:
    """The watchdog's metrics, in a registry of their own.

    Not made at import like the others: a node agent must not show a watchdog's dead-man's switch standing at 0.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.loop_time = Gauge(
            "deeplink_watch_loop_time_seconds",
            "When the watchdog's loop last came round, Unix time: a dead man's switch.",
            registry=registry,
        )
        self.loop_seconds = Histogram(
            "deeplink_watch_loop_seconds", "Time one round of the watchdog's loop took.", registry=registry
        )
        self.leading = Gauge("deeplink_watch_leading", "1 while this watchdog leads.", registry=registry)
        self.acting = Gauge("deeplink_watch_acting", "1 if it may act, 0 if it only observes.", registry=registry)
        self.in_doubt = Gauge(
            "deeplink_watch_in_doubt",
            "1 while the watchdog may be cut off itself and takes no action.",
            registry=registry,
        )
        self.jobs = Gauge(
            "deeplink_watch_jobs", "Jobs that send heartbeats, by phase.", ["phase"], registry=registry
        )
        self.beats = Counter("deeplink_watch_beats", "Heartbeats from launchers.", ["answer"], registry=registry)
        self.probes = Counter("deeplink_watch_probes", "Probes of slurmd.", ["answer"], registry=registry)
        self.slurm_failures = Counter(
            "deeplink_watch_slurm_failures", "Times Slurm did not answer a question.", registry=registry
        )
        self.verdicts = Counter("deeplink_watch_verdicts", "Verdicts reached.", ["kind"], registry=registry)
        self.actions = Counter("deeplink_watch_actions", "Actions ended.", ["remedy", "result"], registry=registry)
        self.incidents_open = Gauge(
            "deeplink_watch_incidents_open", "Incidents without an end.", registry=registry
        )
        self.journal_time = Gauge(
            "deeplink_watch_journal_time_seconds",
            "When the journal last took a write, Unix time.",
            registry=registry,
        )
        self.notify_time = Gauge(
            "deeplink_watch_notify_time_seconds",
            "Unix time when the channel last had no failed notification.",
            ["channel"],
            registry=registry,
        )
        self.notify_waiting = Gauge(
            "deeplink_watch_notify_waiting", "Incidents waiting to be sent.", ["channel"], registry=registry
        )
        self.notify_messages = Counter(
            "deeplink_watch_notify_messages", "Tries to send a message.", ["channel", "result"], registry=registry
        )


def _not_served(bind: str, problem: str) -> DeepLinkError:
    remedy = "Give HOST:PORT, for example 127.0.0.1:9411, of a free port."
    return DeepLinkError(f"metrics address {bind}: {problem}", remedy=remedy)


class _Quiet(WSGIRequestHandler):
    """Answers a request without a line in the log."""

    @override
    def log_message(self, format: str, *args: object) -> None:
        pass


class _MetricsServer(ThreadingWSGIServer):
    """Answers one request on each connection, on a few at once, each within `PROOF_S`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._admission = Admission[socket.socket](
            ConnectionBounds(connections=_CONNECTIONS, proof_s=PROOF_S), SystemClock()
        )
        super().__init__(*args, **options)

    @override
    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # that of HTTP servers asks a name server for our name
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    @override
    def verify_request(self, request: Any, client_address: Any) -> bool:
        leaves = self._admission.admit(request, client_address[0])
        if leaves is not None:
            _cut(leaves)
        return leaves is not request

    @override
    def shutdown_request(self, request: Any) -> None:
        self._admission.leave(request)
        super().shutdown_request(request)

    @override
    def service_actions(self) -> None:
        for request in self._admission.overdue():
            _cut(request)

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a request for metrics from %s ended early", client_address)


def _cut(connection: socket.socket) -> None:
    """End a connection, whichever thread reads from it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def serve_metrics(bind: str, registry: CollectorRegistry = REGISTRY) -> Callable[[], None]:
    """Serve the metrics of a registry over HTTP at `bind` (`host:port`) from a thread; return what stops it."""
    host, _, port = bind.rpartition(":")
    if not host or not port.isdigit():
        raise _not_served(bind, "not HOST:PORT")
    host = host.strip("[]")

    class Here(_MetricsServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    try:
        server = make_server(host, int(port), make_wsgi_app(registry), Here, handler_class=_Quiet)
    except (OSError, OverflowError) as problem:
        raise _not_served(bind, str(problem)) from problem
    thread = threading.Thread(target=server.serve_forever, name="deeplink-metrics", daemon=True)
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join(1.0)

    return stop
