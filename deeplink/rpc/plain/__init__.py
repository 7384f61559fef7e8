"""Calls over a plain socket, for processes that fork.

A process that has used grpcio cannot fork children that use it: they hang (measured, docs/decisions/0002). A
training process does both: it reports its progress and reads samples from other nodes, and its DataLoader forks
workers which do so too. So what runs in a rank is no user of grpcio but this: frames of our own to the agent's
port, after a mutual proof of the token, one call at a time on a connection, no threads, nothing to inherit but a
socket.

Other packages import: `framing`, `local_socket`, `outgoing`, `serving`.
"""

from __future__ import annotations

from deeplink.rpc.plain.connection import Incoming, PlainConnection
from deeplink.rpc.plain.framing import (
    LARGEST_REQUEST,
    CallRefusedError,
    PlainBusyError,
    PlainCallError,
    PlainRefusedError,
    PlainSilentError,
    PlainStatusError,
    Status,
)

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
