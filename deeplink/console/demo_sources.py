"""The sources of `deeplink console --demo`: the recorded day in a folder of its own, and a Slurm that tells it."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from typing_extensions import override

from deeplink.cache.catalog import PackRecord
from deeplink.cache.replicate.residency import note
from deeplink.console.collect import Collector, ConsoleSettings
from deeplink.console.demo_day import (
    GPUS,
    LEAF,
    LEMON,
    LOST_LEAF,
    NODES,
    RECORDED_UNTIL,
    RUNS,
    SPINE,
    DemoRun,
    at,
    beat,
    ended_runs,
    incidents,
    leaf_of,
    loss,
    lost,
    names,
    node,
    rank_times,
    reports,
)
from deeplink.core.clock import Clock
from deeplink.core.process_metrics import MEASURED
from deeplink.core.types import JobId, NodeName
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.recovery.records import Phase
from deeplink.scheduler.slurm.client import Slurm
from deeplink.scheduler.slurm.parse import JobRow, NodeRow, SwitchRow
from deeplink.scheduler.slurm.states import JobState, NodeFlag, NodeState

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from deeplink.scheduler.recovery.records import ProgressPoint

CLUSTER = "demo"
BEAT_S = 10.0
_BOOTED = "2026-11-02T09:14:31"


class DemoClock(Clock):
    """A clock that shows the end of the recorded day when it is made, and goes on from there."""

    def __init__(self) -> None:
        self._ahead = RECORDED_UNTIL - time.monotonic()

    @override
    def monotonic(self) -> float:
        return time.monotonic()

    @override
    def unix(self) -> float:
        return time.monotonic() + self._ahead

    @override
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@dataclass(frozen=True, slots=True)
class DemoSlurm(Slurm):
    """Slurm's word on the recorded day. Each time it is asked for its jobs, their launchers beat once more."""

    day: DemoDay | None = None

    @override
    def nodes(self, names: Iterable[str] = (), *, details: bool = False) -> list[NodeRow]:
        return list(_node_rows())

    @override
    def jobs(self, *, user: str = "") -> list[JobRow]:
        if self.day is not None:
            self.day.beat()
        return list(_job_rows())

    @override
    def topology(self) -> list[SwitchRow]:
        return list(_switch_rows())

    @override
    def cluster_name(self) -> str:
        return CLUSTER


