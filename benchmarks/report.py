"""Writes what was measured as pages for readers: docs/benchmarks*.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.core.publish import write_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from benchmarks.rows import Row

_CACHE = """\
# Benchmarks of the cache

Written by `make bench-cache ARGS=--write-docs`; what is measured and by which rules is in `benchmarks/README.md`.
Measured on {when} ({scale}) on: {machine}. Load average when it began: {load:.1f}.

A ratio (`x`) is how many times faster than that peer we are, in turns within one run; the spread is the lowest and
the highest of the runs. Client and servers share one machine's cores, so remote figures are bound by its
processors and not by a network.
"""


def page(
    subjects: Mapping[str, Sequence[Row]],
    *,
    missing: Mapping[str, str],
    settings: Mapping[str, str],
    when: str,
    scale: str,
    load: float,
) -> str:
    """Return the page.

    Args:
        subjects: rows of each subject, by its name.
        missing: what was not measured, and why.
        settings: of each side, by its name.
        when: the day.
        scale: how it was run.
        load: average of the machine when the run began: with others at work figures say less.
    """
    head = _CACHE.format(when=when, scale=scale, load=load, machine=_machine(subjects))
    said = ["## Settings\n", "".join(f"- **{name}**: {how}\n" for name, how in settings.items())]
    return "\n".join([head, *_measured(subjects), *said, *_not_measured(missing)])


def subjects_page(
    head: str,
    subjects: Mapping[str, Sequence[Row]],
    *,
    missing: Mapping[str, str],
    notes: Sequence[str],
    when: str,
    load: float,
) -> str:
    """Return the page of a benchmark that is several programs.

    Args:
        head: how it begins; holds {when}, {machine} and {load}.
        subjects: rows of each subject, by its title.
        missing: what was not measured, and why.
        notes: remarks, one line each, where there are any.
        when: the day.
        load: average of the machine when the run began.
    """
    begun = head.format(when=when, load=load, machine=_machine(subjects))
    said = ["## What happened\n", "".join(f"- {_cell(note)}\n" for note in notes)] if notes else []
    return "\n".join([begun, *_measured(subjects), *said, *_not_measured(missing)])


def _machine(subjects: Mapping[str, Sequence[Row]]) -> str:
    return next((row.machine for of in subjects.values() for row in of), "nothing")


def _measured(subjects: Mapping[str, Sequence[Row]]) -> list[str]:
    goals = [row for of in subjects.values() for row in of if row.goal is not None]
    reached = sum(1 for row in goals if row.reached)
    parts = [f"## Figures to reach: {reached} of {len(goals)}\n", _table(goals)]
    for name, of in subjects.items():
        parts += [f"## {name}\n", _table(of)]
    return parts


def _not_measured(missing: Mapping[str, str]) -> list[str]:
    if not missing:
        return []
    return ["## Not measured\n", "".join(f"- {what}: {_cell(why)}\n" for what, why in missing.items())]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _table(rows: Sequence[Row]) -> str:
    lines = ["| what | value | spread | runs | at least/most | |", "|---|---|---|---|---|---|"]
    for row in rows:
        verdict = {True: "reached", False: "**short**", None: ""}[row.reached]
        goal = "" if row.goal is None else f"{row.goal:g}"
        low, high = row.spread
        value = f"{row.value:.4g} {row.unit}"
        lines.append(f"| {_cell(row.row)} | {value} | {low:.4g} .. {high:.4g} | {row.runs} | {goal} | {verdict} |")
    return "\n".join(lines) + "\n"


def write_page(path: Path, text: str) -> None:
    """Write the page, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    write_text(path, text)
