"""Open files and folders by their descriptors, and locks on them between processes.

The kernel frees the locks of a process that is killed.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from deeplink.core.errors import DeepLinkError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class LockHeldError(DeepLinkError):
    """Another process does already what this one was to do, and holds the lock for it."""


@contextmanager
def opened(path: Path, flags: int = os.O_RDONLY, mode: int = 0o600) -> Iterator[int]:
    """Give the descriptor of a file or folder, open as os.open(2) has it; `mode` is that of a new file.

    Raises:
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC, mode)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


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
