"""What the operator's page costs: CPU and memory of an idle console, bytes of a tick, and the answers of its API.

`python -m benchmarks.console [--seconds S] [--json]` prints a table and writes build/bench/console.json.

Slurm's commands are stand-ins that print answers in the form of real ones (22.05): load and free memory change
from one to the next. The figures hold the reading of these answers, not what the commands take. The console is a
process of its own, with one page open; its CPU is that of the kernel's account. Exit code 0 whether goals are
reached or not.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deeplink.console.collect import Collector, ConsoleSettings
from deeplink.console.request_guard import Access
from deeplink.console.serve import run
from deeplink.core.types import Attempt, NodeName
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.recovery.records import Beat, Incident, NodeRecord, Phase, ProgressPoint

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
LEAF = 32  # nodes of a leaf
TURNS = 4  # answers on nodes, one after the other
SEPARATOR = "~0000000000000000~"  # the stand-in of squeue puts that of the question in its place
WARM_S = 6.0
GOALS = {"busy_tick_bytes": 20_000.0, "idle_cpu": 3.0, "p95_ms": 30.0, "rss_mib": 200.0}
PATHS = (
    "jobs",
    "jobs?sort=user&page=40",
    "jobs?state=pending&text=sweep-99",
    "jobs/17",
    "jobs/17/timeline",
    "incidents",
    "search?text=node99",
)
_NODE = (
    "NodeName=node{0:05d} Arch=x86_64 CoresPerSocket=32  CPUAlloc={2} CPUEfctv=64 CPUTot=64 CPULoad={3:.2f} "
    "AvailableFeatures=(null) ActiveFeatures=(null) Gres=gpu:8 NodeAddr=10.{4}.{5}.1 NodeHostName=node{0:05d} "
    "Version=22.05.8 OS=Linux 6.1.0 #1 SMP PREEMPT_DYNAMIC @0  RealMemory=1000000 AllocMem=0 FreeMem={6} "
    "Sockets=2 Boards=1 State={1} ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A Partitions=main  "
    "BootTime=2026-11-20T17:48:20 SlurmdStartTime=2026-11-20T17:48:20 LastBusyTime=2026-11-20T17:49:37 "
    "CfgTRES=cpu=64,mem=1000000M,billing=64,gres/gpu=8 AllocTRES=cpu=64,gres/gpu=8 CapWatts=n/a CurrentWatts=0 "
    "AveWatts=0 ExtSensorsJoules=n/s ExtSensorsWatts=0 ExtSensorsTemp=n/s {7}"
)


def stand_ins(folder: Path, nodes: int, jobs: int) -> None:
    """Write an scontrol and a squeue that answer for so many nodes and jobs; a few nodes are down or drained."""
    for turn in range(TURNS):
        (folder / f"node.{turn}").write_text("\n".join(map(_node, range(nodes))) + "\n", encoding="ascii")
    (folder / "topology").write_text(
        "".join(_leaf(first, nodes) for first in range(0, nodes, LEAF)), encoding="ascii"
    )
    (folder / "config").write_text("ClusterName             = made\n", encoding="ascii")
    rows = (f"{field}{SEPARATOR}" for job in range(jobs) for field in _job(job, nodes))
    (folder / "jobs").write_text("".join(rows), encoding="ascii")
    _script(folder / "scontrol", f'case $2 in node) cat node.$(($(date +%s) / 2 % {TURNS}));; *) cat "$2";; esac')
    _script(folder / "squeue", f"""sed "s/{SEPARATOR}/$(echo "$*" | grep -om1 '~[0-9a-f]*~' | head -n1)/g" jobs""")


def _script(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\ncd {path.parent} && {line}\n", encoding="ascii")
    path.chmod(0o755)


def _node(number: int) -> str:
    state, reason = ("ALLOCATED", "") if number % 4 else ("IDLE", "")
    if number % 251 == 7:  # noqa: PLR2004
        state, reason = "DOWN+NOT_RESPONDING", "Reason=Not responding [root@2026-11-20T17:49:37]"
    elif number % 499 == 11:  # noqa: PLR2004
        state, reason = "IDLE+DRAIN", "Reason=ECC errors: GPU 3 [root@2026-11-20T17:49:37]"
    load, free = random.uniform(0, 64), random.randrange(10_000, 900_000)  # noqa: S311 - no secret
    return _NODE.format(
        number, state, 64 if state == "ALLOCATED" else 0, load, number // 250, number % 250, free, reason
    )


def _leaf(first: int, nodes: int) -> str:
    last = min(first + LEAF, nodes) - 1
    return f"SwitchName=leaf{first // LEAF} Level=0 LinkSpeed=1 Nodes=node[{first:05d}-{last:05d}]\n"


def _job(number: int, nodes: int) -> tuple[str, ...]:
    label, user = str(1000 + number), f"user{number % 97}"
    if number < nodes // (2 * LEAF):
        first = number * 2 * LEAF
        names = f"node[{first:05d}-{first + LEAF - 1:05d}]"
        return label, label, "RUNNING", "None", "0", "1", user, names, f"node{first:05d}", f"train-{number}"
    return label, label, "PENDING", "Priority", "0", "1", user, "", "", f"sweep-{number}"


def filled(path: Path, nodes: int, now: float) -> None:
    """Write a journal: an agent's word on every node, some jobs with attempts, 200 incidents."""
    with Journal(path) as journal:
        for number in range(nodes):
            name = NodeName(f"node{number:05d}")
            journal.record_node(
                NodeRecord(name=name, seen_unix=now - 3600, shards=40, shard_bytes=10**10, free_bytes=10**11)
            )
        for job in range(17, 217):
            phase = Phase.SUCCEEDED if job > 20 else Phase.RUNNING  # noqa: PLR2004
            beat = Beat(attempt=Attempt(job, 0, 0), phase=phase, user="alice", job_name=f"old-{job}", world_size=8)
            journal.record_beat(beat, now - 60)
        for number in range(200):
            journal.record_incident(
                Incident(
                    id=f"{17 + number}.0.0-node-dead-{number}",
                    kind="node-dead",
                    attempt=Attempt(17 + number, 0, 0),
                    node=NodeName(f"node{number % 40:05d}"),
                    began_unix=now - 900 * number,
                    detected_unix=now - 900 * number + 3,
                    recovered_unix=now - 900 * number + 20,
                    evidence="no answer on two ways",
                    outcome="recovered",  # type: ignore[arg-type] # read back as the word it is
                )
            )


