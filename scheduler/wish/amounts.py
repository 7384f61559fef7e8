"""Slurm's ways to write times, sizes, counts and generic resources; pure."""

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


_GPU = r"(?ai)(?:gres/)?gpu(?:[:=/]([a-z_][\w.-]*))?(?:[:=](\d{1,6}))?"


def gpus_of(text: str) -> tuple[str, int]:
    """Read how many GPUs of which kind `--gres` asks for; ("", 0) for none.

    >>> gpus_of("gpu:8"), gpus_of("gpu:a100:4"), gpus_of("gpu"), gpus_of("none")
    (('', 8), ('a100', 4), ('', 1), ('', 0))

    Raises:
        AmountError: it asks for something else, or for several kinds.
    """
    if text.strip().lower() in {"", "none", "(null)"}:
        return "", 0
    found = re.fullmatch(_GPU, text.strip())
    if not found:
        raise AmountError(text, "number of GPUs of one kind")
    return found[1] or "", int(found[2] if found[2] is not None else 1)


_HELD = r"(?i)(?:^|,)gpu(?::([^:,(]+))??(?::(\d+))?(?=[(,]|$)(?:\([^)]*\))?"


def gpus_held(text: str, kind: str = "") -> int:
    """Count the GPUs in what sinfo says of a node's generic resources, of one kind or of all.

    >>> gpus_held("gpu:a100:4(S:0-1),gpu:1,shard:8", "a100"), gpus_held("gpu:a100:4(IDX:0-3),gpu:1")
    (4, 5)
    """
    return sum(
        int(number or 1) for named, number in re.findall(_HELD, text) if not kind or named.lower() == kind.lower()
    )
