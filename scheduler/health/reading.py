"""Small files of /proc and /sys, which may not be there."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_LONGEST = 1 << 20


def text_of(path: Path) -> str | None:
    """Return what a file says, without blanks around it; None where it is not there or does not say."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(_LONGEST).strip()
    except OSError:  # "Invalid argument" of the carrier of an interface that is down, say
        return None


def number_of(path: Path) -> int | None:
    """Return the whole number a file begins with; None where there is none."""
    words = (text_of(path) or "").split()
    try:
        return int(words[0]) if words else None
    except ValueError:
        return None


def table_of(path: Path) -> dict[str, int]:
    """Return the numbers of a file of lines such as `oom_kill 3` or `MemTotal:  1024 kB`, by their names."""
    found = {}
    for line in (text_of(path) or "").splitlines():
        name, *rest = line.split()
        if rest and rest[0].isascii() and rest[0].isdigit():
            found[name.rstrip(":")] = int(rest[0])
    return found
