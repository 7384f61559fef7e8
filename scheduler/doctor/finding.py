"""What a check found, and how bad it is; pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing; nothing is to be done."""
    WARNING = "warning"
    """It costs time, or bites in a rarer case."""
    ERROR = "error"
    """Jobs will fail, or a failure will not be recovered from."""
    UNKNOWN = "unknown"
    """It was not looked at, or could not be: `said` tells why."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One answer of one check.

    Attributes:
        said: what was found, with the value.
        remedy: the line to change, or the command to give; empty where there is nothing to do.
        where: the nodes it holds for, folded; empty for the cluster as a whole.
        check: the check's name; rules leave it to `judge`.
    """

    severity: Severity
    said: str
    remedy: str = ""
    where: str = ""
    check: str = ""


def ok(said: str, where: str = "") -> Finding:
    """Return that all is well."""
    return Finding(Severity.OK, said, where=where)


def note(said: str, remedy: str = "", where: str = "") -> Finding:
    """Return what is worth knowing."""
    return Finding(Severity.NOTE, said, remedy, where)


def warning(said: str, remedy: str, where: str = "") -> Finding:
    """Return what costs."""
    return Finding(Severity.WARNING, said, remedy, where)


def error(said: str, remedy: str, where: str = "") -> Finding:
    """Return what must be mended."""
    return Finding(Severity.ERROR, said, remedy, where)


def unknown(said: str, remedy: str = "", where: str = "") -> Finding:
    """Return what could not be looked at, and why."""
    return Finding(Severity.UNKNOWN, said, remedy, where)


def untold(setting: str) -> Finding:
    """Return that this Slurm does not tell a setting."""
    return unknown(f"this Slurm does not tell {setting}, or in a form that is not known here")
