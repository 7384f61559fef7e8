"""The journal's rows to frozen values and back. No decisions here."""

from __future__ import annotations

import dataclasses
import json
from itertools import groupby
from typing import TYPE_CHECKING, Any

from deeplink.scheduler.watch.notify.news import IncidentNews
from deeplink.scheduler.watch.records import (
    ActionRecord,
    AttemptRecord,
    HealthFinding,
    HealthSeverity,
    Incident,
    IncidentOutcome,
    JobRecord,
    Moment,
    NodeRecord,
    Phase,
    ProgressPoint,
    RankStack,
)
from deeplink.types import Attempt, NodeName

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable

    from deeplink.scheduler.watch.records import Beat

Fields = dict[str, Any]


def of_attempt(attempt: Attempt | None) -> Fields:
    """Return the columns that name an attempt."""
    if attempt is None:
        return {"job": None, "restart": None, "relaunch": None}
    return {"job": attempt.job, "restart": attempt.restart, "relaunch": attempt.relaunch}


def of_beat(beat: Beat, now_unix: float) -> Fields:
    """Return the columns of the attempt a beat is about."""
    return {
        **of_attempt(beat.attempt),
        "phase": beat.phase.value,
        "nodes": json.dumps(beat.nodes),
        "spares": json.dumps(beat.spares),
        "world_size": beat.world_size,
        "unix": now_unix,
        "ended": now_unix if beat.phase.ended else 0.0,
        "ring_crossings": beat.ring_crossings,
        "ring_crossings_stock": beat.ring_crossings_stock,
        "step_timeout_s": beat.step_timeout_s,
        "detail": beat.detail,
    }


def of_node(node: NodeRecord) -> Fields:
    """Return the columns of a node."""
    return {
        "name": node.name,
        "topology_address": node.topology_address,
        "seen_unix": node.seen_unix,
        "silent_s": node.silent_s,
        "shards": node.shards,
        "shard_bytes": node.shard_bytes,
        "verified_bytes": node.verified_bytes,
        "free_bytes": node.free_bytes,
        "job": node.job,
        "health": json.dumps([dataclasses.asdict(finding) for finding in node.health]),
        "boot_id": node.boot_id,
    }


def of_point(point: ProgressPoint) -> Fields:
    """Return the columns of a report."""
    return {
        **of_attempt(point.attempt),
        "rank": point.rank,
        "step": point.step,
        "unix": point.unix,
        "metrics": json.dumps(dict(point.metrics)),
    }


def of_job(beat: Beat) -> Fields:
    """Return the columns of a job."""
    return {
        "job": beat.attempt.job,
        "name": beat.job_name,
        "user": beat.user,
        "label": beat.job_label,
    }


def of_incident(incident: Incident) -> Fields:
    """Return the columns of an incident."""
    return {
        **of_attempt(incident.attempt),
        "id": incident.id,
        "kind": str(incident.kind),
        "node": incident.node,
        "action": str(incident.action),
        "evidence": incident.evidence,
        "began_unix": incident.began_unix,
        "detected_unix": incident.detected_unix,
        "acted_unix": incident.acted_unix,
        "recovered_unix": incident.recovered_unix,
        "outcome": incident.outcome.value,
        "steps_repeated": incident.steps_repeated,
        "timeline": json.dumps([[moment.unix, moment.what] for moment in incident.timeline]),
        "ranks": incident.ranks,
        "step_s": incident.step_s,
    }


def of_stack(incident: str, stack: RankStack) -> Fields:
    """Return the columns of where a rank was."""
    return {"incident": incident, **dataclasses.asdict(stack)}


def of_action(action: ActionRecord) -> Fields:
    """Return the columns of an action."""
    return {
        **of_attempt(action.attempt),
        "key": action.key,
        "incident": action.incident,
        "remedy": action.remedy,
        "node": action.node,
        "exclude": json.dumps(action.exclude),
        "reason": action.reason,
        "began_unix": action.began_unix,
    }


