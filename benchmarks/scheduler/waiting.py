"""How long jobs wait with stock sbatch, and with `deeplink sbatch` and its planner: one queue, side by side.

    python -m benchmarks.scheduler.waiting [--rounds 2] [--quick] [--json]

A real Slurm of eight nodes on four leaves (a sandbox of its own; needs root). The same jobs come in the same order
at the same times, once by sbatch and once by `deeplink sbatch`. Then a race is lost on purpose: a job is hinted
two nodes, somebody else takes one of them before Slurm looks, and the time is taken until the job runs elsewhere.
"""

from __future__ import annotations

import os
import secrets
import statistics
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from benchmarks.program import options
from benchmarks.rows import make_row, table, write_rows
from deeplink.scheduler.testbed.cluster import Sandbox
from deeplink.scheduler.testbed.shape import CTL, Shape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.rows import Row

INTERVAL_S = 10
"""Of the planner, by default."""
APART_S = 1.5
"""A job is submitted at each multiple of it, however long submitting the one before took."""
JOBS = ((6, 12), (2, 18), (4, 8), (2, 7), (3, 9), (2, 6), (4, 8), (1, 9), (8, 4), (2, 6))
"""Nodes, and how long it runs, s."""


@dataclass(frozen=True)
class Waited:
    """One job's wait in seconds, and where it ran."""

    wait_s: float
    nodes: str


def told(cluster: Sandbox, argv: Sequence[str]) -> str:
    """Return what a command on the login host wrote."""
    done = cluster.run(CTL, list(argv), timeout_s=60)
    if done.code:
        raise SystemExit(f"{argv}: {done.stderr}")
    return done.stdout.strip()


def played(cluster: Sandbox, submit: Sequence[str]) -> list[Waited]:
    """Submit the queue and return how long each job waited."""
    numbers, began = [], time.monotonic()
    for place, (nodes, runs_s) in enumerate(JOBS):
        time.sleep(max(0.0, began + place * APART_S - time.monotonic()))
        options = ["--parsable", "--exclusive", "-t", "1", "-o", "/dev/null", f"-N{nodes}"]
        numbers.append(told(cluster, [*submit, *options, "--wrap", f"sleep {runs_s}"]))
    while told(cluster, ["squeue", "-h"]):
        time.sleep(0.5)
    return [_waited(cluster, number) for number in numbers]


def _waited(cluster: Sandbox, number: str) -> Waited:
    said = told(cluster, ["scontrol", "show", "job", number, "--oneliner"])
    facts = dict(word.partition("=")[::2] for word in said.split())
    started, came = (datetime.fromisoformat(facts[key]) for key in ("StartTime", "SubmitTime"))
    return Waited((started - came).total_seconds(), facts["NodeList"])


_LOST = """
import sys, time, os, pathlib
from deeplink.scheduler.placement.hint import decision as record
from deeplink.scheduler.placement.hint.decision import Ask, Decision, HintKind, Recorded, Why
state = pathlib.Path(os.path.expanduser("~/.local/state/deeplink"))
decision = Decision(kind=HintKind.NODES, why=Why.FREE_NOW, words="the race to be lost", nodes=("n0", "n4"))
ask = Ask(nodes=2, exclusive=True)
line = Recorded(unix=time.time(), by="sbatch", ask=ask, decision=decision)
record.append(record.job_folder(state, sys.argv[1]), line)
"""


def race_lost(cluster: Sandbox) -> float:
    """Return how long after a lost race the job ran elsewhere."""
    python = told(cluster, ["bash", "-c", "head -1 $(command -v deeplink) | cut -c3-"])
    plain = ["sbatch", "--parsable", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 60"]
    job = told(cluster, [*plain, "-N2", "--hold", "-w", "n0,n4", "--comment=deeplink-wish=n[0,4]"])
    other = told(cluster, [*plain, "-N1", "-w", "n4"])
    while told(cluster, ["squeue", "-h", "-o", "%T", "-j", other]) != "RUNNING":
        time.sleep(0.05)
    told(cluster, [python, "-c", _LOST, job])
    began = time.monotonic()
    told(cluster, ["scontrol", "release", job])
    while told(cluster, ["squeue", "-h", "-o", "%T", "-j", job]) != "RUNNING":
        if time.monotonic() - began > 60:  # noqa: PLR2004 - six rounds
            raise SystemExit(f"job {job} still waits")
        time.sleep(0.05)
    took = time.monotonic() - began
    told(cluster, ["scancel", job, other])
    while told(cluster, ["squeue", "-h"]):
        time.sleep(0.2)
    return took


@dataclass(frozen=True)
class Found:
    """What was measured.

    Attributes:
        rounds: of each, every job's wait by stock sbatch and by ours.
        races_s: how long after each lost race the job ran elsewhere.
    """

    rounds: list[list[tuple[Waited, Waited]]]
    races_s: list[float]


def measured(rounds: int) -> Found:
    """Measure on a sandbox of its own."""
    name = f"w-{os.getpid()}-{secrets.token_hex(2)}"
    cluster = Sandbox.up(name, Shape(spines=2, leaves=2, nodes_per_leaf=2, interleave=True))
    try:
        found = []
        for _ in range(rounds):
            stock = played(cluster, ["env", "sbatch"])
            found.append(list(zip(stock, played(cluster, ["deeplink", "sbatch"]), strict=True)))
        planner = cluster.spawn(CTL, ["deeplink", "plan", "--until-idle"])
        try:
            races = [race_lost(cluster) for _ in range(3)]
        finally:
            planner.kill()
            planner.wait(10)
    finally:
        cluster.down()
    return Found(found, races)


def rows_of(found: Found) -> list[Row]:
    """Return the figures; what must never happen is told as the worst."""
    later = [[ours.wait_s - stock.wait_s for stock, ours in one] for one in found.rounds]
    every = [seconds for one in later for seconds in one]
    what = f"{len(JOBS)} jobs wait longer than by stock sbatch"
    return [
        make_row(f"{what}: the one that is worst off", [max(every)], "s", at_most=INTERVAL_S),
        make_row(f"{what}: the mean of a round", [statistics.fmean(one) for one in later], "s"),
        make_row("a lost race: until the job runs elsewhere", found.races_s, "s", at_most=INTERVAL_S),
    ]


def jobs_told(found: Found) -> str:
    """Return every job's waits as a table."""
    lines = [f"{'job':>4} {'nodes':>6} {'stock s':>8} {'ours s':>8} {'later s':>8}  on"]
    for one in found.rounds:
        for number, (stock, ours) in enumerate(one):
            nodes, later = JOBS[number][0], ours.wait_s - stock.wait_s
            lines.append(
                f"{number:>4} {nodes:>6} {stock.wait_s:>8.0f} {ours.wait_s:>8.0f} {later:>+8.0f}  {ours.nodes}"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write build/bench/waiting.json."""
    parser = options("benchmarks.scheduler.waiting", __doc__, quick="one round")
    parser.add_argument("--rounds", type=int, default=2, help="how often the queue is played (default: 2)")
    asked = parser.parse_args(arguments)
    found = measured(1 if asked.quick else asked.rounds)
    rows = rows_of(found)
    path = write_rows("waiting", rows)
    print(path.read_text(encoding="utf-8") if asked.json else f"{jobs_told(found)}\n{table(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
