"""Incidents as rows: what is told under one id is one incident, and so is one fault that hits several jobs.

Everything here works inside a transaction of `journal`. The id is made by who sees a fault first; each further
node, job or id of it has a row in `hits`, with how that job is now. Whoever asks by such an id finds the one.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from deeplink.core.codec import from_row, to_row
from deeplink.core.types import Attempt, NodeName
from deeplink.scheduler.journal import schema
from deeplink.scheduler.recovery.incident_merging import (
    SLACK_S,
    are_together,
    is_another,
    is_same,
    merged,
    step_seconds,
    united,
    with_timeline,
    within_bounds,
)
from deeplink.scheduler.recovery.records import (
    NODE_LOST,
    Incident,
    IncidentKind,
    IncidentOutcome,
    Moment,
)

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Collection

KEPT_STACKS = 200  # incidents of which the ranks' stacks are kept: the newest
STEPS_TIMED = 64
MOST_CANDIDATES = 32
"""Incidents of a node or job, the newest, among which the one is looked for that a telling belongs to."""
MOST_BELOW = 4_096


def incident_of(row: sqlite3.Row) -> Incident:
    """Return the incident of a row; its stacks are rows of their own."""
    return from_row(Incident, dict(row))


def _row(incident: Incident) -> dict[str, Any]:
    return to_row(incident, leave_out=("stacks",))


def put(db: sqlite3.Connection, told: Incident, below: Collection[NodeName] = ()) -> Incident:
    """Add a telling to the incident it belongs to, or begin one; return what is on record then."""
    known = find(db, told.id, told.began_unix)
    if known is not None and is_another(known, told):
        told, known = replace(told, id=_next_id(db, told.id)), None
    elif known is not None and known.kind == IncidentKind.WATCHDOG_PARTITIONED and told.attempt is not None:
        known = replace(
            known, outcome=told.outcome, recovered_unix=0.0
        )  # it cost a job its attempt: that is not over
    if known is None and (known := _of_the_same_fault(db, told)) is not None:
        known = _joined(db, known, told)
    whole = merged(known, _as_part(db, known, told)) if known else replace(told, timeline=united(told.timeline))
    whole = with_timeline(_with_scale(db, whole), known, replace(told, evidence=_said(db, known, told)))
    # Changed, not put again: that would use up a number each time.
    db.execute(schema.CHANGE_INCIDENT if known else schema.NEW_INCIDENT, _row(whole))
    if told.stacks:
        db.executemany(
            schema.PUT_STACK, [{**to_row(one), "incident": whole.id} for one in within_bounds(told.stacks)]
        )
        db.execute(schema.THIN_STACKS, (KEPT_STACKS,))
    if known and told.id == known.id:
        if told.node and known.node and told.node != known.node:
            _put_node(db, whole, told.node)
        if told.attempt and known.attempt and told.attempt.job != known.attempt.job:
            _put_job(db, known, told, f"{known.id}/{told.attempt}")
    if below:
        _take_over(db, whole, below)
    return incident_of(db.execute(schema.INCIDENT_BY_ID, (whole.id, whole.id)).fetchone())


def find(db: sqlite3.Connection, name: str, began_unix: float = math.inf) -> Incident | None:
    """Return the incident of this id that had begun by then, of several the newest; None where there is none."""
    known = [incident_of(row) for row in db.execute(schema.INCIDENTS_BY_ID, {"id": name})]
    return next((one for one in known if one.began_unix <= began_unix + SLACK_S), known[-1] if known else None)


def _next_id(db: sqlite3.Connection, name: str) -> str:
    """Return the id of what comes again: `cluster-node-sick-n3@2`."""
    base = name.partition("@")[0]
    return f"{base}@{db.execute(schema.TIMES, {'id': base}).fetchone()[0] + 1}"


def put_moment(db: sqlite3.Connection, incident: str, moment: Moment) -> None:
    """Add to the course of the incident of this id, if it is on record."""
    row = db.execute(schema.INCIDENT_BY_ID, (incident, incident)).fetchone()
    if row is not None:
        known = incident_of(row)
        whole = replace(known, timeline=united(known.timeline, [moment]))
        db.execute(schema.CHANGE_INCIDENT, _row(whole))


def settle(db: sqlite3.Connection, attempt: dict[str, Any], now_unix: float) -> bool:
    """Close the incidents of older attempts once this one trains, and count the steps done again; True if any."""
    # One that has hit other jobs, too, stays open until they train again, or end.
    first = db.execute(schema.FIRST_STEP, attempt).fetchone()
    if first is None or first[0] is None:
        return False
    waiting = [incident_of(row) for row in db.execute(schema.TO_SETTLE, attempt)]
    if not waiting:
        return False
    last = db.execute(schema.LAST_STEP_BEFORE, attempt).fetchone()[0]
    again = 0 if last is None else max(0, last - first[0] + 1)
    for known in waiting:
        trains = first[1] or now_unix
        if _others_wait(db, known.id, attempt["job"], IncidentOutcome.RECOVERED):
            put_moment(db, known.id, Moment(trains, f"job {_called(db, attempt['job'])} trains again"))
            continue
        whole = replace(
            known,
            outcome=IncidentOutcome.RECOVERED,
            recovered_unix=max(trains, known.detected_unix),
            steps_repeated=max(known.steps_repeated, again),
        )
        db.execute(schema.CHANGE_INCIDENT, _row(with_timeline(whole, known, whole)))
    return True


def close(db: sqlite3.Connection, job: int, outcome: IncidentOutcome, now_unix: float) -> bool:
    """Give every open incident of a job its end, the job's own; True if there was any."""
    found = [incident_of(row) for row in db.execute(schema.OPEN_OF_JOB, {"job": job})]
    for known in found:
        waits = _others_wait(db, known.id, job, outcome)
        if not waits:
            db.execute("UPDATE incidents SET outcome = ? WHERE id = ?", (outcome.value, known.id))
        if now_unix:
            which = f"job {_called(db, job)}" if waits else "the job"
            put_moment(db, known.id, Moment(now_unix, f"{which} ended: {outcome.value}"))
    return bool(found)


