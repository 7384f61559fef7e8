"""Who leads with a journal: one watchdog at a time, and whether the one before ended, or was ended.

    <journal>.lock    locked by the leader; holds a line while it watches, and its time is the newest round

A leader that ends by itself empties the file. One that is killed, or whose host loses power, leaves the line.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deeplink.errors import DeepLinkError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_WATCHING = b"watching\n"


class LeaderError(DeepLinkError):
    """Another watchdog leads with this journal."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"another watchdog holds {path}", remedy="One leads; this one waits, or give it a journal of its own."
        )
        self.path = path


@dataclass(slots=True, kw_only=True)
class Lead:
    """The place of the one watchdog that leads.

    Attributes:
        last_unix: the newest round of the leader before, where that was ended without a word; else None.
    """

    last_unix: float | None = None
    _file: int
    _marked: bool = field(default=False)

    def watch(self, unix: float) -> None:
        """Take note of a round: whoever leads next knows since when nobody did. Two system calls at most.

        Raises:
            OSError: the file cannot be written.
        """
        if not self._marked:
            os.pwrite(self._file, _WATCHING, 0)
            os.fsync(self._file)
            self._marked = True
        os.utime(self._file, (unix, unix))

    def end(self) -> None:
        """Say that nobody was ended: this one ends by itself.

        Raises:
            OSError: the file cannot be written.
        """
        os.ftruncate(self._file, 0)


@contextmanager
def leading(journal: Path) -> Iterator[Lead]:
    """Be the only watchdog with this journal, until the end of the block; a killed leader's place is free at once.

    A block that is left by an exception was not ended by itself.

    Raises:
        LeaderError: another process is.
        OSError: the lock file cannot be made, or written.
    """
    journal.parent.mkdir(parents=True, exist_ok=True)
    path = journal.with_name(journal.name + ".lock")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as taken:
            raise LeaderError(path) from taken
        left = os.fstat(descriptor)
        lead = Lead(last_unix=left.st_mtime if left.st_size else None, _file=descriptor)
        yield lead
        lead.end()
    finally:
        os.close(descriptor)
