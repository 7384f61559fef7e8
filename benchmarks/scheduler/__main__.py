"""Measures the scheduler and says which goals are reached.

make bench-scheduler
make bench-scheduler ARGS="--only placement,overhead"
make bench-scheduler ARGS="--traces FOLDER"   the measured steps and the job trace that two subjects need
make bench-scheduler ARGS=--write-docs        writes docs/benchmarks-scheduler.md besides

Each subject is a program of its own (`python -m benchmarks.scheduler.SUBJECT --help`) and writes its rows to
build/bench. Those that drive a real Slurm need root; what cannot be measured here is named, with the reason.
"""

from __future__ import annotations

import sys

from benchmarks.frame import TOP, Bench, Subject, main
from benchmarks.program import unwind_when_told

SUBJECTS = {
    "side_by_side": Subject(title="The same job by sbatch and by `deeplink sbatch`, on a real Slurm", root=True),
    "placement": Subject(title="Placement and rank order"),
    "overhead": Subject(title="What the wrapper costs", root=True),
    "model_error": Subject(title="The step model beside measured steps", traces=".", quick=()),
    "simulation": Subject(title="82,247 jobs replayed", traces="philly.csv.gz"),
    "waiting": Subject(title="Waiting in the queue, with the planner and without", root=True),
    "status_load": Subject(title="Questions to slurmctld", root=True),
    "ten_thousand": Subject(title="10,000 nodes, 1e9 samples: launcher, agents, owners"),
    "emulation": Subject(title="1,024 nodes: Slurm's own choice, --switches and ours", root=True),
}
_HEAD = """\
# Benchmarks of the scheduler

Written by `make bench-scheduler ARGS=--write-docs`; what is measured and how is in `benchmarks/README.md`.
Measured on {when} on: {machine}. Load average when it began: {load:.1f}.
"""
BENCH = Bench(
    name="scheduler",
    about=__doc__ or "",
    subjects=SUBJECTS,
    page=TOP / "docs" / "benchmarks-scheduler.md",
    head=_HEAD,
    has_traces=True,
)

if __name__ == "__main__":
    unwind_when_told()
    sys.exit(main(BENCH))
