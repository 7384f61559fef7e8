"""Incidents as JSON documents. Pure."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from deeplink.scheduler.watch.costs import cost

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deeplink.scheduler.watch.records import ActionRecord, Incident, RankStack


def document(incident: Incident) -> dict[str, Any]:
    """Return an incident with its timeline and cost; without its stacks, which are not read with it."""
    plain = dataclasses.replace(incident, stacks=())
    told = dataclasses.asdict(plain)
    del told["stacks"]
    told["attempt"] = str(incident.attempt) if incident.attempt else None
    told["outcome"] = incident.outcome.value
    spent = cost(incident)
    told["cost"] = {
        "rank_hours": spent.total_h,
        "standing_rank_hours": spent.standing_h,
        "repeated_rank_hours": spent.repeated_h,
    }
    return told


def whole_document(
    incident: Incident, actions: Iterable[ActionRecord], stacks: Iterable[RankStack]
) -> dict[str, Any]:
    """Return all that is on record of an incident."""
    done = [
        {**dataclasses.asdict(action), "attempt": str(action.attempt) if action.attempt else None}
        for action in actions
    ]
    return {**document(incident), "actions": done, "stacks": [dataclasses.asdict(stack) for stack in stacks]}
