"""Training in the journal, thinned as it grows: reports, and how long the ranks' own part of a step was."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.core.codec import to_row
from deeplink.scheduler.journal import schema

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Collection, Iterable

    from deeplink.core.types import Attempt
    from deeplink.scheduler.recovery.records import ProgressPoint, RankTimes

KEPT_POINTS = 4_096
"""Progress points kept per attempt; beyond it every second one goes (the first and the newest stay)."""
EACH_POINT_S, SPARSE_S = 60.0, 10.0
"""So long each progress point is kept; of those before, the first one in each so many seconds of each rank is."""
MOST_NUMBERS = 1 << 18
"""Kept for an attempt, of about ten bytes each; beyond it every second row goes, but for the newest."""
MOST_ROWS, LEAST_ROWS = 720, 32

CREATE_TIMES = """
CREATE TABLE IF NOT EXISTS rank_times (
  job INTEGER NOT NULL,
  restart INTEGER NOT NULL,
  relaunch INTEGER NOT NULL,
  unix REAL NOT NULL,
  span_s REAL NOT NULL,
  ranks_each INTEGER NOT NULL,
  own_s TEXT NOT NULL,
  data_s TEXT NOT NULL,
  PRIMARY KEY (job, restart, relaunch, unix)
) WITHOUT ROWID
"""
"""No part of a schema version: older programs pass over the table, and who writes makes it where it is missing."""
TIMES_OF_JOB = "SELECT * FROM rank_times WHERE job = ? AND unix > ? ORDER BY restart, relaunch, unix"
FORGET_TIMES = "DELETE FROM rank_times WHERE job = ?"
_PUT_TIMES = """
INSERT OR REPLACE INTO rank_times VALUES
  (:job, :restart, :relaunch, :unix, :span_s, :ranks_each, :own_s, :data_s)
"""
_COUNT = f"SELECT count(*) FROM rank_times WHERE {schema.THIS}"  # noqa: S608 - a constant of ours
_THIN = f"""
DELETE FROM rank_times WHERE {schema.THIS} AND unix IN (
  SELECT unix FROM (SELECT unix, row_number() OVER (ORDER BY unix) AS place, count(*) OVER () AS places
    FROM rank_times WHERE {schema.THIS})
  WHERE place % 2 = 1 AND place < places)
"""  # noqa: S608 - a constant of ours


def put_points(db: sqlite3.Connection, points: Collection[ProgressPoint]) -> None:
    """Keep these reports, and thin what their attempts have."""
    rows = list(map(to_row, points))
    newest: dict[Attempt, float] = {}
    for point in points:
        newest[point.attempt] = max(point.unix, newest.get(point.attempt, 0.0))
    before = {attempt: db.execute(schema.LAST_STEP_UNIX, to_row(attempt)).fetchone() for attempt in newest}
    for statement in (schema.PUT_POINT, schema.NOTE_STEP):
        db.executemany(statement, rows)
    for attempt, unix in newest.items():
        this = to_row(attempt)
        if before[attempt] and before[attempt][0] // SPARSE_S != unix // SPARSE_S:
            oldest = (unix - EACH_POINT_S) // SPARSE_S * SPARSE_S
            db.execute(schema.SPARSE_POINTS, {**this, "before": oldest, "every": SPARSE_S})
        if db.execute(schema.COUNT_POINTS, this).fetchone()[0] > KEPT_POINTS:
            db.execute(schema.THIN_POINTS, this)


def put_times(db: sqlite3.Connection, times: Iterable[RankTimes]) -> None:
    """Keep these rows; those that are there already are replaced."""
    for each in times:
        row = to_row(each)
        db.execute(_PUT_TIMES, row)
        most = MOST_NUMBERS // max(1, len(each.own_s) + len(each.data_s))
        if db.execute(_COUNT, row).fetchone()[0] > max(LEAST_ROWS, min(MOST_ROWS, most)):
            db.execute(_THIN, row)
