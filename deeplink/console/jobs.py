"""Jobs as the page shows them: what the launcher reports, what Slurm says, and who sits where; pure."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING

from deeplink.console.nodes import NodeRole
from deeplink.core import process_metrics
from deeplink.scheduler.jobs.measured import measured
from deeplink.scheduler.jobs.picture import FRESH_S, pace, release_of
from deeplink.scheduler.recovery.records import Phase
from deeplink.scheduler.slurm.states import JobState

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from deeplink.console.collect import Readings
    from deeplink.console.snapshot import Memo
    from deeplink.core.types import Attempt
    from deeplink.scheduler.recovery.records import AttemptRecord, JobRecord, ProgressPoint
    from deeplink.scheduler.slurm.parse import JobRow

MOST_JOBS = 200  # jobs that every page is told of; the others are asked for, page by page
_HUES = 6
STARVED = 0.4  # a job that waits for its data for such a share of its steps needs a hand


class Mood(Enum):
    """Gravity of what is shown."""

    BAD = "bad"
    WARN = "warn"
    GOOD = "good"
    UNKNOWN = "unknown"
    CALM = "calm"
    DONE = "done"


_BY_PHASE = {
    Phase.STARTING.value: ("starting", Mood.CALM),
    Phase.RUNNING.value: ("running", Mood.GOOD),
    Phase.RECOVERING.value: ("recovering", Mood.WARN),
    Phase.STRANDED.value: ("stranded", Mood.BAD),
    Phase.SUCCEEDED.value: ("succeeded", Mood.DONE),
    Phase.FAILED.value: ("failed", Mood.BAD),
}
_BAD_ENDS = {"FAILED", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "TIMEOUT"}
_ENDED = {"succeeded", "failed", "completed", "cancelled", *(end.lower().replace("_", " ") for end in _BAD_ENDS)}


def condition(phase: str, slurm_state: str, remedy: str) -> tuple[str, Mood]:
    """Return a job's state in a word: held first, then what its launcher says, then what Slurm says."""
    if remedy:
        return "held", Mood.WARN
    if phase in _BY_PHASE:
        return _BY_PHASE[phase]
    if not slurm_state:
        return "unknown", Mood.UNKNOWN
    word = slurm_state.lower().replace("_", " ")
    if slurm_state in _BAD_ENDS:
        return word, Mood.BAD
    if slurm_state in {"COMPLETED", "CANCELLED"}:
        return word, Mood.DONE
    return word, Mood.GOOD if slurm_state == "RUNNING" else Mood.CALM


@dataclass(frozen=True, slots=True)
class Point:
    """One report, reduced to the metric that is drawn."""

    attempt: Attempt
    step: int
    unix: float
    value: float


def drawn(reports: Sequence[ProgressPoint]) -> tuple[str, tuple[Point, ...]]:
    """Return the metric that is drawn (`loss`, else the first by name), and rank 0's points of it."""
    named = {name for report in reports for name in report.metrics if not name.startswith(process_metrics.PREFIX)}
    metric = "loss" if "loss" in named or not named else min(named)
    return metric, tuple(
        Point(report.attempt, report.step, report.unix, report.metrics[metric])
        for report in reports
        if report.rank == 0 and metric in report.metrics
    )


def finite(value: float) -> float | None:
    """Return what a screen can show of a value; None where it is no number, or infinite."""
    # Six digits are more than a screen shows, and half the bytes.
    return float(f"{value:.6g}") if math.isfinite(value) else None


def repeated(spans: Sequence[tuple[int, int]]) -> int:
    """Count the steps that were run again.

    >>> repeated([(0, 240), (201, 300)])
    40
    """
    total, reached = 0, -1
    for first, last in spans:
        total += max(0, min(reached, last) - first + 1)
        reached = max(reached, last)
    return total


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
    """A job. None and the empty text mean that it is not known."""

    id: int
    label: str  # `12_3` for a task of an array
    name: str
    user: str
    remedy: str  # the command that helps, where it is held
    watched: bool  # whether its launcher reports to the watchdog
    phase: str = ""  # as its launcher reports; empty also where that is old
    slurm_state: str
    pending_reason: str
    detail: str = ""
    attempt: str = ""
    attempts: tuple[AttemptView, ...] = ()
    nodes: tuple[str, ...]
    spares: tuple[str, ...] = ()
    world_size: int | None = None
    ring: int | None = None
    ring_stock: int | None = None
    step: int | None = None
    loss: float | str | None = None  # a text where it is no finite number
    rate: float | None = None  # steps per second
    repeated_steps: int = 0
    heard_unix: float = 0.0
    starved: str = ""  # what it is that it waits for its data; empty where it does not, or nobody measured
    hue: int  # which of the page's colours; 0: none

    word: str = field(init=False)  # its state in a word
    mood: Mood = field(init=False)  # how grave that is
    over: bool = field(init=False)  # whether it has ended

    def __post_init__(self) -> None:
        """Put its state into a word, once: lists are sorted by it."""
        word, mood = condition(self.phase, self.slurm_state, self.remedy)
        for name, value in (("word", word), ("mood", mood), ("over", word in _ENDED)):
            object.__setattr__(self, name, value)


