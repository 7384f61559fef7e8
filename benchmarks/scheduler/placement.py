"""Placement and rank order: how long they take, how much memory, and how near the best they come.

`python -m benchmarks.scheduler.placement [--repeats N] [--quick] [--json]` prints a table and writes
build/bench/placement.json. Exit code 0 whether figures are reached or not.

A 512-node job on 4,096 nodes (256 leaves of 16, 16 spines, names dealt over the leaves) in several states; each
time in a process of its own, since the first call of a process is what a command pays, and its peak memory is the
whole process's, interpreter and state included. The clock runs from the state as a value to the ranked candidates.
How good the choices are is told on clusters of 18 nodes, where the best is known because each choice is weighed;
and by a stream of jobs of 1 to 16 nodes on 256, beside the first nodes by name that are idle.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import time
from itertools import pairwise, permutations
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.program import hand_over, options
from benchmarks.rows import make_row
from benchmarks.simulate.fragmentation import fragmentation
from deeplink.core.types import NodeName
from deeplink.scheduler.placement import search
from deeplink.scheduler.placement.candidate_leaves import CandidateLeaves
from deeplink.scheduler.placement.request import (
    DEFAULT_COST,
    DataResidency,
    NodeCapacity,
    NoPlacementError,
    PlacementCluster,
    PlacementRequest,
    Speeds,
)
from deeplink.scheduler.placement.search import place
from deeplink.scheduler.topology.graph import Fabric, natural
from deeplink.scheduler.topology.rank_order import Groups, rank_order, ring_crossings, stock_order

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.rows import Row
    from deeplink.scheduler.placement.request import Cost

NODES, LEAVES, SPINES, JOB = 4096, 256, 16, 512
TIB = 1 << 40
MOST_MS, MOST_MB = 200.0, 200.0
BY_STEP = ", by the predicted step"
STATES = (
    *("idle", "30 % busy", "70 % busy", "after a day of jobs", "30 % busy, data and slow links", "shared GPUs"),
    *(f"30 % busy{BY_STEP}", f"30 % busy, data and slow links{BY_STEP}"),
)


def big_fabric() -> Fabric:
    """Return 4,096 nodes whose names are dealt over 256 leaves."""
    each = LEAVES // SPINES
    return Fabric(
        {
            NodeName(f"n{number}"): (
                "core",
                f"spine{number % LEAVES // each}",
                f"leaf{number % LEAVES}",
            )
            for number in range(NODES)
        }
    )


def big_state(name: str, draw: random.Random) -> tuple[PlacementCluster, PlacementRequest]:
    """Return a state of the big cluster, and the job that is to be placed."""
    fabric = big_fabric()
    nodes = list(fabric.paths)
    share = {"30": 0.3, "70": 0.7}.get(name[:2], 0.0)
    busy = {node for node in nodes if draw.random() < share}
    if name == "after a day of jobs":
        busy = _after_jobs(fabric, draw)
    rooms = {
        node: NodeCapacity(gpus=8, free_gpus=0 if node in busy else 8, idle=node not in busy) for node in nodes
    }
    request = PlacementRequest(nodes=JOB, gpus_per_node=8)
    speeds, residency = Speeds(), DataResidency()
    if name.endswith("slow links"):
        links = draw.sample(sorted(set(fabric.paths.values())), 6)
        speeds = Speeds(dict.fromkeys(draw.sample(nodes, 40), 0.5), dict.fromkeys(links, 0.5))
        residency = DataResidency({node: draw.randrange(TIB) for node in draw.sample(nodes, 800)}, 256 * TIB)
    if name == "shared GPUs":
        free = {node: draw.choice([0, 2, 4, 8]) for node in nodes}
        rooms = {node: NodeCapacity(gpus=8, free_gpus=free[node], idle=free[node] == 8) for node in nodes}  # noqa: PLR2004
        request = PlacementRequest(nodes=JOB, gpus_per_node=2, exclusive=False)
    return PlacementCluster(fabric=fabric, rooms=rooms, speeds=speeds, residency=residency), request


def _after_jobs(fabric: Fabric, draw: random.Random) -> set[NodeName]:
    """Return the busy nodes after jobs of all sizes came in by leaf and name, and ended in any order."""
    order = sorted(fabric.paths, key=fabric.sort_key)
    running: list[list[NodeName]] = []
    busy: set[NodeName] = set()
    for _ in range(600):
        size = draw.choice([1, 1, 2, 4, 8, 16, 32, 64])
        free = [node for node in order if node not in busy]
        if len(free) < JOB + size or draw.random() < len(busy) / NODES:
            ended = running.pop(draw.randrange(len(running)))
            busy.difference_update(ended)
            continue
        running.append(free[:size])
        busy.update(free[:size])
    return busy


def one(name: str, seed: int) -> dict[str, float]:
    """Place the job once and return what that took: for a process that does nothing else."""
    cluster, request = big_state(name.removesuffix(BY_STEP), random.Random(seed))  # noqa: S311 - a state, no secret
    cost = _predicted(request) if name.endswith(BY_STEP) else DEFAULT_COST
    began, worked = time.perf_counter(), time.process_time()
    best = place(cluster, request, cost)[0]
    took, worked = time.perf_counter() - began, time.process_time() - worked
    return {
        "ms": 1e3 * took,
        "cpu": 1e3 * worked,
        "mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "leaves": best.leaves / CandidateLeaves(cluster, request).fewest_leaves(),
    }


def _predicted(request: PlacementRequest) -> Cost:
    """Return the predicted step of a job that reads and talks, so that all parts of the model are needed."""
    from deeplink.scheduler.placement.model import (  # noqa: PLC0415 - numpy comes with it, and most states need none
        Constants,
        Job,
        ReadSpeeds,
    )
    from deeplink.scheduler.placement.predicted import Predicted  # noqa: PLC0415 - as above

    job = Job(batch=32, sample_s=4.4e-3, gradient_bytes=680e6, sample_bytes=110e3)
    return Predicted(job, Constants(reads=ReadSpeeds(local=3e9, peer=1e9, source=2e8)), request.gpus_per_node)


def _in_own_process(name: str, seed: int) -> dict[str, float]:
    argv = [sys.executable, "-m", "benchmarks.scheduler.placement", "--one", name, "--seed", str(seed)]
    done = subprocess.run(argv, capture_output=True, check=True, timeout=120, cwd=Path(__file__).parents[2])
    found: dict[str, float] = json.loads(done.stdout)
    return found


def big_rows(repeats: int) -> list[Row]:
    """Measure the big job in every state, the states in turns."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in STATES}
    for seed in range(repeats):
        for name in STATES:
            found[name].append(_in_own_process(name, seed))
    what = f"place {JOB} of {NODES} nodes"
    rows = [
        make_row(f"{what}: {name}", [run["ms"] for run in runs], "ms", at_most=MOST_MS)
        for name, runs in found.items()
    ]
    rows += [
        make_row(f"{what}, time on the processor: {name}", [run["cpu"] for run in runs], "ms")
        for name, runs in found.items()
    ]
    peaks = [run["mb"] for runs in found.values() for run in runs]
    rows.append(make_row(f"{what}: peak memory of the process", peaks, "MB", at_most=MOST_MB))
    rows += [
        make_row(f"{what}: leaves over the fewest possible: {name}", [run["leaves"] for run in runs])
        for name, runs in found.items()
    ]
    return rows


