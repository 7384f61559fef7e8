"""Progress of a simulation: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_EVERY_S = 5.0
_REDRAWN_S = 0.1


@contextmanager
def shown_runs(total: int, *, quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Give what is to be told of a run: its name, the jobs of those before, and of its own that started.

    Args:
        total: jobs of all runs.
        quiet: show nothing.
    """
    if quiet:
        yield lambda _label, _before, _started: None
    elif sys.stderr.isatty():
        with _bar(total) as show:
            yield show
    else:
        yield _seldom(
            lambda label, started: click.echo(f"{label}: {started:,} of {total:,} jobs", err=True), _EVERY_S
        )


def _seldom(show: Callable[[str, int], None], every_s: float) -> Callable[[str, int, int], None]:
    from deeplink.core.clock import SystemClock

    clock = SystemClock()
    last = clock.monotonic()

    def told(label: str, before: int, started: int) -> None:
        nonlocal last
        if (now := clock.monotonic()) - last >= every_s:
            last = now
            show(label, before + started)

    return told


@contextmanager
def _bar(total: int) -> Iterator[Callable[[str, int, int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield _seldom(lambda label, started: bar.update(task, description=label, completed=started), _REDRAWN_S)
