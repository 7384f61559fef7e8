"""What every program of a benchmark has: options, a way to be ended, and how its rows are handed over."""

from __future__ import annotations

import argparse
import os
import signal
from typing import TYPE_CHECKING

from benchmarks.rows import BENCH, table, write_rows

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.rows import Row


def options(name: str, about: str | None, *, quick: str) -> argparse.ArgumentParser:
    """Return a parser with --quick and --json.

    Args:
        name: of the module, as `python -m` takes it.
        about: what `--help` says.
        quick: what is less in a short run.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {name}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    return parser


def hand_over(name: str, rows: Sequence[Row], *, as_json: bool, folder: Path = BENCH) -> None:
    """Write the rows to `folder`/NAME.json, and print them.

    Raises:
        OSError: they cannot be written.
    """
    path = write_rows(name, rows, folder=folder)
    print(path.read_text(encoding="utf-8") if as_json else f"{table(rows)}\nwritten to {path}")


def _end(number: int, _frame: object) -> None:
    # Whoever presses Ctrl-C once more is not to break off the cleaning up; another signal does.
    signal.signal(number, signal.SIG_IGN)
    # Not print: it may be a print that was interrupted.
    os.write(2, f"{signal.Signals(number).name}: what was started is taken down\n".encode())
    raise SystemExit(128 + number)


def unwind_when_told() -> None:
    """Let SIGTERM and SIGINT unwind this process: the programs and sandboxes it started are ended.

    It exits with 128 and the signal's number, as shells have it: 130 after Ctrl-C.
    """
    for number in (signal.SIGTERM, signal.SIGINT):  # the latter is ignored in a shell's background job else
        signal.signal(number, _end)
