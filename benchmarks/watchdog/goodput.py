"""Which share of the time is work that lasts, at published failure rates: our restart beside stock Slurm's.

`python -m benchmarks.watchdog.goodput [--quick] [--json] [--save-s S] [--stall-share P] [--restart-s S]`
simulates, holds the simulation against the closed form, prints a table and writes build/bench/goodput.json. Exit
code 0 whether figures are reached or not.

Two job sizes, with the mean times to a failure that Meta has published for its research clusters (arXiv
2410.21680): 7.9 hours at 1,024 GPUs, 1.8 hours at 16,384. Failures come as they like (exponential), while training
runs. Each side saves either every hour or as often as is best for it by the formula of arXiv 2410.18124:

- stock: a save stops training for all of its time; from a node's death to the first new step 139 s (measured by
  benchmarks.watchdog.faults, stock Slurm's node-killed: Slurm 22.05.8, SlurmdTimeout 10 s, cred_expire 120 s), or
  429 s with its default SlurmdTimeout of 300 s. That is arithmetic, 139 - 10 + 300, and the least: a node is given
  up a timeout after its last answer, and a part of what comes on top, the time between two pings, grows with it.
- ours: a save stops training for a share of its time (0.04 measured at 500 MB, benchmarks.checkpoints.stall) and
  is whole when it would have been; the restart is given with --restart-s (10 s: the goal with a spare; the faults
  come to 3.3 s, and to 7.8 s where ranks import torch).

What is assumed is printed, and goes to build/bench/goodput.notes.json.
"""

from __future__ import annotations

import json
import math
import random
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.program import hand_over, options, unwind_when_told
from benchmarks.rows import BENCH, make_row
from deeplink.checkpoints.interval import availability, availability_optimal
from deeplink.core.publish import write_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.rows import Row

HOUR_S = 3600.0
MTTF_S = {1_024: 7.9 * HOUR_S, 16_384: 1.8 * HOUR_S}
STOCK_S = 139.0
STOCK_DEFAULT_S = STOCK_S - 10.0 + 300.0
MOST_OFF = 0.01
"""How far the simulation may be from what is computed."""
FIRST_ORDER = 0.2
"""The closed form takes a failure to fall in the middle of an interval, as it does while an interval is a small
part of the time to a failure. Beyond this part the distance is told, and held against nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """How a job saves and restarts, in seconds.

    Attributes:
        interval_s: from one save's begin to the next's.
        stall_s: what a save costs the training.
        save_s: from a save's begin until it is whole; no less than the stall.
        mttf_s: of training to a failure, in the mean.
        restart_s: from a failure to the first new step.
    """

    interval_s: float
    stall_s: float
    save_s: float
    mttf_s: float
    restart_s: float

    def goodput(self) -> float:
        """Return the share by the closed form of arXiv 2410.18124."""
        return availability(self.interval_s, self.stall_s, self.mttf_s, self.restart_s)

    def exact(self) -> float:
        """Return the share without its approximation: the mean of whole saves to a failure is geometric."""
        lag = max(0.0, self.save_s - self.stall_s)
        saves = math.exp(-lag / self.mttf_s) / math.expm1(self.interval_s / self.mttf_s)
        return (self.interval_s - self.stall_s) * saves / (self.mttf_s + self.restart_s)


def simulated(course: Course, failures: int, dice: random.Random) -> float:
    """Return the share of the time that is work that lasts, over so many failures."""
    lag = max(0.0, course.save_s - course.stall_s)
    work_s = time_s = 0.0
    for _ in range(failures):
        up_s = dice.expovariate(1 / course.mttf_s)
        whole = max(0, math.floor((up_s - lag) / course.interval_s))  # what was being written is lost
        work_s += whole * (course.interval_s - course.stall_s)
        time_s += up_s + course.restart_s
    return work_s / time_s


def sides(mttf_s: float, save_s: float, stall_share: float, restart_s: float) -> dict[str, Course]:
    """Return who is compared at one size of job, by name."""
    stall_s = stall_share * save_s

    def best(stall: float, restart: float) -> Course:
        interval = max(save_s, availability_optimal(stall, mttf_s, restart))
        return Course(interval_s=interval, stall_s=stall, save_s=save_s, mttf_s=mttf_s, restart_s=restart)

    def hourly(stall: float, restart: float) -> Course:
        return Course(interval_s=HOUR_S, stall_s=stall, save_s=save_s, mttf_s=mttf_s, restart_s=restart)

    return {
        "stock, default timeout, hourly saves": hourly(save_s, STOCK_DEFAULT_S),
        "stock, hourly saves": hourly(save_s, STOCK_S),
        "stock, best interval": best(save_s, STOCK_S),
        "ours, hourly saves": hourly(stall_s, restart_s),
        "ours, best interval": best(stall_s, restart_s),
    }


def measured(
    failures: int, seeds: int, *, save_s: float = 60.0, stall_share: float = 0.04, restart_s: float = 10.0
) -> list[Row]:
    """Return the rows: goodput of each side, how far from the closed form, and the loss of ours over stock's."""
    rows = []
    for gpus, mttf_s in MTTF_S.items():
        shares: dict[str, list[float]] = {}
        for name, course in sides(mttf_s, save_s, stall_share, restart_s).items():
            runs = [simulated(course, failures, random.Random(seed)) for seed in range(seeds)]  # noqa: S311 - no secret
            shares[name] = runs
            what = f"{gpus:,} GPUs, {name} (every {course.interval_s / 60:.1f} min)"
            rows.append(make_row(f"{what}: goodput", [100 * run for run in runs], "%"))
            mean = sum(runs) / len(runs)
            most = 100 * MOST_OFF
            near = most if course.interval_s <= FIRST_ORDER * mttf_s else None
            rows.append(
                make_row(
                    f"{what}: off the closed form", [100 * abs(mean - course.goodput())], "points", at_most=near
                )
            )
            rows.append(
                make_row(f"{what}: off the exact mean", [100 * abs(mean - course.exact())], "points", at_most=most)
            )
        for stock in ("stock, hourly saves", "stock, best interval"):
            ratios = [
                (1 - ours) / (1 - theirs)
                for ours, theirs in zip(shares["ours, best interval"], shares[stock], strict=True)
            ]
            rows.append(make_row(f"{gpus:,} GPUs: time lost, ours at best over {stock}", ratios, at_most=1.0))
    return rows


