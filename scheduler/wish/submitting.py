"""One submission of a user decides at a time, until its job is in Slurm's queue, where the next one sees it."""

from __future__ import annotations

import fcntl
from contextlib import contextmanager
from typing import TYPE_CHECKING

from deeplink.private import private_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import IO

    from deeplink.clock import Clock

LOCK_WAIT_S = 2.0
_LOOK_S = 0.02


@contextmanager
def alone(folder: Path, clock: Clock) -> Iterator[bool]:
    """Be the only submission that decides; tell whether that could be had in time. It ends with its process."""
    try:
        private_folder(folder)
        file = (folder / "wishes.lock").open("w", encoding="utf-8")
    except OSError:
        yield False
        return
    with file:
        yield _had(file, clock)


def _had(file: IO[str], clock: Clock) -> bool:
    until = clock.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if clock.monotonic() >= until:
                return False
            clock.sleep(_LOOK_S)
        else:
            return True
