"""Every fault of the table, on real Slurm clusters of this machine, ours beside stock Slurm.

    python -m benchmarks.watchdog.faults [--quick] [--only A,B] [--repeats 5] [--stock 3] [--seed 1]

Each run has a cluster of its own, a job of an ordinary user whose ranks step together and save, and one fault.
Scenarios take turns, in a new random order for each repeat. What has no goal of seconds, and stock Slurm's cases,
go side by side at the beginning of a repeat: most of that is waiting; all others have the machine to themselves.
A line is printed for each run, and what was measured so far is in build/bench/faults.runs.json; at the end the
rows go to build/bench/faults.json. A scenario that does not come so far as its fault has a row that is short.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import sys
import time
import traceback
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.program import unwind_when_told
from benchmarks.rows import BENCH, make_row, table, write_rows
from benchmarks.watchdog.judging import Figures
from benchmarks.watchdog.playing import play, play_stock
from benchmarks.watchdog.scenarios import (
    BY_NAME,
    REPEATS,
    SLURMD_TIMEOUT_S,
    STOCK,
    STOCK_REPEATS,
    After,
    Scenario,
    StockCase,
    cases_of,
)
from benchmarks.watchdog.stand import sweep
from benchmarks.watchdog.turns import estimate_s, longest_first, side_by_side
from deeplink.core.errors import DeepLinkError
from deeplink.core.publish import write_text
from deeplink.scheduler.testbed.settings import SandboxSettings, User
from deeplink.scheduler.testbed.shape import Shape

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from benchmarks.rows import Row


@dataclass(slots=True)
class Measured:
    """All runs so far.

    Attributes:
        ours: figures of each run, by scenario.
        stock: seconds of each run until stock Slurm's job trained again; None where it did not in time.
        failed: why a run could not be made, by scenario.
    """

    ours: dict[str, list[Figures]] = field(default_factory=dict)
    stock: dict[str, list[float | None]] = field(default_factory=dict)
    failed: dict[str, list[str]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class Run:
    """One run that was made: of a scenario, or of a case of stock Slurm.

    Attributes:
        came: the figures, or stock Slurm's seconds; None where it never came back.
        problem: why there is neither.
        took_s: from nothing to nothing.
    """

    of: Scenario | StockCase
    took_s: float
    came: Figures | float | None = None
    problem: str = ""


def run(of: Scenario | StockCase, seed: int, starting: threading.Lock | None = None) -> Run:
    """Make one run, and return what came of it. Whatever goes wrong with it is its own misfortune."""
    began = time.monotonic()
    held = starting or nullcontext()
    try:
        came = play(of, seed, held).figures if isinstance(of, Scenario) else play_stock(of, seed, held)
    except Exception as problem:  # noqa: BLE001 - hours of the others' figures are not to be lost for it
        if isinstance(problem, DeepLinkError):
            return Run(of, time.monotonic() - began, problem=str(problem) or type(problem).__name__)
        traceback.print_exc()  # a defect of ours, and a line of its message would not say where
        return Run(of, time.monotonic() - began, problem=f"{type(problem).__name__}: {problem}")
    return Run(of, time.monotonic() - began, came)


def measure(
    scenarios: Sequence[Scenario], repeats: int, stock_repeats: int, seed: int, say: Callable[[str], None]
) -> Measured:
    """Run everything, in turns."""
    found, chance = Measured(), random.Random(seed)  # noqa: S311 - no secret

    def done(one: Run) -> None:
        _note(found, one)
        say(f"{_named(one.of)}: {_told(one)} ({one.took_s:.0f} s)")

    waiting = [scenario for scenario in scenarios if not scenario.timed]
    timed = [scenario for scenario in scenarios if scenario.timed]
    for repeat in range(repeats):
        stock = cases_of(scenarios) if repeat < stock_repeats else []
        beside: list[Scenario | StockCase] = longest_first([*waiting, *stock])
        side_by_side([partial(run, one, seed + repeat) for one in beside], done)
        for scenario in chance.sample(timed, len(timed)):
            done(run(scenario, seed + repeat))
    return found


def _named(of: Scenario | StockCase) -> str:
    return of.name if isinstance(of, Scenario) else f"stock {of.name}"


def _note(found: Measured, one: Run) -> None:
    if one.problem:
        found.failed.setdefault(_named(one.of), []).append(one.problem)
    elif isinstance(one.came, Figures):
        found.ours.setdefault(one.of.name, []).append(one.came)
    else:
        found.stock.setdefault(one.of.name, []).append(one.came)
    _keep(found)


def _told(one: Run) -> str:
    if one.problem:
        return f"could not be run: {one.problem[-300:]}"
    if isinstance(one.came, Figures):
        return told(one.came)
    return f"not within {one.of.bound_s:.0f} s" if one.came is None else f"trains again after {one.came:.1f} s"


def _keep(found: Measured) -> None:
    BENCH.mkdir(parents=True, exist_ok=True)
    write_text(BENCH / "faults.runs.json", json.dumps(found.as_dict(), indent=1) + "\n")


def told(figures: Figures) -> str:
    """Return a run in a line."""
    parts = [
        f"{name} {seconds:.2f} s"
        for name, seconds in (("detected", figures.detected_s), ("first step", figures.first_step_s))
        if seconds is not None
    ]
    parts += [f"BUT {what}: {how}" for what, how in figures.broken.items()]
    parts += [f"NOT YET: {what}" for what in figures.missing]
    return "; ".join(parts) or "nothing came, as it should be"


def rows_of(
    scenario: Scenario, runs: Sequence[Figures], stock: Sequence[float | None], failed: int = 0
) -> list[Row]:
    """Return a scenario's rows. What never came counts as the time that was waited for it.

    Of `failed` more runs nothing is known, not even the fault: that is one row more, and it is short.
    """
    title, bound = scenario.title, scenario.bound_s
    count = len(runs) + failed
    rows = [make_row(f"{title}: came as far as its fault, runs of {count}", [len(runs)], "", at_least=count)]
    rows = rows if failed else []
    if not runs:
        return rows
    detected = [_or(run.detected_s, bound) for run in runs]
    if scenario.detected_s is not None:
        rows.append(make_row(f"{title}: detected", detected, "s", at_most=scenario.detected_s))
    else:
        rows.append(_in_all(f"{title}: noticed", [run.noticed for run in runs]))
    if scenario.after is After.AGAIN:
        first = [_or(run.first_step_s, bound) for run in runs]
        rows.append(make_row(f"{title}: first training step", first, "s", at_most=scenario.first_step_s))
        if scenario.first_step_s is None:
            rows.append(_in_all(f"{title}: trains again", [run.first_step_s is not None for run in runs]))
        if scenario.resume:
            rows.append(_in_all(f"{title}: taken back when it was well", [run.back_s is not None for run in runs]))
        rows += _shown_apart(scenario, runs)
        if stock and None not in stock:
            middle = statistics.median(seconds for seconds in stock if seconds is not None)
            of_stock = [seconds / middle for seconds in first]
            rows.append(
                make_row(f"{title}: ours over stock Slurm's", of_stock, "", at_most=scenario.most_of_stock)
            )
    elif scenario.after is After.HELD:
        rows.append(_in_all(f"{title}: {scenario.after.value}", [not run.missing for run in runs]))
    for never in scenario.never:
        broken = sum(1 for run in runs if never.value in run.broken)
        rows.append(make_row(f"{title}: never {never.value}, runs of {len(runs)}", [broken], "", at_most=0))
    return rows


def _in_all(what: str, runs: Sequence[bool]) -> Row:
    """Return the row of what is to come in every run."""
    return make_row(f"{what}, runs of {len(runs)}", [sum(runs)], "", at_least=len(runs))


def _shown_apart(scenario: Scenario, runs: Sequence[Figures]) -> list[Row]:
    """Return the parts of the time, and what went on meanwhile: no goals."""
    title, imported = scenario.title, "DeepLink and torch" if scenario.torch else "DeepLink"
    parts = {
        "of that, until the first process is started": [run.start_s for run in runs],
        f"of that, from a process's start until it has imported {imported}": [run.import_s for run in runs],
        "an old rank went on beside the new ones for": [run.zombie_s for run in runs],
        "checked and taken back, after its link was healed": [run.back_s for run in runs],
    }
    known = {name: [seconds for seconds in those if seconds is not None] for name, those in parts.items()}
    rows = [make_row(f"{title}: {name}", those, "s") for name, those in known.items() if those]
    repeated = [float(run.repeated) for run in runs if run.repeated is not None]
    return [*rows, *([make_row(f"{title}: steps repeated", repeated, "")] if repeated else [])]


def _or(seconds: float | None, bound: float) -> float:
    return bound if seconds is None else seconds


def stock_rows(found: Measured) -> list[Row]:
    """Return stock Slurm's own figures."""
    return [
        make_row(f"stock Slurm, {case}: first training step", [_or(one, STOCK[case].bound_s) for one in came], "s")
        for case, came in sorted(found.stock.items())
    ]