def assumed(save_s: float, stall_share: float, restart_s: float) -> list[str]:
    """Return what the rows rest on, a line each."""
    often = ", ".join(f"{mttf_s / HOUR_S:g} h at {gpus:,} GPUs" for gpus, mttf_s in MTTF_S.items())
    what = (
        f"training to a failure: {often} (Meta, arXiv 2410.21680)",
        f"a save takes {save_s:g} s: stock stops training for all of it, ours for {stall_share:g} of it",
        f"a failure to the first new step, stock: {STOCK_S:g} s (measured: node killed, SlurmdTimeout 10 s)",
        f"the same with its default SlurmdTimeout, 300 s: at least {STOCK_DEFAULT_S:g} s (arithmetic: +290 s)",
        f"the same, ours: {restart_s:g} s (measured with a spare: 3.3 s, 7.8 s where ranks import torch)",
    )
    return [f"Goodput, assumed: {one}" for one in what]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write; return the exit status."""
    quick = "2,000 failures and 3 seeds instead of 20,000 and 10"
    parser = options("benchmarks.watchdog.goodput", __doc__, quick=quick)
    parser.add_argument("--save-s", type=float, default=60.0, metavar="S", help="how long a save takes (60)")
    parser.add_argument("--stall-share", type=float, default=0.04, metavar="P", help="of it training stops (0.04)")
    parser.add_argument(
        "--restart-s", type=float, default=10.0, metavar="S", help="death to first step, ours (10)"
    )
    asked = parser.parse_args(arguments)
    if not (asked.save_s > 0 and 0 < asked.stall_share <= 1 and asked.restart_s >= 0):
        parser.error("--save-s and --stall-share are above 0, the share at most 1, --restart-s not below 0")
    failures, seeds = (2_000, 3) if asked.quick else (20_000, 10)
    rows = measured(failures, seeds, save_s=asked.save_s, stall_share=asked.stall_share, restart_s=asked.restart_s)
    hand_over("goodput", rows, as_json=asked.json)
    notes = assumed(asked.save_s, asked.stall_share, asked.restart_s)
    write_text(BENCH / "goodput.notes.json", json.dumps(notes, indent=1) + "\n")
    if not asked.json:
        print("\n".join(notes))
    return 0


if __name__ == "__main__":
    unwind_when_told()
    sys.exit(main())
