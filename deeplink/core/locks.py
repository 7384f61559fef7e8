"""Locks between processes, on open files and folders; the kernel frees those of a process that is killed."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

from deeplink.core.errors import DeepLinkError

if TYPE_CHECKING:
    from pathlib import Path

    from deeplink.core.clock import Clock

_PAUSE_S = 0.05


class LockHeldError(DeepLinkError):
    """Another process does already what this one was to do, and holds the lock for it."""


def try_lock(descriptor: int, path: Path | None = None) -> bool:
    """Lock an open file or folder until it is closed; False where another process has it locked.

    With `path`, False also where it lies there no more: its holder removed it, and a third may lock a new one.

    Raises:
        OSError: the storage has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return path is None or os.path.samestat(os.fstat(descriptor), path.stat())
    except (BlockingIOError, FileNotFoundError):
        return False


def lock_within(descriptor: int, wait_s: float, clock: Clock) -> bool:
    """Lock as `try_lock` does as soon as it is free; False where it was not within `wait_s` seconds.

    Raises:
        OSError: the storage has no locks.
    """
    until = clock.monotonic() + wait_s
    while not try_lock(descriptor):
        if clock.monotonic() >= until:
            return False
        clock.sleep(_PAUSE_S)
    return True
