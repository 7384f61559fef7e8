"""What an agent keeps of its ranks' reports: each second of the last ten minutes, and each ten seconds of the job.

A row has the counters that ranks report, which only grow within a rank's process: of two rows the difference is
what was in between, however many were left out. An attempt's counters begin again at 0, and its rows follow those
of the attempt before. A rank takes 1.04 MB when its rings are full, after 14 hours; beyond that every second one
of the coarse rows goes, again and again.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Mapping  # noqa: TC003 - a NamedTuple's annotation
from typing import TYPE_CHECKING, NamedTuple

from deeplink.core.process_metrics import MEASURED
from deeplink.core.types import Attempt
from deeplink.rpc.channel import attempt_from_wire

if TYPE_CHECKING:
    from deeplink.v1 import common_pb2

FINE_S, FINE_ROWS = 1.0, 600
COARSE_S, COARSE_ROWS = 10.0, 5_040
MOST_RANKS = 64
"""Ranks whose rows are kept; of those heard of longest ago none are."""
_HEAD = ("job", "restart", "relaunch", "unix", "step", "work_s")
_WIDTH = len(_HEAD) + len(MEASURED)
ROW_BYTES = 8 * _WIDTH


class MeasuredRow(NamedTuple):
    """A rank's counters at one time."""

    attempt: Attempt
    unix: float  # by the agent's clock
    step: int
    work_s: float  # as in `Progress`
    counters: Mapping[str, float]  # by their names in `core.process_metrics`; what was not reported is 0


class _Ring:
    """The newest row of each span of time. Beyond its length the oldest row goes, or each second one."""

    def __init__(self, every_s: float, most: int, *, thins: bool) -> None:
        self.every_s, self._most, self._thins = every_s, most, thins
        self._numbers = array("d")
        self._span: int | None = None

    def put(self, row: list[float], unix: float) -> None:
        span = int(unix // self.every_s)
        if span == self._span and self._numbers:
            del self._numbers[-_WIDTH:]
        self._span = span
        self._numbers.extend(row)
        if len(self._numbers) > self._most * _WIDTH:
            if self._thins:
                self._thin()
            else:
                del self._numbers[: (len(self._numbers) // _WIDTH - self._most) * _WIDTH]

    def _thin(self) -> None:
        count = len(self._numbers) // _WIDTH
        kept = array("d")
        for place in range((count - 1) % 2, count, 2):  # the newest stays
            kept.extend(self._numbers[place * _WIDTH : (place + 1) * _WIDTH])
        self._numbers, self.every_s, self._span = kept, 2 * self.every_s, None

    def rows(self) -> list[MeasuredRow]:
        return [_row(self._numbers[at : at + _WIDTH]) for at in range(0, len(self._numbers), _WIDTH)]

    @property
    def nbytes(self) -> int:
        return len(self._numbers) * self._numbers.itemsize


def _row(numbers: array[float]) -> MeasuredRow:
    job, restart, relaunch, unix, step, work_s = numbers[: len(_HEAD)]
    counters = dict(zip(MEASURED, numbers[len(_HEAD) :], strict=True))
    return MeasuredRow(Attempt(int(job), int(restart), int(relaunch)), unix, int(step), work_s, counters)


class RankMeasurements:
    """The rows of this node's ranks, by job and rank. Thread-safe, bounded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranks: OrderedDict[tuple[int, int], tuple[_Ring, _Ring]] = OrderedDict()

    def take(self, progress: common_pb2.Progress, unix: float) -> None:
        """Keep what a rank has reported at `unix`."""
        attempt, told = attempt_from_wire(progress.attempt), progress.metrics
        row = [attempt.job, attempt.restart, attempt.relaunch, unix, progress.step, progress.work_s]
        row += [told.get(name, 0.0) for name in MEASURED]
        key = (attempt.job, progress.rank)
        with self._lock:
            if key not in self._ranks:
                fine = _Ring(FINE_S, FINE_ROWS, thins=False)
                self._ranks[key] = (fine, _Ring(COARSE_S, COARSE_ROWS, thins=True))
            self._ranks.move_to_end(key)
            for ring in self._ranks[key]:
                ring.put(row, unix)
            if len(self._ranks) > MOST_RANKS:
                self._ranks.popitem(last=False)

    def ranks(self) -> tuple[tuple[int, int], ...]:
        """Return job and rank of all that rows are kept of."""
        with self._lock:
            return tuple(sorted(self._ranks))

    def newest(self, job: int, rank: int) -> MeasuredRow | None:
        """Return a rank's newest row; None where none is kept."""
        found = self.rows(job, rank, every_s=FINE_S)
        return found[-1] if found else None

    def rows(
        self, job: int, rank: int, *, since_unix: float = 0.0, every_s: float = COARSE_S
    ) -> tuple[MeasuredRow, ...]:
        """Return a rank's rows in order of arrival; `every_s`: 1.0 or 10.0."""
        with self._lock:
            rings = self._ranks.get((job, rank))
            found = rings[every_s >= COARSE_S].rows() if rings else []
        return tuple(row for row in found if row.unix >= since_unix)

    def nbytes(self) -> int:
        """Return the bytes of all rows."""
        with self._lock:
            return sum(ring.nbytes for rings in self._ranks.values() for ring in rings)
