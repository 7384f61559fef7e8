"""A day of 256 nodes with faults, made from a seed: who ran where, what befell it, what it reported; pure.

It ends at `RECORDED_UNTIL` and is the same each time. `deeplink console --demo` shows it, the page's tests ask it.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deeplink.core import process_metrics
from deeplink.core.finding import Finding, Severity
from deeplink.core.types import Attempt, NodeName
from deeplink.scheduler.recovery.records import (
    Action,
    Beat,
    Incident,
    IncidentKind,
    IncidentOutcome,
    Moment,
    NodeRecord,
    Phase,
    ProgressPoint,
    RankTimes,
    incident_id,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

RECORDED_UNTIL = 1_795_157_400.0  # 2026-11-20 06:50:00 UTC
NODES, LEAF, SPINE, GPUS = 256, 16, 64, 8
EVERY_S = 60.0  # between two reports on record
RANKS_EVERY_S = 600.0  # the same of how long the ranks' steps were
GIB = 1 << 30
SAMPLE_BYTES = 110_000
PARTS = ("data", "compute", "others", "checkpoint", "rest")
"""What a step's time is spent on."""
HOUR_S = 3600.0
LOST_LEAF = 13
LEMON, FULL, DIM = NodeName("n142"), NodeName("n201"), NodeName("n119")
"""The node that fails again and again, the one with the full disk, the one behind a degraded cable."""


def names(first: int, count: int, *without: int) -> tuple[NodeName, ...]:
    """Return so many nodes from the first on, in order, without some."""
    return tuple(NodeName(f"n{number:03d}") for number in range(first, first + count) if number not in without)


def leaf_of(node: str) -> int:
    """Return the number of the leaf that a node hangs on."""
    return int(node[1:]) // LEAF


def at(hours: float) -> float:
    """Return the moment so many hours before the day's end."""
    return RECORDED_UNTIL - hours * HOUR_S


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRun:
    """One attempt of a job of the day; times in hours before its end, 0: it runs on."""

    attempt: Attempt
    name: str
    user: str
    nodes: tuple[NodeName, ...]
    began_h: float
    ended_h: float = 0.0
    spares: tuple[NodeName, ...] = ()
    phase: Phase = Phase.RUNNING
    first_step: int = 0
    step_s: float = 1.0  # of a step in which nothing is waited for
    crossings: tuple[int, int] = (0, 0)  # ours, and in Slurm's own order
    starved_h: float = -1.0  # since when it waits for its data; below 0: it does not
    slow: NodeName | None = None  # its ranks are slower than the others
    detail: str = ""

    @property
    def pace_s(self) -> float:
        """Seconds of a step, all in all, as it ends."""
        return self.step_s * (2.6 if self.starved_h >= 0 else 1.45 if self.slow else 1.0)

    def pace_at(self, unix: float) -> float:
        """Seconds of a step at this moment."""
        return self.step_s if self.starved_h >= 0 and not self.starved_at(unix) else self.pace_s

    def starved_at(self, unix: float) -> bool:
        """Whether it waits for its data at this moment."""
        return self.starved_h >= 0 and unix >= at(self.starved_h)

    def shares_at(self, unix: float) -> tuple[float, ...]:
        """Shares of a step at this moment, as `PARTS` names them."""
        if self.starved_at(unix):
            return 0.63, 0.27, 0.06, 0.01, 0.03
        return (0.03, 0.34, 0.56, 0.03, 0.04) if self.slow else (0.04, 0.78, 0.11, 0.03, 0.04)


