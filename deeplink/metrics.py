"""Every Prometheus metric DeepLink has, so that names are found, and kept apart, in one place.

Counters end in `_total`, units are base units (seconds, bytes). Daemons serve them with `serve_metrics`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge, Histogram, Info, start_http_server

from deeplink.errors import DeepLinkError

if TYPE_CHECKING:
    from collections.abc import Callable

# The node agent.
NODE_INFO = Info("deeplink_node", "This node agent: its member name and version.")
NODE_REPORTS = Counter("deeplink_node_reports", "Progress reports received from ranks.", ["answer"])
NODE_HEARTBEATS = Counter("deeplink_node_heartbeats", "Heartbeats answered.")

# What its store holds; the agent sets the functions that read them at each scrape.
STORE_SHARDS = Gauge("deeplink_store_shards", "Sealed shards in this node's store.")
STORE_BYTES = Gauge("deeplink_store_bytes", "Bytes of the sealed shards in this node's store.")
STORE_FREE_BYTES = Gauge("deeplink_store_free_bytes", "Free bytes of the file system the store is on.")

# The operator console.
CONSOLE_STREAMS = Gauge("deeplink_console_streams", "Event streams that are open.")
CONSOLE_DROPPED = Counter("deeplink_console_streams_dropped", "Event streams ended because the browser did not read.")
CONSOLE_UP = Gauge("deeplink_console_source_up", "1 if the last question to this source was answered.", ["source"])
CONSOLE_READ = Gauge("deeplink_console_source_read_time_seconds", "When the source last answered, Unix time.", ["source"])
CONSOLE_QUERIES = Counter("deeplink_console_queries", "Questions asked of a source.", ["source", "answer"])
CONSOLE_QUERY_SECONDS = Histogram("deeplink_console_query_seconds", "Time a source took to answer.", ["source"])
CONSOLE_NODES = Gauge("deeplink_console_nodes", "Nodes by health, as the console shows them.", ["health"])
CONSOLE_INCIDENTS = Gauge("deeplink_console_incidents", "Incidents on the page, by outcome.", ["outcome"])


class MetricsBindError(DeepLinkError):
    """The address for metrics cannot be used."""

    def __init__(self, bind: str, problem: str) -> None:
        super().__init__(
            f"metrics address {bind}: {problem}",
            remedy="Give HOST:PORT, for example 127.0.0.1:9411, of a free port.",
        )
        self.bind, self.problem = bind, problem


def serve_metrics(bind: str) -> Callable[[], None]:
    """Serve the metrics over HTTP at `bind` (`host:port`) from a thread; return what stops it.

    Raises:
        MetricsBindError: the address is malformed or cannot be bound.
    """
    host, _, port = bind.rpartition(":")
    if not host or not port.isdigit():
        raise MetricsBindError(bind, "not HOST:PORT")
    try:
        server, thread = start_http_server(int(port), host.strip("[]"))
    except (OSError, OverflowError) as problem:
        raise MetricsBindError(bind, str(problem)) from problem

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join(1.0)

    return stop
