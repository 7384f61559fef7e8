"""The same job by sbatch and srun, and by `deeplink sbatch` and `deeplink run`, on a real Slurm.

`python -m benchmarks.scheduler.side_by_side [--repeats N] [--quick] [--json]` brings sandboxes of eight nodes up,
as root with networks of their own, prints each rank's hop and a table, and writes build/bench/side_by_side.json.
Exit code 0 whether figures are reached or not.

The names of the nodes are dealt over the leaves, as with cloud names. The ranks pass an all-reduce around their
ring, tell which hops of it cross from leaf to leaf, and time it; cables above the leaves are shaped by tbf to
50 Mbit/s in each direction, so that crossing costs what it does on a fabric that is narrower above. Where the
kernel has no tbf, that is said, and no step time is told. Jobs of both kinds take turns.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.program import hand_over, options
from benchmarks.rows import make_row
from deeplink.scheduler.slurm.command import CommandError
from deeplink.scheduler.testbed.cluster import Sandbox
from deeplink.scheduler.testbed.namespaced import Namespaced
from deeplink.scheduler.testbed.shape import CTL, Shape, cable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.rows import Row

RANK = Path(__file__).with_name("ring_rank.py")
RATE_MBIT = 50
PART_KIB, STEPS = 256, 3
LASTS_S = 120.0
SHAPES = {"8 nodes on 2 leaves": "1x2x4", "8 nodes on 4 leaves": "2x2x2"}
FEWEST = {"8 nodes on 2 leaves": 2, "8 nodes on 4 leaves": 4}
STOCK, OURS = "sbatch + srun", "deeplink sbatch + deeplink run"


@dataclass(frozen=True, slots=True)
class Ran:
    """What the ranks of a job saw.

    Attributes:
        crossings: hops of the ring that cross from leaf to leaf.
        step_s: the median over steps of the slowest rank's all-reduce.
        lines: a line for each rank, for people.
    """

    crossings: int
    step_s: float
    lines: tuple[str, ...]


def shaped(cluster: Sandbox) -> str:
    """Narrow every cable above a leaf; return why that cannot be, empty where it was done."""
    hardware = cluster.hardware
    if not isinstance(hardware, Namespaced):
        return "the nodes have no network of their own"
    leaves = [switch for switch in cluster.shape.switches if switch.nodes and switch.up]
    for leaf in leaves:
        for end in (cable(leaf.name), f"dn-{leaf.name}"):
            argv = ["tc", "qdisc", "add", "dev", end, "root", "tbf", "rate", f"{RATE_MBIT}mbit"]
            try:
                hardware.in_fabric([*argv, "burst", "64kb", "latency", "100ms"])
            except CommandError as refused:
                return f"the kernel shapes no links: {refused.stderr.strip()}"
    return ""


def submit(cluster: Sandbox, how: str, nodes: int) -> Path:
    """Submit a job; return the folder where its ranks leave what they saw."""
    folder = cluster.home / f"ring-{secrets.token_hex(4)}"
    folder.mkdir()
    shutil.chown(folder, cluster.user.uid, cluster.user.gid)
    train = f"{sys.executable} {RANK} {folder} {PART_KIB} {STEPS}"
    program, launch = {
        STOCK: (["sbatch"], f"srun {train}"),
        OURS: (["deeplink", "sbatch"], f"deeplink run --nproc-per-node 1 -- {train}"),
    }[how]
    words = [f"-N{nodes}", "--ntasks-per-node=1", "--exclusive", "-t", "10", f"--output={folder}/out"]
    done = cluster.run(CTL, [*program, *words, "--parsable", "--wrap", launch], env={"DEEPLINK_PLAN": "off"})
    if done.code:
        raise SystemExit(done.stderr)
    return folder


def outcome(folder: Path, nodes: int) -> Ran:
    """Return what the ranks saw, once all are done."""
    end = time.monotonic() + LASTS_S
    while len(list(folder.glob("*.json"))) < nodes:
        if time.monotonic() > end:
            said = (folder / "out").read_text(encoding="utf-8") if (folder / "out").exists() else "nothing"
            raise SystemExit(f"the ranks did not end in {LASTS_S:g} s; the job wrote: {said}")
        time.sleep(0.2)
    ranks: list[dict[str, Any]] = sorted(
        (json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")),
        key=lambda one: one["rank"],
    )
    if not all(one["right"] for one in ranks):
        raise SystemExit("an all-reduce came out wrong")
    crosses = [one["before"]["leaf"] != one["leaf"] for one in ranks]
    lines = tuple(
        f"rank {one['rank']} on {one['node']} ({one['leaf']}), after {one['before']['node']} "
        f"({one['before']['leaf']}){': crosses' if over else ''}"
        for one, over in zip(ranks, crosses, strict=True)
    )
    step_s = median(max(steps) for steps in zip(*(one["steps_s"] for one in ranks), strict=True))
    return Ran(sum(crosses), step_s, lines)


def ran(shape: str, repeats: int) -> tuple[dict[str, list[Ran]], str]:
    """Run jobs of both kinds in turns on a cluster; also return why its links are not shaped, if they are not."""
    cluster = Sandbox.up(f"side-{os.getpid()}", Shape.parse(shape, interleave=True))
    try:
        unshaped = shaped(cluster)
        found: dict[str, list[Ran]] = {STOCK: [], OURS: []}
        for _ in range(repeats):
            for how, runs in found.items():
                runs.append(outcome(submit(cluster, how, len(cluster.nodes)), len(cluster.nodes)))
                cluster.await_idle(30)
        return found, unshaped
    finally:
        cluster.down()


def rows_of(title: str, found: dict[str, list[Ran]], unshaped: str) -> list[Row]:
    """Return the rows of one shape."""
    ours, stock = found[OURS], found[STOCK]
    hops = len(ours[0].lines)
    rows = [
        make_row(
            f"{title}: hops of {hops} that cross leaves: {STOCK}", [float(run.crossings) for run in stock], ""
        ),
        make_row(
            f"{title}: hops of {hops} that cross leaves: {OURS}",
            [float(run.crossings) for run in ours],
            "",
            at_most=FEWEST[title],
        ),
    ]
    if not unshaped:
        what = f"{title}: all-reduce of {PART_KIB * hops / 1024:g} MiB, {RATE_MBIT} Mbit/s above the leaves"
        rows += [
            make_row(f"{what}: {how}", [1e3 * run.step_s for run in runs], "ms") for how, runs in found.items()
        ]
        ratios = [theirs.step_s / mine.step_s for theirs, mine in zip(stock, ours, strict=True)]
        rows.append(make_row(f"{what}: stock over ours", ratios))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write build/bench/side_by_side.json."""
    parser = options("benchmarks.scheduler.side_by_side", __doc__, quick="one job of each kind")
    parser.add_argument("--repeats", type=int, default=5, help="jobs of each kind (default: 5)")
    asked = parser.parse_args(arguments)
    rows: list[Row] = []
    for title, shape in SHAPES.items():
        found, unshaped = ran(shape, 1 if asked.quick else asked.repeats)
        rows += rows_of(title, found, unshaped)
        for how, runs in found.items():
            said = "\n  ".join(
                [f"{title}, {how}: {runs[0].crossings} of {len(runs[0].lines)} hops cross", *runs[0].lines]
            )
            print(said, file=sys.stderr)
        if unshaped:
            print(f"no step times: {unshaped}", file=sys.stderr)
    hand_over("side_by_side", rows, as_json=asked.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
