"""What `deeplink sbatch` takes over sbatch, on a real Slurm, with the placement on.

`python -m benchmarks.scheduler.overhead [--repeats N] [--quick] [--json]` brings a sandbox of eight nodes on two
leaves up, as root with a network of their own, prints a table and writes build/bench/overhead.json. Exit code 0
whether figures are reached or not.

Each round submits the same job by sbatch and by every way of ours, in turns that change, from the login host; what
is told is the time of the command there, and for each of ours the difference to sbatch's in the same round. Jobs
are cancelled at once, so that each submission finds the cluster idle; a watchdog looks after nodes hinted by name.
A Python that does nothing is timed beside them: on a busy machine it tells what the others suffer from.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING

from benchmarks.program import hand_over, options
from benchmarks.rows import make_row
from deeplink.scheduler.placement.model import Constants, constants_text
from deeplink.scheduler.testbed.cluster import Sandbox
from deeplink.scheduler.testbed.shape import CTL, Shape

if TYPE_CHECKING:
    from collections.abc import Sequence
    from subprocess import Popen

    from benchmarks.rows import Row

MOST_MS = 150.0
PREDICTED = "by the predicted step"
"""It imports numpy, which is no part of the goal: who gives a profile pays for it."""
_JOB = ["-N4", "--exclusive", "-t", "60", "-o", "/dev/null", "--parsable", "--wrap", "true"]
WAYS = {
    "sbatch": ["sbatch", *_JOB],
    "Slurm's own choice is as good": ["deeplink", "sbatch", *_JOB],
    "nodes hinted by name": ["deeplink", "sbatch", "--deeplink-data", "images", *_JOB],
    "no hint": ["deeplink", "sbatch", "--deeplink-place=off", *_JOB],
    PREDICTED: [
        *("env", "DEEPLINK_MODEL=constants.json", "deeplink", "sbatch", "--deeplink-profile=profile.json"),
        *_JOB,
    ],
}
_PROFILE = '{"format": 1, "batch": 8, "sample_s": 0.002, "gradient_bytes": 1e9}'
WATCHED = {"DEEPLINK_WATCH": "127.0.0.1:7412"}
CONTROL = "a Python that does nothing"

# Runs on the login host: entering its namespaces is no part of what is measured.
_DRIVER = """
import json, subprocess, sys, time
ways, rounds = json.loads(sys.argv[1]), int(sys.argv[2])
control = sys.argv[3]
found = {name: [] for name in (*ways, control)}
for turn in range(rounds + 1):
    names = list(ways)
    for name in names[turn % len(names):] + names[:turn % len(names)]:
        began = time.perf_counter()
        done = subprocess.run(ways[name], capture_output=True, text=True, check=True, timeout=60)
        took = 1e3 * (time.perf_counter() - began)
        if done.stderr:
            sys.exit(done.stderr)
        subprocess.run(["scancel", done.stdout.strip()], check=True, timeout=60)
        if turn:  # the first fills what is kept on disk
            found[name].append(took)
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], check=True, timeout=60)
    if turn:
        found[control].append(1e3 * (time.perf_counter() - began))
print(json.dumps(found))
"""


def hold_data(cluster: Sandbox) -> None:
    """Note that the nodes which Slurm would not take hold a dataset, so that they are hinted by name."""
    plain = cluster.run(CTL, ["sbatch", "--test-only", *_JOB]).stderr
    other = ["n1", "n3", "n5", "n7"] if "n[0,2,4,6]" in plain else ["n0", "n2", "n4", "n6"]
    nodes = {node: {"bytes": 1, "unix": 4e9} for node in other}
    said = json.dumps({"format": 1, "total": 4, "nodes": nodes})
    # As the user, whose folders they are.
    write = "mkdir -p .local/share/deeplink/catalog/images && cd $_ && echo ab >latest && cat >ab.held"
    done = cluster.run(CTL, ["bash", "-c", write], stdin=said)
    if done.code:
        raise SystemExit(done.stderr)


def begin_watch(cluster: Sandbox) -> Popen[bytes]:
    """Start a watchdog that looks after nodes hinted by name."""
    own = cluster.home.parent / "watch"
    own.mkdir(mode=0o700)
    argv = [sys.executable, "-m", "deeplink", "watch", "--act", "--bind", WATCHED["DEEPLINK_WATCH"]]
    argv += ["--journal", str(own / "watch.sqlite"), "--token-file", str(own / "token")]
    return cluster.spawn(CTL, argv, root=True)


def write_model(cluster: Sandbox) -> None:
    """Write the machines' constants and a job's profile into the user's home."""
    for name, text in (("constants.json", constants_text(Constants())), ("profile.json", _PROFILE)):
        done = cluster.run(CTL, ["bash", "-c", f"cat >{name}"], stdin=text)
        if done.code:
            raise SystemExit(done.stderr)


def measured(rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of every submission, by way."""
    name = f"overhead-{os.getpid()}"
    cluster = Sandbox.up(name, Shape(interleave=True))
    watch = begin_watch(cluster)
    try:
        hold_data(cluster)
        write_model(cluster)
        asked = ["deeplink", "sbatch", "--dry-run", *WAYS["nodes hinted by name"][2:]]
        end = time.monotonic() + 60.0
        while "--nodelist=" not in (wished := cluster.run(CTL, asked, env=WATCHED).stdout):
            if time.monotonic() > end:
                raise SystemExit(f"no nodes were hinted by name:\n{wished}")
            cluster.run(CTL, ["rm", "-f", ".local/state/deeplink/wishes/agreed.json"])
        argv = [sys.executable, "-c", _DRIVER, json.dumps(WAYS), str(rounds), CONTROL]
        done = cluster.run(CTL, argv, timeout_s=30 + 4 * rounds, env=WATCHED)
        if done.code:
            raise SystemExit(done.stderr)
        found: dict[str, list[float]] = json.loads(done.stdout)
        return found
    finally:
        watch.terminate()
        watch.wait(30)
        cluster.down()


def rows_of(found: dict[str, list[float]]) -> list[Row]:
    """Return the rows: how long each way takes, and what ours take over sbatch."""
    rows = [make_row(f"submit: {name}", times, "ms") for name, times in found.items() if name != CONTROL]
    rows.append(make_row(CONTROL, found[CONTROL], "ms"))
    bare = found["sbatch"]
    for name, times in found.items():
        if name not in {"sbatch", CONTROL}:
            over = [ours - theirs for ours, theirs in zip(times, bare, strict=True)]
            most = None if name == PREDICTED else MOST_MS
            rows.append(make_row(f"wrapper overhead over sbatch: {name}", over, "ms", at_most=most))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write build/bench/overhead.json."""
    parser = options("benchmarks.scheduler.overhead", __doc__, quick="five rounds")
    parser.add_argument("--repeats", type=int, default=25, help="rounds (default: 25)")
    asked = parser.parse_args(arguments)
    rows = rows_of(measured(5 if asked.quick else asked.repeats))
    hand_over("overhead", rows, as_json=asked.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