_REMOTE = tuple(name for name in names(40, 64) if name != "n087")
RUNS = (
    DemoRun(
        attempt=Attempt(17, 0, 0), name="vit-large-in22k", user="alice", nodes=names(0, 32), spares=names(32, 1),
        began_h=11.5, step_s=0.9, crossings=(2, 2), starved_h=5.2,
    ),
    DemoRun(
        attempt=Attempt(22, 0, 0), name="llm-1b3", user="bo", nodes=names(40, 64), spares=names(104, 2),
        began_h=22.0, ended_h=4.42, step_s=3.1, crossings=(5, 9),
    ),
    DemoRun(
        attempt=Attempt(22, 0, 1), name="llm-1b3", user="bo", nodes=(*_REMOTE, NodeName("n104")),
        spares=names(105, 1), began_h=4.414, first_step=20_100, step_s=3.1, crossings=(5, 10),
        detail="relaunched on spare n104 from checkpoint step 20100",
    ),
    DemoRun(
        attempt=Attempt(26, 0, 0), name="moe-ablation-8", user="chi", nodes=names(112, 16), began_h=9.3,
        step_s=0.62, slow=DIM,
    ),
    DemoRun(
        attempt=Attempt(29, 0, 0), name="diffusion-sr", user="dora", nodes=names(136, 8), began_h=8.1, ended_h=6.0,
        phase=Phase.FAILED, step_s=1.2, detail="ranks hung: no step for 300 s",
    ),
    DemoRun(
        attempt=Attempt(29, 1, 0), name="diffusion-sr", user="dora", nodes=names(140, 8), began_h=5.9,
        ended_h=2.35, phase=Phase.FAILED, first_step=5_600, step_s=1.2,
        detail="n142 fell silent and no spare was left",
    ),
    DemoRun(
        attempt=Attempt(31, 0, 0), name="speech-base", user="eve", nodes=names(160, 12), began_h=7.0, step_s=0.45,
        crossings=(0, 0),
    ),
    DemoRun(
        attempt=Attempt(35, 0, 0), name="contrastive-pt", user="bo", nodes=names(208, 12), spares=names(220, 4),
        began_h=3.2,
        ended_h=0.31, phase=Phase.STRANDED, step_s=0.8, crossings=(0, 0),
        detail="every node of leaf13 is lost and 4 spares are too few; it waits for nodes",
    ),
    DemoRun(
        attempt=Attempt(36, 0, 0), name="segmenter-ft", user="alice", nodes=names(176, 4), began_h=1.6, step_s=0.3,
    ),
)  # fmt: skip
"""The jobs with a story: 17 starves, 22 lost a node, 26 lags behind a cable, 29 is held, 35 is stranded."""
ENDED = ("resnet-sweep", "bert-probe", "tokenizer-check", "unet-ft", "reward-model")


def ended_runs() -> Iterator[DemoRun]:
    """Yield the jobs that came and went during the day."""
    dice = random.Random(256)  # noqa: S311 - no secret
    for job in range(1, 49):
        if job in {17, 22, 26, 29, 31, 33, 35, 36}:
            continue
        began = 23.5 - job * 0.46
        failed = dice.random() < 0.12  # noqa: PLR2004 - one of eight
        yield DemoRun(
            attempt=Attempt(job, 0, 0),
            name=f"{dice.choice(ENDED)}-{job}",
            user=dice.choice(("alice", "bo", "chi", "dora", "eve", "finn")),
            nodes=names(144 + dice.randrange(0, 60), dice.choice((1, 2, 4))),
            began_h=began,
            ended_h=max(0.2, began - 0.4 - 2 * dice.random()),
            phase=Phase.FAILED if failed else Phase.SUCCEEDED,
            step_s=0.2 + dice.random(),
            detail="exit code 1" if failed else "",
        )


def _waves(step: int) -> float:
    return 0.035 * math.sin(step * 0.37) + 0.02 * math.sin(step * 1.7)


def loss(step: int, job: int) -> float:
    """Return what a job of the day reports at a step."""
    return (1.6 + job % 5 * 0.3) * (1 + 9 * math.exp(-step / 900) + 1.2 * math.exp(-step / 9000)) / 3 + _waves(
        step
    )


