"""A storm: cases of faults drawn from a seed, each on a real Slurm of its own, and what must hold after each.

    make storm MINUTES=60 SEED=7
    make storm CASE="3+1 operator; node-killed last @40+3 for 20; watchdog-killed ctl @40+5 for 5"

Case after case is drawn (`drawing.py`): a job, and one to three faults of the laboratory, where and when they
come, and for how long. Each has a cluster of its own, takes half a minute to two, and is held against every
invariant (`invariants.py`). One that fails is made smaller for as long as it fails the same way, and told as a
line that runs it again; what watchdog, job and daemons said is kept in build/bench/storm. Exit code 1 when
something does not hold.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.program import unwind_when_told
from benchmarks.rows import BENCH
from benchmarks.storm.case import CaseTextError, StormCase
from benchmarks.storm.drawing import case_of, smallest
from benchmarks.storm.invariants import INVARIANTS, CaseFacts, Violation, violations
from benchmarks.storm.playing import play
from benchmarks.watchdog.stand import sweep
from deeplink.core.errors import DeepLinkError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.storm.playing import CaseRun


SHRINKS_S = 900.0
"""So long a case is made smaller, at the most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of a case."""

    case: StormCase
    violations: tuple[Violation, ...]
    took_s: float
    smallest: StormCase | None = None

    @property
    def words(self) -> frozenset[str]:
        """The invariants that do not hold."""
        return frozenset(one.invariant for one in self.violations)


def run(case: StormCase, kept: Path, say: Callable[[str], None]) -> Result:
    """Play a case; where something does not hold, what was said is left in a folder of its own in `kept`."""
    began = time.monotonic()
    folder = kept / f"{len(list(kept.iterdir())):03}"
    facts = CaseFacts()
    try:
        facts = play(case, say, lambda one: keep(one, folder))
    except DeepLinkError as problem:
        return Result(case=case, violations=(Violation("harness", str(problem)),), took_s=time.monotonic() - began)
    found = tuple(violations(facts))
    with suppress(FileNotFoundError):
        if found:
            told = [f"{one.invariant}: {one.seen}" for one in found]
            (folder / "case").write_text(
                "\n".join([str(case), *told, "", *map(str, facts.injected)]), encoding="utf-8"
            )
        else:
            shutil.rmtree(folder)
    return Result(case=case, violations=found, took_s=time.monotonic() - began)


def keep(run: CaseRun, folder: Path) -> None:
    """Leave in `folder` what the watchdog, the job and Slurm's daemons said, and every incident."""
    folder.mkdir(parents=True)
    stand = run.stand
    (folder / "watchdog").write_text(stand.said(), encoding="utf-8")
    (folder / "job").write_text(stand.output(), encoding="utf-8")
    told = [f"{one.detected_unix:.1f} {one}\n" for one in stand.incidents()]
    (folder / "incidents").write_text("".join(told), encoding="utf-8")
    for log in stand.cluster.home.glob(".local/state/deeplink/jobs/*/events.jsonl"):
        shutil.copy(log, folder / f"events.{log.parent.name}")
    shutil.copytree(stand.cluster.layout.log, folder / "slurm")


def made_smaller(result: Result, kept: Path, tries: int, say: Callable[[str], None]) -> StormCase:
    """Return the smallest case that fails as this one does, of those that were tried."""
    ends = time.monotonic() + SHRINKS_S

    def fails(case: StormCase) -> bool:
        if time.monotonic() > ends:
            return False
        say(f"smaller? {case}")
        words = run(case, kept, say).words
        say(f"{'as before' if words & result.words else 'no longer'}: {', '.join(sorted(words)) or 'all holds'}")
        return bool(words & result.words)

    return smallest(result.case, fails, tries)


def summary(results: Sequence[Result]) -> str:
    """Return what came of a storm as a table, with a line for each case that failed."""
    failed = [one for one in results if one.violations]
    faults = Counter(injection.what for one in results for injection in one.case.injections)
    bad = Counter(injection.what for one in failed for injection in one.case.injections)
    words = Counter(word for one in failed for word in one.words)
    lines = [f"{len(results)} cases, {len(results) - len(failed)} of them well", ""]
    lines += [f"{'fault':24} {'drawn':>5} {'in failed cases':>16}"]
    lines += [f"{what:24} {times:5} {bad[what]:16}" for what, times in sorted(faults.items())]
    lines += [
        "",
        *(
            f"{words[word]:3} x {word}: {INVARIANTS.get(word, 'the case could not be played')}"
            for word in sorted(words)
        ),
    ]
    for one in failed:
        lines += ["", f"CASE='{one.smallest or one.case}'"]
        lines += [f"  {told.invariant}: {told.seen}" for told in one.violations]
        if one.smallest and one.smallest != one.case:
            lines += [f"  first as: {one.case}"]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write the summary; 1 when something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="no case begins later (%(default)s)")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--case", action="append", metavar="TEXT", help="this one alone; repeatable")
    parser.add_argument(
        "--tries", type=int, default=12, help="to make a failing case smaller; 0: none (%(default)s)"
    )
    parser.add_argument(
        "--kept", type=Path, default=BENCH / "storm", metavar="FOLDER", help="made again (%(default)s)"
    )
    asked = parser.parse_args(arguments)
    try:
        only = [StormCase.parse(text) for text in asked.case or ()]
    except CaseTextError as problem:
        parser.error(str(problem))
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {line}", flush=True)

    sweep()
    shutil.rmtree(asked.kept, ignore_errors=True)
    asked.kept.mkdir(parents=True)
    results: list[Result] = []
    try:
        for case in only or (case_of(asked.seed, number) for number in count()):
            if time.monotonic() - began > 60 * asked.minutes:
                break
            say(f"case {len(results)}: {case}")
            result = run(case, asked.kept, say)
            say(
                "; ".join(f"{one.invariant}: {one.seen}" for one in result.violations)
                or f"well, {result.took_s:.0f} s"
            )
            results.append(result)
            if result.violations and asked.tries:
                results[-1] = dataclasses.replace(
                    result, smallest=made_smaller(result, asked.kept, asked.tries, say)
                )
    finally:
        text = summary(results)
        (asked.kept / "summary").write_text(text + "\n", encoding="utf-8")
        print(text)
    return 1 if any(one.violations for one in results) else 0


if __name__ == "__main__":
    unwind_when_told()
    sys.exit(main())
