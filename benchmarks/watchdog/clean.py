"""Hours in which nothing is wrong: how often a job is restarted all the same.

`python -m benchmarks.watchdog.clean [--jobs N] [--minutes M] [--quick] [--json]` brings a sandbox of eight nodes
up, as root, with an acting watchdog that has an operator's rights, and runs so many jobs of two nodes side by
side, each with its own launcher, agents, checkpoints and learned time limits. Steps of 50 ms are what is sped up:
what watches runs at its own pace, on a machine that has far too few cores for it. Sixteen jobs for 75 minutes are
20 job-hours.

Prints a table and writes build/bench/clean.json. Exit code 0 whether figures are reached or not.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

from benchmarks.program import hand_over, options, unwind_when_told
from benchmarks.rows import make_row
from benchmarks.watchdog.facts import newest_step
from benchmarks.watchdog.scenarios import Rights
from benchmarks.watchdog.stand import Stand, StandError, sweep, until
from deeplink.scheduler.testbed.shape import Shape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.rows import Row

NODES, PER_JOB = 8, 2
HOUR_S, HOURS = 3600.0, 20.0
_FIRST_STEPS_S, _LOOK_S = 240.0, 30.0
LATELY_S = 60.0
MOST_JOBS = 16
"""One CPU on each of two nodes, of four on each of eight."""


def begun(stand: Stand, count: int) -> list[Stand]:
    """Start the jobs, and return the stand of each once all of them train.

    Raises:
        StandError: one of them does not.
    """
    jobs = []
    for number in range(count):
        job = stand.another(f"job{number}")
        run = f"exec deeplink run --nproc-per-node 1 -- {job.train()}"
        job.submit(f"-N{PER_JOB} --ntasks-per-node=1 --no-kill --requeue", run, watched=True)
        jobs.append(job)
    for job in jobs:
        if not until(lambda job=job: newest_step(job.lines()) > 0, _FIRST_STEPS_S):  # type: ignore[misc]
            raise StandError(f"job {job.job} does not train: {job.output()[-2000:]}")
    return jobs


def trained_s(newest: Sequence[float], began: float, over: float) -> float:
    """Return for how long all jobs trained together, given when each made its newest step.

    One that made a step lately has trained to the end; one that has stopped, whoever noticed, no longer than that.

    >>> trained_s([995.0, 400.0, 0.0], began=100.0, over=1000.0)
    1200.0
    """
    return sum((over if over - one < LATELY_S else max(one, began)) - began for one in newest)


def measured(count: int, minutes: float, *, least_hours: float | None) -> list[Row]:
    """Run it and return what came of it."""
    sweep()
    with Stand.up(Shape.of(NODES)) as stand:
        stand.watch(Rights.OPERATOR)
        jobs = begun(stand, count)
        began, began_unix = time.monotonic(), time.time()
        while (left := 60.0 * minutes - (time.monotonic() - began)) > 0:
            time.sleep(min(_LOOK_S, left))
            passed, count_now = (time.monotonic() - began) / 60, len(stand.incidents())
            print(f"{passed:.0f} of {minutes:g} min, {count_now} incidents", file=sys.stderr, flush=True)
        over_unix = time.time()
        lines = [job.lines() for job in jobs]
        newest = [max((line.unix for line in those if line.what == "step"), default=0.0) for those in lines]
        hours = trained_s(newest, began_unix, over_unix) / HOUR_S
        attempts = [len({line.attempt for line in those}) for those in lines]
        incidents = stand.incidents()
        for incident in incidents:
            print(f"{incident.kind} {incident.attempt} {incident.node}: {incident.evidence}", file=sys.stderr)
        steps = [newest_step(those) for those in lines]
    return [
        make_row("clean job-hours", [hours], "h", at_least=least_hours),
        make_row("jobs restarted though nothing was wrong", [sum(attempts) - count], "", at_most=0),
        make_row("incidents though nothing was wrong", [len(incidents)], "", at_most=0),
        make_row("steps of a job", steps, ""),
        make_row("load average at the end", [os.getloadavg()[0]], ""),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write build/bench/clean.json."""
    parser = options("benchmarks.watchdog.clean", __doc__, quick="4 jobs for 3 minutes")
    parser.add_argument("--jobs", type=int, default=MOST_JOBS, help=f"side by side ({MOST_JOBS}, the most)")
    parser.add_argument("--minutes", type=float, default=75.0, help="for so long (75)")
    asked = parser.parse_args(arguments)
    if asked.quick:
        asked.jobs, asked.minutes = 4, 3.0
    if not 1 <= asked.jobs <= MOST_JOBS or asked.minutes <= 0:
        parser.error(f"--jobs: 1 to {MOST_JOBS}; --minutes: above 0")
    rows = measured(asked.jobs, asked.minutes, least_hours=None if asked.quick else HOURS)
    hand_over("clean", rows, as_json=asked.json)
    return 0


if __name__ == "__main__":
    unwind_when_told()
    sys.exit(main())
