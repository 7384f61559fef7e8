"""An agent's second port: batches of samples, sent where they lie (docs/decisions/0007-data-server.md).

The calls are those of the agent's own port, with the same token; there is only Read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink import metrics
from deeplink.bind_errors import data_listener
from deeplink.cache.remote.transport import READ_METHOD
from deeplink.cache.server import MOST_READS
from deeplink.plainrpc.serving import PlainServer, ServerLimits
from deeplink.wire import connections_allowed

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from deeplink.cache.server import CacheServicer
    from deeplink.clock import Clock


def data_server(
    servicer: CacheServicer,
    bind: str | socket.socket,
    token: str | Callable[[str], bool],
    clock: Clock,
    limits: ServerLimits | None = None,
) -> PlainServer:
    """Return a server of `servicer`'s Read, bound next to the agent's own port; `start` and `stop` it.

    See `data_listener`.

    Args:
        servicer: what answers; it tells readers of this port from now on.
        bind: `host:port` the agent itself listens on, port 0 for any free one; or a socket that listens already.
        token: what each call must carry, or what tells of a token whether it is valid.
        clock: where time comes from.
        limits: of the server; an agent's own when not given.

    Raises:
        ListenError: it cannot listen there.
    """
    server = PlainServer(
        data_listener(bind) if isinstance(bind, str) else bind,
        token,
        {READ_METHOD: servicer.read_message},
        clock,
        limits=limits or own_limits(),
        on_refused=metrics.CACHE_REFUSED_CALLS.inc,
    )
    servicer.data_port = server.port
    return server


def own_limits() -> ServerLimits:
    """Return an agent's bounds: connections take a quarter of its descriptors, open shards half."""
    return ServerLimits(answers=MOST_READS, connections=connections_allowed(ServerLimits().connections))
