"""Measures the cache beside its peers, in turns within one run, and says which goals are reached.

make bench-cache
make bench-cache ARGS="--quick --only packing,local"
make bench-cache ARGS=--resume          after an interruption: what was finished is kept
make bench-cache ARGS=--write-docs      writes docs/benchmarks.md besides
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cache.child import side_named
from benchmarks.cache.lab import FULL, QUICK, SIDES, TINY, Lab, Scale
from benchmarks.cache.players import UnmeasuredError
from benchmarks.report import page, write_page
from benchmarks.rows import BENCH, Row, machine, rows_from, table, write_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True, slots=True)
class Subject:
    """One part of the run.

    Attributes:
        title: its head in the page.
        measure: returns its rows; imports what it needs when called.
    """

    title: str
    measure: Callable[[Lab], list[Row]]


def _module(name: str) -> Callable[[Lab], list[Row]]:
    def measure(lab: Lab) -> list[Row]:
        found: list[Row] = importlib.import_module(f"benchmarks.cache.{name}").measure(lab)
        return found

    return measure


def _index(lab: Lab) -> list[Row]:
    from benchmarks.cache.index_ten_million import measure  # noqa: PLC0415 - as the other subjects

    lab.say(f"index: {lab.scale.index:,} samples")
    return measure(lab.work, lab.scale.index)


SUBJECTS = {
    "packing": Subject("Packing and space", _module("packing")),
    "local": Subject("Local reads", _module("local")),
    "loader": Subject("DataLoader", _module("loader")),
    "transport": Subject("Remote reads", _module("transport")),
    "index": Subject("Index", _index),
    "sweep": Subject("Room for a part of the data, and a throttled source", _module("sweep")),
    "member": Subject("A lost member", _module("member")),
}
SCALES = {"full": FULL, "quick": QUICK, "tiny": TINY}
PARTS = BENCH / "cache-parts"
PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"


@dataclass(slots=True)
class Found:
    """What a run came to, subject by subject.

    Attributes:
        rows: of each subject that was measured.
        missing: what was not measured, and why.
        failed: subjects that ended with an error.
    """

    rows: dict[str, list[Row]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    @property
    def all_rows(self) -> list[Row]:
        """All rows, in the subjects' order."""
        return [row for name in SUBJECTS for row in self.rows.get(name, [])]


def run(subjects: Sequence[str], scale: Scale, parts: Path, say: Callable[[str], None]) -> Found:
    """Measure subjects; each is noted below `parts` when finished, and not repeated when it is noted there."""
    found = Found()
    for number, name in enumerate(subjects, 1):
        part = parts / f"{name}.json"
        if part.exists():
            noted = json.loads(part.read_text(encoding="utf-8"))
            found.rows[name] = rows_from(noted["rows"])
            found.missing |= noted["missing"]
            say(f"{name}: measured before, kept")
            continue
        say(f"{number} of {len(subjects)}: {SUBJECTS[name].title}")
        _run_one(name, scale, parts, say, found)
    return found


def _run_one(name: str, scale: Scale, parts: Path, say: Callable[[str], None], found: Found) -> None:
    with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=BENCH) as work, Lab(Path(work), scale, say) as lab:
        try:
            rows = SUBJECTS[name].measure(lab)
        except UnmeasuredError as problem:
            say(f"not measured: {name}: {problem}")
            found.missing[SUBJECTS[name].title] = str(problem)
            return
        except Exception as problem:  # noqa: BLE001 - the other subjects go on; said here and by the exit status
            say(f"{name} FAILED: {type(problem).__name__}: {problem}")
            found.failed.append(name)
            found.missing[name] = f"{type(problem).__name__}: {problem}"
            return
        found.rows[name] = rows
        found.missing |= lab.missing
        parts.mkdir(parents=True, exist_ok=True)
        write_rows(name, rows, folder=parts)
        noted: dict[str, Any] = {"rows": json.loads((parts / f"{name}.json").read_text(encoding="utf-8"))}
        (parts / f"{name}.json").write_text(json.dumps({**noted, "missing": lab.missing}), encoding="utf-8")
        say(f"{name}: done\n{table(rows)}")


def settings() -> dict[str, str]:
    """Return how each side is used."""
    sides = [side_named(where) for where in (*SIDES, "plain.Tar")]
    return {side.name: side.settings for side in sides}


def _asked(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make bench-cache", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", choices=SCALES, default="full", help="how much is measured (default: full)")
    parser.add_argument("--quick", action="store_const", const="quick", dest="scale", help="same as --scale quick")
    parser.add_argument("--only", metavar="A,B", default=",".join(SUBJECTS), help=f"of: {', '.join(SUBJECTS)}")
    parser.add_argument("--resume", action="store_true", help="keep what an interrupted run had finished")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON; what goes on goes to stderr")
    parser.add_argument("--write-docs", action="store_true", help="write docs/benchmarks.md")
    asked = parser.parse_args(arguments)
    asked.subjects = asked.only.split(",")
    unknown = sorted(set(asked.subjects) - set(SUBJECTS))
    if unknown:
        parser.error(f"--only: no such subject: {', '.join(unknown)}; there are {', '.join(SUBJECTS)}")
    return asked


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write build/bench/cache.json; 1 when a subject could not be measured for an error of its own."""
    asked = _asked(arguments)
    out = sys.stderr if asked.json else sys.stdout
    began, load = time.monotonic(), os.getloadavg()[0]

    def say(line: str) -> None:
        print(f"[{time.monotonic() - began:4.0f} s] {line}", file=out, flush=True)

    parts = PARTS / asked.scale
    if not asked.resume:
        shutil.rmtree(parts, ignore_errors=True)
    BENCH.mkdir(parents=True, exist_ok=True)
    say(f"{machine()}; load {load:.1f}; scale {asked.scale}; below {BENCH}")
    for name, said in settings().items():
        print(f"  {name}: {said}", file=out)
    found = run(asked.subjects, SCALES[asked.scale], parts, say)
    rows = found.all_rows
    path = write_rows("cache", rows)
    goals = [row for row in rows if row.goal is not None]
    print(
        f"\nFigures to reach: {sum(1 for row in goals if row.reached)} of {len(goals)}\n{table(goals)}", file=out
    )
    for what, why in found.missing.items():
        print(f"not measured: {what}: {why}", file=out)
    if asked.write_docs:
        write_page(PAGE, _page(found, asked.scale, load))
    if asked.json:
        print(path.read_text(encoding="utf-8"), end="")
    say(f"written to {path}{f' and {PAGE}' if asked.write_docs else ''}")
    return 1 if found.failed else 0


def _end(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def _page(found: Found, scale: str, load: float) -> str:
    return page(
        {SUBJECTS[name].title: rows for name, rows in found.rows.items()},
        missing=found.missing,
        settings=settings(),
        when=datetime.now(UTC).date().isoformat(),
        scale=f"scale {scale}",
        load=load,
    )


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)  # unwinds: processes are ended, folders removed
    sys.exit(main())
