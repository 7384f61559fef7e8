"""The journal's statements, and its rows to frozen values and back. No decisions here."""

from __future__ import annotations

import dataclasses
import json
from itertools import groupby
from typing import TYPE_CHECKING, Any

from deeplink.scheduler.watch.notify.news import News
from deeplink.scheduler.watch.records import (
    ActionRecord,
    AttemptRecord,
    Finding,
    Incident,
    JobRecord,
    Moment,
    NodeRecord,
    Outcome,
    Phase,
    ProgressPoint,
    RankStack,
    Severity,
)
from deeplink.types import Attempt, NodeName

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable

    from deeplink.scheduler.watch.records import Beat

Fields = dict[str, Any]

PUT_JOB = """
INSERT INTO jobs (job, name, user) VALUES (:job, :name, :user)
ON CONFLICT (job) DO UPDATE SET
  name = CASE excluded.name WHEN '' THEN name ELSE excluded.name END,
  user = CASE excluded.user WHEN '' THEN user ELSE excluded.user END
"""
PUT_EXCLUDED = """
INSERT INTO jobs (job, name, user, excluded) VALUES (:job, '', '', :excluded)
ON CONFLICT (job) DO UPDATE SET excluded = excluded.excluded
"""
PUT_ATTEMPT = """
INSERT INTO attempts (job, restart, relaunch, phase, nodes, spares, world_size, began_unix, beat_unix, ended_unix,
  ring_crossings, ring_crossings_stock, step_timeout_s, detail)
VALUES (:job, :restart, :relaunch, :phase, :nodes, :spares, :world_size, :unix, :unix, :ended,
  :ring_crossings, :ring_crossings_stock, :step_timeout_s, :detail)
ON CONFLICT (job, restart, relaunch) DO UPDATE SET
  phase = excluded.phase, nodes = excluded.nodes, spares = excluded.spares, world_size = excluded.world_size,
  beat_unix = max(beat_unix, excluded.beat_unix),
  ended_unix = CASE WHEN ended_unix = 0 THEN excluded.ended_unix ELSE ended_unix END,
  ring_crossings = excluded.ring_crossings, ring_crossings_stock = excluded.ring_crossings_stock,
  step_timeout_s = excluded.step_timeout_s, detail = excluded.detail
"""
END_OLDER = """
UPDATE attempts SET ended_unix = :unix
WHERE job = :job AND ended_unix = 0 AND (restart, relaunch) <
  (SELECT restart, relaunch FROM attempts WHERE job = :job ORDER BY restart DESC, relaunch DESC LIMIT 1)
"""
PUT_NODE = """
INSERT INTO nodes
  (name, topology_address, seen_unix, silent_s, shards, shard_bytes, verified_bytes, free_bytes, job, health,
  boot_id)
VALUES
  (:name, :topology_address, :seen_unix, :silent_s, :shards, :shard_bytes, :verified_bytes, :free_bytes, :job,
  :health, :boot_id)
ON CONFLICT (name) DO UPDATE SET
  topology_address =
    CASE excluded.topology_address WHEN '' THEN topology_address ELSE excluded.topology_address END,
  seen_unix = excluded.seen_unix, silent_s = excluded.silent_s, shards = excluded.shards,
  shard_bytes = excluded.shard_bytes, verified_bytes = excluded.verified_bytes, free_bytes = excluded.free_bytes,
  job = excluded.job, health = excluded.health,
  boot_id = CASE excluded.boot_id WHEN '' THEN boot_id ELSE excluded.boot_id END
WHERE excluded.seen_unix >= seen_unix OR excluded.job = job
"""
PUT_POINT = """
INSERT INTO progress (job, restart, relaunch, rank, step, unix, metrics)
VALUES (:job, :restart, :relaunch, :rank, :step, :unix, :metrics)
ON CONFLICT (job, restart, relaunch, rank, step) DO UPDATE SET unix = excluded.unix, metrics = excluded.metrics
"""
NOTE_STEP = """
UPDATE attempts SET first_step = min(ifnull(first_step, :step), :step),
  last_step = max(ifnull(last_step, :step), :step), last_step_unix = max(last_step_unix, :unix)
WHERE job = :job AND restart = :restart AND relaunch = :relaunch
"""
_THIS = "job = :job AND restart = :restart AND relaunch = :relaunch"
COUNT_POINTS = f"SELECT count(*) FROM progress WHERE {_THIS}"  # noqa: S608 - a constant of ours
THIN_POINTS = f"""
DELETE FROM progress WHERE {_THIS} AND (rank, step) IN (
  SELECT rank, step FROM (SELECT rank, step, row_number() OVER (PARTITION BY rank ORDER BY step) AS place,
    count(*) OVER (PARTITION BY rank) AS places FROM progress WHERE {_THIS})
  WHERE place % 2 = 0 AND place < places)
"""  # noqa: S608 - a constant of ours
FIRST_STEP = f"""
SELECT a.first_step, (SELECT min(unix) FROM progress WHERE {_THIS}) FROM attempts a WHERE {_THIS}
"""  # noqa: S608 - a constant of ours
LAST_STEP_BEFORE = """
SELECT max(last_step) FROM attempts WHERE job = :job AND (restart, relaunch) < (:restart, :relaunch)
"""
TO_SETTLE = """
SELECT * FROM incidents
WHERE (job = :job AND (restart, relaunch) < (:restart, :relaunch) OR id IN (
    SELECT incident FROM hits WHERE job = :job AND (restart, relaunch) < (:restart, :relaunch)))
  AND (outcome = 'open' OR outcome = 'failed' AND kind != 'rank-failed' AND recovered_unix = 0)
  AND NOT EXISTS (SELECT 1 FROM hits WHERE incident = incidents.id AND job = :job AND outcome = 'recovered')
"""
NEW_INCIDENT = """
INSERT INTO incidents (id, kind, node, job, restart, relaunch, action, evidence, began_unix, detected_unix,
  acted_unix, recovered_unix, outcome, steps_repeated, timeline, ranks, step_s)
VALUES (:id, :kind, :node, :job, :restart, :relaunch, :action, :evidence, :began_unix, :detected_unix,
  :acted_unix, :recovered_unix, :outcome, :steps_repeated, :timeline, :ranks, :step_s)
"""
CHANGE_INCIDENT = """
UPDATE incidents SET kind = :kind, node = :node, job = :job, restart = :restart, relaunch = :relaunch,
  action = :action, evidence = :evidence, began_unix = :began_unix, detected_unix = :detected_unix,
  acted_unix = :acted_unix, recovered_unix = :recovered_unix, outcome = :outcome,
  steps_repeated = :steps_repeated, timeline = :timeline, ranks = :ranks, step_s = :step_s
WHERE id = :id
"""
PUT_STACK = """
INSERT INTO stacks (incident, rank, pid, state, source, text, flight)
VALUES (:incident, :rank, :pid, :state, :source, :text, :flight)
ON CONFLICT (incident, rank) DO UPDATE SET
  pid = excluded.pid, state = excluded.state, source = excluded.source, text = excluded.text,
  flight = excluded.flight
"""
THIN_STACKS = """
DELETE FROM stacks WHERE incident NOT IN (
  SELECT incident FROM stacks GROUP BY incident ORDER BY max(rowid) DESC LIMIT ?)
"""
NEWEST_STEPS = f"""
SELECT step, unix FROM progress WHERE {_THIS} AND rank = 0 ORDER BY step DESC LIMIT :limit
"""  # noqa: S608 - a constant of ours
WORLD_SIZE = f"SELECT world_size FROM attempts WHERE {_THIS}"  # noqa: S608 - a constant of ours
CANDIDATES = """
SELECT * FROM incidents WHERE number IN (
  SELECT number FROM incidents WHERE node = :node
  UNION SELECT number FROM incidents WHERE job = :job
  UNION SELECT number FROM incidents WHERE kind = :kind AND kind = 'storage-frozen'
  UNION SELECT incidents.number FROM incidents JOIN hits ON hits.incident = incidents.id
    WHERE hits.node = :node OR hits.job = :job)
ORDER BY number DESC LIMIT :limit
"""
INCIDENT_BY_ID = "SELECT * FROM incidents WHERE id = ?"
OPEN_OF_JOB = """
SELECT * FROM incidents WHERE outcome = 'open'
  AND (job = :job OR id IN (SELECT incident FROM hits WHERE job = :job AND outcome = 'open'))
"""
HIT = "SELECT * FROM hits WHERE id = ?"
HIT_BY_NUMBER = "SELECT * FROM hits WHERE number = ?"
HITS_OF_JOB = "SELECT * FROM hits WHERE job = ? ORDER BY restart, relaunch"
PUT_HIT = """
INSERT INTO hits (id, incident, number, node, job, restart, relaunch, outcome)
VALUES (:id, :incident, :number, :node, :job, :restart, :relaunch, :outcome)
ON CONFLICT (id) DO UPDATE SET incident = excluded.incident
"""
END_HITS = (
    "UPDATE hits SET outcome = :outcome WHERE incident = :incident AND job = :job AND outcome != 'recovered'"
)
OTHERS_HIT = """
SELECT count(*) FROM hits WHERE incident = :incident AND job IS NOT NULL AND job != :job AND outcome = 'open'
"""
BELOW = "SELECT node FROM hits WHERE incident = ? AND node IS NOT NULL"
LOST_BELOW = """
SELECT * FROM incidents WHERE node = :node AND id != :incident ORDER BY number DESC LIMIT :limit
"""
TAKE_OVER = (
    "UPDATE actions SET incident = :incident WHERE incident = :id",
    "UPDATE OR REPLACE stacks SET incident = :incident WHERE incident = :id",
    "UPDATE hits SET incident = :incident WHERE incident = :id",
    "DELETE FROM notices WHERE incident = :id",
    "DELETE FROM incidents WHERE id = :id",
)
"""What becomes of an incident that turns out to be part of another."""
PUT_ACTION = """
INSERT INTO actions (key, incident, remedy, job, restart, relaunch, node, exclude, reason, began_unix)
VALUES (:key, :incident, :remedy, :job, :restart, :relaunch, :node, :exclude, :reason, :began_unix)
ON CONFLICT (key) DO NOTHING
"""
JOBS = """
SELECT jobs.name, jobs.user, attempts.* FROM attempts JOIN jobs USING (job)
WHERE attempts.job IN (
  SELECT job FROM attempts WHERE :job IS NULL OR job = :job
  GROUP BY job ORDER BY max(beat_unix) DESC, job DESC LIMIT :limit)
ORDER BY max(beat_unix) OVER (PARTITION BY attempts.job) DESC, attempts.job DESC, restart, relaunch
"""
POINTS = """
SELECT * FROM progress WHERE job = ? AND unix > ? ORDER BY restart, relaunch, rank, step LIMIT ?
"""
UNSENT = """
SELECT incidents.*, EXISTS (SELECT 1 FROM notices
    WHERE channel = :channel AND incident = incidents.id AND state = 'open' AND result = 'sent') AS opened_told
FROM incidents JOIN channels ON channels.channel = :channel
WHERE number > after_number AND NOT EXISTS (SELECT 1 FROM notices
    WHERE channel = :channel AND incident = incidents.id AND state = incidents.outcome)
ORDER BY number LIMIT :limit
"""
OPEN_CHANNEL = """
INSERT INTO channels (channel, after_number) SELECT :channel, ifnull(max(number), 0) FROM incidents
WHERE true ON CONFLICT (channel) DO NOTHING
"""
PUT_NOTICE = """
INSERT INTO notices (channel, incident, state, unix, result) VALUES (:channel, :incident, :state, :unix, :result)
ON CONFLICT (channel, incident, state) DO NOTHING
"""
# Up to where all is told: those need not be looked at again. One that failed may yet recover, if it is of late.
MOVE_CHANNEL = """
UPDATE channels SET after_number = ifnull((
  SELECT min(number) - 1 FROM incidents WHERE number > after_number AND (
    outcome = 'open' OR outcome = 'failed' AND detected_unix > :unix - 86400
    OR NOT EXISTS (SELECT 1 FROM notices
      WHERE channel = :channel AND incident = incidents.id AND state = incidents.outcome))),
  (SELECT ifnull(max(number), 0) FROM incidents))
WHERE channel = :channel
"""
THIN_NOTICES = """
DELETE FROM notices WHERE channel = :channel AND incident IN (
  SELECT id FROM incidents WHERE number <= (SELECT after_number FROM channels WHERE channel = :channel))
"""
ACTIONS = """
SELECT * FROM actions WHERE (NOT :open OR done_unix = 0) AND (:incident IS NULL OR incident = :incident)
ORDER BY began_unix, key
"""
DRAINED = """
SELECT node, max(began_unix) AS unix FROM actions
WHERE node IS NOT NULL AND remedy IN ('drain', 'drain-down') GROUP BY node
"""