def reports(run: DemoRun, until: float) -> Iterator[ProgressPoint]:
    """Yield what the first rank of a run said, the oldest first."""
    step, unix, until = run.first_step, at(run.began_h), min(until, at(run.ended_h) if run.ended_h else until)
    counts = dict.fromkeys(("local", "peer", "source", *PARTS, "steps"), 0.0)
    batch, saved = 32 * len(run.nodes) * GPUS, (0, 0.0)
    while True:
        pace = run.pace_at(unix + EVERY_S)
        made = max(1, round(EVERY_S / pace))  # whole steps alone
        unix, step = unix + made * pace, step + made
        if unix > until:
            return
        counts["steps"] += made
        for part, share in zip(PARTS, run.shares_at(unix), strict=True):
            counts[part] += made * pace * share
        starved = run.starved_at(unix)
        for place, share in (
            ("local", 0.13 if starved else 0.93),
            ("peer", 0.05),
            ("source", 0.82 if starved else 0.02),
        ):
            counts[place] += batch * made * share
        if step // 300 > saved[0] // 300:
            saved = (step // 300 * 300, round(unix, 1))
        said = _metrics(run, step, unix, batch, counts, saved)
        yield ProgressPoint(attempt=run.attempt, step=step, unix=unix, metrics=said)


def _metrics(  # noqa: PLR0917 - what a report holds
    run: DemoRun, step: int, unix: float, batch: int, counts: Mapping[str, float], saved: tuple[int, float]
) -> dict[str, float]:
    pace = run.pace_at(unix)
    said = {
        "loss": round(loss(step, run.attempt.job), 4),
        "lr": round(3e-4 * min(1.0, step / 500) * 0.5 * (1 + math.cos(min(1.0, step / 40_000) * math.pi)), 8),
        "samples_per_s": round(batch / pace * (1 + 0.02 * math.sin(step)), 1),
        process_metrics.LOCAL_SAMPLES: round(counts["local"]),
        process_metrics.PEER_SAMPLES: round(counts["peer"]),
        process_metrics.SOURCE_SAMPLES: round(counts["source"]),
        process_metrics.LOCAL_BYTES: round(counts["local"] * SAMPLE_BYTES),
        process_metrics.PEER_BYTES: round(counts["peer"] * SAMPLE_BYTES),
        process_metrics.SOURCE_BYTES: round(counts["source"] * SAMPLE_BYTES),
        process_metrics.STEPS: round(counts["steps"]),
        **{name: round(counts[part], 2) for name, part in zip(process_metrics.PARTS_S, PARTS, strict=True)},
    }
    if saved[0]:
        said |= {process_metrics.CHECKPOINT_STEP: saved[0], process_metrics.CHECKPOINT_UNIX: saved[1]}
    return said


def rank_times(run: DemoRun, until: float) -> Iterator[RankTimes]:
    """Yield how long the ranks' own part of a step was: a number for the ranks of each node, every ten minutes."""
    unix, until = at(run.began_h), min(until, at(run.ended_h) if run.ended_h else until)
    while (unix := unix + RANKS_EVERY_S) <= until:
        shares = dict(zip(PARTS, run.shares_at(unix), strict=True))
        own = run.pace_at(unix) * (1 - shares["others"] - shares["checkpoint"])
        yield RankTimes(
            attempt=run.attempt,
            unix=unix,
            span_s=RANKS_EVERY_S,
            ranks_each=GPUS,
            own_s=tuple(
                round(own * (2.3 if node == run.slow else 1 + 0.02 * math.sin(place * 7 + unix)), 4)
                for place, node in enumerate(run.nodes)
            ),
            data_s=tuple(round(own * shares["data"], 4) for _ in run.nodes),
        )


def beat(run: DemoRun, now: float, progress: tuple[ProgressPoint, ...] = ()) -> Beat:
    """Return what the launcher of a run says at this moment."""
    return Beat(
        attempt=run.attempt,
        phase=run.phase,
        user=run.user,
        job_name=run.name,
        nodes=run.nodes,
        spares=run.spares,
        world_size=len(run.nodes) * GPUS,
        node_beats=tuple(node(name, now, run.attempt.job) for name in (*run.nodes, *run.spares)),
        progress=progress,
        ring_crossings=run.crossings[0],
        ring_crossings_stock=run.crossings[1],
        step_timeout_s=300.0,
        detail=run.detail,
    )


FINDINGS = {
    FULL: Finding(Severity.WARNING, "/scratch: 312 MiB free of at least 1024", "disk", since_unix=at(0.05)),
    DIM: Finding(Severity.WARNING, "ib0 runs at 50 Gb/s of 200: cable or plug", "network", since_unix=at(9.4)),
    NodeName("n063"): Finding(Severity.NOTE, "clock 38 ms ahead", "clock", since_unix=at(14)),
}  # fmt: skip


def lost(name: str) -> bool:
    """Whether a node is out of reach as the day ends."""
    return leaf_of(name) == LOST_LEAF or name == "n087"


def node(name: NodeName, now: float, job: int = 0) -> NodeRecord:
    """Return what the agent of a node says."""
    number = int(name[1:])
    held = 0 if number == 201 else 180 + number * 37 % 90  # noqa: PLR2004 - the full one holds what is not ours
    silent = 0.4 if not lost(name) else now - (at(0.32) if leaf_of(name) == LOST_LEAF else at(4.42))
    return NodeRecord(
        name=name,
        topology_address=f"core.spine{number // SPINE}.leaf{number // LEAF}.{name}",
        seen_unix=now - silent,
        silent_s=silent,
        shards=held,
        shard_bytes=held * GIB // 4,
        verified_bytes=held * GIB // 4 - (number % 5 == 0) * 2 * GIB,
        free_bytes=312 << 20 if name == FULL else (900 - held) * GIB,
        job=job,
        health=(FINDINGS[name],) if name in FINDINGS else (),
    )


def _incident(
    kind: IncidentKind,
    hours: float,
    *,
    job: Attempt | None = None,
    node: NodeName | None = None,
    after_s: float = 3.0,
    healed_s: float = 0.0,
    said: tuple[str, ...] = (),
    **facts: Any,
) -> Incident:
    began, acted = at(hours), facts.get("action", Action.NONE) is not Action.NONE
    return Incident(
        id=incident_id(job, kind, node or f"{hours:g}"),
        kind=kind,
        attempt=job,
        node=node,
        began_unix=began,
        detected_unix=began + after_s,
        acted_unix=began + after_s + 0.6 if acted else 0.0,
        recovered_unix=began + healed_s if healed_s else 0.0,
        timeline=tuple(Moment(began + after_s + 0.5 + place, what) for place, what in enumerate(said)),
        **{"outcome": IncidentOutcome.RECOVERED, **facts},
    )


def incidents() -> Iterator[Incident]:
    """Yield what went wrong, in this night and in the eight weeks before, oldest first."""
    yield from _older()
    silent, open_ = IncidentKind.NODE_SILENT, IncidentOutcome.OPEN
    yield _incident(
        IncidentKind.STRAGGLER, 9.1, job=Attempt(26, 0, 0), node=DIM, after_s=95, action=Action.COMMENT,
        outcome=open_, evidence="ranks 56 to 63 work 0.85 s on a step, the others 0.37 s; ib0 of n119: 50 Gb/s",
        ranks=128,
    )  # fmt: skip
    yield _incident(
        IncidentKind.RANKS_HUNG, 6.08, job=Attempt(29, 0, 0), node=LEMON, after_s=300, healed_s=640,
        action=Action.REQUEUE_EXCLUDE,
        evidence="no step for 300 s; 56 ranks wait in all_reduce, rank 48 on n142 in D",
        ranks=64, steps_repeated=140, step_s=1.2,
    )  # fmt: skip
    yield _incident(
        silent, 4.42, job=Attempt(22, 0, 0), node=NodeName("n087"), healed_s=21.4, action=Action.RELAUNCH,
        evidence="agent silent for 3.0 s; connecting timed out; 63 others answer; leaf5's other nodes answer",
        ranks=512, steps_repeated=96, step_s=3.1,
        said=("n104 takes its ranks", "restored from checkpoint step 20100"),
    )  # fmt: skip
    yield _incident(
        silent, 2.36, job=Attempt(29, 1, 0), node=LEMON, action=Action.REQUEUE, outcome=IncidentOutcome.FAILED,
        evidence="agent silent for 3.0 s; seven others answer; its BMC says a GPU fell off the bus", ranks=64,
        step_s=1.2, steps_repeated=210,
    )  # fmt: skip
    yield _incident(
        IncidentKind.REQUEUE_HELD, 2.34, job=Attempt(29, 1, 0), outcome=open_, after_s=2,
        evidence="Slurm holds job 29 after its requeue (job requeued in held state)",
    )  # fmt: skip
    yield _incident(
        IncidentKind.SWITCH_SUSPECT, 0.32, node=None, after_s=4.2, outcome=open_,
        evidence="all 16 nodes of leaf13 fell silent within 0.4 s, and no node of another leaf did",
    )  # fmt: skip
    yield _incident(
        IncidentKind.JOB_STRANDED, 0.31, job=Attempt(35, 0, 0), outcome=open_, after_s=6,
        evidence="12 of its 12 nodes are lost at once and 4 spares are too few", ranks=96,
    )  # fmt: skip


def _older() -> Iterator[Incident]:
    dice = random.Random(8)  # noqa: S311 - no secret
    kinds = (IncidentKind.NODE_SILENT, IncidentKind.RANK_FAILED, IncidentKind.NODE_DEAD, IncidentKind.RANKS_HUNG)
    for number in range(64):
        hours = 26 + (63 - number) * 20.6
        lemon = number in {38, 49, 55, 60, 62}
        kind = kinds[number % 4]
        job = Attempt(9_000 + number, 0, 0)
        yield _incident(
            kind, hours, job=job, node=LEMON if lemon else NodeName(f"n{number * 37 % 200:03d}"),
            after_s=2 + 3 * dice.random(), healed_s=15 + 60 * dice.random(), action=Action.RELAUNCH,
            evidence="a GPU fell off the bus (Xid 79)" if lemon else "no answer on two ways",
            steps_repeated=dice.randrange(20, 200), step_s=1.0,
        )  # fmt: skip
