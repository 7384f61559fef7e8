"""What telling costs a training loop: `deeplink.report` and a section with each step, beside a silent loop.

`python -m benchmarks.watchdog.reporting [--steps N] [--repeats N] [--quick] [--json]` runs loops of steps of 10 ms
of work in turns, with an agent of this machine's that takes the reports, prints a table and writes
build/bench/reporting.json. Exit code 0 whether figures are reached or not.

Counted is processor time: that of the calls, each after a step that has used the caches for other things, and that
of the sender's thread, less what timing itself takes. Beside it stands the difference of the process's
processor time with and without, which holds what the step itself loses, and on a shared machine tells of the
others more than of us.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.agents import agents
from benchmarks.program import hand_over, options, unwind_when_told
from benchmarks.rows import make_row

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.rows import Row

STEP_S = 0.010
MOST_PERCENT = 0.5


def spin(rounds: int) -> int:
    """Do so much work."""
    total = 0
    for number in range(rounds):
        total += number
    return total


def rounds_of(seconds: float) -> int:
    """Return how many rounds of `spin` take so long on this processor."""
    rounds, took = 10_000, 0.0
    while took < seconds:
        rounds = int(rounds * 1.2)
        took = statistics.median(_timed(lambda: spin(rounds)) for _ in range(5))  # noqa: B023 - used at once
    return rounds


def _timed(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _sender_s() -> float:
    """Return the processor time that the thread which sends reports has used so far."""
    sender = next((one for one in threading.enumerate() if one.name == "deeplink-report"), None)
    if sender is None or sender.ident is None:
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(sender.ident))


def measured(steps: int, repeats: int) -> list[Row]:
    """Return the rows; the environment names an agent that takes reports."""
    from deeplink import report, section  # noqa: PLC0415 - reads the environment, which must be made first

    rounds = rounds_of(STEP_S)
    step = 0

    def nothing() -> None:
        nonlocal step
        step += 1

    def telling() -> None:
        nonlocal step
        step += 1
        report(step=step, loss=1.0, lr=0.1)

    def in_a_section() -> None:
        nonlocal step
        step += 1
        with section("evaluation"):
            report(step=step, loss=1.0, lr=0.1)

    def loop(tell: Callable[[], None]) -> tuple[float, float]:
        """Return the seconds of telling, and of all."""
        calls, sender, whole = 0.0, _sender_s(), time.process_time()
        for _ in range(steps):
            spin(rounds)
            began = time.thread_time()
            tell()
            calls += time.thread_time() - began
        return calls + _sender_s() - sender, time.process_time() - whole

    telling()  # begins the sender's thread
    sides = {"report": telling, "report and a section": in_a_section}
    counted: dict[str, list[float]] = {name: [] for name in sides}
    more: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            timing, without = loop(nothing)
            told, all_s = loop(side)
            counted[name].append(100 * (told - timing) / (steps * STEP_S))
            more[name].append(100 * (all_s / without - 1))
    calls = []
    for _ in range(1_000):
        began = time.perf_counter()
        report(step=step, loss=1.0, lr=0.1)
        calls.append(1e6 * (time.perf_counter() - began))
    return [
        *(make_row(f"{name}, of a 10 ms step", runs, "%", at_most=MOST_PERCENT) for name, runs in counted.items()),
        *(make_row(f"{name}, difference of the process", runs, "%") for name, runs in more.items()),
        make_row("a call of report", calls, "us"),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write build/bench/reporting.json."""
    parser = options("benchmarks.watchdog.reporting", __doc__, quick="100 steps, 3 repeats")
    parser.add_argument("--steps", type=int, default=300, help="of a loop (300)")
    parser.add_argument("--repeats", type=int, default=15, help="of each loop (15)")
    asked = parser.parse_args(arguments)
    if asked.quick:
        asked.steps, asked.repeats = 100, 3
    if min(asked.steps, asked.repeats) < 1:
        parser.error("--steps and --repeats: at least 1")
    # The agent's own time does not count: it is another process.
    with tempfile.TemporaryDirectory(prefix="deeplink-report-") as folder, agents(Path(folder), ["here"]) as env:
        os.environ.update(env)
        rows = measured(asked.steps, asked.repeats)
    hand_over("reporting", rows, as_json=asked.json)
    return 0


if __name__ == "__main__":
    unwind_when_told()
    sys.exit(main())
