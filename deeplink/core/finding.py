"""A check's finding and its severity: of the doctor, of a node's health checks, of the topology; pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from typing_extensions import override

from deeplink.core.text import printable


class Severity(IntEnum):
    """How bad a finding is, in order."""

    UNKNOWN = 0  # not looked at, or the check could not tell; never taken for bad
    OK = 1
    NOTE = 2  # worth knowing; nothing has to be done
    WARNING = 3  # costs time, or matters in a rarer case
    ERROR = 4  # jobs will fail, or a failure will not be recovered from

    @property
    def word(self) -> str:
        """The severity in output."""
        return self.name.lower()

    @property
    def action(self) -> str:
        """What a health check of this severity asks for, in configuration, messages and the journal."""
        return _ACTIONS[self]

    @classmethod
    def of_action(cls, action: str) -> Severity:
        """Return the severity that asks for `action`; UNKNOWN for a word that is not known.

        >>> Severity.of_action("drain").word
        'error'
        """
        return next((severity for severity, known in _ACTIONS.items() if known == action), cls.UNKNOWN)


_ACTIONS = {
    Severity.UNKNOWN: "unknown",
    Severity.NOTE: "observe",
    Severity.WARNING: "comment",
    Severity.ERROR: "drain",
}
HEALTH = frozenset(_ACTIONS)
"""Severities of health findings."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One answer of one check."""

    severity: Severity
    text: str  # for people
    check: str = ""  # its name
    remedy: str = ""  # the line to change or the command to run; empty where there is nothing to do
    where: str = ""  # nodes, a file or a command; empty where it is about the whole
    line: int = 0  # of the file, from 1; 0 where no single line is meant
    since_unix: float = 0.0  # first found, by the clock of its node

    @override
    def __str__(self) -> str:
        where = f"{self.where}:{self.line}: " if self.line else f"{self.where}: " if self.where else ""
        return printable(f"{where}{self.check}: {self.text}")
