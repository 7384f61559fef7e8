"""What one look of a check sees; pure values."""

from __future__ import annotations

from dataclasses import dataclass, replace

from deeplink.scheduler.watch.records import HealthSeverity
from deeplink.text import printable

MOST_COMPLAINTS = 32
"""Subjects a check may complain of at once; of more the gravest are kept."""
LONGEST_PROBLEM = 256

_ORDER = (HealthSeverity.UNKNOWN, HealthSeverity.OBSERVE, HealthSeverity.COMMENT, HealthSeverity.DRAIN)


def gravity(severity: HealthSeverity) -> int:
    """Return a number that is greater, the graver: 0 for UNKNOWN, which asks for nothing.

    >>> [gravity(HealthSeverity(word)) for word in ("unknown", "observe", "comment", "drain")]
    [0, 1, 2, 3]
    """
    return _ORDER.index(severity)


def at_gravity(number: int) -> HealthSeverity:
    """Return the severity that `gravity` gives this number for."""
    return _ORDER[number]


@dataclass(frozen=True, slots=True)
class Complaint:
    """One thing that a look finds wrong.

    Attributes:
        subject: what it is about, the same from look to look ("/home", "gpu 3 ecc"); its hysteresis hangs on it.
        severity: what it asks for, before the check's own limit.
        problem: for people, with the figures.
        certain: the kernel or a driver has recorded it: one look is enough for a finding.
        at_unix: when it last happened, for what happens in a moment: the finding is since then. 0: it lasts.
    """

    subject: str
    severity: HealthSeverity
    problem: str
    certain: bool = False
    at_unix: float = 0.0


@dataclass(frozen=True, slots=True)
class Look:
    """What one look of a check sees.

    Attributes:
        complaints: what is wrong; at most one per subject counts.
        unknown: why the check could not tell of all else; empty where what is not complained of is well.
    """

    complaints: tuple[Complaint, ...] = ()
    unknown: str = ""

    def bounded(self) -> Look:
        """Return it with one complaint per subject, the gravest, of bounded number and length."""
        kept: dict[str, Complaint] = {}
        for complaint in sorted(self.complaints, key=lambda one: (-gravity(one.severity), one.subject)):
            if len(kept) < MOST_COMPLAINTS:
                kept.setdefault(complaint.subject, _short(complaint))
        return Look(tuple(kept.values()), one_line(self.unknown))


GOOD = Look()


def observe(subject: str, problem: str, *, certain: bool = False) -> Complaint:
    """Return a complaint to be seen on pages and in metrics."""
    return Complaint(subject, HealthSeverity.OBSERVE, problem, certain)


def comment(subject: str, problem: str, *, certain: bool = False) -> Complaint:
    """Return a complaint to be written down at the node in Slurm."""
    return Complaint(subject, HealthSeverity.COMMENT, problem, certain)


def drain(subject: str, problem: str, *, certain: bool = False) -> Complaint:
    """Return a complaint that asks for the node to be drained."""
    return Complaint(subject, HealthSeverity.DRAIN, problem, certain)


def one_line(text: str) -> str:
    r"""Return a text on one line and of bounded length, with nothing unprintable in it.

    >>> one_line("disk\n full\x1b[2J")
    'disk full\\x1b[2J'
    """
    said = printable(" ".join(text.split()))
    return said if len(said) <= LONGEST_PROBLEM else f"{said[: LONGEST_PROBLEM - 3]}..."


def _short(complaint: Complaint) -> Complaint:
    return replace(complaint, subject=one_line(complaint.subject), problem=one_line(complaint.problem))
