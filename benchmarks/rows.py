"""What a benchmark hands back: rows with a goal each, as JSON below build/bench and as a table."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import platform
import statistics
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeplink.core.publish import write_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BENCH = Path(__file__).parents[1] / "build" / "bench"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure.

    Attributes:
        row: what was measured, against what.
        value: the median of the runs.
        unit: its unit; `x` for a ratio.
        goal: the bound it is held against; None where there is none.
        reached: whether it keeps the bound; None where there is none.
        spread: the lowest and the highest run.
        runs: how many runs.
        machine: where.
    """

    row: str
    value: float
    unit: str
    goal: float | None
    reached: bool | None
    spread: tuple[float, float]
    runs: int
    machine: str


def machine() -> str:
    """Return cores, processor, kernel and Python of this machine, and which DeepLink is measured, in a line."""
    cores = len(os.sched_getaffinity(0))
    python = platform.python_version()
    return f"{cores} cores, {_processor()}, Linux {platform.release()}, Python {python}, DeepLink at {code()}"


@functools.cache
def code() -> str:
    """Return the commit that is checked out, and `+` where files differ from it; `unknown` outside of a clone."""
    argv = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=7", "--dirty=+"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return " ".join(value.split())
    return platform.machine()


def make_row(
    row: str,
    runs: Sequence[float],
    unit: str = "x",
    *,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Row:
    """Return the row of several runs.

    Args:
        row: what was measured.
        runs: a figure per run.
        unit: their unit.
        at_least: the goal, where more is better.
        at_most: the goal, where less is better.

    Raises:
        ValueError: there are no runs, or two goals.
    """
    if not runs:
        raise ValueError(f"{row}: no runs")
    if at_least is not None and at_most is not None:
        raise ValueError(f"{row}: two goals")
    value = statistics.median(runs)
    reached = None
    if at_least is not None:
        reached = value >= at_least
    elif at_most is not None:
        reached = value <= at_most
    goal = at_most if at_least is None else at_least
    return Row(
        row=row,
        value=value,
        unit=unit,
        goal=goal,
        reached=reached,
        spread=(min(runs), max(runs)),
        runs=len(runs),
        machine=machine(),
    )


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text in columns."""
    lines = [("row", "value", "spread", "runs", "goal", "")]
    for row in rows:
        verdict = {True: "reached", False: "short", None: ""}[row.reached]
        low, high = row.spread
        goal = "" if row.goal is None else f"{row.goal:g}"
        spread = f"{low:.4g} .. {high:.4g}"
        lines.append((row.row, f"{row.value:.4g} {row.unit}", spread, str(row.runs), goal, verdict))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def write_rows(name: str, rows: Sequence[Row], *, folder: Path = BENCH) -> Path:
    """Write the rows to `folder/NAME.json`, whole or not at all, and return the path.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    write_text(path, json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
    return path


def rows_from(noted: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return the rows of what `write_rows` wrote, read from JSON.

    Raises:
        TypeError: it is something else.
    """
    return [Row(**{**row, "spread": tuple(row["spread"])}) for row in noted]
