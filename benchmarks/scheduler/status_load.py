"""Queries to slurmctld with many `deeplink status --watch` open, beside those with one; on a real Slurm.

`python -m benchmarks.scheduler.status_load [--watchers N] [--interval S] [--slots K] [--quick] [--json]` brings a
sandbox up, as root, runs a job, prints a table and writes build/bench/status_load.json. Exit code 0 whether
figures are reached or not.

Each watcher is a process of its own that runs the command's own code, `deeplink status JOB --watch=S`, with its
output to /dev/null; it is forked from one that has imported it, for 200 interpreters would need more memory and
start longer than a test machine has. They begin at moments of their own, spread over one interval. What is counted
are the calls that slurmctld has answered by its own word (`sdiag`), by type, over a window of K intervals, and the
looks that the watchers made meanwhile. The first queries of all are not in the window.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

from benchmarks.program import hand_over, options
from benchmarks.rows import make_row
from deeplink.scheduler.slurm.client import Slurm
from deeplink.scheduler.testbed.cluster import Sandbox
from deeplink.scheduler.testbed.shape import CTL, Shape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.rows import Row

# Runs on the login host, as the user.
_DRIVER = r"""
import json, mmap, os, re, signal, struct, subprocess, sys, time
from deeplink.cli import cli, status, status_live, status_screen
from deeplink.scheduler.jobs import job_view

job, watchers, interval, slots = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
COUNTS = mmap.mmap(-1, 8 * watchers)

def calls():
    said = subprocess.run(["sdiag"], capture_output=True, text=True, check=True, timeout=60).stdout
    said = said.partition("by message type")[2].partition("by user")[0]
    found = {name: int(count) for name, count in re.findall(r"(REQUEST_\w+)\s+\(\s*\d+\) count:(\d+)", said)}
    return {name: count for name, count in found.items() if re.search("JOB|NODE|TOPO|BUILD|PARTITION", name)}

def looks():
    return sum(struct.unpack(f"{watchers}Q", COUNTS[:]))

def watch(number):
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    one = job_view.Viewer.one
    def counted(self, word):
        found = one(self, word)
        if not found.problem:
            at = 8 * number
            COUNTS[at : at + 8] = struct.pack("Q", struct.unpack("Q", COUNTS[at : at + 8])[0] + 1)
        return found
    job_view.Viewer.one = counted
    time.sleep(number * interval / watchers)
    cli.main(["status", job, f"--watch={interval}"], standalone_mode=False)

children = []
try:
    for number in range(watchers):
        child = os.fork()
        if not child:
            try:
                watch(number)
            finally:
                os._exit(1)
        children.append(child)
    time.sleep(2 * interval)
    now = time.time()
    time.sleep((1.5 * interval - now % interval) % interval)  # to the middle of a slot
    before, seen = calls(), looks()
    time.sleep(slots * interval)
    after, seen = calls(), looks() - seen
    alive = sum(os.waitpid(child, os.WNOHANG) == (0, 0) for child in children)
finally:
    for child in children:
        os.kill(child, signal.SIGKILL)
counted = {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}
print(json.dumps({"calls": counted, "looks": seen, "alive": alive}))
"""


def measured(watchers: int, interval_s: float, slots: int) -> dict[int, dict[str, Any]]:
    """Return what was counted with one watcher, and with many."""
    cluster = Sandbox.up(f"status-{os.getpid()}", Shape(interleave=True))
    try:
        job = Slurm(cluster.runner()).submit(["-N4", "-o", "/dev/null", "--wrap", "sleep 3600"])
        found = {}
        for many in (1, watchers):
            argv = [sys.executable, "-c", _DRIVER, str(job), str(many), str(interval_s), str(slots)]
            done = cluster.run(CTL, argv, timeout_s=120 + (slots + 4) * interval_s + many)
            if done.code:
                raise SystemExit(done.stderr)
            found[many] = json.loads(done.stdout)
            print(f"{many} watchers: {done.stdout.strip()}", file=sys.stderr)
        return found
    finally:
        cluster.down()


def rows_of(found: dict[int, dict[str, Any]], seconds: float) -> list[Row]:
    """Return the rows: queries with one watcher and with many, their ratio, and that the watchers did look."""
    rows = []
    totals = {}
    for many, counts in found.items():
        totals[many] = sum(counts["calls"].values())
        kinds = ", ".join(f"{name} {count}" for name, count in sorted(counts["calls"].items()))
        who = f"{many} x `deeplink status --watch`"
        rows.append(make_row(f"queries in {seconds:g} s, {who} ({kinds})", [totals[many]], "queries"))
        rows.append(
            make_row(
                f"looks in {seconds:g} s, {who}, {counts['alive']} alive at the end", [counts["looks"]], "looks"
            )
        )
    one, many = sorted(found)
    ratio = totals[many] / totals[one]
    rows.append(make_row(f"queries with {many} watchers over those with one", [ratio], at_most=1.0))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write build/bench/status_load.json."""
    parser = options("benchmarks.scheduler.status_load", __doc__, quick="20 watchers, every 3 s, three intervals")
    parser.add_argument("--watchers", type=int, default=200, help="how many (default: 200)")
    parser.add_argument("--interval", type=float, default=10.0, help="seconds between looks (default: 10)")
    parser.add_argument("--slots", type=int, default=6, help="intervals that are counted (default: 6)")
    asked = parser.parse_args(arguments)
    if asked.quick:
        asked.watchers, asked.interval, asked.slots = 20, 3.0, 3
    rows = rows_of(measured(asked.watchers, asked.interval, asked.slots), asked.slots * asked.interval)
    hand_over("status_load", rows, as_json=asked.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
