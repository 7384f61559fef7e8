"""Draws the README's plot from the figures in docs/benchmarks-watchdog.md: `python -m benchmarks.figure`."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.simulate.charts import Bar, bars

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks-watchdog.md"
PLOT = ROOT / "docs" / "recovery.svg"
# Below the bars, what our row is called, and what stock Slurm's is.
FAULTS = (
    ("node killed, spare", "node killed, a spare in the allocation", "node-killed"),
    ("node killed", "node killed, no spare, operator rights", "node-killed"),
    ("node cut off", "node cut off, healed 60 s later", "node-cut"),
    ("rank stopped", "rank SIGSTOPped", "rank-stopped"),
    ("rank exits", "rank exits 1 once", "rank-exit"),
)
STANDALONE = 'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="12" style="background: white"'


class NoRowError(Exception):
    """The page has no such row."""


def row(page: str, name: str) -> Bar:
    """Return the seconds of a row, with half of their spread.

    Raises:
        NoRowError: there is none of this name.
    """
    found = re.search(rf"^\| {re.escape(name)} \| ([\d.]+) s \| ([\d.]+) \.\. ([\d.]+) \|", page, re.MULTILINE)
    if not found:
        raise NoRowError(name)
    value, low, high = map(float, found.groups())
    return Bar(value, (high - low) / 2)


def plot(page: str) -> str:
    """Return the plot as SVG: seconds from a fault to the first training step after it."""
    ours = [row(page, f"{name}: first training step") for _, name, _ in FAULTS]
    stock = [row(page, f"stock Slurm, {name}: first training step") for _, _, name in FAULTS]
    title = "Seconds from a fault to the first training step after it"
    drawn = bars(title, [name for name, _, _ in FAULTS], [("DeepLink", ours), ("stock Slurm", stock)], "s")
    return drawn.replace("<svg ", f"<svg {STANDALONE} ", 1)


if __name__ == "__main__":
    PLOT.write_text(plot(PAGE.read_text(encoding="utf-8")) + "\n", encoding="utf-8")