def small_state(draw: random.Random) -> tuple[PlacementCluster, PlacementRequest]:
    """Return 18 nodes on 5 leaves: some busy, some slow, some with data."""
    nodes = [NodeName(f"n{number}") for number in range(18)]
    leaf = {node: draw.randrange(5) for node in nodes}
    fabric = Fabric({node: ("core", f"spine{leaf[node] % 2}", f"leaf{leaf[node]}") for node in nodes})
    rooms = {node: NodeCapacity(idle=draw.random() < 0.8) for node in nodes}  # noqa: PLR2004
    held = {node: draw.choice([0, 0, 5, 10, 20]) for node in nodes} if draw.random() < 0.7 else {}  # noqa: PLR2004
    links = draw.sample(sorted(set(fabric.paths.values())), draw.randrange(2))
    speeds = Speeds(dict.fromkeys(draw.sample(nodes, draw.randrange(3)), 0.5), dict.fromkeys(links, 0.5))
    cluster = PlacementCluster(
        fabric=fabric, rooms=rooms, speeds=speeds, residency=DataResidency(held, 100 if held else 0)
    )
    return cluster, PlacementRequest(nodes=draw.randint(2, 9))


def quality_rows(count: int) -> list[Row]:
    """Compare built choices with the best there are; the search is told that no number of choices is small."""
    ratios = []
    for seed in range(count):
        cluster, request = small_state(random.Random(seed))  # noqa: S311
        try:
            best = _placed(cluster, request, exact=10**7)
        except NoPlacementError:
            continue
        built = _placed(cluster, request, exact=0)
        ratios.append(built / best if best else 1.0 + built)
    optimal = 100.0 * sum(ratio < 1.0 + 1e-9 for ratio in ratios) / len(ratios)
    return [
        make_row(f"18 nodes, {len(ratios)} states: built choices that are the best", [optimal], "%"),
        make_row("18 nodes: cost of the built choice over the best", ratios),
    ]


