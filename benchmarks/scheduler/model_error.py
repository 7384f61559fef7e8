"""How well the cost model predicts measured steps, and what choosing by it costs: `python -m ... FOLDER`.

FOLDER holds a folder per workload, each with `placements.csv` (`placement,local_bsz,step_time,...`: a digit per
node, the GPUs used there; samples per GPU; seconds) and, if there is one, `scalability.csv`
(`num_nodes,num_replicas,local_bsz,step_time,...`). The measured steps of Pollux (OSDI 2021) have this form:
petuum/adaptdl, branch osdi21-artifact, `simulator/traces`.

A configuration is a placement with a batch size. What is told of one is predicted without having seen it:

* leave one out: by a fit to all other configurations.
* leave its shape out: by a fit without all placements of the same GPUs per node, in whatever order, in ten parts.
* and the same nodes elsewhere: as the first, corrected by the shrunk effect of that allocation, seen at the same
  placement's other batch sizes. No correction is for a configuration.

A choice is among the configurations of as many GPUs and the same batch size, where there are at least two. Its
regret is the measured step of the least predicted (of equal ones the first in the file) over that of the fastest
measured. All of a choice is left out of the fit that makes it (or all of as many GPUs, at any batch size): were
each candidate left out of a fit of its own, a slow one's absence would make just its own prediction faster. The
floor is what the regret would be if what the fit leaves over had nothing to do with shape: it is dealt out again
among the placements, fifty times.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.model_fit import FREE, Measurement, Observed, fit, scatter
from benchmarks.rows import BENCH, Row, make_row, table, write_rows
from deeplink.core.errors import DeepLinkError
from deeplink.scheduler.placement.model import Constants, Job, NodeShare, Placement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.model_fit import FittedModel
    from deeplink.scheduler.placement.predicted import Floats

_GPUS_OF_A_NODE = 4
_NOMINAL_BYTES = 1e8  # the files do not tell; step times show bandwidth only relative to it
_JOB = Job(batch=1, sample_s=1.0, gradient_bytes=_NOMINAL_BYTES)
_PARTS = 10
_DEALS = 50
_ERROR_AT_MOST, _MEAN_AT_MOST, _P95_AT_MOST = 15.0, 5.0, 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The measured steps of one job: what is learnt from, and those on more nodes."""

    name: str
    placements: tuple[str, ...]
    batches: tuple[int, ...]
    seen: Observed
    larger: Observed | None

    def groups(self) -> list[list[int]]:
        """Return the configurations one may choose among: same GPUs, same batch; at least two each."""
        found: dict[tuple[int, int], list[int]] = defaultdict(list)
        for place, (name, batch) in enumerate(zip(self.placements, self.batches, strict=True)):
            found[sum(map(int, name)), batch].append(place)
        return [group for _, group in sorted(found.items()) if len(group) > 1]

    def others(self, place: int) -> list[int]:
        """Return the same placement's configurations at other batch sizes."""
        return [
            other
            for other, name in enumerate(self.placements)
            if name == self.placements[place] and other != place
        ]


def read_workload(folder: Path) -> Workload:
    """Return the measurements of one workload's folder.

    Raises:
        OSError: there is no placements.csv.
        KeyError: a column is missing.
        ValueError: a number is none.
        DeepLinkError: a number that cannot be, such as a step of no seconds.
    """
    rows = _rows(folder / "placements.csv")
    measured = [
        Measurement(_shape(row["placement"]), int(row["local_bsz"]), float(row["step_time"])) for row in rows
    ]
    more = folder / "scalability.csv"
    larger = [
        Measurement(
            _even(int(row["num_nodes"]), int(row["num_replicas"])), int(row["local_bsz"]), float(row["step_time"])
        )
        for row in (_rows(more) if more.exists() else ())
    ]
    return Workload(
        name=folder.name,
        placements=tuple(row["placement"] for row in rows),
        batches=tuple(int(row["local_bsz"]) for row in rows),
        seen=Observed.of(measured),
        larger=Observed.of(larger) if larger else None,
    )


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, restval=""))


def _shape(name: str) -> Placement:
    return Placement(tuple(NodeShare(int(gpus), _GPUS_OF_A_NODE) for gpus in name))