def job_views(readings: Readings, memo: Memo) -> tuple[JobView, ...]:
    """Return every job on record, and those of Slurm that have not ended: the most telling first."""
    journal = readings.journal
    silent = frozenset(one.job for one in journal.jobs if readings.unix - one.newest.beat_unix > FRESH_S)
    return memo.of("jobs", (readings.slurm.jobs, journal.jobs, journal.reports, silent), partial(_views, memo))


def _views(
    memo: Memo,
    slurm_jobs: Iterable[JobRow],
    records: Iterable[JobRecord],
    reports: Mapping[int, tuple[ProgressPoint, ...]],
    silent: Container[int],
) -> tuple[JobView, ...]:
    rows, others = memo.of("jobs of Slurm", (slurm_jobs,), partial(_of_slurm, memo))
    parts = {one.job: (one, rows.get(one.job), reports.get(one.job, ()), one.job in silent) for one in records}
    watched = memo.rows("watched", parts, _watched)
    alone = (view for job, view in others.items() if job not in watched)
    return tuple(sorted([*watched.values(), *alone], key=_weight))


def _of_slurm(memo: Memo, slurm_jobs: Iterable[JobRow]) -> tuple[dict[int, JobRow], dict[int, JobView]]:
    # Of tasks that have not started, which share an id, a held one is shown: it needs somebody.
    rows = {int(row.id): row for row in sorted(slurm_jobs, key=lambda row: bool(release_of(row)))}
    waiting = Counter(row.id for row in slurm_jobs if row.shares_id)
    going_on = {job: (row, waiting[row.id]) for job, row in rows.items() if not row.state.final}
    return rows, memo.rows("unwatched", going_on, _unwatched)


_GRAVITY = {mood: place for place, mood in enumerate(Mood)}


def _weight(job: JobView) -> tuple[bool, bool, int, bool, int]:
    return job.over, not job.remedy, _GRAVITY[job.mood], not job.watched, -job.id


def _watched(
    record: JobRecord,
    row: JobRow | None,
    reports: tuple[ProgressPoint, ...],
    silent: bool,  # noqa: FBT001 - a part
) -> JobView:
    newest = record.newest
    lost = _lost(newest, row, silent=silent)
    points: tuple[Point, ...] = drawn(reports)[1]
    spans = [
        (each.first_step, each.last_step)
        for each in record.attempts
        if each.first_step is not None and each.last_step is not None
    ]
    over = newest.phase.ended or lost
    return JobView(
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
        step=next((each.last_step for each in reversed(record.attempts) if each.last_step is not None), None),
        loss=_number(points[-1].value) if points else None,
        rate=None if over else pace([each for each in reports if each.rank == 0]).steps_per_s,
        repeated_steps=repeated(spans),
        heard_unix=round(newest.beat_unix, 1),
        starved="" if over else _starved(reports),
        hue=0 if newest.phase.ended else 1 + record.job % _HUES,
    )


def _lost(newest: AttemptRecord, row: JobRow | None, *, silent: bool) -> bool:
    """Tell whether the launcher's last report no longer counts.

    It fell silent, Slurm knows of the job's end, or of its return to the queue: then its run ended, not the job.
    """
    if newest.phase.ended:
        return row is not None and (row.state is JobState.PENDING or bool(release_of(row)))
    return silent or (row is not None and row.state.final)


def _starved(reports: Sequence[ProgressPoint]) -> str:
    binds = measured(reports, most_rows=1).binds
    return binds.text if binds and binds.cause == "data" and binds.shares["data"] >= STARVED else ""


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
        slurm_state=row.state.value,
        pending_reason=row.reason,
        nodes=row.nodes,
        hue=1 + row.id % _HUES if row.state is JobState.RUNNING else 0,
    )


def _number(value: float) -> float | str:
    known = finite(value)
    return known if known is not None else "NaN" if math.isnan(value) else "inf" if value > 0 else "-inf"


def seats(jobs: Iterable[JobView]) -> dict[str, NodeRole]:
    """Return what each node is used for; a job that reports its ranks goes before one that Slurm alone knows."""
    found: dict[str, NodeRole] = {}
    for job in jobs:
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
