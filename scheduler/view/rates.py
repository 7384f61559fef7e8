"""How fast a job is, and what it said last, from the reports of its rank 0; pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from deeplink import process_metrics

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deeplink.scheduler.watch.records import ProgressPoint

_RATE_POINTS = 32
SAMPLES_PER_S = "samples_per_s"
SAMPLES = "samples"
TOTAL_STEPS = "total_steps"
"""Metrics of the user's that mean something here: a rate, samples so far, steps of the whole training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRate:
    """Samples that rank 0 has read so far."""

    local: int
    peer: int
    source: int

    @property
    def total(self) -> int:
        """All of them; above 0."""
        return self.local + self.peer + self.source


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The last whole checkpoint.

    Attributes:
        every: steps between it and the one before; None with only one.
    """

    step: int
    unix: float
    every: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRate:
    """What the reports say. None: they do not.

    Attributes:
        unix: when the last one was made.
        metric: name of the number shown: `loss`, or the first by name.
        value: may be no finite number.
        left_s: how long the rest will take at this pace.
    """

    step: int | None = None
    unix: float | None = None
    metric: str = "loss"
    value: float | None = None
    steps_per_s: float | None = None
    samples_per_s: float | None = None
    reads: ReadRate | None = None
    saved: Saved | None = None
    total_steps: int | None = None
    left_s: float | None = None

    @property
    def standing(self) -> TrainingRate:
        """The same of a job that does not go on, or of which nobody knows."""
        return replace(self, steps_per_s=None, samples_per_s=None, left_s=None)


def pace(points: Sequence[ProgressPoint]) -> TrainingRate:
    """Return how fast a job is by its newest reports, in order of attempt and step."""
    if not points:
        return TrainingRate()
    last = points[-1]
    recent = [point for point in points[-_RATE_POINTS:] if point.attempt == last.attempt]
    steps_per_s = _rate([(point.unix, float(point.step)) for point in recent])
    counted = [(point.unix, point.metrics[SAMPLES]) for point in recent if SAMPLES in point.metrics]
    total = last.metrics.get(TOTAL_STEPS)
    known = total is not None and math.isfinite(total) and total >= last.step
    metric = _metric(last.metrics)
    return TrainingRate(
        step=last.step,
        unix=last.unix,
        metric=metric,
        value=last.metrics.get(metric),
        steps_per_s=steps_per_s,
        samples_per_s=last.metrics.get(SAMPLES_PER_S, _rate(counted)),
        reads=_reads(last.metrics),
        saved=_saved(last.metrics),
        total_steps=int(total) if known and total is not None else None,
        left_s=(total - last.step) / steps_per_s if known and total is not None and steps_per_s else None,
    )


def _metric(metrics: Mapping[str, float]) -> str:
    known = {SAMPLES, SAMPLES_PER_S, TOTAL_STEPS}
    names = [name for name in metrics if not name.startswith(process_metrics.PREFIX) and name not in known]
    return "loss" if "loss" in names or not names else min(names)


def _rate(seen: Sequence[tuple[float, float]]) -> float | None:
    if len(seen) < 2:  # noqa: PLR2004
        return None
    seconds, amount = seen[-1][0] - seen[0][0], seen[-1][1] - seen[0][1]
    return amount / seconds if seconds > 0 and amount > 0 else None


def _reads(metrics: Mapping[str, float]) -> ReadRate | None:
    names = (process_metrics.LOCAL_SAMPLES, process_metrics.PEER_SAMPLES, process_metrics.SOURCE_SAMPLES)
    if not any(metrics.get(name) for name in names):
        return None
    local, peer, source = (int(metrics.get(name, 0)) for name in names)
    return ReadRate(local=local, peer=peer, source=source)


def _saved(metrics: Mapping[str, float]) -> Saved | None:
    step, unix = metrics.get(process_metrics.CHECKPOINT_STEP), metrics.get(process_metrics.CHECKPOINT_UNIX)
    if step is None or unix is None:
        return None
    every = metrics.get(process_metrics.CHECKPOINT_EVERY)
    return Saved(step=int(step), unix=unix, every=int(every) if every else None)
