"""Incidents to tell of."""

from __future__ import annotations

import dataclasses
from typing import Any

from deeplink.core.types import Attempt, NodeName
from deeplink.scheduler.journal.incident_json import IncidentNews
from deeplink.scheduler.recovery.records import Incident, IncidentKind, IncidentOutcome

DEAD = Incident(
    id="17.0.0-node-dead-n1",
    kind=IncidentKind.NODE_DEAD,
    node=NodeName("n1"),
    attempt=Attempt(17, 0, 0),
    evidence="slurmd is silent for 3.1 s",
    began_unix=1_700_000_000.0,
    detected_unix=1_700_000_003.5,
)


def dead(job: int, node: str = "n1", **changes: Any) -> Incident:
    attempt = Attempt(job, 0, 0)
    return dataclasses.replace(
        DEAD, **{"id": f"{attempt}-node-dead-{node}", "node": NodeName(node), "attempt": attempt, **changes}
    )


def recovered(incident: Incident) -> Incident:
    return dataclasses.replace(
        incident,
        outcome=IncidentOutcome.RECOVERED,
        recovered_unix=incident.began_unix + 10.5,
        action="drain-down",
        ranks=1_440,
        steps_repeated=7,
        step_s=0.5,
    )


def news(job: int, node: str = "n1", **changes: Any) -> IncidentNews:
    return IncidentNews(dead(job, node, **changes))
