"""Which jobs were ended by Slurm, for a reason that is no fault of theirs, or of a node's? Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.scheduler.slurm.states import JobState
from deeplink.scheduler.watch.records import IncidentKind, Phase
from deeplink.scheduler.watch.verdict import Remedy, Verdict

if TYPE_CHECKING:
    from deeplink.scheduler.watch.evidence import Snapshot

_KINDS = {
    JobState.PREEMPTED: (IncidentKind.PREEMPTED, "Slurm gave its nodes to another job"),
    JobState.TIMEOUT: (IncidentKind.TIME_LIMIT, "it reached its time limit"),
    JobState.DEADLINE: (IncidentKind.TIME_LIMIT, "it reached its deadline"),
    JobState.OUT_OF_MEMORY: (IncidentKind.OUT_OF_MEMORY, "Slurm ended it for the memory it used"),
}
BLAMELESS = frozenset(
    {
        IncidentKind.RANK_FAILED,
        IncidentKind.LAUNCH_FAILED,
        IncidentKind.APPLICATION_FAILED,
        IncidentKind.OUT_OF_MEMORY,
        IncidentKind.PREEMPTED,
        IncidentKind.TIME_LIMIT,
    }
)
"""Kinds for which no node is to blame, whichever they name: the next start may use it again."""


def endings(sight: Snapshot) -> list[Verdict]:
    """Return how jobs were ended, as far as their launchers have not said it already."""
    return [
        Verdict(
            kind=_KINDS[job.state][0], remedy=Remedy.NOTHING, reasons=(_KINDS[job.state][1],), attempt=job.attempt
        )
        for job in sight.jobs
        if job.state in _KINDS and job.phase is not Phase.SUCCEEDED and _KINDS[job.state][0] not in job.told
    ]
