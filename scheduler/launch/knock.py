"""Whether something listens at addresses: connections are opened and closed, nothing is said."""

from __future__ import annotations

import select
import socket
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

KNOCK_S = 1.5
"""On a network for MPI or NCCL an answer takes less than a millisecond; a lost packet is sent again after 1 s."""


def all_reached(addresses: Collection[tuple[str, int]], timeout_s: float = KNOCK_S) -> bool:
    """Tell whether every address accepts a connection within the time; all are asked at once."""
    waiting: dict[int, socket.socket] = {}
    # Not select(), which fails beyond 1,024 open files.
    poll = select.poll()
    with ExitStack() as stack:
        for address in addresses:
            knock = stack.enter_context(socket.socket())
            knock.settimeout(0)
            try:
                knock.connect(address)
            except BlockingIOError:
                waiting[knock.fileno()] = knock
                poll.register(knock, select.POLLOUT)
            except OSError:
                return False
        deadline = time.monotonic() + timeout_s
        while waiting:
            left_s = deadline - time.monotonic()
            ready = poll.poll(left_s * 1000) if left_s > 0 else []
            if not ready:
                return False
            for descriptor, _ in ready:
                if waiting[descriptor].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    return False
                poll.unregister(descriptor)
                del waiting[descriptor]
    return True
