"""Writes the stack of each thread of a rank to a file when the node's agent sends a signal.

faulthandler does that without the interpreter: also for a rank whose main thread waits in C, and holds the GIL.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
from pathlib import Path
from typing import IO

from deeplink.scheduler.node.asking import ASKING, answer_file, catches

_kept: dict[int, IO[bytes]] = {}  # faulthandler writes to its descriptor for as long as the process lives


def answer_in(folder: Path) -> bool:
    """Answer from now on, in a file of this folder; False where that cannot be, or somebody has the signal."""
    pid = os.getpid()
    if pid in _kept:
        return True
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
        if not _kept and catches(status.splitlines(), ASKING):  # a forked child answers in a file of its own
            return False
        file = answer_file(folder, pid).open("ab", buffering=0)
        faulthandler.register(ASKING, file=file, all_threads=True, chain=False)
        _kept[pid] = file
        return True
    return False
