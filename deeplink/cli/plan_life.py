"""How long `deeplink plan` lives: one at a time, until it is told to end, or nobody needs it."""

from __future__ import annotations

import os
import pwd
import signal
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.daemon import ending_signals
from deeplink.scheduler.planner.lock import PlannerRunsError, holding, lock_path

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from deeplink.scheduler.planner.loop import Planner

SLICE_S = 0.5
"""How often a planner that waits looks whether it is to end, or a job was submitted (a stat of a folder)."""
SETTLED_S = 0.2
"""A job's folder is there before its record is."""
LEAST_S = 1.0
"""From one round to the next, however many jobs are submitted: each asks Slurm for its whole queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerLifetime:
    """When to end.

    Attributes:
        job: when this job waits no more; None for no such bound.
        until_idle: when no job has needed it for a minute.
        locked: whether it is to be the only one.
    """

    job: int | None
    until_idle: bool
    locked: bool


def user_name() -> str:
    """Return whose jobs are ours, as squeue writes it: the name, or the number of a user without one."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


@contextmanager
def alone(planner: Planner) -> Iterator[None]:
    """Be this user's only planner for this cluster.

    Raises:
        PlannerRunsError: another one runs.
    """
    with holding(lock_path(planner.state, os.environ), planner.clock.unix()):
        yield


def live(planner: Planner, life: PlannerLifetime) -> None:
    """Go round until it is time to end.

    Raises:
        PlannerRunsError: another planner runs; not where this one was started for as long as it is needed only.
    """
    stop = _Stop()
    if not life.locked:
        _rounds(planner, life, stop)
        return
    while True:
        try:
            with alone(planner):
                _rounds(planner, life, stop)
        except PlannerRunsError:
            if life.until_idle:
                return  # that one does what this one was started for
            raise
        # A job may have come between the last round and now, whose submission found us still there.
        if stop.told or not life.until_idle or not planner.needed():
            return


def _rounds(planner: Planner, life: PlannerLifetime, stop: _Stop) -> None:
    while not stop.told:
        seen, began = _changed(planner.state / "jobs"), planner.clock.monotonic()
        pause = planner.tick()
        if life.job is not None and planner.over:
            planner.say(f"job {life.job} waits no more")
            return
        if life.until_idle and planner.idle:
            return
        stop.wait(pause, planner, seen, began + LEAST_S)


class _Stop:
    """Becomes true at SIGTERM or SIGINT."""

    def __init__(self) -> None:
        self.told = False
        for number in ending_signals():
            signal.signal(number, self._tell)

    def _tell(self, *_: object) -> None:
        self.told = True

    def wait(self, seconds: float, planner: Planner, seen: int, earliest: float) -> None:
        """Wait so long; less where it is time to end, or a job was submitted since the jobs were `seen` so."""
        jobs, clock = planner.state / "jobs", planner.clock
        until = clock.monotonic() + seconds
        while not self.told and _changed(jobs) == seen:
            left = until - clock.monotonic()
            if left <= 0:
                return
            clock.sleep(min(left, SLICE_S))
        if not self.told:
            clock.sleep(max(SETTLED_S, earliest - clock.monotonic()))


def _changed(folder: Path) -> int:
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return 0
