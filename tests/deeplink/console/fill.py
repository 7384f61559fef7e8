"""Fills a journal, through its own API, with a day a cluster may have had: what the page's tests look at."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from deeplink.scheduler.watch.records import (
    Action,
    Beat,
    Incident,
    Kind,
    NodeRecord,
    Outcome,
    Phase,
    ProgressPoint,
    incident_id,
)
from deeplink.types import Attempt, NodeName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deeplink.scheduler.watch.journal import Journal

MIB = 1 << 20
LOST = NodeName("n3")
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
    """Job 17: lost n3 at step 412, went on from step 380 on a spare, and runs."""
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
            id=incident_id(first, Kind.NODE_SILENT, LOST),
            kind=Kind.NODE_SILENT,
            attempt=first,
            node=LOST,
            action=Action.RELAUNCH,
            evidence="agent silent for 3.0 s at 10.77.0.13:4000; TCP connect timed out; 3 of 4 other agents answer; "
            "leaf1's other node answers",
            began_unix=died,
            detected_unix=died + 3.1,
            acted_unix=died + 3.4,
        )
    )
    after = names(0, 1, 2, 6)
    for moment in (died + 4, now - 0.3):
        journal.record_beat(
            Beat(
                attempt=second,
                phase=Phase.RUNNING,
                user="alice",
                job_name="digits-ddp",
                nodes=after,
                world_size=8,
                node_beats=(
                    *(node(name, 17, moment) for name in after),
                    node(LOST, 17, moment, silent_s=moment - died),
                ),
                progress=reports(second, range(381, 640, 2), died + 8.2, 1.9) if moment > died + 4 else (),
                ring_crossings=2,
                ring_crossings_stock=4,
                detail="relaunched on spare n6 from checkpoint step 380",
            ),
            moment,
        )


def imagenet(journal: Journal, now: float) -> None:
    """Job 21: a plain good run, started a little while ago."""
    attempt, nodes = Attempt(21, 0, 0), names(4, 5)
    journal.record_beat(
        Beat(
            attempt=attempt,
            phase=Phase.RUNNING,
            user="bo",
            job_name="resnet50-warmup",
            nodes=nodes,
            world_size=4,
            node_beats=tuple(node(name, 21, now) for name in nodes),
            progress=reports(attempt, range(0, 90), now - 90 * 0.7, 0.7),
            ring_crossings=0,
            ring_crossings_stock=0,
        ),
        now - 0.5,
    )


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
            id=incident_id(hung, Kind.RANKS_HUNG, "r2"),
            kind=Kind.RANKS_HUNG,
            attempt=hung,
            action=Action.REQUEUE_EXCLUDE,
            evidence="no step for 60 s; ranks 0, 1 and 3 wait in all_reduce, rank 2 reads",
            began_unix=now - 88_000,
            detected_unix=now - 87_940,
            acted_unix=now - 87_939.2,
            recovered_unix=now - 87_928,
            outcome=Outcome.RECOVERED,
            steps_repeated=55,
        )
    )
    journal.record_incident(
        Incident(
            id=incident_id(dead, Kind.NODE_DEAD, "n5"),
            kind=Kind.NODE_DEAD,
            node=NodeName("n5"),
            attempt=dead,
            action=Action.DRAIN_DOWN,
            evidence="no whole checkpoint after two restarts: no progress between them",
            began_unix=now - 81_000,
            detected_unix=now - 80_994,
            acted_unix=now - 80_990,
            outcome=Outcome.FAILED,
        )
    )


def fill(journal: Journal, now: float) -> None:
    older(journal, now)
    digits(journal, now)
    imagenet(journal, now)
