"""A watchdog of 1,000 nodes and 200 jobs on one core, beside one that watches a single job.

`python -m benchmarks.watchdog.scale [--nodes N] [--jobs N] [--faults N] [--quick] [--json]` starts, as root, a
real slurmctld and a slurmd for every node in namespaces of its own, real jobs of five nodes each, and `deeplink
watch --observe` on one core. Launchers and standing agents are played by one process on the other cores, each as
often as in life, over real gRPC (`benchmarks.watchdog.crowd`). Then one slurmd at a time is ended, and its
launcher misses its agent from that moment on. All slurmds are on one host: a dead one refuses connections and is
not silent: what is measured is the watchdog's own work, not the wire.

Prints a table and writes build/bench/scale.json. Exit code 0 whether figures are reached or not.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from benchmarks.program import hand_over, options, unwind_when_told
from benchmarks.rows import make_row, rows_from, write_rows
from benchmarks.scheduler.manyslurmd import Shape, in_namespaces, said, slurm_of, until
from deeplink.scheduler.journal.journal import Journal, JournalError
from deeplink.scheduler.slurm.nodeset import unfold

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.rows import Row

ADDRESS = "127.0.0.1:7412"
PER_JOB = 5
DETECTED_S = 3.0
"""The goal of a node that is killed."""
MOST_SLOWER = 1.2
LONGEST_S = 1500.0
_FAULT_S, _SETTLE_S, _PAUSE_S = 60.0, 12.0, 3.0


@dataclass(frozen=True, slots=True)
class Watch:
    """A watchdog under way, and who speaks to it.

    Attributes:
        process: `deeplink watch`.
        journal: its file.
        orders: where the crowd is told what to do.
    """

    process: subprocess.Popen[bytes]
    journal: Path
    orders: IO[str]

    def cpu_s(self) -> float:
        """Return the seconds of processor time it has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_mb(self) -> float:
        """Return what it holds in memory, MB."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def tell(self, order: str) -> None:
        """Give the crowd an order."""
        self.orders.write(f"{order}\n")
        self.orders.flush()


@contextmanager
def watching(
    jobs: dict[str, list[str]], standing: Sequence[str], folder: Path
) -> Iterator[tuple[Watch, list[str]]]:
    """Run a watchdog and its crowd; the list holds the crowd's last words once all has ended."""
    folder.mkdir()
    journal, token, cast = folder / "watch.sqlite", folder / "token", folder / "cast.json"
    cast.write_text(json.dumps({"jobs": jobs, "standing": list(standing)}), encoding="utf-8")
    cores = sorted(os.sched_getaffinity(0))
    # Not its package's program, which may not be installed where we run: the module is the same.
    argv = [sys.executable, "-m", "deeplink", "watch", "--observe", "--bind", ADDRESS]
    argv += ["--journal", str(journal), "--token-file", str(token)]
    words: list[str] = []
    with (folder / "watch.log").open("wb") as log:
        watch = subprocess.Popen(["taskset", "-c", str(cores[0]), *argv], stdout=log, stderr=log)
        crowd = None
        try:
            until(lambda: token.exists() and journal.exists(), 30.0, f"the watchdog: see {log.name}")
            others = ",".join(map(str, cores[1:] or cores))
            own = ["taskset", "-c", others, sys.executable, "-m", "benchmarks.watchdog.crowd", ADDRESS]
            crowd = subprocess.Popen(
                [*own, str(token), str(cast)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            if crowd.stdin is None:
                raise AssertionError("a pipe was asked for")
            yield Watch(watch, journal, crowd.stdin), words
            words += [crowd.communicate(timeout=30)[0]]
        finally:
            for process in (crowd, watch):
                if process is not None and process.poll() is None:
                    process.terminate()
                    process.wait(30)


def submitted(count: int) -> dict[str, list[str]]:
    """Start jobs that only sleep, and return them with their nodes once all run."""
    for _ in range(count):
        subprocess.run(
            ["sbatch", "-N", str(PER_JOB), "-o", "/dev/null", "--wrap", "sleep 3000"],
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=60,
        )
    until(lambda: len(_running()) == count, 180.0, "jobs that run")
    return _running()


def _running() -> dict[str, list[str]]:
    lines = said(["squeue", "-h", "-t", "running", "-o", "%i %N"]).splitlines()
    return {job: list(unfold(nodes)) for job, nodes in (line.split() for line in lines)}


def slurmd_of(node: str) -> int:
    """Return the process of a node's slurmd.

    Raises:
        LookupError: there is none.
    """
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0].endswith(b"slurmd") and node.encode() in words:
            return int(entry.parent.name)
    raise LookupError(node)


def fault(watch: Watch, node: str) -> float:
    """End a node's slurmd, mute its agent; return the seconds until the watchdog's verdict, and mend it again."""
    began = time.time()
    watch.tell(f"mute {node}")
    os.kill(slurmd_of(node), signal.SIGKILL)
    detected: list[float] = []

    def found() -> bool:
        try:
            with Journal(watch.journal, read_only=True) as journal:
                hits = [
                    hit for hit in journal.incidents(limit=50) if hit.node == node and hit.detected_unix >= began
                ]
        except JournalError:
            return False
        detected.extend(hit.detected_unix - began for hit in hits)
        return bool(detected)

    until(found, _FAULT_S, f"a verdict about {node}: see {watch.journal.parent}/watch.log")
    subprocess.run(["slurmd", "-N", node, "-f", os.environ["SLURM_CONF"]], check=True, timeout=60)
    watch.tell(f"heal {node}")
    return detected[0]


def one_side(
    name: str, jobs: dict[str, list[str]], standing: Sequence[str], folder: Path, faults: int
) -> tuple[list[float], list[Row]]:
    """Watch these jobs, break one node of another job each time; return the times and what it cost."""
    # A node that one attempt lost is one incident for ever: each fault takes another.
    lists = list(jobs.values())
    victims = [lists[number * len(lists) // faults][-1 - number % PER_JOB] for number in range(faults)]
    with watching(jobs, standing, folder) as (watch, words):
        time.sleep(_SETTLE_S)
        cpu_s, began = watch.cpu_s(), time.monotonic()
        time.sleep(_SETTLE_S)
        share = 100 * (watch.cpu_s() - cpu_s) / (time.monotonic() - began)
        times = []
        for number, node in enumerate(victims):
            times.append(fault(watch, node))
            print(f"{name}: {times[-1]:.2f} s", file=sys.stderr, flush=True)
            time.sleep(_PAUSE_S + 2 * number)  # the brake counts dead nodes within a minute
        memory = watch.memory_mb()
    crowd = json.loads(words[0])
    return times, [
        make_row(f"{name}: node lost, until the verdict", times, "s", at_most=DETECTED_S),
        make_row(f"{name}: the watchdog's share of its core, all well", [share], "%", at_most=100.0),
        make_row(f"{name}: the watchdog's memory", [memory], "MB"),
        make_row(f"{name}: beats and attendances that failed", [crowd["failed"]], ""),
        make_row(f"{name}: a beat or attendance, p99", [crowd["p99_ms"]], "ms"),
    ]


def inside(nodes: int, jobs: int, faults: int, folder: Path) -> list[Row]:
    """Start everything and measure both sides; inside `in_namespaces`."""
    with slurm_of(Shape(nodes=nodes), folder / "slurm"):
        running = submitted(jobs)
        first = dict(list(running.items())[:1])
        few, rows = one_side("one job", first, next(iter(first.values())), folder / "one", faults)
        names = [f"e{number}" for number in range(nodes)]
        all_of = f"{nodes:,} nodes, {jobs} jobs"
        many, more = one_side(all_of, running, names, folder / "all", faults)
    ratio = [sum(many) / len(many) / (sum(few) / len(few))]
    return [*rows, *more, make_row("until the verdict, all over one", ratio, at_most=MOST_SLOWER)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write build/bench/scale.json."""
    parser = options("benchmarks.watchdog.scale", __doc__, quick="128 nodes, 20 jobs, 2 faults")
    parser.add_argument("--nodes", type=int, default=1_024, help="slurmds (1,024)")
    parser.add_argument("--jobs", type=int, default=200, help="jobs of five nodes (200)")
    parser.add_argument("--faults", type=int, default=5, help="nodes broken, one at a time (5, the most)")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.quick:
        asked.nodes, asked.jobs, asked.faults = 128, 20, 2
    if asked.jobs * PER_JOB > asked.nodes or min(asked.jobs, asked.faults) < 1:
        parser.error(f"--jobs: {PER_JOB} nodes each, of {asked.nodes}")
    if asked.faults > PER_JOB:
        parser.error(f"--faults: at most {PER_JOB}")
    if asked.inside:
        write_rows("rows", inside(asked.nodes, asked.jobs, asked.faults, asked.inside), folder=asked.inside)
        return 0
    with tempfile.TemporaryDirectory(prefix="deeplink-scale-") as folder:
        (Path(folder) / "slurm").mkdir()
        own = ["--nodes", str(asked.nodes), "--jobs", str(asked.jobs), "--faults", str(asked.faults)]
        argv = [sys.executable, "-m", "benchmarks.watchdog.scale", *own, "--inside", folder]
        if code := in_namespaces(argv, LONGEST_S):
            _keep_logs(Path(folder))
            return code
        rows = rows_from(json.loads((Path(folder) / "rows.json").read_text(encoding="utf-8")))
    hand_over("scale", rows, as_json=asked.json)
    return 0


def _keep_logs(folder: Path) -> None:
    for log in folder.glob("*/watch.log"):
        print(f"{log.parent.name}: {log.read_text(encoding='utf-8', errors='replace')[-2000:]}", file=sys.stderr)


if __name__ == "__main__":
    if shutil.which("unshare") is None or os.geteuid():
        sys.exit("a real slurmctld with many slurmd needs root and unshare")
    unwind_when_told()
    sys.exit(main())
