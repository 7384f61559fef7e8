"""What a check found, and how bad it is; pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class DoctorSeverity(StrEnum):
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
class DoctorFinding:
    """One answer of one check.

    Attributes:
        said: what was found, with the value.
        remedy: the line to change, or the command to give; empty where there is nothing to do.
        where: the nodes it holds for, folded; empty for the cluster as a whole.
        check: the check's name; rules leave it to `judge`.
    """

    severity: DoctorSeverity
    said: str
    remedy: str = ""
    where: str = ""
    check: str = ""


def ok(said: str, where: str = "") -> DoctorFinding:
    """Return that all is well."""
    return DoctorFinding(DoctorSeverity.OK, said, where=where)


def note(said: str, remedy: str = "", where: str = "") -> DoctorFinding:
    """Return what is worth knowing."""
    return DoctorFinding(DoctorSeverity.NOTE, said, remedy, where)


def warning(said: str, remedy: str, where: str = "") -> DoctorFinding:
    """Return what costs."""
    return DoctorFinding(DoctorSeverity.WARNING, said, remedy, where)


def error(said: str, remedy: str, where: str = "") -> DoctorFinding:
    """Return what must be mended."""
    return DoctorFinding(DoctorSeverity.ERROR, said, remedy, where)


def unknown(said: str, remedy: str = "", where: str = "") -> DoctorFinding:
    """Return what could not be looked at, and why."""
    return DoctorFinding(DoctorSeverity.UNKNOWN, said, remedy, where)


def untold(setting: str) -> DoctorFinding:
    """Return that this Slurm does not tell a setting."""
    return unknown(f"this Slurm does not tell {setting}, or in a form that is not known here")
