"""A job's course on one axis of time: attempts, incidents, metrics, checkpoints, node events; pure."""

from __future__ import annotations

import dataclasses
import math
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

from deeplink.console.jobs import Point, finite
from deeplink.console.snapshot import incident_row
from deeplink.core import process_metrics
from deeplink.scheduler.jobs.measured import measured

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from deeplink.scheduler.recovery.records import Incident, JobRecord, ProgressPoint, RankTimes

MOST_METRICS = 6
MOST_POINTS = 600  # of a series
MOST_EVENTS = 200
MOST_RANK_ROWS = 160  # rows of a heat map, of all attempts together
_OURS = frozenset({"samples", "samples_per_s", "total_steps"})


@dataclasses.dataclass(frozen=True, slots=True)
class NodeEvent:
    """Something that befell a node of the job, and did not begin with the job."""

    unix: float
    node: str
    what: str
    place: str  # where the page shows more of it


def timeline(
    record: JobRecord,
    points: Sequence[ProgressPoint],
    incidents: Iterable[Incident],
    events: Iterable[NodeEvent],
    *,
    since: float = 0.0,
    until: float = 0.0,
) -> dict[str, Any]:
    """Return the course of a job from one moment to another (Unix time; 0: from its start, to its end).

    Series are `[unix, value, attempt]`, thinned to what a screen can show; `value` is None where it is no number.
    """
    until = until or math.inf
    order = [each.attempt for each in record.attempts]
    within = [point for point in points if since <= point.unix <= until]
    first = [point for point in within if point.rank == 0]
    return {
        "attempts": [
            {
                "name": f"{record.label}.{each.attempt.restart}.{each.attempt.relaunch}",
                "began_unix": each.began_unix,
                "ended_unix": each.ended_unix,
                "first_step": each.first_step,
                "last_step": each.last_step,
                "nodes": list(each.nodes),
                "world_size": each.world_size,
                "detail": each.detail,
            }
            for each in record.attempts
        ],
        "incidents": [incident_row(each) for each in incidents],
        "metrics": {name: _series(_values(first, name), order) for name in metric_names(first)},
        "steps_per_s": _series(_pace(first), order),
        "steps": [[round(point.unix, 1), point.step] for point, _ in kept(_values(first, None), order)],
        "samples_per_s": _series(_values(first, "samples_per_s"), order),
        "checkpoints": _checkpoints(first),
        "events": [dataclasses.asdict(each) for each in sorted(events, key=lambda one: one.unix)][-MOST_EVENTS:],
    }


