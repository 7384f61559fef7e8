"""What a slot says to its node's agent, one line of JSON at each change. Imported by slots: light."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_SOCKET = "slots"


@contextmanager
def agents_socket(folder: Path) -> Iterator[str]:
    """Give a path of an agent's socket for slots, in its folder, that is short however long the folder's is."""
    there = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{there}/{_SOCKET}"
    finally:
        os.close(there)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotReport:
    """What a slot says: who it is, and what it runs, or ran last."""

    step: int  # its step, as the launcher numbers them
    slot: int  # its number on this node, from 0
    pid: int
    step_id: int = -1  # its step, as Slurm numbers them; -1: it does not know
    attempt: str = ""  # of its rank; empty before the first one
    rank: int = 0
    rank_pid: int = 0
    tag: str = ""  # what all that the rank started bears in its environment
    code: int | None = None  # how the rank's own process exited: 128 + n for signal n; None while it runs
    exited: float = 0.0  # when, monotonic: one clock for all of a machine
    ended: bool = False  # and nothing that it started is left
    out_of_memory: bool = False  # processes of its cgroup were killed for want of memory
    preloaded: bool = False  # a process waits that has the next rank's imports done
    unstarted: str = ""  # why the rank's command could not even be started

    @classmethod
    def of(cls, line: bytes) -> SlotReport:
        """Read a line; raises ValueError or TypeError where it is none."""
        return cls(**json.loads(line))

    @property
    def is_running(self) -> bool:
        """Whether anything of its rank may be there."""
        return bool(self.attempt) and not self.ended
