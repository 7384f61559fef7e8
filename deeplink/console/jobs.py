"""Jobs as the page shows them: what the launcher reports, what Slurm says, and who sits where; pure."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.console.curve import CurvePoint, drawn, rate, repeated, thin
from deeplink.console.nodes import NodeRole
from deeplink.scheduler.slurm.states import JobState
from deeplink.scheduler.view.reasons import release_of
from deeplink.scheduler.watch.records import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from deeplink.console.readings import Readings
    from deeplink.scheduler.slurm.parse import JobRow
    from deeplink.scheduler.watch.records import AttemptRecord, JobRecord
    from deeplink.types import Attempt

FRESH_S = 15.0
"""A launcher beats once a second; after so long without a beat its word about the phase is no longer taken."""
MOST_JOBS = 200
"""Jobs on the page; what the others do on which node is shown all the same."""
_HUES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptView:
    """One attempt; `ended_unix` is 0 while it runs."""

    name: str
    began_unix: float
    ended_unix: float
    nodes: tuple[str, ...]
    first_step: int | None
    last_step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """A job. None and the empty text mean that nobody said.

    Attributes:
        label: what people call it, `12_3` for a task of an array.
        remedy: the command that helps, where it is held; else empty.
        watched: whether its launcher reports to the watchdog.
        phase: the launcher's word; empty where there is none, or none that is fresh.
        slurm_state: Slurm's word.
        loss: the last value of the metric; the text `NaN` or `inf` where it is no finite number.
        rate: steps per second.
        hue: which of the page's colours it has (0: none).
    """

    id: int
    label: str
    name: str
    user: str
    remedy: str
    watched: bool
    phase: str
    slurm_state: str
    pending_reason: str
    detail: str
    attempt: str
    attempts: tuple[AttemptView, ...]
    nodes: tuple[str, ...]
    spares: tuple[str, ...]
    world_size: int | None
    ring: int | None
    ring_stock: int | None
    step: int | None
    loss: float | str | None
    rate: float | None
    repeated_steps: int
    heard_unix: float
    hue: int


@dataclass(frozen=True, slots=True)
class CurveView:
    """What is drawn for a job."""

    metric: str
    points: tuple[CurvePoint, ...]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A job and its curve (None: it reports to nobody)."""

    view: JobView
    curve: CurveView | None


def job_views(readings: Readings) -> tuple[Drawn, ...]:
    """Return every job on record, and those of Slurm that have not ended: the most telling first."""
    # Of tasks that have not started, which share an id, a held one is shown: it needs somebody.
    rows = {int(row.id): row for row in sorted(readings.slurm.jobs, key=lambda row: row.held)}
    watched = [_watched(record, rows.get(record.job), readings) for record in readings.journal.jobs]
    have = {made.view.id for made in watched}
    waiting = Counter(row.id for row in readings.slurm.jobs if row.shares_id)
    others = [
        Drawn(_unwatched(row, waiting[row.id]), None)
        for row in rows.values()
        if row.id not in have and not row.state.final
    ]
    return tuple(sorted([*watched, *others], key=lambda made: _weight(made.view), reverse=True))


def _weight(job: JobView) -> tuple[bool, bool, int]:
    return job.watched, job.slurm_state == JobState.RUNNING.value, job.id


