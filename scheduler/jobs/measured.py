"""What was measured of a job over time, and what binds it: the one place that others draw it from. Pure.

`measured(journal.points(job), journal.rank_times(job)).document()` is this JSON; seconds are floats, times Unix
seconds, what is not known null:

    {"rows": [{"t", "span_s", "attempt": "12.0.1", "step", "steps",
               "data_s", "compute_s", "others_s", "checkpoint_s", "rest_s", "samples_per_s",
               "reads": {"local", "peer", "home", "source"}, "bytes": {the same}}],
     "ranks": [{"t", "span_s", "attempt", "ranks_each", "own_s": [...], "data_s": [...]}],
     "binds": {"cause", "shares": {"data", "compute", "others", "checkpoint", "rest"}, "step_s", "text",
               "slowest": {"rank", "factor", "own_s", "data_s", "node"} or null} or null}

A row is of rank 0 and its DataLoader workers: what they did in `span_s` seconds up to `t`. Its five parts add up
to the part of the span that was steps. `samples_per_s` is rank 0's. `ranks`: by rank, the seconds of a step
without waiting for others and without checkpoints, and those of them that waited for data; one number stands for
`ranks_each` ranks. `binds` is of the newest attempt's last two minutes.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

from deeplink.core import process_metrics as names

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deeplink.scheduler.recovery.records import ProgressPoint, RankTimes

MOST_ROWS = 600
RECENT_S = 120.0
"""What binds a job is told by so much of the past."""
LEAST_SHARE = 0.1
"""A part of the steps that is smaller holds up nothing worth a word."""
CAUSES = ("data", "compute", "others", "checkpoint", "rest")
SAMPLES = {
    "local": names.LOCAL_SAMPLES,
    "peer": names.PEER_SAMPLES,
    "home": names.HOME_SAMPLES,
    "source": names.SOURCE_SAMPLES,
}
BYTES = {
    "local": names.LOCAL_BYTES,
    "peer": names.PEER_BYTES,
    "home": names.HOME_BYTES,
    "source": names.SOURCE_BYTES,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSpan:
    """What rank 0 and its workers did between two reports of one attempt."""

    t: float  # the end
    span_s: float
    attempt: str
    step: int
    steps: int
    data_s: float
    compute_s: float
    others_s: float
    checkpoint_s: float
    rest_s: float
    samples_per_s: float | None
    reads: Mapping[str, int]
    bytes: Mapping[str, float]

    @property
    def parts_s(self) -> dict[str, float]:
        """Seconds by cause."""
        return {cause: float(getattr(self, f"{cause}_s")) for cause in CAUSES}


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowestRank:
    """The rank whose own part of a step takes longest."""

    rank: int  # the first of several that share a number
    factor: float  # times the median of all
    own_s: float
    data_s: float
    node: str = ""  # empty: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """What most of a step's time goes to."""

    cause: str  # of `CAUSES`
    shares: Mapping[str, float]  # of a step, by cause; they add up to 1
    step_s: float
    text: str  # one line for people
    slowest: SlowestRank | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMeasured:
    """All that was measured of a job."""

    rows: tuple[MeasuredSpan, ...] = ()
    ranks: tuple[RankTimes, ...] = ()
    binds: Binding | None = None

    def document(self) -> dict[str, Any]:
        """Return it as JSON has it (see the module)."""
        return {
            "rows": [asdict(row) for row in self.rows],
            "ranks": [_ranks_document(each) for each in self.ranks],
            "binds": None if self.binds is None else asdict(self.binds),
        }


def _ranks_document(times: RankTimes) -> dict[str, Any]:
    data = times.data_s or (0.0,) * len(times.own_s)
    return {
        "t": times.unix,
        "span_s": times.span_s,
        "attempt": str(times.attempt),
        "ranks_each": times.ranks_each,
        "own_s": [own or None for own in times.own_s],
        "data_s": [waited if own else None for own, waited in zip(times.own_s, data, strict=False)],
    }


