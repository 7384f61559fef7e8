"""Every fault of the table, on real Slurm clusters of this machine, ours beside stock Slurm.

    python -m benchmarks.watchdog.faults [--quick] [--only A,B] [--repeats 5] [--stock 3] [--seed 1]

Each run has a cluster of its own, a job of an ordinary user whose ranks step together and save, and one fault.
Scenarios take turns, in an order drawn anew for each repeat; stock Slurm's cases, most of which is waiting, run
side by side at the beginning of the first repeats. A line is printed for each run, and what was measured so far is
in build/bench/faults.runs.json; at the end the rows go to build/bench/faults.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.frame import unwind_when_told
from benchmarks.rows import BENCH, make_row, table, write_rows
from benchmarks.watchdog.playing import play, play_stock
from benchmarks.watchdog.scenarios import BY_NAME, SLURMD_TIMEOUT_S, STOCK, After, Scenario
from benchmarks.watchdog.stand import end_all
from deeplink.errors import DeepLinkError
from deeplink.publish import write_text
from deeplink.scheduler.sandbox.settings import Settings, User
from deeplink.scheduler.sandbox.shape import Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.rows import Row
    from benchmarks.watchdog.judging import Figures

REPEATS, STOCK_REPEATS = 5, 3


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


def measure(
    scenarios: Sequence[Scenario], repeats: int, stock_repeats: int, seed: int, say: Callable[[str], None]
) -> Measured:
    """Run everything, in turns."""
    found, chance = Measured(), random.Random(seed)  # noqa: S311 - no secret
    cases = sorted({scenario.stock for scenario in scenarios if scenario.stock})
    for repeat in range(repeats):
        if repeat < stock_repeats and cases:
            _stock_round(cases, seed + repeat, found, say)
        for scenario in chance.sample(scenarios, len(scenarios)):
            began = time.monotonic()
            try:
                figures = play(scenario, seed + repeat).figures
            except DeepLinkError as problem:
                found.failed.setdefault(scenario.name, []).append(str(problem))
                say(f"{scenario.name}: could not be run: {str(problem)[-300:]}")
                continue
            found.ours.setdefault(scenario.name, []).append(figures)
            say(f"{scenario.name}: {told(figures)} ({time.monotonic() - began:.0f} s)")
            _keep(found)
    return found


def _stock_round(cases: Sequence[str], seed: int, found: Measured, say: Callable[[str], None]) -> None:
    def one(case: str) -> float | DeepLinkError | None:
        try:
            return play_stock(STOCK[case], seed)
        except DeepLinkError as problem:
            return problem

    with ThreadPoolExecutor(len(cases)) as pool:
        coming = pool.map(one, cases)
        try:
            all_came = list(coming)
        except BaseException:
            end_all()
            raise
        for case, came in zip(cases, all_came, strict=True):
            if isinstance(came, DeepLinkError):
                found.failed.setdefault(f"stock {case}", []).append(str(came))
                say(f"stock Slurm, {case}: could not be run: {came}")
                continue
            found.stock.setdefault(case, []).append(came)
            within = f"not within {STOCK[case].bound_s:.0f} s" if came is None else f"{came:.1f} s"
            say(f"stock Slurm, {case}: trains again after {within}")
    _keep(found)


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


def rows_of(scenario: Scenario, runs: Sequence[Figures], stock: Sequence[float | None]) -> list[Row]:
    """Return a scenario's rows. What never came counts as the time that was waited for it."""
    title, bound = scenario.title, scenario.bound_s
    detected = [_or(run.detected_s, bound) for run in runs]
    rows = []
    if scenario.detected_s is not None:
        rows.append(make_row(f"{title}: detected", detected, "s", at_most=scenario.detected_s))
    elif scenario.kinds:
        noticed = sum(1 for run in runs if run.detected_s is not None)
        rows.append(make_row(f"{title}: noticed, runs of {len(runs)}", [noticed], "", at_least=len(runs)))
    if scenario.after is After.AGAIN:
        first = [_or(run.first_step_s, bound) for run in runs]
        rows.append(make_row(f"{title}: first training step", first, "s", at_most=scenario.first_step_s))
        rows += _shown_apart(title, runs)
        if stock and None not in stock:
            middle = statistics.median(seconds for seconds in stock if seconds is not None)
            of_stock = [seconds / middle for seconds in first]
            rows.append(
                make_row(f"{title}: ours over stock Slurm's", of_stock, "", at_most=scenario.most_of_stock)
            )
    elif scenario.after is After.HELD:
        held = sum(1 for run in runs if not run.missing)
        rows.append(
            make_row(f"{title}: {scenario.after.value}, runs of {len(runs)}", [held], "", at_least=len(runs))
        )
    for never in scenario.never:
        broken = sum(1 for run in runs if never.value in run.broken)
        rows.append(make_row(f"{title}: never {never.value}, runs of {len(runs)}", [broken], "", at_most=0))
    return rows


def _shown_apart(title: str, runs: Sequence[Figures]) -> list[Row]:
    """Return the parts of the time, and what went on meanwhile: no goals."""
    parts = {
        "until a process is started": [run.start_s for run in runs],
        "of it Python's start and imports": [run.import_s for run in runs],
        "an old rank went on beside the new ones for": [run.zombie_s for run in runs],
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
    settings = Settings(shape=Shape(), user=User("u", 1, 1, Path("/")), slurmd_timeout=SLURMD_TIMEOUT_S)
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
    names = asked.only.split(",")
    if unknown := sorted(set(names) - set(BY_NAME)):
        parser.error(f"--only: no such scenario: {', '.join(unknown)}; there are {', '.join(BY_NAME)}")
    scenarios = [BY_NAME[name] for name in names]
    repeats, stock = (1, min(1, asked.stock)) if asked.quick else (asked.repeats, asked.stock)

    def say(line: str) -> None:
        print(f"  {line}", flush=True)

    say(f"slurm.conf differs from Slurm's defaults in: {differing()}")
    found = measure(scenarios, repeats, stock, asked.seed, say)
    rows = [
        row
        for scenario in scenarios
        if found.ours.get(scenario.name)
        for row in rows_of(scenario, found.ours[scenario.name], found.stock.get(scenario.stock, ()))
    ]
    rows += stock_rows(found)
    write_rows("faults", rows)
    write_text(BENCH / "faults.notes.json", json.dumps(notes_of(found), indent=1) + "\n")
    print(table(rows))
    return 0 if found.ours else 1


if __name__ == "__main__":
    unwind_when_told()
    sys.exit(main())
