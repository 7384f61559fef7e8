"""A journal filled through its own API with a day a cluster may have had, a recorded Slurm, a served console."""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import re
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from deeplink.console.app import build_app
from deeplink.console.collect import Collector, ConsoleSettings
from deeplink.console.feed import TABLES
from deeplink.console.journal_queries import JournalQueries
from deeplink.console.request_guard import Access
from deeplink.console.serve import Console, Server, listen, parse_address
from deeplink.core.types import Attempt, NodeName
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.recovery.records import (
    Action,
    Beat,
    Incident,
    IncidentKind,
    IncidentOutcome,
    NodeRecord,
    Phase,
    ProgressPoint,
    RankStack,
    incident_id,
)
from deeplink.scheduler.slurm.client import Slurm
from deeplink.scheduler.slurm.command import CommandError
from tests.waiting import LIMIT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

RECORDED = Path(__file__).parents[2] / "data" / "slurm" / "22.05.8"
MIB = 1 << 20
LOST = NodeName("n1")
"""The node that died in job 17's first attempt."""


def names(*numbers: int) -> tuple[NodeName, ...]:
    return tuple(NodeName(f"n{number}") for number in numbers)


def address(name: str) -> str:
    number = int(name.removeprefix("n"))
    return f"core.spine{number // 4}.leaf{number // 2}.{name}"


def loss(step: int) -> float:
    return 0.18 + 2.15 * math.exp(-step / 130) + 0.06 * math.sin(step * 1.7) * math.exp(-step / 400)


def node(name: NodeName, job: int, now: float, *, silent_s: float = 0.4) -> NodeRecord:
    number = int(name.removeprefix("n"))
    return NodeRecord(
        name=name,
        topology_address=address(name),
        seen_unix=now - silent_s,
        silent_s=silent_s,
        shards=38 + 3 * (number % 4),
        shard_bytes=(38 + 3 * (number % 4)) * 251 * MIB,
        verified_bytes=(38 + number % 4) * 251 * MIB,
        free_bytes=(61 - 7 * number) * 1024 * MIB + 9_000 * MIB,
        job=job,
    )


def reports(attempt: Attempt, steps: Sequence[int], began: float, per_step_s: float) -> tuple[ProgressPoint, ...]:
    return tuple(
        ProgressPoint(
            attempt=attempt,
            step=step,
            unix=began + place * per_step_s,
            metrics={"loss": loss(step), "lr": 0.1 * 0.999**step},
        )
        for place, step in enumerate(steps)
    )


def digits(journal: Journal, now: float) -> None:
    """Job 17: lost n1 at step 412, went on from step 380 on a spare, and runs."""
    first, second = Attempt(17, 0, 0), Attempt(17, 0, 1)
    died = now - 260
    before = names(0, 1, 2, 3)
    journal.record_beat(
        Beat(
            attempt=first,
            phase=Phase.RUNNING,
            user="alice",
            job_name="digits-ddp",
            nodes=before,
            spares=names(6),
            world_size=8,
            node_beats=tuple(node(name, 17, died - 400) for name in before),
            progress=reports(first, range(0, 413, 2), died - 420, 2.0),
            ring_crossings=2,
            ring_crossings_stock=4,
        ),
        died - 420,
    )
    journal.record_incident(
        Incident(
            id=incident_id(first, IncidentKind.NODE_SILENT, LOST),
            kind=IncidentKind.NODE_SILENT,
            attempt=first,
            node=LOST,
            action=Action.RELAUNCH,
            evidence="agent silent for 3.0 s at 10.77.0.11:4000; connecting timed out; 3 of 4 others answer; "
            "leaf0's other node answers",
            began_unix=died,
            detected_unix=died + 3.1,
            acted_unix=died + 3.4,
        )
    )
    progress = reports(second, range(381, 640, 2), died + 8.2, 1.9)
    journal.record_beat(replace(digits_beat(died + 4, died), node_beats=()), died + 4)
    journal.record_beat(replace(digits_beat(now, died), progress=progress), now)


