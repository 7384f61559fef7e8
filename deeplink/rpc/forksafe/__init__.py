"""gRPC calls over a plain socket, for processes that fork.

A process that has used grpcio cannot fork children that use it: they hang (measured, docs/decisions/0002). A
training process does both: it reports its progress and reads samples from other nodes, and its DataLoader forks
workers which do so too. So what runs in a rank is no user of grpcio but this: HTTP/2 (RFC 9113) to the same
server, with the same token, one call at a time on a connection, no threads, nothing to inherit but a socket.

Other packages import: `framing`, `intake`, `scattered`, `serving`.
"""

from __future__ import annotations

from deeplink.rpc.forksafe.connection import (
    LARGEST_REQUEST,
    Incoming,
    PlainBusyError,
    PlainCallError,
    PlainConnection,
    PlainRefusedError,
    PlainSilentError,
    PlainStatusError,
)
from deeplink.rpc.forksafe.framing import Status
from deeplink.rpc.forksafe.intake import CallRefusedError

__all__ = [
    "LARGEST_REQUEST",
    "CallRefusedError",
    "Incoming",
    "PlainBusyError",
    "PlainCallError",
    "PlainConnection",
    "PlainRefusedError",
    "PlainSilentError",
    "PlainStatusError",
    "Status",
]
