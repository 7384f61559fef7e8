"""How far the ranks of a run are, over all its attempts; pure, time is passed in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deeplink.scheduler.watch.records import ProgressPoint
    from deeplink.types import Attempt

LONG_RUN_S = 600.0
"""An attempt of a job that reports no steps counts as progress when it ran for so long."""


@dataclass(slots=True)
class Progress:
    """The newest step of a run and of its newest attempt.

    Attributes:
        best: newest step of any attempt; None before the first report.
        first: first step the newest attempt reported; None before.
        fruitless: relaunches since a newer step than ever before was reported.
    """

    best: int | None = None
    first: int | None = None
    fruitless: int = 0
    _began: float = 0.0
    _newest: int | None = None
    _newest_at: float = 0.0
    _best_before: int | None = None

    def begin(self, now: float, *, relaunch: bool) -> None:
        """A new attempt begins."""
        if relaunch:
            self.fruitless = self.fruitless_now(now) + 1
        self._best_before = self.best
        self._began, self.first, self._newest = now, None, None

    def fruitless_now(self, now: float) -> int:
        """Return the relaunches since the newest step, or since a long run of a job that reports none."""
        return 0 if self.best is None and self.ran_s(now) >= LONG_RUN_S else self.fruitless

    def ran_s(self, now: float) -> float:
        """Return the seconds since the newest attempt began."""
        return now - self._began

    def take(self, points: Iterable[ProgressPoint], attempt: Attempt, now: float) -> bool:
        """Take in reports; those of other attempts do not count. True when they hold the attempt's first step."""
        steps = [point.step for point in points if point.attempt == attempt]
        if not steps:
            return False
        began = self.first is None
        if began:
            self.first = min(steps)
        newest = max(steps)
        if self._newest is None or newest > self._newest:
            self._newest, self._newest_at = newest, now
        if self.best is None or newest > self.best:
            self.best, self.fruitless = newest, 0
        return began

    def stuck_s(self, now: float) -> float | None:
        """Return the seconds since the newest attempt's newest step; None before its first report."""
        return None if self._newest is None else now - self._newest_at

    @property
    def repeated(self) -> int:
        """Steps the newest attempt does again, because they came after the last checkpoint."""
        if self.first is None or self._best_before is None:
            return 0
        return max(0, self._best_before - self.first + 1)
