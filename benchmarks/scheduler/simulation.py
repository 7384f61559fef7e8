"""A real trace replayed: how long that takes, and deeplink beside Slurm's own choice in queueing and steps.

`python -m benchmarks.scheduler.simulation TRACE [--seeds N] [--quick] [--json]` prints a table and writes
build/bench/simulation.json. TRACE is Philly's (philly.csv.gz). Exit code 0 whether figures are reached or not.

The cluster is that of docs/simulation.md: 176 nodes of 4 GPUs on 11 leaves, names dealt over the leaves, so great
that the trace's busy weeks fill it. Differences are seed by seed; what is held against a bound is an end of their
95 % interval: the one that is best for us (surely worse in no size class), or worst (surely no worse in steps).
Few seeds prove little. One more run is of 4,096 nodes, with submissions moved until these are full at times.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.program import hand_over, options
from benchmarks.rows import make_row
from benchmarks.simulate.measure import SIZES, WIDE, Figure, What
from benchmarks.simulate.policies import SchedulingPolicy
from benchmarks.simulate.site import SimulatedTree, generated
from benchmarks.simulate.study import Study, StudySettings, planned, run_once
from benchmarks.simulate.trace import read_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.rows import Row

TREE = SimulatedTree(nodes=176, per_leaf=16, leaves=8, gpus=4, dealt=True)
GREAT, QUICK = SimulatedTree(nodes=4096), SimulatedTree(nodes=256)
QUICK_JOBS = 8_000
LOAD = 0.9
MOST_S = 120.0


def studied(trace_file: Path, seeds: int, jobs: int | None) -> tuple[Study, dict[SchedulingPolicy, list[float]]]:
    """Return all runs, and how many seconds those of each policy took."""
    trace, site, settings = read_trace(trace_file, limit=jobs), generated(TREE), StudySettings()
    plan = planned(trace, site)
    runs, took = [], dict[SchedulingPolicy, list[float]]()
    for seed in range(seeds):
        for policy in SchedulingPolicy:
            began = time.perf_counter()
            runs.append(run_once(site, plan, policy, seed=seed, settings=settings))
            took.setdefault(policy, []).append(time.perf_counter() - began)
            print(f"{policy}, seed {seed + 1} of {seeds}: {took[policy][-1]:.1f} s", file=sys.stderr, flush=True)
    return Study(tuple(runs), plan), took


def great_row(trace_file: Path, tree: SimulatedTree, jobs: int | None) -> Row:
    """Return how long deeplink's choices on a great cluster take."""
    trace, site, settings = read_trace(trace_file, limit=jobs), generated(tree), StudySettings(load=LOAD)
    plan = planned(trace, site, settings.load)
    began = time.perf_counter()
    run_once(site, plan, SchedulingPolicy.DEEPLINK, seed=0, settings=settings)
    took = time.perf_counter() - began
    title = f"{len(plan.work):,} jobs replayed on {tree.nodes:,} nodes: {SchedulingPolicy.DEEPLINK}"
    return make_row(title, [took], "s", at_most=MOST_S)


def rows_of(study: Study, took: dict[SchedulingPolicy, list[float]]) -> list[Row]:
    """Return the figures."""
    jobs = len(study.plan.work)
    rows = [
        make_row(f"{jobs:,} jobs replayed: {policy}", seconds, "s", at_most=MOST_S)
        for policy, seconds in took.items()
    ]
    for _, name in SIZES:
        for what in (What.WAIT_MEAN, What.WAIT_P95):
            spread = study.against(SchedulingPolicy.DEEPLINK, SchedulingPolicy.SLURM_TREE, Figure(what, name))
            if spread is None:
                continue
            title = f"{what}, deeplink minus slurm-tree, {name}"
            rows.append(make_row(title, [spread.mean / 60.0], "min"))
            rows.append(make_row(f"{title}: least by the interval", [spread.low / 60.0], "min", at_most=0.0))
    for what, scale, unit in ((What.STEP, 1e3, "ms"), (What.CROSSINGS, 1.0, ""), (What.LEAVES, 1.0, "")):
        spread = study.against(SchedulingPolicy.DEEPLINK, SchedulingPolicy.SLURM_TREE, Figure(what, WIDE))
        if spread is not None:
            title = f"{what}, deeplink minus slurm-tree, {WIDE}"
            rows.append(make_row(title, [scale * spread.mean], unit))
            if what is What.STEP:
                rows.append(make_row(f"{title}: most by the interval", [scale * spread.high], unit, at_most=0.0))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write build/bench/simulation.json."""
    parser = options(
        "benchmarks.scheduler.simulation", __doc__, quick="two seeds and 8,000 jobs; 256 nodes for 4,096"
    )
    parser.add_argument("trace", type=Path, help="Philly's trace as CSV")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each policy (default: 5)")
    asked = parser.parse_args(arguments)
    jobs = QUICK_JOBS if asked.quick else None
    study, took = studied(asked.trace, 2 if asked.quick else asked.seeds, jobs)
    rows = [*rows_of(study, took), great_row(asked.trace, QUICK if asked.quick else GREAT, jobs)]
    hand_over("simulation", rows, as_json=asked.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