def _of_the_same_fault(db: sqlite3.Connection, told: Incident) -> Incident | None:
    asked = {**_row(told), "limit": MOST_CANDIDATES}
    for row in db.execute(schema.CANDIDATES, asked).fetchall():
        if is_same(incident_of(row), told, shares_node=bool(row["shares_node"])):
            return incident_of(row)
    return None


def _joined(db: sqlite3.Connection, known: Incident, told: Incident) -> Incident:
    """Note that `told` is `known`, too; return `known`, open again where it only waited for this."""
    _put_job(db, known, told, told.id)
    if known.outcome is IncidentOutcome.FAILED and told.outcome is IncidentOutcome.OPEN:
        # Its launcher gave it that end when it told about this one; the job goes on being in need.
        return replace(known, outcome=IncidentOutcome.OPEN)
    return known


def _as_part(db: sqlite3.Connection, known: Incident | None, told: Incident) -> Incident:
    """Return a telling as what it adds: of another job the evidence says so; its end may not be the whole's."""
    said = replace(told, evidence=_said(db, known, told))
    job = (told.attempt or (known.attempt if known else None) or Attempt(0, 0, 0)).job
    if known is None or told.outcome is IncidentOutcome.OPEN:
        return said
    beside = told.id != known.id and told.node != known.node  # a spare's loss, say: that is over at once
    if not beside and not _others_wait(db, known.id, job, told.outcome):
        return said
    return replace(said, outcome=IncidentOutcome.OPEN, recovered_unix=0.0)


def _called(db: sqlite3.Connection, job: int) -> str:
    """Return what a job is called, `12_3` for a task of an array."""
    found = db.execute(schema.LABEL, (job,)).fetchone()
    return str(found[0] if found else job)


def _said(db: sqlite3.Connection, known: Incident | None, told: Incident) -> str:
    other = known and known.attempt and told.attempt and known.attempt.job != told.attempt.job
    return f"job {_called(db, told.attempt.job)}: {told.evidence}" if other and told.attempt else told.evidence


def _others_wait(db: sqlite3.Connection, incident: str, job: int, outcome: IncidentOutcome) -> bool:
    """Note how a job is now; return whether others that this hit still wait."""
    hit = {"incident": incident, "job": job, "outcome": outcome.value}
    db.execute(schema.END_HITS, hit)
    return bool(db.execute(schema.OTHERS_HIT, hit).fetchone()[0])


def _hit(told: Incident, incident: str) -> dict[str, Any]:
    return {**_row(told), "incident": incident, "number": told.number or None}


def _take_over(db: sqlite3.Connection, whole: Incident, below: Collection[NodeName]) -> None:
    """Make what is on record of the loss of these nodes a part of this incident."""
    for name in sorted(below)[:MOST_BELOW]:
        _put_node(db, whole, name)
        asked = {**_row(replace(whole, attempt=None, node=name)), "limit": MOST_CANDIDATES}
        for row in db.execute(schema.CANDIDATES, asked).fetchall():
            if row["id"] != whole.id and row["kind"] in NODE_LOST and are_together(incident_of(row), whole):
                whole = _with_part(db, whole, incident_of(row))


def _put_node(db: sqlite3.Connection, whole: Incident, name: NodeName) -> None:
    hit = _hit(replace(whole, attempt=None, node=name), whole.id)
    db.execute(schema.PUT_HIT, {**hit, "id": f"{whole.id}/{name}"})


def _put_job(db: sqlite3.Connection, known: Incident, told: Incident, name: str) -> None:
    """Note what else an incident hit, of which it is told as `name`; and what it hit first."""
    if known.attempt is not None and not db.execute(schema.HIT, (known.id,)).fetchone():
        db.execute(schema.PUT_HIT, _hit(known, known.id))
    db.execute(schema.PUT_HIT, {**_hit(told, known.id), "id": name})


def _with_part(db: sqlite3.Connection, whole: Incident, part: Incident) -> Incident:
    for statement in schema.TAKE_OVER:
        db.execute(statement, {"id": part.id, "incident": whole.id})
    _put_job(db, whole, part, part.id)
    told = replace(part, evidence=f"{part.id}: {part.evidence}", outcome=IncidentOutcome.OPEN, recovered_unix=0.0)
    both = merged(whole, told)
    db.execute(schema.CHANGE_INCIDENT, _row(both))
    return both


def _with_scale(db: sqlite3.Connection, incident: Incident) -> Incident:
    """Return it with the ranks and the step time of its attempt, as far as no one told them and they are known."""
    if incident.attempt is None or (incident.ranks and incident.step_s):
        return incident
    this = to_row(incident.attempt)
    size = db.execute(schema.WORLD_SIZE, this).fetchone()
    steps = db.execute(schema.NEWEST_STEPS, {**this, "limit": STEPS_TIMED}).fetchall()
    return replace(
        incident,
        ranks=incident.ranks or (size["world_size"] if size else 0),
        step_s=incident.step_s or step_seconds([(row["step"], row["unix"]) for row in reversed(steps)]),
    )
