"""Slurm's choice of nodes beside our emulation of it, and stock, --switches and deeplink side by side.

`python -m benchmarks.scheduler.emulation [--nodes 1024] [--states 50] [--names dealt] [--record FILE]`
as root. Starts a real slurmctld and a slurmd for each node in namespaces of their own (40 s and 3.8 GB for 1,024),
makes random states of the cluster with real jobs, asks `sbatch --test-only` where jobs of several sizes would run,
without and with the `--switches` that fewest leaves allow, and in each state runs one with `salloc --no-shell`.
Prints a table and writes build/bench/emulation.json. `--from FILE` takes the answers of an earlier run.
Exit code 0 whether figures are reached or not.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import sys
import tempfile
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.program import hand_over, options, unwind_when_told
from benchmarks.rows import make_row
from benchmarks.scheduler.choices import Answer, Asked, Record, read_record, write_record
from benchmarks.scheduler.manyslurmd import GPUS, Names, Shape, in_namespaces, said, slurm_of, wait_idle
from benchmarks.simulate.floor import Floor
from benchmarks.simulate.slurm_tree import slurm_choice
from deeplink.core.types import NodeName
from deeplink.scheduler.placement.request import NodeCapacity, PlacementCluster, PlacementRequest
from deeplink.scheduler.placement.search import place
from deeplink.scheduler.slurm.nodeset import fold, unfold
from deeplink.scheduler.topology.graph import Fabric
from deeplink.scheduler.topology.rank_order import rank_order, ring_crossings, stock_order

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.rows import Row

SIZES = (1, 2, 4, 8, 12, 16, 24, 48, 64, 130, 200)
_PLANNED = re.compile(r"to start at (\S+) using .* on nodes (\S+) in partition")
_LATER_S = 60.0
_UNEVEN = 128
_MOST_S = 900.0
_TITLES = {
    Names.DEALT: "names dealt over leaves",
    Names.FOLLOW: "names follow leaves",
    Names.UNEVEN: "uneven leaves and depths",
}


def floor_of(shape: Shape) -> Floor:
    """Return the nodes and switches."""
    fabric = Fabric({NodeName(f"e{number}"): shape.path(number) for number in range(shape.nodes)})
    return Floor(fabric.paths, fabric)


def able_in(used: str, gpus: int) -> int:
    """Return the nodes that can run a job with so many GPUs on each; 0 for whole nodes."""
    return sum(1 << bit for bit, digit in enumerate(used) if int(digit) <= GPUS - (gpus or GPUS))


def whole_state(shape: Shape, draw: random.Random) -> str:
    """Return a state of whole nodes: single ones and runs of them busy."""
    used = [0] * shape.nodes
    share = draw.uniform(0.1, 0.8)
    longest = draw.choice([1, 4, 16, 64])
    while sum(map(bool, used)) < share * shape.nodes:
        first = draw.randrange(shape.nodes)
        for node in range(first, min(first + draw.randint(1, longest), shape.nodes)):
            used[node] = GPUS
    return "".join(map(str, used))


def shared_state(shape: Shape, draw: random.Random) -> str:
    """Return a state of nodes that jobs share."""
    full = draw.uniform(0.1, 0.7)
    return "".join(
        str(GPUS if draw.random() < full else draw.choice([0, 1, 2, 4, 4, 6, 7])) for _ in range(shape.nodes)
    )


def make_state(used: str) -> None:
    """Run jobs that use so many GPUs of each node."""
    for amount in sorted(set(used) - {"0"}):
        nodes = fold(f"e{bit}" for bit, digit in enumerate(used) if digit == amount)
        many = str(used.count(amount))
        how = ["-p", "main"] if amount == str(GPUS) else ["-p", "shared", f"--gres=gpu:{amount}", "-n", many]
        answer = said(["salloc", "-Q", "--no-shell", "-I10", "-N", many, "-w", nodes, *how])
        if answer:
            raise RuntimeError(answer)


def ask(nodes: int, gpus: int, *, switches: int = 0) -> Answer:
    """Ask Slurm where a job would run."""
    argv = ["sbatch", "--test-only", *_wanted(nodes, gpus)]
    answer = said([*argv, *([f"--switches={switches}"] if switches else []), "--wrap", "true"])
    found = _PLANNED.search(answer)
    if found is None:
        if (
            switches and "node configuration is not available" in answer
        ):  # seen with uneven leaves: refused for ever
            return Answer(nodes, gpus, switches, "test-only", later=True, chosen="")
        raise RuntimeError(f"{argv}: {answer}")
    wait = datetime.fromisoformat(found[1]) - datetime.now()  # noqa: DTZ005 - sbatch prints local time
    return Answer(nodes, gpus, switches, "test-only", wait.total_seconds() > _LATER_S, found[2])


def run(nodes: int, gpus: int) -> Answer:
    """Run a job, and end it."""
    answer = said(["salloc", "--no-shell", "-I10", "-J", "asked", *_wanted(nodes, gpus)])
    chosen = said(["squeue", "-h", "-n", "asked", "-t", "R", "-o", "%N"])
    if not chosen:
        raise RuntimeError(answer)
    return Answer(nodes, gpus, 0, "salloc", later=False, chosen=chosen)


def _wanted(nodes: int, gpus: int) -> list[str]:
    return ["-N", str(nodes), *(["-p", "shared", f"--gres=gpu:{gpus}", "-n", str(nodes)] if gpus else [])]


def asked_in(shape: Shape, used: str, floor: Floor, draw: random.Random) -> Asked:
    """Make a state, ask about jobs of many sizes in it, and end all jobs."""
    make_state(used)
    found = []
    shared = bool(set(used) - {"0", str(GPUS)})
    for nodes in SIZES:
        gpus = draw.choice([1, 2, 4]) if shared else 0
        able = able_in(used, gpus)
        if able.bit_count() < nodes:
            continue
        found.append(ask(nodes, gpus))
        if not shared and nodes > 1:
            found.append(ask(nodes, gpus, switches=fewest_leaves(floor, able, nodes)))
    last = draw.choice(found)
    found.append(run(last.nodes, last.gpus))
    said(["scancel", "-u", "root"])
    wait_idle(shape)
    return Asked(used, tuple(found))


def fewest_leaves(floor: Floor, able: int, nodes: int) -> int:
    """Return how few leaves have so many nodes that can run the job."""
    rooms = sorted(((leaf.below & able).bit_count() for leaf in floor.leaves), reverse=True)
    leaves = 0
    while nodes > 0:
        nodes -= rooms[leaves]
        leaves += 1
    return leaves


def recorded(shape: Shape, states: int, folder: Path) -> Record:
    """Start everything and return all answers; inside `in_namespaces`."""
    draw = random.Random(states)  # noqa: S311 - states, no secrets
    floor = floor_of(shape)
    found = []
    with slurm_of(shape, folder):
        version = said(["sinfo", "--version"]).split()[-1]
        for number in range(states):
            used = shared_state(shape, draw) if number % 3 == 2 else whole_state(shape, draw)  # noqa: PLR2004
            found.append(asked_in(shape, used, floor, draw))
            print(f"state {number + 1} of {states}", file=sys.stderr, flush=True)
    return Record(version, shape, tuple(found))


def agreement_rows(record: Record) -> list[Row]:
    """Compare Slurm's choice with the emulated one: a figure for each kind of question."""
    floor = floor_of(record.shape)
    same: dict[str, list[bool]] = {}
    for used, answer in record.each():
        if answer.switches:
            continue
        kind = (
            "jobs that ran (salloc)"
            if answer.how == "salloc"
            else "parts of nodes"
            if answer.gpus
            else "whole nodes"
        )
        emulated = slurm_choice(floor, able_in(used, answer.gpus), answer.nodes)
        same.setdefault(kind, []).append(emulated == floor.chosen(unfold(answer.chosen)))
    return [
        make_row(
            f"same nodes emulated, {kind} ({len(found)} answers)",
            [100.0 * statistics.fmean(found)],
            "%",
            at_least=98,
        )
        for kind, found in sorted(same.items())
    ]


