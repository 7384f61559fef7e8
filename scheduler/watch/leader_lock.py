"""A lock so that one watchdog leads per journal; records whether the last leader ended or was killed.

    <journal>.lock    locked by the leader; while it watches it holds the time of its newest round

A leader that ends in order empties the file. One that is killed leaves its time; one whose host loses power leaves
it, too, or that of some round in the half minute before.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.errors import DeepLinkError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_LONGEST = 32


class LeaderError(DeepLinkError):
    """Another watchdog leads with this journal."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"another watchdog holds {path}", remedy="One leads; this one waits, or give it a journal of its own."
        )
        self.path = path


@dataclass(slots=True, kw_only=True)
class LeaderLock:
    """The place of the one watchdog that leads.

    Attributes:
        last_unix: the newest round of the leader before, where that did not end in order; else None.
    """

    last_unix: float | None = None
    _file: int
    _lasts: bool = False

    def watch(self, unix: float) -> None:
        """Take note of a round, so that whoever leads next knows since when nobody did.

        One system call; the first one waits for the disk.

        Raises:
            OSError: the file cannot be written.
        """
        os.pwrite(self._file, b"%017.3f\n" % unix, 0)
        if not self._lasts:
            os.fsync(self._file)
            self._lasts = True

    def end(self) -> None:
        """Say that this watchdog ends in order.

        Raises:
            OSError: the file cannot be written.
        """
        os.ftruncate(self._file, 0)
        os.fsync(self._file)


@contextmanager
def leading(journal: Path) -> Iterator[LeaderLock]:
    """Be the only watchdog with this journal, until the end of the block; a killed leader's place is free at once.

    Raises:
        LeaderError: another process is.
        OSError: the lock file cannot be made, or read.
    """
    journal.parent.mkdir(parents=True, exist_ok=True)
    path = journal.with_name(journal.name + ".lock")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as taken:
            raise LeaderError(path) from taken
        yield LeaderLock(last_unix=_last(descriptor), _file=descriptor)
    finally:
        os.close(descriptor)


def _last(descriptor: int) -> float | None:
    left = os.pread(descriptor, _LONGEST, 0)
    try:
        return float(left) if left else None
    except ValueError:  # half of it was written, or somebody else did
        return os.fstat(descriptor).st_mtime
