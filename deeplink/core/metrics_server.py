"""Serves a daemon's metrics over HTTP, to Prometheus; beyond loopback only to who shows the token."""

from __future__ import annotations

import contextlib
import hmac
import logging
import socket
import threading
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer
from typing_extensions import override

from deeplink.core.admission import Admission, ConnectionBounds
from deeplink.core.clock import SystemClock
from deeplink.core.errors import DeepLinkError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from prometheus_client import CollectorRegistry

log = logging.getLogger(__name__)

PROOF_S = 10.0
"""Time for the request for metrics, and for the answer."""
_CONNECTIONS = 64


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

    request_queue_size = 128  # with the standard 5, a scrape beside a burst waits out the kernel's own retries

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


def serve_metrics(bind: str, registry: CollectorRegistry, token: str = "") -> Callable[[], None]:
    """Serve the metrics of a registry over HTTP at `bind` (`host:port`) from a thread; return what stops it.

    With a token only who shows it (`Authorization: Bearer`) is answered.
    """
    host, _, port = bind.rpartition(":")
    if not host or not port.isdecimal():
        raise _not_served(bind, "not HOST:PORT")
    host = host.strip("[]")

    class Here(_MetricsServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    app = make_wsgi_app(registry)
    try:
        server = make_server(host, int(port), _guarded(app, token) if token else app, Here, handler_class=_Quiet)
    except (OSError, OverflowError) as problem:
        raise _not_served(bind, str(problem)) from problem
    thread = threading.Thread(target=server.serve_forever, name="deeplink-metrics", daemon=True)
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join(1.0)

    return stop


def _guarded(app: WSGIApplication, token: str) -> WSGIApplication:
    right = f"Bearer {token}".encode()

    def guarded(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        shown = str(environ.get("HTTP_AUTHORIZATION", "")).encode("latin-1", "replace")
        if hmac.compare_digest(shown, right):
            return app(environ, start_response)
        start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")])
        return [b"the token of --metrics-token-file is needed\n"]

    return guarded