def incidents(*, hits: bool, **asked: object) -> str:
    """Return the statement that finds the incidents asked for; what is None or False is not asked.

    Not one statement for all: none of the indexes could be used.

    Args:
        hits: whether the journal has that table.
        asked: job, kind, node, since, open.
    """
    also = " OR id IN (SELECT incident FROM hits WHERE {0} = :{0})" if hits else ""
    conditions = {
        "job": f"(job = :job{also.format('job')})",
        "node": f"(node = :node{also.format('node')})",
        "kind": "kind = :kind",
        "since": "began_unix >= :since",
        "open": "outcome = 'open'",
    }
    wanted = [condition for name, condition in conditions.items() if asked.get(name)]
    where = f"WHERE {' AND '.join(wanted)} " if wanted else ""
    return f"SELECT * FROM incidents {where}ORDER BY number DESC LIMIT :limit"  # noqa: S608 - constants of ours


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
    """Return the jobs of rows of JOBS."""
    return tuple(
        JobRecord(
            job=job,
            name=group[0]["name"],
            user=group[0]["user"],
            attempts=tuple(_to_attempt(row) for row in group),
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
    health = tuple(Finding(**{**finding, "severity": Severity(finding["severity"])}) for finding in told)
    return NodeRecord(**fields, health=health)


def to_incident(row: sqlite3.Row) -> Incident:
    """Return the incident of a row."""
    return _to_incident(dict(row))


def _to_incident(fields: Fields) -> Incident:
    attempt = _attempt(fields)
    for name in ("job", "restart", "relaunch"):
        del fields[name]
    outcome = Outcome(fields.pop("outcome"))
    told = json.loads(fields.pop("timeline", "[]"))  # an older schema has none
    timeline = tuple(Moment(unix, what) for unix, what in told)
    return Incident(attempt=attempt, outcome=outcome, timeline=timeline, **fields)


def seen_by(incident: Incident, hit: sqlite3.Row) -> Incident:
    """Return an incident as a job knows it that it has hit, too: with its own attempt, and how it is."""
    return dataclasses.replace(incident, attempt=_attempt(hit), outcome=Outcome(hit["outcome"]))


def to_news(row: sqlite3.Row) -> News:
    """Return the news of a row of UNSENT."""
    fields = dict(row)
    told = bool(fields.pop("opened_told"))
    return News(_to_incident(fields), told)


def to_stack(row: sqlite3.Row) -> RankStack:
    """Return where a rank was, of a row."""
    fields = dict(row)
    del fields["incident"]
    return RankStack(**fields)


def to_action(row: sqlite3.Row) -> ActionRecord:
    """Return the action of a row."""
    fields = {name: row[name] for name in row.keys() if name not in {"job", "restart", "relaunch", "exclude"}}  # noqa: SIM118 - a Row iterates over values
    return ActionRecord(attempt=_attempt(row), exclude=_names(row["exclude"]), **fields)
