"""Finding the real srun and torchrun where stand-ins of ours are in front of them on PATH."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from deeplink.private import private_folder
from deeplink.publish import write_text

STAND_INS = ("srun", "torchrun")
_MARK = b"-m deeplink shim "
_HEAD = 4096  # bytes


def make_stand_ins(folder: Path) -> None:
    """Leave stand-ins for srun and torchrun in `folder`, for the front of a job's PATH.

    Raises:
        OSError: they cannot be written.
    """
    private_folder(folder)
    for program in STAND_INS:
        text = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -P -m deeplink shim {program} "$@"\n'
        standin = folder / program
        if not standin.is_file() or standin.read_text(encoding="utf-8") != text:
            write_text(standin, text, mode=0o755)


def real_program(name: str, path: str) -> str | None:
    """Return the file that `name` stands for on `path`, leaving our stand-ins out; None where there is none."""
    for folder in filter(None, path.split(os.pathsep)):
        found = shutil.which(name, path=folder)
        if found is not None and not _stands_in(Path(found)):
            return found
    return None


def _stands_in(program: Path) -> bool:
    try:
        with program.open("rb") as file:
            return _MARK in file.read(_HEAD)
    except OSError:  # executable but not readable: none of ours
        return False