def digits_beat(now: float, died: float) -> Beat:
    nodes = names(0, 2, 3, 6)
    lost = node(LOST, 17, now, silent_s=now - died)
    return Beat(
        attempt=Attempt(17, 0, 1),
        phase=Phase.RUNNING,
        user="alice",
        job_name="digits-ddp",
        nodes=nodes,
        world_size=8,
        node_beats=(*(node(name, 17, now) for name in nodes), lost),
        ring_crossings=2,
        ring_crossings_stock=4,
        detail="relaunched on spare n6 from checkpoint step 380",
    )


def warmup_beat(now: float) -> Beat:
    nodes = names(5)
    return Beat(
        attempt=Attempt(21, 0, 0),
        phase=Phase.RUNNING,
        user="bo",
        job_name="resnet50-warmup",
        nodes=nodes,
        world_size=2,
        node_beats=tuple(node(name, 21, now) for name in nodes),
    )


def warmup(journal: Journal, now: float) -> None:
    """Job 21: a plain good run, started a little while ago."""
    progress = reports(Attempt(21, 0, 0), range(90), now - 90 * 0.7, 0.7)
    journal.record_beat(replace(warmup_beat(now), progress=progress), now)


def older(journal: Journal, now: float) -> None:
    """What happened before today: one recovered by requeue, one that could not be."""
    hung, dead = Attempt(9, 0, 0), Attempt(12, 1, 0)
    for number, (attempt, name) in enumerate([(hung, "hyperband-3"), (dead, "gpt-small")]):
        journal.record_beat(
            Beat(
                attempt=attempt,
                phase=Phase.FAILED if attempt == dead else Phase.SUCCEEDED,
                user="chi",
                job_name=name,
                nodes=names(4, 5),
                world_size=4,
                progress=reports(attempt, range(0, 200, 5), now - 90_000 + number, 1.0),
            ),
            now - 80_000 + number,
        )
    journal.record_incident(
        Incident(
            id=incident_id(hung, IncidentKind.RANKS_HUNG, "r2"),
            kind=IncidentKind.RANKS_HUNG,
            attempt=hung,
            action=Action.REQUEUE_EXCLUDE,
            evidence="no step for 60 s; ranks 0, 1 and 3 wait in all_reduce, rank 2 reads",
            began_unix=now - 88_000,
            detected_unix=now - 87_940,
            acted_unix=now - 87_939.2,
            recovered_unix=now - 87_928,
            outcome=IncidentOutcome.RECOVERED,
            steps_repeated=55,
            stacks=(
                RankStack(rank=0, pid=4000, state="S", source="py-spy", text="all_reduce (dist.py:7)"),
                RankStack(rank=2, pid=4002, state="D", source="kernel", text="<b>nfs_wait</b>"),
            ),
        )
    )
    journal.record_incident(
        Incident(
            id=incident_id(dead, IncidentKind.NODE_DEAD, "n5"),
            kind=IncidentKind.NODE_DEAD,
            node=NodeName("n5"),
            attempt=dead,
            action=Action.DRAIN_DOWN,
            evidence="no whole checkpoint after two restarts: no progress between them",
            began_unix=now - 81_000,
            detected_unix=now - 80_994,
            acted_unix=now - 80_990,
            outcome=IncidentOutcome.FAILED,
        )
    )


def fill(journal: Journal, now: float) -> None:
    older(journal, now)
    digits(journal, now)
    warmup(journal, now)


