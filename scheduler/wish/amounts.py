"""Slurm's ways to write times, sizes and counts; pure."""

from __future__ import annotations

import re

from deeplink.errors import DeepLinkError

FOREVER_S = 1 << 40
"""A time limit that is none."""


class AmountError(DeepLinkError):
    """A text is no such amount as Slurm writes it."""

    exit_code = 2

    def __init__(self, text: str, what: str) -> None:
        super().__init__(f"{text!r} is no {what}", remedy="See sbatch(1) for how it is written.")
        self.text, self.what = text, what


# Text, compiled when first needed: `deeplink sbatch` needs few of them, and waits.
_DAYS = r"(\d{1,6})-(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?"
_CLOCK = r"(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?"


def seconds_of(text: str) -> int:
    """Read a time: minutes, M:S, H:M:S, D-H, D-H:M, D-H:M:S, or INFINITE.

    >>> seconds_of("5"), seconds_of("1:30"), seconds_of("2:00:00"), seconds_of("1-6")
    (300, 90, 7200, 108000)

    Raises:
        AmountError: it is none.
    """
    said = text.strip()
    if said.upper() in {"INFINITE", "UNLIMITED"}:
        return FOREVER_S
    if found := re.fullmatch(_DAYS, said):
        days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if found := re.fullmatch(_CLOCK, said):
        first, second, third = found.groups()
        if third is not None:
            return (int(first) * 60 + int(second)) * 60 + int(third)
        return int(first) * 60 + int(second or 0)
    raise AmountError(text, "time")


def time_text(seconds: int) -> str:
    """Write a time as Slurm reads it.

    >>> time_text(90), time_text(90_000)
    ('00:01:30', '25:00:00')
    """
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


_SIZE = r"(?i)(\d{1,15})([kmgt]?)b?"
_MIB = {"k": 1 / 1024, "": 1, "m": 1, "g": 1024, "t": 1 << 20}


def mebibytes(text: str) -> int:
    """Read an amount of memory; MiB where it names no unit.

    >>> mebibytes("4G"), mebibytes("100"), mebibytes("512K")
    (4096, 100, 1)

    Raises:
        AmountError: it is none.
    """
    found = re.fullmatch(_SIZE, text.strip())
    if not found:
        raise AmountError(text, "amount of memory")
    exact = int(found[1]) * _MIB[found[2].lower()]
    return int(exact) + (exact > int(exact))


def count_of(text: str) -> int:
    """Read a plain number.

    Raises:
        AmountError: it is none.
    """
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()):
        raise AmountError(text, "number")
    return int(text)


def node_count(text: str) -> int:
    """Read how many nodes; 0 where it is a range, and so not known.

    >>> node_count("4"), node_count("4-4"), node_count("2-4"), node_count("1K")
    (4, 4, 0, 1024)

    Raises:
        AmountError: it is neither.
    """
    ends = [re.fullmatch(r"([0-9]{1,9})([km]?)", part, re.IGNORECASE) for part in text.strip().split("-")]
    if text.strip().endswith("-"):
        ends.pop()
    if not 1 <= len(ends) <= 2:  # noqa: PLR2004
        raise AmountError(text, "number of nodes")
    counts = {int(end[1]) * {"": 1, "k": 1 << 10, "m": 1 << 20}[end[2].lower()] if end else -1 for end in ends}
    if -1 in counts:
        raise AmountError(text, "number of nodes")
    return counts.pop() if len(counts) == 1 and not text.strip().endswith("-") else 0