def _watched(record: JobRecord, row: JobRow | None, readings: Readings) -> Drawn:
    newest = record.newest
    reports = readings.journal.curves.get(record.job, ())
    metric, points = drawn(reports)
    spans = [
        (each.first_step, each.last_step)
        for each in record.attempts
        if each.first_step is not None and each.last_step is not None
    ]
    lost = _lost(newest, row, readings)
    over = newest.phase.ended or lost
    view = JobView(
        id=record.job,
        label=row.label if row else record.label,
        remedy=release_of(row) if row else "",
        name=record.name or (row.name if row else ""),
        user=record.user or (row.user if row else ""),
        watched=True,
        phase="" if lost else newest.phase.value,
        slurm_state=row.state.value if row else "",
        pending_reason=row.reason if row else "",
        detail=newest.detail,
        attempt=_called(newest.attempt, record),
        attempts=tuple(_attempt(each, record) for each in record.attempts),
        nodes=newest.nodes,
        spares=newest.spares,
        world_size=newest.world_size or None,
        ring=newest.ring_crossings if newest.nodes else None,
        ring_stock=newest.ring_crossings_stock if newest.nodes else None,
        step=newest.last_step if newest.last_step is not None else _last_step(record.attempts),
        loss=_number(points[-1].value) if points else None,
        rate=None if over else rate(points),
        repeated_steps=repeated(spans),
        heard_unix=round(newest.beat_unix, 1),
        hue=0 if newest.phase.ended else 1 + record.job % _HUES,
    )
    return Drawn(view, CurveView(metric, thin(points, [each.attempt for each in record.attempts])))


def _lost(newest: AttemptRecord, row: JobRow | None, readings: Readings) -> bool:
    """Whether the launcher's last word no longer counts.

    It fell silent, Slurm knows of the job's end, or of its return to the queue: then its run ended, not the job.
    """
    if newest.phase.ended:
        return row is not None and (row.state is JobState.PENDING or row.held)
    if row is not None and row.state.final:
        return True
    return readings.unix - newest.beat_unix > FRESH_S


def _last_step(attempts: Sequence[AttemptRecord]) -> int | None:
    steps = [each.last_step for each in attempts if each.last_step is not None]
    return steps[-1] if steps else None


def _called(attempt: Attempt, record: JobRecord) -> str:
    return f"{record.label}.{attempt.restart}.{attempt.relaunch}"


def _attempt(each: AttemptRecord, record: JobRecord) -> AttemptView:
    return AttemptView(
        name=_called(each.attempt, record),
        began_unix=each.began_unix,
        ended_unix=each.ended_unix,
        nodes=each.nodes,
        first_step=each.first_step,
        last_step=each.last_step,
    )


def _unwatched(row: JobRow, tasks: int) -> JobView:
    return JobView(
        id=row.id,
        label=row.label if tasks < 2 else f"{row.address.whole} ({tasks} tasks)",  # noqa: PLR2004 - several
        remedy=release_of(row, whole=tasks > 1),
        name=row.name,
        user=row.user,
        watched=False,
        phase="",
        slurm_state=row.state.value,
        pending_reason=row.reason,
        detail="",
        attempt="",
        attempts=(),
        nodes=row.nodes,
        spares=(),
        world_size=None,
        ring=None,
        ring_stock=None,
        step=None,
        loss=None,
        rate=None,
        repeated_steps=0,
        heard_unix=0.0,
        hue=1 + row.id % _HUES if row.state is JobState.RUNNING else 0,
    )


def _number(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    return float(f"{value:.6g}") if math.isfinite(value) else ("inf" if value > 0 else "-inf")


def seats(jobs: Iterable[Drawn]) -> dict[str, NodeRole]:
    """Return what each node is used for; a job that reports its ranks goes before one that Slurm alone knows."""
    found: dict[str, NodeRole] = {}
    for job in (made.view for made in jobs):
        if job.watched and job.phase in {Phase.STARTING.value, Phase.RUNNING.value, Phase.RECOVERING.value}:
            for name, ranks in _ranks(job).items():
                found[name] = NodeRole(job.id, ranks, watched=True)
            for name in job.spares:
                found.setdefault(name, NodeRole(job.id, spare=True, watched=True))
        elif job.slurm_state in {"RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED"}:
            for name in job.nodes:
                found.setdefault(name, NodeRole(job.id))
    return found


def _ranks(job: JobView) -> dict[str, tuple[int, ...]]:
    """Spread the ranks over the nodes in order; unknown (none) where they do not divide evenly."""
    world, nodes = job.world_size or 0, job.nodes
    each = world // len(nodes) if nodes and world % len(nodes) == 0 else 0
    spread: dict[str, tuple[int, ...]] = {}
    for place, name in enumerate(nodes):
        spread[name] = (*spread.get(name, ()), *range(place * each, (place + 1) * each))
    return spread