def notes_of(found: Measured) -> list[str]:
    """Return what happened beside the figures, once for each thing, and how the clusters are set."""
    said: dict[str, None] = {}
    for name, runs in found.ours.items():
        for run in runs:
            said |= {f"{BY_NAME[name].title}: {what}: {how}": None for what, how in run.broken.items()}
            said |= {f"{BY_NAME[name].title}: not yet: {what}": None for what in run.missing}
    for case, came in sorted(found.stock.items()):
        never = sum(1 for one in came if one is None)
        if never:
            bound = f"not within the {STOCK[case].bound_s:.0f} s it was watched"
            said[f"stock Slurm, {case}: trains again in {len(came) - never} of {len(came)} runs, else {bound}"] = (
                None
            )
    said |= {
        f"could not be run: {name}: {why[-300:]}": None for name, whys in found.failed.items() for why in whys
    }
    return [*said, f"slurm.conf of both sides differs from Slurm's defaults in: {differing()}"]


def differing() -> str:
    """Return in what the clusters' slurm.conf differs from Slurm's defaults."""
    settings = SandboxSettings(shape=Shape(), user=User("u", 1, 1, Path("/")), slurmd_timeout=SLURMD_TIMEOUT_S)
    return ", ".join(f"{tuned.key}={tuned.value} ({tuned.default})" for tuned in settings.differing)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write build/bench/faults.json; 1 when not one run could be made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="each once, stock Slurm once")
    parser.add_argument("--only", metavar="A,B", default=",".join(BY_NAME), help=f"of: {', '.join(BY_NAME)}")
    parser.add_argument("--repeats", type=int, default=REPEATS, metavar="N")
    parser.add_argument(
        "--stock", type=int, default=STOCK_REPEATS, metavar="N", help="runs of stock Slurm; 0: none"
    )
    parser.add_argument("--seed", type=int, default=1, help="of orders and targets (default: 1)")
    asked = parser.parse_args(arguments)
    if asked.repeats < 1 or asked.stock < 0:
        parser.error("--repeats: at least 1; --stock: not below 0")
    names = asked.only.split(",")
    if unknown := sorted(set(names) - set(BY_NAME)):
        parser.error(f"--only: no such scenario: {', '.join(unknown)}; there are {', '.join(BY_NAME)}")
    scenarios = [BY_NAME[name] for name in names]
    repeats, stock = (1, min(1, asked.stock)) if asked.quick else (asked.repeats, asked.stock)

    began = time.monotonic()

    def say(line: str) -> None:
        print(f"  [{time.monotonic() - began:4.0f} s] {line}", flush=True)

    say(f"slurm.conf differs from Slurm's defaults in: {differing()}")
    about = estimate_s(scenarios, cases_of(scenarios), repeats, stock) / 60
    say(f"{len(scenarios)} scenarios, {repeats} times each, stock Slurm {stock} times: about {about:.0f} minutes")
    if swept := sweep():
        say(f"taken down, of a run that was killed: {', '.join(swept)}")
    found = measure(scenarios, repeats, stock, asked.seed, say)
    rows = [
        row
        for scenario in scenarios
        for row in rows_of(
            scenario,
            found.ours.get(scenario.name, ()),
            found.stock.get(scenario.stock, ()),
            failed=len(found.failed.get(scenario.name, ())),
        )
    ]
    rows += stock_rows(found)
    write_rows("faults", rows)
    write_text(BENCH / "faults.notes.json", json.dumps(notes_of(found), indent=1) + "\n")
    print(table(rows))
    return 0 if found.ours else 1


if __name__ == "__main__":
    unwind_when_told()
    sys.exit(main())
