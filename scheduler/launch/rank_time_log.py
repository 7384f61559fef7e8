"""How long the ranks' own part of a step is, from what they report: a row about every ten seconds; pure.

A rank's own part is its step without waiting for other ranks, and without checkpoints, which one saves for all.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from deeplink.core import process_metrics as names
from deeplink.rpc.channel import attempt_from_wire
from deeplink.scheduler.recovery.records import RankTimes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from deeplink.core.types import Attempt
    from deeplink.v1 import common_pb2

EVERY_S = 10.0
MOST_NUMBERS = 4_096
"""Of one row: where there are more ranks, several share a number, the slowest one's."""


class _Counted(NamedTuple):
    """A rank's counters so far; and its own word, where it counts nothing."""

    steps: float = 0.0
    own_s: float = 0.0
    data_s: float = 0.0
    work_s: float = 0.0


class RankTimesLog:
    """Makes the rows of an attempt from its ranks' reports."""

    def __init__(self) -> None:
        self._attempt: Attempt | None = None
        self._began = 0.0
        self._before: dict[int, _Counted] = {}
        self._newest: dict[int, _Counted] = {}

    def take(self, reports: Iterable[common_pb2.Progress], attempt: Attempt, now: float) -> RankTimes | None:
        """Take in reports; return a row, still without its time, where one is due. `now` is monotonic."""
        if attempt != self._attempt:
            self._attempt, self._began, self._before, self._newest = attempt, now, {}, {}
        for report in reports:
            if attempt_from_wire(report.attempt) == attempt:
                self._newest[report.rank] = _counted(report)
        span_s = now - self._began
        if span_s < EVERY_S or not self._newest:
            return None
        each = -(-(max(self._newest) + 1) // MOST_NUMBERS)
        times = {rank: _step_of(self._before.get(rank), counted) for rank, counted in self._newest.items()}
        own_s, data_s = _slowest(times, each)
        self._began, self._before = now, dict(self._newest)
        if not any(own_s):
            return None
        return RankTimes(attempt=attempt, unix=0.0, span_s=span_s, ranks_each=each, own_s=own_s, data_s=data_s)


def _counted(report: common_pb2.Progress) -> _Counted:
    told = report.metrics
    data_s, compute_s, rest_s, steps = (
        told.get(name, 0.0) for name in (names.DATA_S, names.COMPUTE_S, names.REST_S, names.STEPS)
    )
    return _Counted(steps, data_s + compute_s + rest_s, data_s, report.work_s)


def _step_of(before: _Counted | None, now: _Counted) -> tuple[float, float]:
    """Return seconds of a step, and of waiting for data in it; 0 where they are not known."""
    before = before or _Counted()
    steps = now.steps - before.steps
    if steps <= 0:  # it has done none, or counts none: then its own word is what there is
        return (0.0 if now.steps else max(0.0, now.work_s)), 0.0
    own_s, data_s = (now.own_s - before.own_s) / steps, (now.data_s - before.data_s) / steps
    return max(0.0, own_s), max(0.0, data_s)


def _slowest(times: Mapping[int, tuple[float, float]], each: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    rows = [(0.0, 0.0)] * (max(times) // each + 1)
    for rank, time in times.items():
        rows[rank // each] = max(rows[rank // each], time)
    return tuple(_rounded(own_s) for own_s, _ in rows), tuple(_rounded(data_s) for _, data_s in rows)


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.4g}") if math.isfinite(seconds) else 0.0