def _even(nodes: int, ranks: int) -> Placement:
    # The file tells totals alone: taken as spread as evenly as they go.
    low, more = divmod(ranks, nodes)
    return Placement(tuple(NodeShare(low + (place < more), _GPUS_OF_A_NODE) for place in range(nodes)))


@dataclass(frozen=True, slots=True)
class Predicted:
    """Predicted seconds of each configuration, alone and with the effect of its allocation."""

    alone: Floats
    with_effect: Floats


def one_by_one(work: Workload, whole: FittedModel) -> Predicted:
    """Return each configuration's step by a fit without it."""
    return _left_out(work, whole, [[place] for place in range(len(work.placements))])


def by_choice(work: Workload, whole: FittedModel) -> Predicted:
    """Return each configuration's step by a fit without all of its choice."""
    return _left_out(work, whole, work.groups())


def by_ranks(work: Workload, whole: FittedModel) -> Predicted:
    """Return each configuration's step by a fit without all of as many GPUs."""
    ranks = work.seen.asked.ranks
    return _left_out(
        work, whole, [[int(place) for place in np.flatnonzero(ranks == one)] for one in np.unique(ranks)]
    )


def by_shape(work: Workload, whole: FittedModel) -> Predicted:
    """Return each configuration's step by a fit without a tenth of the shapes, its own among them."""
    shapes = sorted({"".join(sorted(name)) for name in work.placements})
    part = np.array([shapes.index("".join(sorted(name))) % _PARTS for name in work.placements])
    return _left_out(work, whole, [[int(place) for place in np.flatnonzero(part == one)] for one in range(_PARTS)])


def _left_out(work: Workload, whole: FittedModel, parts: Sequence[Sequence[int]]) -> Predicted:
    """Predict each part by a fit to all the others. What is in no part stays unknown."""
    seen, count = work.seen, len(work.placements)
    alone, with_effect = np.full(count, np.nan), np.full(count, np.nan)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(work.placements))}
    allocations = np.array([numbers[name] for name in work.placements])
    for part in parts:
        rest = np.ones(count, bool)
        rest[list(part)] = False
        without = fit(seen.rows(rest), _JOB, Constants(), start=whole)
        step_s = without.step_s(seen.asked)
        left_over = np.log(seen.step_s / step_s)
        found = scatter(left_over[rest], allocations[rest])
        for place in part:
            there = rest & (allocations == allocations[place])
            alone[place] = step_s[place]
            with_effect[place] = step_s[place] * np.exp(found.effect(left_over[there]))
    return Predicted(alone, with_effect)


def nearest(work: Workload) -> Floats:
    """Return, for each configuration, the same placement's measured step at the nearest other batch size."""
    step_s = work.seen.step_s
    return np.array(
        [
            min(
                ((abs(np.log(work.batches[other] / batch)), step_s[other]) for other in work.others(place)),
                default=(0.0, np.inf),
            )[1]
            for place, batch in enumerate(work.batches)
        ]
    )


def pack(work: Workload) -> Floats:
    """Return a score that is least for the fewest nodes, then for the fullest."""
    return np.array([len(name) - max(map(int, name)) / 10 for name in work.placements])


def spread(work: Workload) -> Floats:
    """Return a score that is least for the most nodes, then for the most even."""
    return np.array([max(map(int, name)) / 10 - len(name) for name in work.placements])


def regrets(groups: Sequence[Sequence[int]], step_s: Floats, score: Floats) -> list[float]:
    """Return, in percent, what the pick of least score costs over the fastest, for each group."""
    return [
        100 * float(step_s[min(group, key=lambda place: score[place])] / step_s[list(group)].min() - 1)
        for group in groups
    ]


def floor(work: Workload, predicted: Floats) -> list[float]:
    """Return the regrets of a prediction that misses nothing but what differs between placements of one shape."""
    left_over = np.log(work.seen.step_s / predicted)
    table_of = {
        name: {batch: left_over[place] for place, batch in places} for name, places in _by_placement(work).items()
    }
    names, dice, groups = list(table_of), np.random.default_rng(1), work.groups()
    found: list[float] = []
    for _ in range(_DEALS):
        gets = dict(zip(names, (names[place] for place in dice.permutation(len(names))), strict=True))
        dealt = [
            # A placement not measured at this batch size gives what it leaves over on average.
            table_of[gets[name]].get(batch, float(np.mean(list(table_of[gets[name]].values()))))
            for name, batch in zip(work.placements, work.batches, strict=True)
        ]
        found += regrets(groups, predicted * np.exp(dealt), predicted)
    return found


