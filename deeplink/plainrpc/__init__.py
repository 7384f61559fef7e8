"""gRPC calls over a plain socket, for processes that fork.

A process that has used grpcio cannot fork children that use it: they hang (measured, docs/decisions/0002). A
training process does both: it reports its progress and reads samples from other nodes, and its DataLoader forks
workers which do so too. So what runs in a rank is no user of grpcio but this: HTTP/2 (RFC 9113) to the same
server, with the same token, one call at a time on a connection, no threads, nothing to inherit but a socket.
"""

from __future__ import annotations

from deeplink.plainrpc.answers import Incoming
from deeplink.plainrpc.connection import LARGEST_REQUEST, PlainConnection
from deeplink.plainrpc.errors import (
    CallRefusedError,
    PlainBusyError,
    PlainCallError,
    PlainFormatError,
    PlainLateError,
    PlainRefusedError,
    PlainSilentError,
    PlainStatusError,
    PlainStrangerError,
)
from deeplink.plainrpc.framing import Status
from deeplink.plainrpc.terms import TOKEN_HEADER, only

__all__ = [
    "LARGEST_REQUEST",
    "TOKEN_HEADER",
    "CallRefusedError",
    "Incoming",
    "PlainBusyError",
    "PlainCallError",
    "PlainConnection",
    "PlainFormatError",
    "PlainLateError",
    "PlainRefusedError",
    "PlainSilentError",
    "PlainStatusError",
    "PlainStrangerError",
    "Status",
    "only",
]
