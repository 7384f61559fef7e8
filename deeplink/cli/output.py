"""Output of commands: JSON, tables, progress, moments, durations and rates; and what commands and daemons log."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Self

import click
from typing_extensions import override

from deeplink.cli import output_minded
from deeplink.core.clock import SystemClock
from deeplink.core.config import load_config
from deeplink.core.text import printable, printable_lines, sized

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from rich.console import Console

    from deeplink.scheduler.jobs.job_view import Viewer

UNKNOWN = "unknown"
_EVERY_S = 5.0  # a line of progress where standard error is no terminal
_WIDE = 4096  # into a pipe or a file nothing is cut off


def print_json(value: object, *, indent: int | None = None) -> None:
    """Print a value as JSON."""
    click.echo(json.dumps(value, indent=indent))


def print_table(rows: Sequence[Sequence[str]], *, right: Iterable[int] = ()) -> None:
    """Print rows in columns as wide as they need; those whose numbers are in `right` stand to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [">" if number in set(right) else "<" for number in range(len(widths))]
    for row in rows:
        cells = [f"{cell:{side}{width}}" for cell, side, width in zip(row, aligned, widths, strict=True)]
        click.echo(printable("  ".join(cells).rstrip()))


def print_facts(facts: Iterable[tuple[str, str]], width: int) -> None:
    """Print names and what they are, a line each."""
    for name, value in facts:
        click.echo(f"  {name + ':':{width}}{value}".rstrip())


def warn(problem: object) -> None:
    """Say on standard error what went wrong."""
    click.echo(f"deeplink: {problem}", err=True)


def write_bytes(pieces: Iterable[bytes | memoryview]) -> None:
    """Write bytes to standard output."""
    with output_minded(only_output=True):
        for piece in pieces:
            sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()


def speaker(*, as_json: bool) -> Callable[[str], None]:
    """Return what prints a line after the time, or both as JSON."""

    def say(line: str) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        click.echo(json.dumps({"time": now, "said": line}) if as_json else f"{now} {printable(line)}")

    return say


def console() -> Console:
    """Return a console as wide as the terminal, or wide enough for all; rich heeds NO_COLOR and TERM."""
    from rich.console import Console

    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=_WIDE)


class ShownProgress:
    """Shows on standard error how far a command is: a bar on a terminal, else a line every few seconds."""

    def __init__(self, doing: str, things: str, total: int = 0) -> None:
        self._doing, self._things = doing, things
        self._done, self._total, self._size = 0, total, 0
        self._clock = SystemClock()
        self._began = self._last = self._clock.monotonic()
        self._bar: Any = _bar(doing) if sys.stderr.isatty() else None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def add(self, things: int, size: int = 0) -> None:
        """Count so many more things, and bytes."""
        self.at(self._done + things, self._total, self._size + size)

    def at(self, done: int, total: int, size: int = 0, whole_size: int = 0) -> None:
        """Take how many things of how many are done, and bytes of how many where that is known."""
        self._done, self._total, self._size = done, total, size
        now = self._clock.monotonic()
        if self._bar is not None:
            # A thing counts as a byte, so that empty ones move the bar too.
            made, whole = (size + done, whole_size + total) if whole_size else (done, total)
            self._bar.update(self._bar.task_ids[0], total=whole, completed=made, words=self._words(now))
        elif now - self._last >= _EVERY_S:
            self._last = now
            click.echo(f"{self._doing} {self._words(now)}", err=True)

    def _words(self, now: float) -> str:
        seconds = now - self._began or 1.0
        words = f"{self._done:,} of {self._total:,} {self._things} ({self._done / seconds:,.0f}/s)"
        return f"{words}, {sized(self._size)} ({sized(self._size / seconds)}/s)" if self._size else words


def _bar(doing: str) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(doing), BarColumn(), TextColumn("{task.fields[words]}"), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    bar.add_task(doing, total=None, words="")
    return bar


def moment(unix: float | None, none: str = "-") -> str:
    """Return a day and time of this place."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix)) if unix else none


def figure(value: float | None) -> str:
    """Return a rate as people read it; empty where there is none.

    >>> figure(12345.6), figure(0.01234), figure(7.25), figure(None)
    ('12,346', '0.0123', '7.25', '')
    """
    if value is None or not math.isfinite(value):
        return "" if value is None else f"{value}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"  # noqa: PLR2004


def span(seconds: float | None) -> str:
    """Return a duration as people read it.

    >>> span(4.4), span(75), span(3723), span(200_000), span(-1.0)
    ('4 s', '1:15 min', '1:02 h', '2 d 7 h', '0 s')
    """
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    minutes, rest = divmod(max(0, int(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    if not minutes:
        return f"{rest} s"
    if not hours:
        return f"{minutes}:{rest:02} min"
    return f"{hours}:{minute:02} h" if hours < 24 else f"{hours // 24} d {hours % 24} h"  # noqa: PLR2004


def job_viewer(every_s: float = 2.0) -> Viewer:
    """Return what looks at jobs; Slurm is asked once in so long, however many commands of this user are open."""
    from deeplink.scheduler.jobs.job_view import Viewer, me, shared

    config, clock = load_config(), SystemClock()
    return Viewer(asked=shared(config.state, clock, every_s), state=config.state, clock=clock, user=me())


FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
JOURNAL_FORMAT = "%(levelname)s %(name)s: %(message)s"
"""For systemd's journal, which knows the time."""
PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
"""Of syslog(3), as sd-daemon(3) reads them at the beginning of a line."""
LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)


class LineFormatter(logging.Formatter):
    """Writes each message as one printable line, and a traceback below it: both may quote foreign text."""

    @override
    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message)
        return super().formatMessage(record)

    @override
    def formatException(self, ei: Any) -> str:
        return printable_lines(super().formatException(ei))


class JournalFormatter(LineFormatter):
    """The same, each line with its priority before it."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        priority = PRIORITIES.get(record.levelno, 6)
        return "\n".join(f"<{priority}>{line}" for line in super().format(record).split("\n"))


class JsonFormatter(logging.Formatter):
    """One JSON object a line: `unix`, `level`, `logger`, `message`, and `exception` where there is one."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        told = {
            "unix": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told)


def to_journal(descriptor: int, env: Mapping[str, str]) -> bool:
    """Whether what is written there goes to systemd's journal, as `JOURNAL_STREAM` says (systemd.exec(5))."""
    device, _, inode = env.get("JOURNAL_STREAM", "").partition(":")
    try:
        found = os.fstat(descriptor)
    except OSError:
        return False
    return (device, inode) == (str(found.st_dev), str(found.st_ino))


def log_to_stderr(verbose: int, *, as_json: bool) -> None:
    """Log to standard error; `verbose`: 0 what needs somebody, 1 also what is done, 2 everything."""
    journal = to_journal(sys.__stderr__.fileno(), os.environ) if sys.__stderr__ else False
    handler = logging.StreamHandler(sys.stderr)
    lines = JournalFormatter(JOURNAL_FORMAT) if journal else LineFormatter(FORMAT)
    handler.setFormatter(JsonFormatter() if as_json else lines)
    logging.basicConfig(level=LEVELS[min(verbose, 2)], handlers=[handler])