class DemoDay:
    """The recorded day, written into a folder: the journal and the catalog. What runs on goes on beating."""

    def __init__(self, folder: Path, interval_s: float = 2.0) -> None:
        self.clock = DemoClock()
        self._journal = Journal(folder / "watch.sqlite")
        self._newest: dict[DemoRun, tuple[ProgressPoint, ProgressPoint]] = {}
        self._fill()
        _write_catalog(folder / "catalog")
        self.beat()
        settings = ConsoleSettings(
            journal=self._journal.path, interval_s=interval_s, catalog=folder / "catalog", demo=True
        )
        self.collector = Collector(settings, clock=self.clock, slurm=DemoSlurm(day=self))

    def close(self) -> None:
        """Close the journal's writing end; the collector is its console's."""
        self._journal.close()

    def _fill(self) -> None:
        for number in range(NODES):
            self._journal.record_node(node(NodeName(f"n{number:03d}"), RECORDED_UNTIL))
        for run in sorted([*ended_runs(), *RUNS], key=lambda one: one.attempt):
            told = tuple(reports(run, RECORDED_UNTIL))
            self._journal.record_beat(
                replace(beat(run, at(run.began_h)), phase=Phase.RUNNING, node_beats=()), at(run.began_h)
            )
            if len(told) > 1:
                self._newest[run] = told[-2], told[-1]
            ended = at(run.ended_h) if run.ended_h else RECORDED_UNTIL
            said = replace(beat(run, ended, told), rank_times=tuple(rank_times(run, ended)))
            self._journal.record_beat(replace(said, node_beats=()) if run.ended_h else said, ended)
        for incident in incidents():
            self._journal.record_incident(incident)

    def beat(self) -> None:
        """Let the launchers and agents that are heard say once more how they are."""
        now = self.clock.unix()
        for run in RUNS:
            if not run.ended_h:
                self._journal.record_beat(beat(run, now, self._next(run, now)), now)
            elif run.phase is Phase.STRANDED:
                self._journal.record_beat(beat(run, now), now)
        used = {name for run in RUNS if not run.ended_h for name in (*run.nodes, *run.spares)}
        for number in range(NODES):
            name = NodeName(f"n{number:03d}")
            if name not in used and not lost(name):
                self._journal.record_node(node(name, now))

    def _next(self, run: DemoRun, now: float) -> tuple[ProgressPoint, ...]:
        # As it went on over the last minute on record, so it goes on: whole steps, and those every ten seconds.
        before, last = self._newest[run]
        steps, span_s = last.step - before.step, last.unix - before.unix
        made = int((now - last.unix) // BEAT_S * BEAT_S / span_s * steps)
        if made <= 0:
            return ()
        share, step = made / steps, last.step + made
        grown = {
            name: last.metrics[name] + share * (last.metrics[name] - before.metrics[name])
            for name in MEASURED
            if name in last.metrics
        }
        said = {**last.metrics, **grown, "loss": round(loss(step, run.attempt.job), 4)}
        return (replace(last, step=step, unix=last.unix + share * span_s, metrics=said),)


def _node_rows() -> Iterator[NodeRow]:
    used = {
        name
        for run in RUNS
        if not run.ended_h or run.phase is Phase.STRANDED
        for name in (*run.nodes, *run.spares)
    }
    for number in range(NODES):
        name = NodeName(f"n{number:03d}")
        state, flags, reason = NodeState.ALLOCATED if name in used else NodeState.IDLE, set(), ""
        if leaf_of(name) == LOST_LEAF:
            flags = {NodeFlag.NOT_RESPONDING}
        elif name == "n087":
            state, flags, reason = NodeState.DOWN, {NodeFlag.NOT_RESPONDING}, "Not responding"
        elif name == LEMON:
            state, flags, reason = (
                NodeState.IDLE,
                {NodeFlag.DRAIN},
                "deeplink: failed twice this night, 29.1.0-node-silent",
            )
        yield NodeRow(
            name=name, address=f"10.8.{number // LEAF}.{number % LEAF + 1}", host=name, port=None, state=state,
            flags=frozenset(flags), reason=reason, reason_by="root" if reason else "", boot_time=_BOOTED,
            gpus=GPUS,
        )  # fmt: skip


def _job_rows() -> Iterator[JobRow]:
    for run in RUNS:
        if not run.ended_h or run.phase is Phase.STRANDED:
            yield _row(run.attempt.job, run.name, run.user, JobState.RUNNING, nodes=(*run.nodes, *run.spares))
    held = "job requeued in held state"
    yield _row(29, "diffusion-sr", "dora", JobState.PENDING, reason=held, restarts=2)
    yield _row(33, "clip-b32", "finn", JobState.PENDING, reason="Resources")
    for number in range(49, 71):
        yield _row(number, f"sweep-{number - 48:02d}", "eve", JobState.PENDING, reason="Priority")


def _row(
    job: int,
    name: str,
    user: str,
    state: JobState,
    *,
    reason: str = "",
    restarts: int = 0,
    nodes: tuple[NodeName, ...] = (),
) -> JobRow:
    return JobRow(
        id=JobId(job), label=str(job), state=state, reason=reason, restarts=restarts, requeueable=True, user=user,
        nodes=nodes, batch_host=nodes[0] if nodes else None, name=name,
    )  # fmt: skip


def _switch_rows() -> Iterator[SwitchRow]:
    for leaf in range(NODES // LEAF):
        yield SwitchRow(f"leaf{leaf}", 0, names(leaf * LEAF, LEAF), ())
    leaves = SPINE // LEAF
    for spine in range(NODES // SPINE):
        below = tuple(f"leaf{spine * leaves + place}" for place in range(leaves))
        yield SwitchRow(f"spine{spine}", 1, names(spine * SPINE, SPINE), below)
    yield SwitchRow("core", 2, names(0, NODES), tuple(f"spine{spine}" for spine in range(NODES // SPINE)))


_DATASETS = (
    # Name, version, packed so many hours ago, source, TiB, nodes that hold all of it, share that they hold.
    ("in22k", "a7", 30.0, "s3://datasets/imagenet-22k", 1.3, names(0, 32), 1.0),
    ("in22k", "c4", 5.3, "s3://datasets/imagenet-22k-dedup", 1.2, names(224, 24), 0.96),
    ("pile-tokens", "3d", 190.0, "/home/data/pile", 0.8, names(40, 66), 1.0),
    ("librispeech", "91", 400.0, "/home/data/libri", 0.06, names(160, 12), 1.0),
    ("laion-12m", "5e", 52.0, "s3://datasets/laion-12m", 2.9, names(128, 32), 0.71),
)


def _write_catalog(root: Path) -> None:
    """Write the catalog as far as a console reads it: the record and what is held of each version, no index."""
    for name, stem, hours, source, tib, holders, share in _DATASETS:
        folder, version = root / name, (stem * 20)[:40]
        folder.mkdir(parents=True, exist_ok=True)
        total = int(tib * (1 << 40))
        record = PackRecord(
            source=source, plan=version, files=int(tib * 10.4e6), bytes=total, shards=total // (256 << 20) + 1,
            packed_unix=at(hours), home="" if source.startswith("s3") else f"{source}-packed",
        )  # fmt: skip
        (folder / f"{version}.arrow").touch()
        os.utime(folder / f"{version}.arrow", (at(hours), at(hours)))
        (folder / f"{version}.json").write_text(json.dumps(asdict(record)), encoding="utf-8")
        (folder / "latest").write_text(f"{version}\n", encoding="ascii")
        each = min(total, int(total * share) if len(holders) == 1 else int(2 * total * share / len(holders)))
        note(root, name, version, dict.fromkeys(holders, each), total=total, unix=at(0.4))