def _attempt(row: sqlite3.Row | Fields) -> Attempt | None:
    return None if row["job"] is None else Attempt(row["job"], row["restart"], row["relaunch"])


def _names(text: str) -> tuple[NodeName, ...]:
    return tuple(NodeName(name) for name in json.loads(text))


def to_jobs(found: Iterable[sqlite3.Row]) -> tuple[JobRecord, ...]:
    """Return the jobs of rows of `statements.JOBS`."""
    return tuple(
        JobRecord(
            job=job,
            name=group[0]["name"],
            user=group[0]["user"],
            attempts=tuple(_to_attempt(row) for row in group),
            label=dict(group[0]).get("label", ""),  # an older schema has none
        )
        for job, group in ((job, list(group)) for job, group in groupby(found, lambda row: int(row["job"])))
    )


def _to_attempt(row: sqlite3.Row) -> AttemptRecord:
    return AttemptRecord(
        attempt=Attempt(row["job"], row["restart"], row["relaunch"]),
        phase=Phase(row["phase"]),
        nodes=_names(row["nodes"]),
        spares=_names(row["spares"]),
        **{
            name: row[name]
            for name in (
                "world_size",
                "began_unix",
                "beat_unix",
                "ended_unix",
                "ring_crossings",
                "ring_crossings_stock",
                "step_timeout_s",
                "detail",
                "first_step",
                "last_step",
                "last_step_unix",
            )
        },
    )


def to_point(row: sqlite3.Row) -> ProgressPoint:
    """Return the report of a row."""
    return ProgressPoint(
        attempt=Attempt(row["job"], row["restart"], row["relaunch"]),
        rank=row["rank"],
        step=row["step"],
        unix=row["unix"],
        metrics=json.loads(row["metrics"]),
    )


def to_node(row: sqlite3.Row) -> NodeRecord:
    """Return the node of a row."""
    fields = dict(row)
    # A reader leaves an older schema as it is: what came later is not there.
    told = json.loads(fields.pop("health", "[]"))
    health = tuple(
        HealthFinding(**{**finding, "severity": HealthSeverity(finding["severity"])}) for finding in told
    )
    return NodeRecord(**fields, health=health)


def to_incident(row: sqlite3.Row) -> Incident:
    """Return the incident of a row."""
    return _to_incident(dict(row))


def _to_incident(fields: Fields) -> Incident:
    attempt = _attempt(fields)
    for name in ("job", "restart", "relaunch"):
        del fields[name]
    outcome = IncidentOutcome(fields.pop("outcome"))
    told = json.loads(fields.pop("timeline", "[]"))  # an older schema has none
    timeline = tuple(Moment(unix, what) for unix, what in told)
    return Incident(attempt=attempt, outcome=outcome, timeline=timeline, **fields)


def seen_by(incident: Incident, hit: sqlite3.Row) -> Incident:
    """Return an incident as a job knows it that it has hit, too: with its own attempt, and how it is."""
    return dataclasses.replace(incident, attempt=_attempt(hit), outcome=IncidentOutcome(hit["outcome"]))


def to_news(row: sqlite3.Row) -> IncidentNews:
    """Return the news of a row of `statements.UNSENT`."""
    fields = dict(row)
    told = bool(fields.pop("opened_told"))
    return IncidentNews(_to_incident(fields), told)


def to_stack(row: sqlite3.Row) -> RankStack:
    """Return where a rank was, of a row."""
    fields = dict(row)
    del fields["incident"]
    return RankStack(**fields)


def to_action(row: sqlite3.Row) -> ActionRecord:
    """Return the action of a row."""
    fields = {name: row[name] for name in row.keys() if name not in {"job", "restart", "relaunch", "exclude"}}  # noqa: SIM118 - a Row iterates over values
    return ActionRecord(attempt=_attempt(row), exclude=_names(row["exclude"]), **fields)
