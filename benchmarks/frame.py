"""The frame of a benchmark that is several programs: which are run, for how long, and what their rows come to.

Each subject is a program of its own (`python -m benchmarks.BENCH.SUBJECT --help`), writes its rows to
build/bench/SUBJECT.json, and may leave remarks for people in build/bench/SUBJECT.notes.json. What cannot be
measured here is named, with the reason.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
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

from benchmarks.report import subjects_page, write_page
from benchmarks.rows import BENCH, Row, machine, rows_from, table, write_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TextIO

TOP = Path(__file__).parents[1]
LONGEST_S = 1800.0
"""A subject that takes longer is ended and counts as failed."""
END_S = 60.0
"""So long a subject may take to clean up after it was told to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One program.

    Attributes:
        title: its head in the page.
        traces: what of the folder of traces it is given, as its first argument; nothing when empty.
        root: whether it drives a real Slurm with network namespaces.
        quick: its arguments for a short run.
        parts: names of its own that --only may choose from; the program takes them by its own --only.
        longest_s: it is ended when it takes longer.
        about_s: how long it takes, given the parts that were chosen (none: all) and whether it is a short run.
    """

    title: str
    traces: str = ""
    root: bool = False
    quick: tuple[str, ...] = ("--quick",)
    parts: tuple[str, ...] = ()
    longest_s: float = LONGEST_S
    about_s: Callable[[tuple[str, ...], bool], float] | None = None


def lasts(full_s: float, quick_s: float) -> Callable[[tuple[str, ...], bool], float]:
    """Return the `about_s` of a subject without parts."""
    return lambda _parts, quick: quick_s if quick else full_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One benchmark.

    Attributes:
        name: of the package below `benchmarks`, and of the file of all rows.
        about: what `--help` says.
        subjects: its programs.
        page: what --write-docs writes.
        head: how the page begins; holds {when}, {machine} and {load}.
        has_traces: whether a subject wants a folder of traces.
        folder: where rows are written.
    """

    name: str
    about: str
    subjects: Mapping[str, Subject]
    page: Path
    head: str
    has_traces: bool = False
    folder: Path = BENCH


