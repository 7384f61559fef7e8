"""Before the time limit: when the ranks are to save, and when the job is better started again; pure.

The margin is learned from how long saves of this run took. The ranks are told a step to save at, a little ahead of
the newest one, so that all of them save at the same step: where a save is a common effort, no rank may miss it.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from deeplink import process_metrics

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deeplink.scheduler.watch.records import ProgressPoint

LEAD_S = 3.0
"""How long every rank may take to learn of the step: its agent is told, then its next report is answered."""
END_S = 20.0
"""What is left of the time once the ranks are ended: for Slurm to start the job again before it ends it."""
LEAST_MARGIN_S, MOST_MARGIN_S = 60.0, 900.0
SAVES = 3.0
"""Times a save: storage may be slower than it was so far, and the limit comes for many jobs at once."""
MOVED_S = 30.0
"""Time that is left grows by more only where the limit was moved, or the job was suspended for a while."""
MOST_POINTS = 512


class DeadlineAction(Enum):
    """What the time that is left asks for."""

    NOTHING = "nothing"
    SAVE = "save"
    END = "end"


@dataclass(slots=True)
class Deadline:
    """What is known of a run's saves, and of its limit.

    Args:
        margin_s: how long before the limit the ranks are to save; None: learned.

    Attributes:
        save_s: the longest save so far, seconds; None before the first.
        saved: step of the newest whole checkpoint; None before the first.
        save_at: the step the ranks were told to save at; 0 while they were not.
    """

    margin_s: float | None = None
    save_s: float | None = None
    saved: int | None = None
    save_at: int = 0
    _least_s: float = math.inf
    _points: deque[ProgressPoint] = field(default_factory=lambda: deque(maxlen=MOST_POINTS))

    def begin(self) -> None:
        """A new attempt begins: its ranks have been told nothing."""
        self.save_at = 0
        self._points.clear()

    def take(self, points: Iterable[ProgressPoint]) -> None:
        """Take in reports of the newest attempt."""
        for point in points:
            if point.rank:
                continue
            self._points.append(point)
            step = point.metrics.get(process_metrics.CHECKPOINT_STEP)
            if step is not None and step != self.saved:
                self.saved = int(step)
                begun = next((one.unix for one in self._points if one.step >= step), point.unix)
                took = max(0.0, point.metrics.get(process_metrics.CHECKPOINT_UNIX, point.unix) - begun)
                self.save_s = took if self.save_s is None else max(took, self.save_s)

    @property
    def step_s(self) -> float:
        """Seconds of a step lately; 0 where too little was heard."""
        if not self._points or self._points[-1].step <= self._points[0].step:
            return 0.0
        first, last = self._points[0], self._points[-1]
        return max(0.0, last.unix - first.unix) / (last.step - first.step)

    @property
    def margin(self) -> float:
        """Seconds before the limit at which the ranks are told to save."""
        if self.margin_s is not None:
            return self.margin_s
        wanted = END_S + LEAD_S + SAVES * (self.save_s or 0.0) + 2 * self.step_s
        return min(MOST_MARGIN_S, max(LEAST_MARGIN_S, wanted))

    def look(self, left_s: float | None) -> DeadlineAction:
        """Return what is to be done with so much time left; SAVE once an attempt, for one limit."""
        if left_s is None or not self._points:
            return DeadlineAction.NOTHING  # who never said how far it is, is not told to save either
        if left_s > self._least_s + MOVED_S:
            self.save_at, self._least_s = 0, math.inf  # what was told was for another limit
        self._least_s = min(self._least_s, left_s)
        if self.save_at:
            done = self.saved is not None and self.saved >= self.save_at
            return DeadlineAction.END if done or left_s < min(END_S, self.margin / 2) else DeadlineAction.NOTHING
        return DeadlineAction.SAVE if left_s <= self.margin else DeadlineAction.NOTHING

    def told(self) -> int:
        """Return the step at which all ranks are to save, and remember that they were told."""
        ahead = 1 + math.ceil(LEAD_S / self.step_s) if self.step_s else 1
        self.save_at = self._points[-1].step + ahead
        return self.save_at
