"""Measures what faults cost with the watchdogs, beside stock Slurm, and says which goals are reached.

make bench-watchdog
make bench-watchdog ARGS="--quick --only node-killed-spare,leaf-cut"
make bench-watchdog ARGS=--write-docs        writes docs/benchmarks-watchdog.md besides

Each subject is a program of its own (`python -m benchmarks.watchdog.SUBJECT --help`) and writes its rows to
build/bench. Those that drive a real Slurm need root; what cannot be measured here is named, with the reason. The
faults take forty minutes, the clean hours more than an hour: `--only faults` leaves them out. Faults
drawn from a seed are a program of its own: `make storm`.
"""

from __future__ import annotations

import sys

from benchmarks.frame import TOP, Bench, Subject, lasts, main
from benchmarks.program import unwind_when_told
from benchmarks.watchdog.scenarios import BY_NAME, REPEATS, STOCK_REPEATS, cases_of
from benchmarks.watchdog.turns import estimate_s


def _faults_s(names: tuple[str, ...], quick: bool) -> float:  # noqa: FBT001 - as the frame calls it
    scenarios = [BY_NAME[name] for name in names or BY_NAME]
    return estimate_s(scenarios, cases_of(scenarios), *((1, 1) if quick else (REPEATS, STOCK_REPEATS)))


SUBJECTS = {
    "faults": Subject(
        title="Faults, on a real Slurm",
        root=True,
        parts=tuple(BY_NAME),
        longest_s=2 * 3600.0,
        about_s=_faults_s,
    ),
    "clean": Subject(
        title="Clean hours: false restarts", root=True, longest_s=2 * 3600.0, about_s=lasts(77 * 60, 210)
    ),
    "scale": Subject(title="1,000 nodes and 200 jobs on one core", root=True, about_s=lasts(300, 100)),
    "reporting": Subject(title="What reporting costs a step", about_s=lasts(180, 30)),
    "goodput": Subject(title="Goodput at published failure rates", about_s=lasts(30, 5)),
}
_HEAD = """\
# Benchmarks of the watchdogs

Written by `make bench-watchdog ARGS=--write-docs`; what is measured and how is in `benchmarks/README.md`, the
faults are those of [the laboratory](faults.md). Measured on {when} on: {machine}.
Load average when it began: {load:.1f}.

Seconds are counted from right before the fault. Both sides run as an ordinary user on the same cluster
(`cred_expire=120`, `SlurmdTimeout=10`); links are cut before anything is killed.
"""
BENCH = Bench(
    name="watchdog",
    about=__doc__ or "",
    subjects=SUBJECTS,
    page=TOP / "docs" / "benchmarks-watchdog.md",
    head=_HEAD,
)

if __name__ == "__main__":
    unwind_when_told()
    sys.exit(main(BENCH))
