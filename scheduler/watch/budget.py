"""How often may a job be started again? By its progress, not by a count. Pure."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from deeplink.scheduler.watch.records import NODE_LOST, OF_THE_APPLICATION, IncidentKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deeplink.scheduler.watch.records import Incident, JobRecord

_OF_THE_CLUSTER = NODE_LOST | {
    *(
        IncidentKind.SWITCH_SUSPECT,
        IncidentKind.LAUNCHER_LOST,
        IncidentKind.LAUNCH_FAILED,
        IncidentKind.PREEMPTED,
        IncidentKind.STORAGE_FROZEN,
    )
}


def fruitless_starts(job: JobRecord, incidents: Iterable[Incident]) -> int:
    """Return how many starts of a job in a row, the newest among them, failed by themselves without a new step.

    A start (Slurm's count of restarts) counts when it came no further than those before it, when its record blames
    no node, switch, storage or start of the ranks, and when it does blame the application; of the newest one,
    which may have no record yet, the caller knows what it died of. A job that reports no steps is judged by its
    incidents alone.
    """
    causes = defaultdict(set)
    for incident in incidents:
        if incident.attempt:
            causes[incident.attempt.restart].add(incident.kind)
    best: int | None = None
    count = 0
    starts = sorted({record.attempt.restart for record in job.attempts})
    for start in starts:
        steps = [
            record.last_step
            for record in job.attempts
            if record.attempt.restart == start and record.last_step is not None
        ]
        reached = max(steps, default=None)
        further = reached is not None and (best is None or reached > best)
        blamed = causes[start] & OF_THE_APPLICATION or start == starts[-1]
        failed = not further and not causes[start] & _OF_THE_CLUSTER and bool(blamed)
        count = count + 1 if failed else 0
        best = reached if further else best
    return count