def ours(floor: Floor, used: str, nodes: int) -> tuple[NodeName, ...]:
    """Return the nodes that production chooses for whole nodes, in rank order."""
    rooms = {
        node: NodeCapacity(gpus=GPUS, free_gpus=GPUS - int(digit), idle=digit == "0")
        for node, digit in zip(floor.nodes, used, strict=True)
    }
    cluster = PlacementCluster(fabric=floor.fabric, rooms=rooms)
    chosen = place(cluster, PlacementRequest(nodes=nodes, gpus_per_node=GPUS), most=1)[0].nodes
    return rank_order(chosen, floor.fabric).nodes


class _Sides:
    """Leaf spread and ring crossings of jobs, by who placed them."""

    def __init__(self, floor: Floor) -> None:
        self._floor = floor
        self.spread: dict[str, list[float]] = {}
        self.crossings: dict[str, list[float]] = {}

    def add(self, who: str, order: Sequence[NodeName]) -> None:
        leaf = self._floor.fabric.leaf
        self.spread.setdefault(who, []).append(len({leaf(node) for node in order}))
        self.crossings.setdefault(who, []).append(ring_crossings(order, leaf))


def side_by_side(record: Record) -> list[Row]:
    """Compare leaf spread and ring crossings of whole-node jobs over one node: stock, --switches, and ours."""
    floor = floor_of(record.shape)
    sides = _Sides(floor)
    waits = []
    mine: tuple[NodeName, ...] = ()
    for used, answer in record.each():
        if answer.gpus or answer.nodes == 1 or answer.how == "salloc":
            continue
        order = stock_order(unfold(answer.chosen))
        if not answer.switches:
            mine = ours(floor, used, answer.nodes)  # also for the answer with --switches, which comes next
            sides.add("stock", order)
            sides.add("stock's nodes, our rank order", rank_order(order, floor.fabric).nodes)
            sides.add("deeplink", mine)
            continue
        waits.append(answer.later)
        if not answer.later:
            sides.add("--switches, those that need not wait", order)
            sides.add("deeplink, those that need not wait with --switches", mine)
    rows = []
    for what, found in (("leaves of a job", sides.spread), ("ring crossings of a job", sides.crossings)):
        rows += [make_row(f"{what}: {who}", [statistics.fmean(values)], "") for who, values in found.items()]
    waiting = 100.0 * statistics.fmean(waits)
    return [*rows, make_row("--switches=FEWEST: jobs that would have to wait, or are refused", [waiting], "%")]


