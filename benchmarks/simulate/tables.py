"""Tables of a report, in Markdown that can be read on a terminal too; pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.simulate.spread import FigureSpread

_NOTHING = 1e-6  # what adding up times of months in another order makes of nothing
_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86400.0


@dataclass(frozen=True, slots=True)
class ReportTable:
    """A table.

    Attributes:
        title: what it shows.
        header: the columns' names.
        rows: as many cells each.
        note: what must be known to read it; may be empty.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def markdown(table: ReportTable) -> str:
    """Return a table with its title and note; columns stand below each other."""
    cells = [table.header, *table.rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(table.header))]

    def line(row: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    parts = [f"### {table.title}", "", line(table.header), rule, *map(line, table.rows)]
    return "\n".join([*parts, *(["", table.note] if table.note else [])]) + "\n"


def timed(seconds: float) -> str:
    """Return a time as people say it, in three digits.

    >>> timed(0), timed(0.3123), timed(45.2), timed(-90), timed(5400), timed(400_000)
    ('0 s', '312 ms', '45.2 s', '-1.5 min', '1.5 h', '4.63 d')
    """
    size = abs(seconds)
    if size < _NOTHING:
        return "0 s"
    if size < 1:
        return f"{seconds * 1e3:.3g} ms"
    for least, unit in ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "min")):
        if size >= least:
            return f"{seconds / least:.3g} {unit}"
    return f"{seconds:.3g} s"


def about(spread: FigureSpread | None, *, time: bool = False) -> str:
    """Return a mean and half of its 95 % interval; the mean alone where there was one run."""
    if spread is None:
        return "-"
    one = spread.runs == 1
    if not time:
        return f"{spread.mean:.3f}" + ("" if one else f" ± {spread.half:.3f}")
    return timed(spread.mean) + ("" if one else f" ± {timed(spread.half)}")