@dataclass
class RecordedSlurm:
    """Answers as a real Slurm once did; refuses while `dead`. Counts what it is asked."""

    moment: str = "3-nodes-down"
    dead: bool = False
    jobs: tuple[tuple[str, ...], ...] = ()
    asked: list[str] = field(default_factory=list)

    def __call__(self, argv: Sequence[str], /, *, timeout_s: float = LIMIT_S) -> str:
        kind = " ".join(argv[:3]) if argv[0] == "scontrol" else argv[0]
        self.asked.append(kind)
        if self.dead:
            raise CommandError(argv, 1, "slurm_load_nodes: Unable to contact slurm controller (connect failure)")
        if kind == "scontrol show config":
            return "ClusterName             = recorded\n"
        if kind == "squeue":  # the separator is behind each field, and new each time
            separator = next(iter(re.findall("~[0-9a-f]{16}~", " ".join(argv))))
            return "".join(f"{field}{separator}" for job in self.jobs for field in job)
        file = {
            "scontrol show node": "scontrol-show-node-o.txt",
            "scontrol show topology": "scontrol-show-topology.txt",
        }
        return (RECORDED / self.moment / file[kind]).read_text()


@dataclass
class Served:
    """A console that answers on a free port of loopback."""

    port: int
    console: Console
    server: Server

    def connection(self, timeout_s: float = LIMIT_S) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)

    def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
        asker = self.connection()
        asker.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = asker.getresponse()
        body = answer.read()
        asker.close()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, body

    def json(self, path: str) -> Any:
        status, _, body = self.get(path)
        assert status == 200, body
        return json.loads(body)


@pytest.fixture
def slurm() -> RecordedSlurm:
    return RecordedSlurm()


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "watch.sqlite") as opened:
        yield opened


@pytest.fixture
def filled(journal: Journal) -> Journal:
    fill(journal, time.time())
    return journal


@pytest.fixture
def living(filled: Journal) -> Iterator[Journal]:
    """The filled journal, while the launchers of its two jobs go on beating."""
    died = time.time() - 260
    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.5):
            now = time.time()
            filled.record_beat(digits_beat(now, died), now)
            filled.record_beat(warmup_beat(now), now)

    thread = threading.Thread(target=beat)
    thread.start()
    yield filled
    over.set()
    thread.join()


@pytest.fixture
def collector(journal: Journal, slurm: RecordedSlurm) -> Collector:
    return Collector(ConsoleSettings(journal=journal.path, interval_s=0.2), slurm=Slurm(slurm))


@pytest.fixture(autouse=True)
def collectors_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close every collector that a test makes: a connection left open is a warning of Python 3.13's."""
    made, begin = [], Collector.__init__

    def begun(collector: Collector, *facts: Any, **named: Any) -> None:
        begin(collector, *facts, **named)
        made.append(collector)

    monkeypatch.setattr(Collector, "__init__", begun)
    yield
    for each in made:
        each.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Serves a collector's console until the test is over."""
    running: list[tuple[Server, threading.Thread]] = []

    def start(collector: Collector, access: Access | None = None) -> Served:
        console = Console(collector)
        listener = listen(parse_address("127.0.0.1:0"), token="")
        app = build_app(
            console.feed,
            access or Access(),
            JournalQueries(collector.settings.journal),
            background=console.collecting,
        )
        server = Server(app, console.feed)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        running.append((server, thread))
        return Served(listener.getsockname()[1], console, server)

    yield start
    for server, thread in running:
        server.should_exit = True
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def eventually(question: Callable[[], Any], bound_s: float = LIMIT_S) -> Any:
    """Return the first true answer; fail when there was none within the bound."""
    until = time.monotonic() + bound_s
    while time.monotonic() < until:
        if answer := question():
            return answer
        time.sleep(0.02)
    raise AssertionError(f"not within {bound_s:g} s: {question}")


@pytest.fixture(name="eventually")
def eventually_fixture() -> Callable[..., Any]:
    return eventually


def apply(old: dict[str, Any], delta: dict[str, Any]) -> dict[str, Any]:
    """Return the snapshot that `delta` leads to from `old` (what the page does in its own language)."""
    new = {**old, **delta["meta"]}
    for table in TABLES:
        rows = {key: row for key, row in old.get(table, {}).items() if key not in delta["gone"].get(table, ())}
        for key, fields in delta["set"].get(table, {}).items():
            rows[key] = {**rows.get(key, {}), **fields}
        new[table] = rows
    return new
