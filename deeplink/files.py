"""Files that a verb is told to read, or to write."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from deeplink.errors import DeepLinkError
from deeplink.publish import write_text

STANDARD_OUTPUT = 1


class FileTroubleError(DeepLinkError):
    """A file cannot be read, or not be written; then what was there before still is."""

    def __init__(self, doing: str, path: Path, problem: OSError) -> None:
        super().__init__(
            f"cannot {doing} {path}: {problem.strerror or problem}",
            remedy=f"Name a place that you may {doing}, on storage that answers.",
        )
        self.doing, self.path, self.problem = doing, path, problem


def standard_output_file() -> str:
    """Return the file that standard output goes to; empty where it is a terminal, a pipe or nothing.

    For a batch script's launcher that is the job's output file.
    """
    try:
        target = Path(f"/proc/self/fd/{STANDARD_OUTPUT}").readlink()
        return str(target) if stat.S_ISREG(os.fstat(STANDARD_OUTPUT).st_mode) and target.exists() else ""
    except OSError:
        return ""


def write_output(path: Path, text: str) -> None:
    """Write a file, whole or not at all.

    Raises:
        FileTroubleError: it cannot be written.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")  # a pipe, or /dev/null: nothing to put in its place
            return
        # What a link leads to is replaced, not the link; and who could read the file still can.
        final = path.resolve()
        write_text(final, text, mode=stat.S_IMODE(final.stat().st_mode) if final.exists() else None)
    except OSError as problem:
        raise FileTroubleError("write", path, problem) from problem