def _placed(cluster: PlacementCluster, request: PlacementRequest, *, exact: int) -> float:
    before, search.EXACT_CHOICES = search.EXACT_CHOICES, exact
    try:
        return place(cluster, request)[0].cost
    finally:
        search.EXACT_CHOICES = before


def by_name(cluster: PlacementCluster, request: PlacementRequest) -> tuple[NodeName, ...]:
    """Return the first idle nodes by name: what there is without a topology."""
    idle = sorted((node for node, room in cluster.rooms.items() if room.idle), key=natural)
    if len(idle) < request.nodes:
        raise NoPlacementError("too few")
    return tuple(idle[: request.nodes])


def by_us(cluster: PlacementCluster, request: PlacementRequest) -> tuple[NodeName, ...]:
    """Return the best nodes."""
    return place(cluster, request)[0].nodes


def stream(
    choose: Callable[[PlacementCluster, PlacementRequest], tuple[NodeName, ...]], seed: int, jobs: int
) -> tuple[float, float]:
    """Let jobs come and end on 256 nodes; return the mean share of scattered idle nodes, and of crossings per job.

    The jobs and how long each lasts are the same whoever chooses; one that finds no room is left out.
    """
    draw = random.Random(seed)  # noqa: S311
    names = [NodeName(f"n{number}") for number in range(256)]
    fabric = Fabric({node: ("core", f"leaf{place // 16}") for place, node in enumerate(names)})
    ends: list[tuple[int, tuple[NodeName, ...]]] = []
    scattered, crossings = [], []
    for now in range(jobs):
        ends = [end for end in ends if end[0] > now]
        busy = {node for _, nodes in ends for node in nodes}
        request = PlacementRequest(nodes=draw.choice([1, 1, 1, 2, 2, 4, 8, 16]))
        until = now + draw.randint(5, 80)
        cluster = PlacementCluster(
            fabric=fabric, rooms={node: NodeCapacity(idle=node not in busy) for node in names}
        )
        scattered.append(fragmentation(fabric, cluster.rooms).scattered)
        try:
            nodes = choose(cluster, request)
        except NoPlacementError:
            continue
        if request.nodes > 1:
            crossings.append(ring_crossings(rank_order(nodes, fabric).nodes, fabric.leaf) / request.nodes)
        ends.append((until, nodes))
    return statistics.fmean(scattered[jobs // 5 :]), statistics.fmean(crossings)


def stream_rows(repeats: int, jobs: int) -> list[Row]:
    """Compare a stream of jobs placed by us with the same placed by name."""
    rows = []
    ours, names = ([stream(choose, seed, jobs) for seed in range(repeats)] for choose in (by_us, by_name))
    for which, what in enumerate(("idle nodes not on a whole leaf", "hops of the ring that cross, per hop")):
        for who, found in (("ours", ours), ("first by name", names)):
            rows.append(
                make_row(f"stream of {jobs} jobs: {what}: {who}", [100 * run[which] for run in found], "%")
            )
    return rows


def order_rows(repeats: int) -> list[Row]:
    """Measure rank orders: their time for 4,096 ranks, and crossings of random allocations beside name order."""
    fabric = big_fabric()
    nodes = list(fabric.paths)
    took: dict[str, list[float]] = {}
    for seed in range(repeats):
        some = random.Random(seed).sample(nodes, JOB)  # noqa: S311
        for name, asked, groups in (
            ("4,096 ranks on 4,096 nodes", nodes, Groups()),
            ("4,096 ranks on 512 random nodes", some, Groups((), 8)),
            ("4,096 ranks on 512 random nodes, groups of 16 and 32", some, Groups((16, 32), 8)),
        ):
            began = time.perf_counter()
            rank_order(asked, fabric, groups)
            took.setdefault(name, []).append(1e3 * (time.perf_counter() - began))
    rows = [make_row(f"rank order: {name}", runs, "ms") for name, runs in took.items()]
    for following in (True, False):
        rows += _crossing_rows(following=following, draws=200)
    return rows


def _crossing_rows(*, following: bool, draws: int) -> list[Row]:
    """80 nodes on 5 leaves, as in a small pod; their names follow the leaves or are dealt over them."""
    names = [NodeName(f"n{number}") for number in range(80)]
    leaf = {node: place // 16 if following else place % 5 for place, node in enumerate(names)}
    fabric = Fabric({node: ("core", f"leaf{leaf[node]}") for node in names})
    how = "names follow leaves" if following else "names dealt over leaves"
    rows = []
    for size in (8, 16, 32, 64):
        ratios, best = [], 0
        for seed in range(draws):
            some = random.Random(seed).sample(names, size)  # noqa: S311
            found = rank_order(some, fabric).crossings
            ratios.append(ring_crossings(stock_order(some), fabric.leaf) / found if found else 1.0)
            best += found == (_least(some, fabric) if size == 8 else found)  # noqa: PLR2004 - brute force ends here
        title = f"rank order, {size} of 80 nodes at random, {how}: crossings by name order over ours"
        rows.append(make_row(title, [statistics.fmean(ratios)]))
        if size == 8:  # noqa: PLR2004
            title = f"rank order, 8 of 80 nodes at random, {how}: allocations at the optimum (brute force)"
            rows.append(make_row(title, [100.0 * best / draws], "%", at_least=100))
    return rows


def _least(nodes: Sequence[NodeName], fabric: Fabric) -> int:
    """Return the fewest crossings of all orders; a ring has no first node, so one stands still."""
    leaves = [fabric.leaf(node) for node in nodes]
    rings = {(leaves[0], *rest) for rest in set(permutations(leaves[1:]))}
    return min(sum(a != b for a, b in pairwise((*ring, ring[0]))) for ring in rings)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write build/bench/placement.json."""
    parser = options("benchmarks.scheduler.placement", __doc__, quick="two repeats, and less of everything")
    parser.add_argument("--repeats", type=int, default=7, help="how often each is measured (default: 7)")
    parser.add_argument("--one", choices=STATES, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.one:
        print(json.dumps(one(asked.one, asked.seed)))
        return 0
    repeats = 2 if asked.quick else asked.repeats
    rows = [
        *big_rows(repeats),
        *quality_rows(40 if asked.quick else 300),
        *stream_rows(min(repeats, 3), 150 if asked.quick else 600),
        *order_rows(repeats),
    ]
    hand_over("placement", rows, as_json=asked.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
