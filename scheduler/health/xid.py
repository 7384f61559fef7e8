"""Errors of GPUs in the kernel's log, which NVIDIA's driver calls Xid."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deeplink.scheduler.health.kernellog import KernelLog, Said
from deeplink.scheduler.health.look import Complaint, Look, comment, drain, observe
from deeplink.scheduler.health.recent import Recent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from deeplink.clock import Clock

HELD_S = 3600.0
"""An Xid is told for so long after it came."""
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)(?:, ?(.*))?$")

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


def xids_in(lines: Iterable[Said]) -> Iterator[Xid]:
    r"""Yield the Xids in lines of the kernel's log.

    >>> [xid.number for xid in xids_in([Said("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off.", 9.0)])]
    [79]
    """
    for line in lines:
        found = _XID.search(line.text)
        if found:
            yield Xid(found[1], int(found[2]), line.at, (found[3] or "").strip())


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


@dataclass(slots=True)
class XidCheck:
    """Tells the Xids of the last hour: within seconds, as what a rank died of is asked for at once."""

    clock: Clock
    log: KernelLog = field(default_factory=KernelLog)
    _recent: Recent = field(default_factory=lambda: Recent(HELD_S))

    def look(self) -> Look:
        """Look once."""
        now = self.clock.monotonic()
        for xid in xids_in(self.log.news()):
            if now - xid.at < HELD_S:
                self._recent.note(judge_xid(xid), min(now, xid.at))
        return Look(self._recent.complaints(now))

    def close(self) -> None:
        """Read no more."""
        self.log.close()
