"""Processes that a test starts: what is below them, and ports for them."""

from __future__ import annotations

import contextlib
import secrets
import socket
from pathlib import Path


def free_ports(count: int) -> list[int]:
    """Return so many ports that are free now, and that the kernel gives nobody who does not ask for them."""
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(found) < count:
            port = 12_000 + secrets.randbelow(20_000)  # tests' own random numbers repeat
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
                found.append(port)
    return found


def children(pid: int) -> list[int]:
    """Return the children of a process: of an agent, whose process keeps its sockets, the one that serves."""
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