def _measured(shape: Shape, states: int) -> Record:
    # The daemons end with the namespaces; a file that one of them wrote meanwhile is no reason to fail.
    with tempfile.TemporaryDirectory(prefix="deeplink-emulation-", ignore_cleanup_errors=True) as folder:
        own = [
            "--nodes",
            str(shape.nodes),
            "--states",
            str(states),
            "--names",
            shape.names,
        ]
        argv = [sys.executable, "-m", "benchmarks.scheduler.emulation", *own, "--inside", folder]
        if code := in_namespaces(argv, _MOST_S):
            raise SystemExit(code)
        return read_record(Path(folder) / "answers.json.gz")


def rows_of(record: Record) -> list[Row]:
    """Return all figures of a record, each with what it is of."""
    of = f"{record.shape.nodes:,} slurmd, {len(record.states)} states, {_TITLES[record.shape.names]}"
    return [replace(row, row=f"{of}: {row.row}") for row in (*agreement_rows(record), *side_by_side(record))]


def _asked(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = options("benchmarks.scheduler.emulation", __doc__, quick="128 slurmd and 10 states")
    parser.add_argument("--nodes", type=int, default=1024, help="how many slurmd (default: 1024)")
    parser.add_argument("--states", type=int, default=50, help="how many random states (default: 50)")
    parser.add_argument("--names", choices=[*Names], help="one of the trees alone; uneven is of 128 nodes at most")
    parser.add_argument(
        "--record", type=Path, help="write all answers here, as JSON in gzip; of one kind of names"
    )
    parser.add_argument("--from", dest="earlier", type=Path, help="take the answers from here, start nothing")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.record and not asked.names and not asked.earlier:
        parser.error("--record: say which --names")
    if asked.quick:
        asked.nodes, asked.states = 128, min(asked.states, 10)
    return asked


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write build/bench/emulation.json."""
    asked = _asked(arguments)
    names = [Names(asked.names)] if asked.names else [*Names]
    # Uneven leaves hold dozens of nodes with 128 already: more would make one leaf of most of them.
    shapes = [Shape(min(asked.nodes, _UNEVEN) if one is Names.UNEVEN else asked.nodes, one) for one in names]
    if asked.inside:
        (shape,) = shapes
        write_record(recorded(shape, asked.states, asked.inside), asked.inside / "answers.json.gz")
        return 0
    if asked.earlier:
        record = read_record(asked.earlier)
        records = [replace(record, states=record.states[: asked.states])]
    else:
        records = [_measured(shape, asked.states) for shape in shapes]
    if asked.record:
        write_record(records[0], asked.record)
    rows = [row for record in records for row in rows_of(record)]
    hand_over("emulation", rows, as_json=asked.json)
    return 0


if __name__ == "__main__":
    unwind_when_told()
    sys.exit(main())
