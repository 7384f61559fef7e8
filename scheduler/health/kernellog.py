"""The kernel's log: what it said since it was last read, where we may read it."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_MOST_RECORDS = 200_000
_RECORD = 8192  # the longest that /dev/kmsg gives at once
_HEAD = re.compile(r"\d+,\d+,(\d+),[^;]*;(.*)")


@dataclass(frozen=True, slots=True)
class Said:
    """One line of the log.

    Attributes:
        at: monotonic seconds of the kernel, about those of `time.monotonic`.
    """

    text: str
    at: float


def parse_kmsg(text: str) -> Iterator[Said]:
    r"""Yield the lines in records of /dev/kmsg.

    >>> list(parse_kmsg("4,1,9000000,-;eth0: link up\n SUBSYSTEM=net\n"))
    [Said(text='eth0: link up', at=9.0)]
    """
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head:
            yield Said(head[2], int(head[1]) / 1e6)


class KernelLog:
    """Reads /dev/kmsg from where it read last; the whole ring at first. Nothing where that is not allowed."""

    def __init__(self, path: Path = Path("/dev/kmsg")) -> None:
        self._path = path
        self._file = -1

    def may_read(self) -> bool:
        """Return whether the log is there, and we may read it."""
        return self._opened()

    def news(self) -> list[Said]:
        """Return what was said since the last call."""
        if not self._opened():
            return []
        return [said for text in self._records() for said in parse_kmsg(text)]

    def close(self) -> None:
        """Read no more."""
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = -1

    def _opened(self) -> bool:
        if self._file < 0:
            try:
                self._file = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK)
            except OSError:
                return False
        return True

    def _records(self) -> Iterator[str]:
        for _ in range(_MOST_RECORDS):
            try:
                record = os.read(self._file, _RECORD)
            except OSError as problem:
                if problem.errno == errno.EPIPE:  # overwritten before we read it
                    continue
                return
            if not record:
                return
            yield record.decode(errors="replace")