@dataclass(slots=True)
class Found:
    """What a run came to.

    Attributes:
        rows: of each subject that was measured.
        notes: remarks of the subjects, for people.
        missing: what was not measured, and why.
        failed: subjects that ended with an error.
    """

    rows: dict[str, list[Row]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What was asked for.

    Attributes:
        chosen: the parts of each subject that is to run; empty: all of it.
        join: the other subjects' rows are those of their own last run.
    """

    chosen: Mapping[str, tuple[str, ...]]
    quick: bool
    as_json: bool
    write_docs: bool
    traces: Path | None = None
    join: bool = False


def not_measurable(subject: Subject, traces: Path | None, *, module: str = "") -> str:
    """Return why a subject cannot be measured here; empty where it can."""
    if module and importlib.util.find_spec(module) is None:
        return "there is no such program yet"
    if subject.root and os.geteuid() != 0:
        return "it drives a real Slurm in network namespaces: root only"
    if subject.traces and traces is None:
        return "its measurements are not ours to ship: --traces FOLDER (benchmarks/README.md says where they are)"
    if subject.traces and traces is not None and not (traces / subject.traces).exists():
        return f"there is no {traces / subject.traces}"
    return ""


def command(bench: Bench, name: str, asked: Asked) -> list[str]:
    """Return the command of a subject."""
    subject, parts = bench.subjects[name], asked.chosen[name]
    argv = [sys.executable, "-m", f"benchmarks.{bench.name}.{name}"]
    if subject.traces and asked.traces is not None:
        argv.append(str(asked.traces / subject.traces))
    return [*argv, *(subject.quick if asked.quick else ()), *(["--only", ",".join(parts)] if parts else [])]


def run(
    bench: Bench,
    asked: Asked,
    say: Callable[[str], None],
    program: Callable[[Bench, str, Asked], list[str]] = command,
) -> Found:
    """Measure subject after subject."""
    found = Found()
    for number, name in enumerate(asked.chosen, 1):
        subject = bench.subjects[name]
        if why := not_measurable(subject, asked.traces, module=f"benchmarks.{bench.name}.{name}"):
            say(f"not measured: {name}: {why}")
            found.missing[subject.title] = why
            continue
        say(f"{number} of {len(asked.chosen)}: {subject.title}")
        path, notes = bench.folder / f"{name}.json", bench.folder / f"{name}.notes.json"
        short = _short(bench, name)
        for old in (path, notes, short):
            old.unlink(missing_ok=True)
        problem = _ended(program(bench, name, asked), subject.longest_s, quiet=asked.as_json)
        if problem := problem or ("" if path.exists() else "it left no rows"):
            say(f"{name} FAILED: {problem}")
            found.failed.append(name)
            found.missing[subject.title] = problem
        if not path.exists():
            continue
        found.rows[name] = rows_from(json.loads(path.read_text(encoding="utf-8")))
        found.notes += _notes(bench, name)
        if asked.quick:
            short.touch()
    return found


def joined(bench: Bench, found: Found, chosen: Mapping[str, object]) -> Found:
    """Return what was found, and for the other subjects what they left at their own last run, saying when."""
    rows, notes, missing = dict(found.rows), list(found.notes), dict(found.missing)
    for name, subject in bench.subjects.items():
        path = bench.folder / f"{name}.json"
        if name in chosen:
            continue
        if not path.exists():
            missing[subject.title] = f"not asked for, and no earlier run left {path.name}"
            continue
        try:
            rows[name] = rows_from(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError) as damaged:
            missing[subject.title] = f"{path.name} of an earlier run cannot be read: {damaged!r}"
            continue
        notes += _notes(bench, name)
        ended, short = path.stat().st_mtime, _short(bench, name)
        how = "a short run" if short.exists() and short.stat().st_mtime >= ended else "a run"
        when = datetime.fromtimestamp(ended, UTC)
        on = f", on {rows[name][0].machine}" if rows[name] else ""
        notes.append(f"{subject.title}: of {how} by itself that ended {when:%Y-%m-%d %H:%M} UTC{on}")
    ordered = {name: rows[name] for name in bench.subjects if name in rows}
    return dataclasses.replace(found, rows=ordered, notes=notes, missing=missing)


def _short(bench: Bench, name: str) -> Path:
    """Return the file that marks the rows of a short run: who joins them later says so. Newer rows are others."""
    return bench.folder / f"{name}.short"


def _notes(bench: Bench, name: str) -> list[str]:
    path = bench.folder / f"{name}.notes.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def _ended(argv: list[str], longest_s: float, *, quiet: bool) -> str:
    """Run a program to its end; return what went wrong, if anything did."""
    out = sys.stderr if quiet else None
    # Of its own session: Ctrl-C reaches it once, from us, and does not interrupt its cleaning up.
    process, signals = _start(argv, out)
    with process:
        try:
            for number in signals:
                signal.raise_signal(number)
            code = process.wait(longest_s)
        except subprocess.TimeoutExpired:
            return f"it took longer than {longest_s:g} s"
        finally:
            if process.returncode is None:
                _end_it(process)
    return f"exit code {code}" if code else ""


def _start(argv: list[str], out: TextIO | None) -> tuple[subprocess.Popen[bytes], list[int]]:
    """Start a program; return it with the signals that came before anybody could have ended it."""
    came: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _frame: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        return subprocess.Popen(argv, cwd=TOP, stdout=out, start_new_session=True), came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_it(process: subprocess.Popen[bytes]) -> None:
    """End a program: it has namespaces and processes to clean up, and is killed if it does not come to an end."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def asked_for(bench: Bench, arguments: Sequence[str] | None) -> Asked:
    """Read the command line; wrong usage ends the process with code 2."""
    parser = argparse.ArgumentParser(
        prog=f"make bench-{bench.name}",
        description=bench.about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = [*bench.subjects, *(part for subject in bench.subjects.values() for part in subject.parts)]
    parser.add_argument("--quick", action="store_true", help="less of everything")
    parser.add_argument("--only", metavar="A,B", default="", help=f"of: {', '.join(known)}")
    if bench.has_traces:
        parser.add_argument("--traces", type=Path, metavar="FOLDER", help="*/placements.csv and philly.csv.gz")
    parser.add_argument(
        "--join", action="store_true", help="with --only: the others' rows are those of their last runs"
    )
    parser.add_argument("--json", action="store_true", help="print the rows as JSON; what goes on goes to stderr")
    parser.add_argument("--write-docs", action="store_true", help=f"write {bench.page.name} besides")
    asked = parser.parse_args(arguments)
    names = asked.only.split(",") if asked.only else [*bench.subjects]
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"--only: no such subject: {', '.join(unknown)}; there are {', '.join(known)}")
    return Asked(
        chosen=_chosen(bench, names),
        quick=asked.quick,
        as_json=asked.json,
        write_docs=asked.write_docs,
        traces=asked.traces if bench.has_traces else None,
        join=asked.join,
    )


def _chosen(bench: Bench, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    chosen: dict[str, tuple[str, ...]] = {}
    for name in names:
        if name in bench.subjects:
            chosen[name] = ()
            continue
        owner = next(of for of, subject in bench.subjects.items() if name in subject.parts)
        if owner not in names:
            chosen[owner] = (*chosen.get(owner, ()), name)
    return chosen


def estimated(bench: Bench, asked: Asked) -> list[str]:
    """Return how long a run takes, in a line; nothing where no subject says."""
    known = {
        name: about(parts, asked.quick)
        for name, parts in asked.chosen.items()
        if (about := bench.subjects[name].about_s) is not None
    }
    if not known:
        return []
    each = ", ".join(f"{name} {_minutes(about)}" for name, about in known.items())
    return [f"about {_minutes(sum(known.values()))} minutes: {each}"]


def _minutes(seconds: float) -> str:
    return f"{max(1, round(seconds / 60))}"


def main(
    bench: Bench,
    arguments: Sequence[str] | None = None,
    program: Callable[[Bench, str, Asked], list[str]] = command,
) -> int:
    """Run, print, write build/bench/NAME.json; 1 when a subject ended with an error of its own."""
    asked = asked_for(bench, arguments)
    out = sys.stderr if asked.as_json else sys.stdout
    began, load = time.monotonic(), os.getloadavg()[0]

    def say(line: str) -> None:
        print(f"[{time.monotonic() - began:4.0f} s] {line}", file=out, flush=True)

    bench.folder.mkdir(parents=True, exist_ok=True)
    say(f"{machine()}; load {load:.1f}")
    for line in estimated(bench, asked):
        say(line)
    found = run(bench, asked, say, program)
    if asked.join:
        found = joined(bench, found, asked.chosen)
    rows = [row for of in found.rows.values() for row in of]
    goals = [row for row in rows if row.goal is not None]
    path = write_rows(bench.name, rows, folder=bench.folder)
    reached = sum(1 for row in goals if row.reached)
    print(f"\nFigures to reach: {reached} of {len(goals)}\n{table(goals)}", file=out)
    for note in found.notes:
        print(note, file=out)
    for what, why in found.missing.items():
        print(f"not measured: {what}: {why}", file=out)
    if asked.write_docs:
        titled = {bench.subjects[name].title: of for name, of in found.rows.items()}
        when = datetime.now(UTC).date().isoformat() + (" (a short run)" if asked.quick else "")
        text = subjects_page(bench.head, titled, missing=found.missing, notes=found.notes, when=when, load=load)
        write_page(bench.page, text)
    if asked.as_json:
        print(json.dumps(json.loads(path.read_text(encoding="utf-8")), indent=1))
    say(f"written to {path}{f' and {bench.page}' if asked.write_docs else ''}")
    return 1 if found.failed else 0
