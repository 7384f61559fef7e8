"""Progress of a command that goes through samples: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_EVERY_S = 5.0


@contextmanager
def shown_progress(doing: str, total: int, things: str = "samples") -> Iterator[Callable[[int, int], None]]:
    """Give what is to be told of each few more things and bytes; shows them on standard error.

    Args:
        doing: what is done, one word.
        total: things in all.
        things: what they are.
    """
    if sys.stderr.isatty():
        with _bar(doing, total) as show:
            yield show
    else:
        yield _lines(doing, total, things)


def _lines(doing: str, total: int, things: str) -> Callable[[int, int], None]:
    from deeplink.clock import SystemClock
    from deeplink.text import sized

    clock = SystemClock()
    began = last = clock.monotonic()
    done = size = 0

    def show(more: int, count: int) -> None:
        nonlocal last, done, size
        done, size, now = done + more, size + count, clock.monotonic()
        if now - last >= _EVERY_S:
            last = now
            rate = sized(size / (now - began))
            click.echo(f"{doing} {done:,} of {total:,} {things}, {sized(size)}, {rate}/s", err=True)

    return show


@contextmanager
def _bar(doing: str, total: int) -> Iterator[Callable[[int, int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from deeplink.text import sized

    columns = (
        TextColumn(doing),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[size]}  {task.fields[rate]}/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(doing, total=total, size=sized(0), rate=sized(0))
        size = 0

        def show(more: int, count: int) -> None:
            nonlocal size
            size += count
            rate = sized(size / (bar.tasks[0].elapsed or 1.0))
            bar.update(task, advance=more, size=sized(size), rate=rate)

        yield show
