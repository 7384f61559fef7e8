"""Processes below one that a test has started."""

from __future__ import annotations

from pathlib import Path


def children(pid: int) -> list[int]:
    """Return the children of a process: of an agent, whose process keeps its sockets, the one that serves."""
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