def measurements(
    record: JobRecord, points: Sequence[ProgressPoint], rank_times: Sequence[RankTimes], until: float = 0.0
) -> dict[str, Any]:
    """Return where the steps' time went up to a moment (0: to the end), as `scheduler.jobs.measured` has it.

    Of the heat map as many rows as a screen has room for, the attempts' alike: of several each rank's slowest, and
    its own time alone. Seconds have four significant digits.
    """
    until = until or math.inf
    newest = record.newest
    nodes: dict[str, range] = {}
    each = newest.world_size // len(newest.nodes) if newest.nodes else 0
    if each and each * len(newest.nodes) == newest.world_size:
        nodes = {str(name): range(place * each, (place + 1) * each) for place, name in enumerate(newest.nodes)}
    within = [point for point in points if point.unix <= until]
    made = measured(within, [row for row in rank_times if row.unix <= until], nodes=nodes)
    document = dataclasses.replace(made, ranks=()).document()
    for row in document["rows"]:
        row.update({key: short(value) for key, value in row.items() if key != "t" and isinstance(value, float)})
        row["attempt"] = _called(record, row["attempt"])
    runs = [list(run) for _, run in groupby(made.ranks, lambda row: (row.attempt, row.ranks_each, len(row.own_s)))]
    runs = runs[-MOST_RANK_ROWS:]
    total, room = sum(map(len, runs)), max(1, MOST_RANK_ROWS - len(runs))  # each may have a row that is not full
    stretch = 1 if total <= MOST_RANK_ROWS else -(-total // room)
    rows = [_joined(run[at : at + stretch], record) for run in runs for at in range(0, len(run), stretch)]
    return {**document, "ranks": rows}


def short(value: float) -> float | None:
    """Return a measured number as it is shown; None where it is no number, or infinite."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _joined(run: Sequence[RankTimes], record: JobRecord) -> dict[str, Any]:
    slowest = [max(values) for values in zip(*(row.own_s for row in run), strict=True)]
    return {
        "t": round(run[-1].unix, 2),
        "span_s": short(run[-1].unix - run[0].unix + run[0].span_s),
        "attempt": _called(record, str(run[-1].attempt)),
        "ranks_each": run[-1].ranks_each,
        "own_s": [short(own) or None for own in slowest],
    }


def _called(record: JobRecord, attempt: str) -> str:
    return f"{record.label}.{attempt.partition('.')[2]}"


def metric_names(points: Iterable[ProgressPoint]) -> list[str]:
    """Return the metrics that a user's loop reported, the loss first, a bounded number of them."""
    found = {name for point in points for name in point.metrics}
    theirs = [name for name in found if not name.startswith(process_metrics.PREFIX) and name not in _OURS]
    return sorted(theirs, key=lambda name: (name != "loss", "loss" not in name, name))[:MOST_METRICS]


def _values(points: Iterable[ProgressPoint], name: str | None) -> list[Point]:
    return [
        Point(point.attempt, point.step, point.unix, point.metrics[name] if name else float(point.step))
        for point in points
        if name is None or name in point.metrics
    ]


def _pace(points: Sequence[ProgressPoint]) -> list[Point]:
    made = []
    for before, after in pairwise(points):
        seconds, steps = after.unix - before.unix, after.step - before.step
        if before.attempt == after.attempt and seconds > 0 and steps >= 0:  # a clock may have jumped
            made.append(Point(after.attempt, after.step, after.unix, steps / seconds))
    return made


def _series(points: Sequence[Point], order: Sequence[object]) -> list[list[float | int | None]]:
    return [[round(point.unix, 1), finite(point.value), attempt] for point, attempt in kept(points, order)]


def _checkpoints(points: Iterable[ProgressPoint]) -> list[list[float]]:
    found: dict[float, float] = {}
    for point in points:
        step = point.metrics.get(process_metrics.CHECKPOINT_STEP, math.nan)
        unix = point.metrics.get(process_metrics.CHECKPOINT_UNIX, math.nan)
        if math.isfinite(step) and math.isfinite(unix):
            found[unix] = step
    return [[unix, step] for unix, step in sorted(found.items())]


def kept(points: Sequence[Point], order: Sequence[object]) -> list[tuple[Point, int]]:
    """Return at most about `MOST_POINTS` of the points: of each stretch the least and the greatest, never an end.

    Each with the number of its attempt in `order`. The stretch is a power of two, so that more points leave what
    was drawn as it is until it doubles.
    """
    stretch = 1
    while 2 * len(points) / stretch > MOST_POINTS and stretch < len(points):
        stretch *= 2
    index = {attempt: number for number, attempt in enumerate(order)}
    found: list[tuple[Point, int]] = []
    for attempt, run in groupby(points, key=lambda point: point.attempt):
        if attempt in index:
            found.extend((point, index[attempt]) for point in _thin_run(list(run), stretch))
    return found


def _thin_run(run: list[Point], stretch: int) -> list[Point]:
    chosen: dict[int, None] = {0: None}
    for start in range(0, len(run), stretch):
        window = range(start, min(start + stretch, len(run)))
        strange = [at for at in window if not math.isfinite(run[at].value)]
        known = [at for at in window if math.isfinite(run[at].value)]
        if known:
            chosen[min(known, key=lambda at: run[at].value)] = None
            chosen[max(known, key=lambda at: run[at].value)] = None
        if strange:
            chosen[strange[0]] = None
    chosen[len(run) - 1] = None
    return [run[at] for at in sorted(chosen)]