def measured(
    points: Sequence[ProgressPoint],
    rank_times: Sequence[RankTimes] = (),
    *,
    nodes: Mapping[str, range] | None = None,
    most_rows: int = MOST_ROWS,
) -> JobMeasured:
    """Return what a job's reports say of where its time went.

    Args:
        points: as `Journal.points` has them; those of other ranks than 0 are passed over.
        rank_times: as `Journal.rank_times` has them.
        nodes: which ranks each node runs in the newest attempt, where that is known.
        most_rows: more rows are joined, each with its neighbour.
    """
    runs = _runs([point for point in points if not point.rank and names.STEPS in point.metrics])
    spans = [spans for run in runs if (spans := _spans(run, max(1, most_rows // len(runs))))]
    newest = runs[-1] if runs else []
    latest = [times for times in rank_times if newest and times.attempt == newest[-1].attempt]
    return JobMeasured(
        rows=tuple(span for some in spans for span in some),
        ranks=tuple(rank_times),
        binds=_binding(newest, slowest_rank(latest[-1], nodes or {}) if latest else None),
    )


def _runs(points: Sequence[ProgressPoint]) -> list[list[ProgressPoint]]:
    """Return the reports by attempt, those of one process after another's apart: its counters begin again."""
    runs: list[list[ProgressPoint]] = []
    for _, group in groupby(points, lambda point: point.attempt):
        run: list[ProgressPoint] = []
        for point in sorted(group, key=lambda one: one.unix):
            if run and point.metrics[names.STEPS] < run[-1].metrics[names.STEPS]:
                runs.append(run)
                run = []
            run.append(point)
        runs.append(run)
    return runs


def _spans(run: Sequence[ProgressPoint], most: int) -> list[MeasuredSpan]:
    stretch = -(-(len(run) - 1) // most) if len(run) > 1 else 1
    kept = [*run[:-1:stretch], run[-1]] if len(run) > 1 else []
    return [span for before, after in pairwise(kept) if (span := span_of(before, after)) is not None]


def span_of(before: ProgressPoint, after: ProgressPoint) -> MeasuredSpan | None:
    """Return what was between two reports of one process; None where no step was, or its counters began again.

    By the counters alone: a clock that jumped meanwhile makes no part of it longer or shorter.
    """
    grown = {name: _grown(before, after, name) for name in names.MEASURED}
    steps = grown[names.STEPS]
    if steps <= 0 or min(grown.values()) < 0:
        return None
    parts = [grown[name] for name in names.PARTS_S]
    whole = math.fsum(parts)
    span_s = after.unix - before.unix
    loaded = grown[names.LOADED_SAMPLES]
    return MeasuredSpan(
        t=after.unix,
        span_s=span_s if span_s > 0 else whole,
        attempt=str(after.attempt),
        step=after.step,
        steps=int(steps),
        data_s=parts[0],
        compute_s=parts[1],
        others_s=parts[2],
        checkpoint_s=parts[3],
        rest_s=parts[4],
        samples_per_s=loaded / whole if loaded and whole > 0 else None,
        reads={place: int(grown[name]) for place, name in SAMPLES.items()},
        bytes={place: grown[name] for place, name in BYTES.items()},
    )


def _grown(before: ProgressPoint, after: ProgressPoint, name: str) -> float:
    grown = after.metrics.get(name, 0.0) - before.metrics.get(name, 0.0)
    return grown if math.isfinite(grown) else -1.0


def slowest_rank(times: RankTimes, nodes: Mapping[str, range]) -> SlowestRank | None:
    """Return the slowest rank of a row; None with fewer than two that are known."""
    known = [(own_s, place) for place, own_s in enumerate(times.own_s) if own_s > 0]
    if len(known) < 2:  # noqa: PLR2004
        return None
    own_s, place = max(known)
    middle = statistics.median_low([each for each, _ in known])
    rank = place * times.ranks_each
    return SlowestRank(
        rank=rank,
        factor=own_s / middle,
        own_s=own_s,
        data_s=times.data_s[place] if place < len(times.data_s) else 0.0,
        node=next((node for node, ranks in nodes.items() if rank in ranks), ""),
    )


def _binding(run: Sequence[ProgressPoint], slowest: SlowestRank | None) -> Binding | None:
    recent = [point for point in run if point.unix >= run[-1].unix - RECENT_S]
    span = span_of(recent[0], recent[-1]) if len(recent) > 1 else None
    whole = math.fsum(span.parts_s.values()) if span else 0.0
    if span is None or whole <= 0:
        return None
    shares = {cause: seconds / whole for cause, seconds in span.parts_s.items()}
    cause = max(CAUSES, key=lambda one: shares[one])
    step_s = whole / span.steps
    text = f"{_share_text(cause, shares)} of {_duration(step_s)} a step{_also(cause, shares)}"
    why = _remedy(cause, span, slowest, recent)
    return Binding(
        cause=cause, shares=shares, step_s=step_s, text=f"{text}; {why}" if why else text, slowest=slowest
    )


_WORDS = {
    "data": "waiting for data",
    "compute": "computing",
    "others": "waiting for other ranks",
    "checkpoint": "checkpoints",
    "rest": "the loop's own code",
}


def _share_text(cause: str, shares: Mapping[str, float]) -> str:
    return f"{_WORDS[cause]} {100 * shares[cause]:.0f} %"


def _also(cause: str, shares: Mapping[str, float]) -> str:
    rest = [one for one in CAUSES if one != cause and shares[one] >= LEAST_SHARE]
    return "".join(f", {_share_text(one, shares)}" for one in sorted(rest, key=lambda one: -shares[one]))


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _remedy(cause: str, span: MeasuredSpan, slowest: SlowestRank | None, recent: Sequence[ProgressPoint]) -> str:
    """Return what is behind it, and what would help."""
    if cause == "data":
        return _of_data(span)
    if cause == "others":
        return _of_others(slowest)
    if cause == "checkpoint":
        return _of_checkpoints(span, recent)
    if cause == "rest":
        return "outside of the model and of DataLoaders: copies to the device, logging, evaluation"
    return _of_computing(span, recent)


def _of_computing(span: MeasuredSpan, recent: Sequence[ProgressPoint]) -> str:
    if not span.data_s and span.samples_per_s is None:  # a fresh iterator alone takes some time
        waited_s = _grown(recent[0], recent[-1], names.WAITED_S)
        told = "no DataLoader of torch was seen: waiting for data is not measured here"
        if waited_s > LEAST_SHARE * math.fsum(span.parts_s.values()):
            return f"{told}, but reads waited {_duration(waited_s)} for samples from elsewhere: {_of_data(span)}"
        return told
    # Never a moment: of FSDP, DeepSpeed and the like it is not measured, and it may be in computing.
    faster = "data or network" if span.others_s else "data"
    return f"no faster {faster} would help: only less work, or faster devices"


def _of_data(span: MeasuredSpan) -> str:
    total = sum(span.reads.values())
    if not total:
        return "no sample was read through DeepLink: more DataLoader workers, or pack the data"
    most = max(span.reads, key=lambda place: span.reads[place])
    share = 100 * span.reads[most] / total
    rate = span.bytes[most] / span.span_s / 1e6
    said = f"{share:.0f} % of its reads came from {_PLACES[most]} ({rate:.3g} MB/s)"
    return f"{said}: {_HELP[most]}"


_PLACES = {"local": "this node", "peer": "other nodes", "home": "the packed home", "source": "the source"}
_PREFETCH = "where agents stand on the nodes, `deeplink prefetch JOB` brings its shards onto them"
_HELP = {
    "local": "they are here already; more DataLoader workers, or a cheaper transform",
    "peer": _PREFETCH,
    "home": _PREFETCH,
    "source": f"pack the dataset; then {_PREFETCH}",
}


def _of_others(slowest: SlowestRank | None) -> str:
    if slowest is None:
        return "how long the ranks' own work takes is not known"
    where = f" on {slowest.node}" if slowest.node else ""
    said = f"rank {slowest.rank}{where} is slowest: {slowest.factor:.2f} x the median, {_duration(slowest.own_s)}"
    if slowest.factor < 1 + LEAST_SHARE:
        return f"no rank is slow ({said}): the network, or gradients too large for it"
    if 2 * slowest.data_s > slowest.own_s:
        return f"{said}, {_duration(slowest.data_s)} of it waiting for data"
    return f"{said}: `deeplink health` on its node"


def _of_checkpoints(span: MeasuredSpan, recent: Sequence[ProgressPoint]) -> str:
    saved = {point.metrics[names.CHECKPOINT_STEP] for point in recent if names.CHECKPOINT_STEP in point.metrics}
    each = (
        f"{_duration(span.checkpoint_s / len(saved))} for each of {len(saved)}" if saved else "none is whole yet"
    )
    return f"{each}: save less often, or with `save_state`, in the background"