def _by_placement(work: Workload) -> dict[str, list[tuple[int, int]]]:
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for place, (name, batch) in enumerate(zip(work.placements, work.batches, strict=True)):
        found[name].append((place, batch))
    return found


def _errors(predicted: Floats, measured: Floats) -> list[float]:
    known = np.isfinite(predicted)
    return [float(error) for error in 100 * np.abs(predicted[known] / measured[known] - 1)]


_Regrets = dict[str, list[float]]


def error_rows(work: Workload, whole: FittedModel) -> list[Row]:
    """Return how far the predictions of one workload are off."""
    one_out, step_s = one_by_one(work, whole), work.seen.step_s
    ways = {
        "leave one out": (one_out.alone, _ERROR_AT_MOST),
        "leave its shape out": (by_shape(work, whole).alone, _ERROR_AT_MOST),
        "leave one out, and the same nodes elsewhere": (one_out.with_effect, _ERROR_AT_MOST),
        "nearest batch measured there": (nearest(work), None),
    }
    rows = [
        make_row(f"{work.name}: error, {way}", _errors(step, step_s), "%", at_most=goal)
        for way, (step, goal) in ways.items()
    ]
    if work.larger is not None:
        beyond = _errors(whole.step_s(work.larger.asked), work.larger.step_s)
        rows.append(make_row(f"{work.name}: error, more nodes than any fitted", beyond, "%"))
    return rows


def all_regrets(work: Workload, whole: FittedModel) -> _Regrets:
    """Return the regrets of each way to choose."""
    choice_out, ranks_out = by_choice(work, whole), by_ranks(work, whole)
    scores = {
        "shape alone, the choice left out": choice_out.alone,
        "shape alone, as many GPUs left out": ranks_out.alone,
        "and the same nodes elsewhere, the choice left out": choice_out.with_effect,
        "always pack": pack(work),
        "always spread": spread(work),
        "nearest batch measured there": nearest(work),
    }
    found = {way: regrets(work.groups(), work.seen.step_s, score) for way, score in scores.items()}
    return found | {"floor of shape alone": floor(work, whole.step_s(work.seen.asked))}


_BASELINES = frozenset({"always pack", "always spread", "nearest batch measured there", "floor of shape alone"})


def regret_rows(name: str, found: _Regrets) -> list[Row]:
    """Return the mean and the 95th percentile of the regrets of each way to choose."""
    rows = []
    for way, values in found.items():
        ours = way not in _BASELINES
        mean, high = float(np.mean(values)), float(np.quantile(values, 0.95))
        rows += [
            make_row(f"{name}: regret, {way}, mean", [mean], "%", at_most=_MEAN_AT_MOST if ours else None),
            make_row(f"{name}: regret, {way}, p95", [high], "%", at_most=_P95_AT_MOST if ours else None),
        ]
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a folder per workload, each with placements.csv")
    parser.add_argument(
        "--out", type=Path, default=BENCH, help="where model_error.json goes (default: build/bench)"
    )
    asked = parser.parse_args(arguments)
    folder: Path = asked.folder
    files = sorted(folder.glob("*/placements.csv"))
    if not files:
        parser.error(f"{folder}: no */placements.csv there")
    rows: list[Row] = []
    every: _Regrets = defaultdict(list)
    for file in files:
        try:
            work = read_workload(file.parent)
        except (KeyError, ValueError, DeepLinkError) as wrong:
            parser.error(f"{file.parent}: not measurements in the form told by --help: {wrong!r}")
        print(f"{work.name}: {len(FREE)} free constants, {len(work.placements)} measurements", flush=True)
        whole = fit(work.seen, _JOB, Constants())
        here = all_regrets(work, whole)
        rows += error_rows(work, whole) + regret_rows(work.name, here)
        for way, values in here.items():
            every[way] += values
    rows += regret_rows("all", every)
    print(table(rows))
    print(write_rows("model_error", rows, folder=asked.out))


if __name__ == "__main__":
    main()