def serve(path: Path) -> None:
    """Serve a console until SIGTERM, at its usual interval."""
    collector = Collector(ConsoleSettings(journal=path))
    run(collector, "127.0.0.1:0", Access(), lambda url: print(url, flush=True))


@contextmanager
def beating(path: Path, nodes: int) -> Iterator[None]:
    """Let four jobs' launchers beat once a second meanwhile, each with all its nodes, and report its steps."""
    over = threading.Event()

    def beat() -> None:
        with Journal(path) as journal:
            for step in itertools.count():
                now = time.time()
                for job in range(17, 21):
                    attempt, first = Attempt(job, 0, 0), (job - 17) * (nodes // 4)
                    names = [
                        NodeName(f"node{number:05d}") for number in range(first, first + min(256, nodes // 4))
                    ]
                    free = 10**11 - step * 10**6
                    seen = [
                        NodeRecord(name=name, seen_unix=now, job=job, free_bytes=free, shards=40) for name in names
                    ]
                    point = ProgressPoint(attempt=attempt, step=step, unix=now, metrics={"loss": 1 / (1 + step)})
                    journal.record_beat(
                        Beat(
                            attempt=attempt,
                            phase=Phase.RUNNING,
                            nodes=tuple(names),
                            world_size=8 * len(names),
                            node_beats=tuple(seen),
                            progress=(point,),
                        ),
                        now,
                    )
                if over.wait(1.0):
                    return

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@dataclass(frozen=True, slots=True)
class Served:
    """A console in a process of its own."""

    pid: int
    port: int

    def cpu_s(self) -> float:
        """Return the seconds of processor time it has taken."""
        fields = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss_mib(self) -> float:
        """Return the memory it holds."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii").split()[1])
        return pages * resource.getpagesize() / (1 << 20)

    def ask(self, path: str) -> tuple[float, int]:
        """Return for how many seconds an answer was waited for, and its bytes."""
        began = time.monotonic()
        asker = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        asker.request("GET", f"/api/v1/{path}", headers={"accept-encoding": "gzip"})
        answer = asker.getresponse()
        size = len(answer.read())
        asker.close()
        if answer.status != http.client.OK:
            raise RuntimeError(f"{path}: {answer.status}")
        return time.monotonic() - began, size

    def ticks(self, seconds: float) -> list[int]:
        """Read the stream of events for so long; return the bytes of each change."""
        asker = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        asker.request("GET", "/api/v1/events")
        answer, sizes, until = asker.getresponse(), [], time.monotonic() + seconds
        while time.monotonic() < until:
            line = answer.readline()
            if line.startswith(b"event: change"):
                sizes.append(len(answer.readline()))
        asker.close()
        return sizes


def measured(nodes: int, jobs: int, seconds: float, answers: int) -> dict[str, float]:
    """Return the figures of a console of so many nodes and jobs."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "watch.sqlite"
        filled(path, nodes, time.time())
        stand_ins(Path(folder), nodes, jobs)
        argv = [sys.executable, "-m", "benchmarks.console", "--serve", str(path)]
        env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env) as process:
            assert process.stdout is not None  # noqa: S101 - it was asked for
            try:
                served = Served(process.pid, int(process.stdout.readline().rstrip("/\n").rpartition(":")[2]))
                time.sleep(WARM_S)
                before = served.cpu_s()
                ticks = served.ticks(seconds)
                idle = 100 * (served.cpu_s() - before) / seconds
                waits = {each: [served.ask(each)[0] for _ in range(answers)] for each in PATHS}
                whole = served.ask("snapshot")[1]
                with beating(path, nodes):
                    before = served.cpu_s()
                    busy_ticks = served.ticks(seconds)
                    busy = 100 * (served.cpu_s() - before) / seconds
                rss = served.rss_mib()
            finally:
                process.terminate()
    p95 = {each: 1000 * statistics.quantiles(some, n=20)[-1] for each, some in waits.items()}
    return {
        "nodes": nodes,
        "jobs": jobs,
        "idle_cpu": round(idle, 1),
        "rss_mib": round(rss),
        "tick_bytes": round(statistics.median(ticks)) if ticks else 0,
        "busy_cpu": round(busy, 1),
        "busy_tick_bytes": round(statistics.median(busy_ticks)) if busy_ticks else 0,
        "snapshot_kib": round(whole / 1024),
        "p95_ms": round(max(p95.values()), 1),
        **{f"p95 {each}": round(value, 1) for each, value in p95.items()},
    }


def main() -> None:
    """Measure, print the table, and write it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of an idle console")
    parser.add_argument("--answers", type=int, default=40, help="of each question")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", type=Path, metavar="JOURNAL", help=argparse.SUPPRESS)
    said = parser.parse_args()
    if said.serve:
        serve(said.serve)
        return
    rows = [
        measured(1_024, 1_000, said.seconds, said.answers),
        measured(10_000, 10_000, said.seconds, said.answers),
    ]
    out = ROOT / "build" / "bench" / "console.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"goals": GOALS, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    if said.json:
        print(out.read_text(encoding="utf-8"), end="")
        return
    for name in rows[0]:
        goal = f"goal {GOALS[name]:g}" if name in GOALS else ""
        print(f"{name:<40} {rows[0][name]:>12,} {rows[1][name]:>12,}  {goal}")


if __name__ == "__main__":
    main()
