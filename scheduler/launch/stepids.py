"""Numbers of a job's steps that an earlier run of it may still be asked to end.

slurmctld keeps trying to deliver a signal for a step to a node that does not answer. A job that Slurm starts again
counts its steps from 0: when the node comes back, the old signal ends the new step of that number (measured with
22.05.8, 67 s later). So a run that follows one which lost a node lets as many numbers pass as that one had used.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.publish import write_text

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

log = logging.getLogger(__name__)

FILE, BEFORE_FILE = "steps", "steps.before"
"""The numbers of the newest run that noted some, and those of the runs before that had lost a node."""
MOST_PASSED = 64
"""Each costs about 0.1 s. Beyond it the older numbers are those of steps that ended long ago."""
AT_ONCE = 8
_changing = threading.Lock()
"""Ranks and agents are started by threads of their own."""


@dataclass(frozen=True, slots=True)
class StepIds:
    """What is known of a job's step numbers, in two files of its state folder.

    Args:
        folder: the job's state folder.
        restart: which run of the job this is.
    """

    folder: Path
    restart: int

    def note(self, number: int) -> None:
        """A step of this run has this number; until `forget` says otherwise, a signal for it may be under way."""
        with _changing:
            self._leave(max(number, self._noted()))

    def add(self) -> None:
        """One more step has been started since the last one that was noted."""
        with _changing:
            number = self._noted()
            if number >= 0:
                self._leave(number + 1)

    def _noted(self) -> int:
        """Return the highest number of this run's so far; -1 where none was noted."""
        restart, number = self._read(FILE)
        return number if restart == self.restart else -1

    def _read(self, name: str) -> tuple[int, int]:
        """Return which run a file is of, and the number in it; -1 and -1 where there is none."""
        try:
            restart, number = map(int, (self.folder / name).read_text(encoding="ascii").split())
        except FileNotFoundError:
            return -1, -1
        except (OSError, ValueError) as problem:
            log.warning("%s: %s", self.folder / name, problem)
            return -1, -1
        return restart, number

    def _leave(self, number: int, name: str = FILE) -> None:
        try:
            write_text(self.folder / name, f"{self.restart} {number}")
        except OSError as problem:
            log.warning("%s: %s", self.folder / name, problem)

    def forget(self) -> None:
        """This run ended without having lost a node: no signal of its own is under way."""
        try:
            (self.folder / FILE).unlink(missing_ok=True)
        except OSError as problem:
            log.warning("%s: %s", self.folder / FILE, problem)

    def highest(self) -> int:
        """Return the highest number that a run before this one may still be signalled under; -1 for none."""
        if not self.restart:
            return -1
        last, number = self._read(FILE)
        return max(number if last < self.restart else -1, self._read(BEFORE_FILE)[1])

    def let_pass(self, start_step: Callable[[], int | None]) -> int:
        """Start empty steps until all numbers up to `highest` are used; return how many were.

        Args:
            start_step: runs a step that does nothing; returns its number, None where it could not be run.
        """
        highest = self.highest()
        if highest < 0:
            return 0
        self._leave(highest, BEFORE_FILE)
        first = start_step()
        if first is None:
            return 0
        missing = min(highest - first, MOST_PASSED)
        if missing > 0:
            with ThreadPoolExecutor(AT_ONCE) as pool:
                list(pool.map(lambda _: start_step(), range(missing)))
        return 1 + max(0, missing)
