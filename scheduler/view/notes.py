"""What a user did to a job, noted in its folder beside what its launcher writes.

A file of its own: on a shared home two hosts that append to one file may write over each other.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

NOTES = "notes.jsonl"


def note(folder: Path, event: str, unix: float, **facts: object) -> None:
    """Add a note in the form of an event to a job's folder; a job without one gets none.

    Raises:
        OSError: it cannot be written.
    """
    line = f"{json.dumps({'event': event, 'unix': unix, **facts}, separators=(',', ':'))}\n".encode()
    try:
        opened = os.open(folder / NOTES, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return
    try:
        os.write(opened, line)
    finally:
        os.close(opened)
