"""An agent's second port: batches of samples, sent where they lie (docs/decisions/0007-data-server.md).

The calls are those of the agent's own port, with the same token; there is only Read.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from deeplink import metrics
from deeplink.cache.remote.transport import READ_METHOD
from deeplink.cache.server import MOST_READS
from deeplink.listening import PortBusyError
from deeplink.plainrpc.serving import Limits, PlainServer
from deeplink.wire import connections_allowed

if TYPE_CHECKING:
    from deeplink.cache.server import CacheServicer
    from deeplink.clock import Clock

log = logging.getLogger(__name__)

ABOVE = 100
"""How far the data port lies above the agent's own: no other daemon of ours is usually there."""
_MOST_PORT = 65_535


def data_server(
    servicer: CacheServicer, bind: str, token: str, clock: Clock, limits: Limits | None = None
) -> PlainServer:
    """Return a server of `servicer`'s Read, bound next to the agent's own port; `start` and `stop` it.

    It listens `ABOVE` ports above the agent's, so that a firewall can know it; on any free one if that is taken.

    Args:
        servicer: what answers; it tells readers of this port from now on.
        bind: `host:port` the agent itself listens on; port 0 for any free one.
        token: what each call must carry.
        clock: where time comes from.
        limits: of the server; an agent's own when not given.

    Raises:
        ListenError: it cannot listen there.
    """
    host, _, port = bind.rpartition(":")

    def made(number: int) -> PlainServer:
        return PlainServer(
            f"{host}:{number}",
            token,
            {READ_METHOD: servicer.read_message},
            clock,
            limits=limits or own_limits(),
            on_refused=metrics.CACHE_REFUSED_CALLS.inc,
        )

    wanted = _port_for(int(port))
    try:
        server = made(wanted)
    except PortBusyError:
        if not wanted:
            raise
        server = made(0)
        said = "port %d is in use: samples are served on port %d, which a firewall must let in"
        log.warning(said, wanted, server.port)
    servicer.data_port = server.port
    return server


def own_limits() -> Limits:
    """Return an agent's bounds: connections take a quarter of its descriptors, open shards half."""
    return Limits(answers=MOST_READS, connections=connections_allowed(Limits().connections))


def _port_for(own: int) -> int:
    if not own:
        return 0
    return own + ABOVE if own + ABOVE <= _MOST_PORT else own - ABOVE
