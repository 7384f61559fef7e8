"""The kernel log: errors of GPUs, which NVIDIA's driver calls Xid, and of the bus they hang on."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from deeplink.scheduler.health.look import Complaint, Look, comment, drain, observe
from deeplink.scheduler.health.recent import Recent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deeplink.clock import Clock

HELD_S = 3600.0
"""An Xid is told for so long after it came."""
_MOST_RECORDS = 200_000
_RECORD = 8192  # the longest that /dev/kmsg gives at once
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)(?:, ?(.*))?$")
_HEAD = re.compile(r"\d+,\d+,(\d+),[^;]*;(.*)")

# What NVIDIA's catalogue of Xid errors says is the hardware's: the GPU is not to be used before it was reset or
# replaced. Those that a program causes (13, 31, 43, 45 and others) say nothing of the node.
DRAINED = {
    48: "uncorrectable ECC error",
    62: "internal microcontroller halt",
    64: "row remapping failed",
    74: "NVLink error",
    79: "fallen off the bus",
    95: "uncontained ECC error",
    109: "context switch timeout",
    119: "GSP does not answer",
    120: "GSP error",
    136: "link training failed",
    140: "unrecovered ECC error",
    143: "GPU did not initialise",
}
COMMENTED = {63: "row remapping or page retirement", 92: "many correctable ECC errors", 94: "contained ECC error"}


@dataclass(frozen=True, slots=True)
class Xid:
    """One line of the driver's.

    Attributes:
        at: monotonic seconds of the kernel, about those of `time.monotonic`.
    """

    gpu: str
    number: int
    at: float
    said: str = ""


def parse_kmsg(text: str) -> Iterator[Xid]:
    r"""Yield the Xids in records of /dev/kmsg.

    >>> [xid.number for xid in parse_kmsg("4,1,9000000,-;NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off.\n")]
    [79]
    """
    for line in text.splitlines():
        head = _HEAD.match(line)
        found = _XID.search(head[2]) if head else None
        if head and found:
            yield Xid(found[1], int(found[2]), int(head[1]) / 1e6, (found[3] or "").strip())


def judge_xid(xid: Xid) -> Complaint:
    """Return what an Xid asks for."""
    known = DRAINED.get(xid.number) or COMMENTED.get(xid.number)
    said = f"Xid {xid.number} of the GPU at {xid.gpu}: {known or xid.said or 'see NVIDIA catalogue of Xid errors'}"
    subject = f"xid {xid.number} {xid.gpu}"
    if xid.number in DRAINED:
        return drain(subject, said, certain=True)
    if xid.number in COMMENTED:
        return comment(subject, said, certain=True)
    return observe(subject, said, certain=True)


class KernelLog:
    """Reads /dev/kmsg from where it read last; the whole ring at first. Nothing where that is not allowed."""

    def __init__(self, path: Path = Path("/dev/kmsg")) -> None:
        self._path = path
        self._file = -1

    def may_read(self) -> bool:
        """Return whether the log is there, and we may read it."""
        return self._opened()

    def news(self) -> list[Xid]:
        """Return the Xids since the last call."""
        if not self._opened():
            return []
        return [xid for text in self._records() for xid in parse_kmsg(text)]

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


@dataclass(slots=True)
class XidCheck:
    """Tells the Xids of the last hour: within seconds, as what a rank died of is asked for at once."""

    clock: Clock
    log: KernelLog = field(default_factory=KernelLog)
    _recent: Recent = field(default_factory=lambda: Recent(HELD_S))

    def look(self) -> Look:
        """Look once."""
        now = self.clock.monotonic()
        for xid in self.log.news():
            if now - xid.at < HELD_S:
                self._recent.note(judge_xid(xid), min(now, xid.at))
        return Look(self._recent.complaints(now))

    def close(self) -> None:
        """Read no more."""
        self.log.close()
