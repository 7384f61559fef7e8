"""`decisions.jsonl` in a job's folder: every decision about where the job should run, a line each."""

from __future__ import annotations

import errno
import json
import os
import stat
from typing import TYPE_CHECKING

from deeplink.private import private_folder
from deeplink.scheduler.wish.decision import DecisionFormatError, Recorded

if TYPE_CHECKING:
    from pathlib import Path

NAME = "decisions.jsonl"
_MOST_READ = 4 << 20  # bytes: the newest lines of a record that somebody let grow


def job_folder(state: Path, job: int | str) -> Path:
    """Return where a job's records are; of an array that of the array's own id."""
    return state / "jobs" / str(job)


def append(folder: Path, recorded: Recorded, owner: int | None = None) -> None:
    """Add a decision to a job's record, whole or not at all; makes the folder, where it is ours.

    Args:
        folder: the job's.
        recorded: the decision.
        owner: the user id of somebody else, whose record it is: then nothing is made there, and nothing but a file
            of his own is written to, wherever his links lead.

    Raises:
        OSError: it cannot be written.
    """
    if owner is None:
        private_folder(folder)
    line = f"{json.dumps(recorded.document())}\n".encode()
    opened = _opened(folder / NAME, os.O_WRONLY | os.O_APPEND | (os.O_CREAT if owner is None else os.O_NOFOLLOW))
    try:
        if owner is not None and (os.fstat(opened).st_uid != owner or os.fstat(opened).st_nlink != 1):
            raise PermissionError(errno.EPERM, "not a file of its user's own", str(folder / NAME))
        before = os.fstat(opened).st_size
        if os.write(opened, line) != len(line):  # the disk is full
            os.ftruncate(opened, before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / NAME))
    finally:
        os.close(opened)


def _opened(path: Path, flags: int) -> int:
    """Open a file, and nothing else: a pipe that somebody put there would be waited for."""
    opened = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    if stat.S_ISREG(os.fstat(opened).st_mode):
        return opened
    os.close(opened)
    raise OSError(errno.EINVAL, "not a file", str(path))


def read(folder: Path) -> list[Recorded]:
    """Return a job's decisions, oldest first; none where there is no record.

    Lines that are not whole, or of another version, are left out.

    Raises:
        OSError: there is a record, and it cannot be read.
    """
    try:
        with os.fdopen(_opened(folder / NAME, os.O_RDONLY), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _MOST_READ))
            lines = file.read(_MOST_READ).splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            found.append(Recorded.parse(json.loads(line)))
        except (ValueError, RecursionError, DecisionFormatError):
            continue
    return found
