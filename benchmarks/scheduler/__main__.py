"""Measures the scheduler and says which goals are reached.

make bench-scheduler
make bench-scheduler ARGS="--only placement,overhead"
make bench-scheduler ARGS="--traces FOLDER"   the measured steps and the job trace that two subjects need
make bench-scheduler ARGS=--write-docs        writes docs/benchmarks-scheduler.md besides

Each subject is a program of its own (`python -m benchmarks.scheduler.SUBJECT --help`) and writes its rows to
build/bench. Those that drive a real Slurm need root; what cannot be measured here is named, with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.report import scheduler_page, write_page
from benchmarks.rows import BENCH, Row, machine, rows_from, table, write_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TOP = Path(__file__).parents[2]
PAGE = TOP / "docs" / "benchmarks-scheduler.md"
LONGEST_S = 1800.0
"""A subject that takes longer is ended and counts as failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One program.

    Attributes:
        title: its head in the page.
        traces: what of the folder of traces it is given, as its first argument; nothing when empty.
        root: whether it drives a real Slurm with network namespaces.
        quick: its arguments for a short run.
    """

    title: str
    traces: str = ""
    root: bool = False
    quick: tuple[str, ...] = ("--quick",)


SUBJECTS = {
    "side_by_side": Subject(title="The same job by sbatch and by `deeplink sbatch`, on a real Slurm", root=True),
    "placement": Subject(title="Placement and rank order"),
    "overhead": Subject(title="What the wrapper costs", root=True),
    "model_error": Subject(title="The step model beside measured steps", traces=".", quick=()),
    "simulation": Subject(title="82,247 jobs replayed", traces="philly.csv.gz"),
    "waiting": Subject(title="Waiting in the queue, with the planner and without", root=True),
    "status_load": Subject(title="Questions to slurmctld", root=True),
    "emulation": Subject(title="1,024 nodes: Slurm's own choice, --switches and ours", root=True),
}


@dataclass(slots=True)
class Found:
    """What a run came to.

    Attributes:
        rows: of each subject that was measured.
        missing: what was not, and why.
        failed: subjects that ended with an error.
    """

    rows: dict[str, list[Row]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)


def not_measurable(subject: Subject, traces: Path | None) -> str:
    """Return why a subject cannot be measured here; empty where it can."""
    if subject.root and os.geteuid() != 0:
        return "it drives a real Slurm in network namespaces: root only"
    if subject.traces and traces is None:
        return "its measurements are not ours to ship: --traces FOLDER (benchmarks/README.md says where they are)"
    if subject.traces and traces is not None and not (traces / subject.traces).exists():
        return f"there is no {traces / subject.traces}"
    return ""


def command(name: str, subject: Subject, traces: Path | None, *, quick: bool) -> list[str]:
    """Return the command of a subject."""
    argv = [sys.executable, "-m", f"benchmarks.scheduler.{name}"]
    if subject.traces and traces is not None:
        argv.append(str(traces / subject.traces))
    return [*argv, *(subject.quick if quick else ())]


def run(asked: argparse.Namespace, say: Callable[[str], None]) -> Found:
    """Measure subject after subject."""
    found = Found()
    for number, name in enumerate(asked.subjects, 1):
        subject = SUBJECTS[name]
        if why := not_measurable(subject, asked.traces):
            say(f"not measured: {name}: {why}")
            found.missing[subject.title] = why
            continue
        say(f"{number} of {len(asked.subjects)}: {subject.title}")
        path = BENCH / f"{name}.json"
        path.unlink(missing_ok=True)
        argv = command(name, subject, asked.traces, quick=asked.quick)
        if problem := _ended(argv, quiet=asked.json) or ("" if path.exists() else "it left no rows"):
            say(f"{name} FAILED: {problem}")
            found.failed.append(name)
            found.missing[subject.title] = problem
            continue
        found.rows[name] = rows_from(json.loads(path.read_text(encoding="utf-8")))
    return found


def _ended(argv: list[str], *, quiet: bool) -> str:
    """Run a program to its end; return what went wrong, if anything did."""
    out = sys.stderr if quiet else None
    with subprocess.Popen(argv, cwd=TOP, stdout=out) as process:
        try:
            code = process.wait(LONGEST_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # it has namespaces and processes to clean up
            process.wait(60)
            return f"it took longer than {LONGEST_S:g} s"
        except BaseException:
            process.send_signal(signal.SIGINT)
            process.wait(60)
            raise
    return f"exit code {code}" if code else ""


def _asked(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make bench-scheduler", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="less of everything")
    parser.add_argument("--only", metavar="A,B", default=",".join(SUBJECTS), help=f"of: {', '.join(SUBJECTS)}")
    parser.add_argument("--traces", type=Path, metavar="FOLDER", help="*/placements.csv and philly.csv.gz")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON; what goes on goes to stderr")
    parser.add_argument("--write-docs", action="store_true", help="write docs/benchmarks-scheduler.md")
    asked = parser.parse_args(arguments)
    asked.subjects = asked.only.split(",")
    if unknown := sorted(set(asked.subjects) - set(SUBJECTS)):
        parser.error(f"--only: no such subject: {', '.join(unknown)}; there are {', '.join(SUBJECTS)}")
    return asked


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write build/bench/scheduler.json; 1 when a subject ended with an error of its own."""
    asked = _asked(arguments)
    out = sys.stderr if asked.json else sys.stdout
    began, load = time.monotonic(), os.getloadavg()[0]

    def say(line: str) -> None:
        print(f"[{time.monotonic() - began:4.0f} s] {line}", file=out, flush=True)

    BENCH.mkdir(parents=True, exist_ok=True)
    say(f"{machine()}; load {load:.1f}")
    found = run(asked, say)
    rows = [row for of in found.rows.values() for row in of]
    goals = [row for row in rows if row.goal is not None]
    path = write_rows("scheduler", rows)
    print(
        f"\nFigures to reach: {sum(1 for row in goals if row.reached)} of {len(goals)}\n{table(goals)}", file=out
    )
    for what, why in found.missing.items():
        print(f"not measured: {what}: {why}", file=out)
    if asked.write_docs:
        titled = {SUBJECTS[name].title: of for name, of in found.rows.items()}
        when = datetime.now(UTC).date().isoformat()
        write_page(PAGE, scheduler_page(titled, missing=found.missing, when=when, load=load))
    if asked.json:
        print(json.dumps(json.loads(path.read_text(encoding="utf-8")), indent=1))
    say(f"written to {path}{f' and {PAGE}' if asked.write_docs else ''}")
    return 1 if found.failed else 0


def _end(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)  # unwinds: the program that runs is ended
    sys.exit(main())
