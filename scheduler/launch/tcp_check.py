"""Checks in parallel whether TCP ports accept connections."""

from __future__ import annotations

import select
import socket
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

KNOCK_S = 1.5
"""On a network for MPI or NCCL an answer takes less than a millisecond; a lost packet is sent again after 1 s."""
AT_ONCE = 256
"""Each is an open file, of which most shells allow 1,024."""


def all_reached(addresses: Collection[tuple[str, int]], timeout_s: float = KNOCK_S) -> bool:
    """Tell whether every address accepts a connection within the time; many are asked at once."""
    deadline = time.monotonic() + timeout_s
    everyone = list(addresses)
    return all(_answer(everyone[start : start + AT_ONCE], deadline) for start in range(0, len(everyone), AT_ONCE))


def _answer(addresses: Collection[tuple[str, int]], deadline: float) -> bool:
    waiting: dict[int, socket.socket] = {}
    # Not select(), which fails beyond 1,024 open files.
    poll = select.poll()
    with ExitStack() as stack:
        for address in addresses:
            try:
                knock = stack.enter_context(socket.socket())
                knock.settimeout(0)
                with suppress(BlockingIOError):
                    knock.connect(address)
            except OSError:  # there is no way, or no more files may be opened
                return False
            waiting[knock.fileno()] = knock
            poll.register(knock, select.POLLOUT)
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
