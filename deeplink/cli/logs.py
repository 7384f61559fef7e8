"""What daemons and commands log, on standard error: one line each, for people, for the journal, or as JSON."""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from deeplink.core.text import printable, printable_lines

if TYPE_CHECKING:
    from collections.abc import Mapping

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
