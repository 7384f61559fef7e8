"""`decisions.jsonl` in a job's folder: every decision about where the job should run, a line each."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from deeplink.scheduler.wish.decision import DecisionFormatError, Recorded

if TYPE_CHECKING:
    from pathlib import Path

NAME = "decisions.jsonl"
_MOST_READ = 4 << 20  # bytes: the newest lines of a record that somebody let grow


def job_folder(state: Path, job: int | str) -> Path:
    """Return where a job's records are; of an array that of the array's own id."""
    return state / "jobs" / str(job)


def append(folder: Path, recorded: Recorded) -> None:
    """Add a decision to a job's record, whole or not at all; makes the folder.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    line = f"{json.dumps(recorded.document())}\n".encode()
    opened = os.open(folder / NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        before = os.fstat(opened).st_size
        if os.write(opened, line) != len(line):  # the disk is full
            os.ftruncate(opened, before)
            raise OSError(28, os.strerror(28), str(folder / NAME))
    finally:
        os.close(opened)


def read(folder: Path) -> list[Recorded]:
    """Return a job's decisions, oldest first; none where there is no record.

    Lines that are not whole, or of another version, are left out.

    Raises:
        OSError: there is a record, and it cannot be read.
    """
    try:
        with (folder / NAME).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _MOST_READ))
            lines = file.read(_MOST_READ).splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            found.append(Recorded.parse(json.loads(line)))
        except (ValueError, DecisionFormatError):
            continue
    return found
