"""The ranks' times of a step in the journal: a row about every 10 s of an attempt, fewer as it grows long.

The table is no part of a schema version: older programs pass over it, and who writes makes it where it is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.core.codec import to_row

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable

    from deeplink.scheduler.recovery.records import RankTimes

MOST_NUMBERS = 1 << 18
"""Kept for an attempt, of about ten bytes each; beyond it every second row goes, but for the newest."""
MOST_ROWS, LEAST_ROWS = 720, 32

CREATE = """
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
OF_JOB = "SELECT * FROM rank_times WHERE job = ? AND unix > ? ORDER BY restart, relaunch, unix"
FORGET = "DELETE FROM rank_times WHERE job = ?"
_PUT = """
INSERT OR REPLACE INTO rank_times VALUES
  (:job, :restart, :relaunch, :unix, :span_s, :ranks_each, :own_s, :data_s)
"""
_THIS = "job = :job AND restart = :restart AND relaunch = :relaunch"
_COUNT = f"SELECT count(*) FROM rank_times WHERE {_THIS}"  # noqa: S608 - a constant of ours
_THIN = f"""
DELETE FROM rank_times WHERE {_THIS} AND unix IN (
  SELECT unix FROM (SELECT unix, row_number() OVER (ORDER BY unix) AS place, count(*) OVER () AS places
    FROM rank_times WHERE {_THIS})
  WHERE place % 2 = 1 AND place < places)
"""  # noqa: S608 - a constant of ours


def put(db: sqlite3.Connection, times: Iterable[RankTimes]) -> None:
    """Keep these rows; those that are there already are replaced."""
    for each in times:
        row = to_row(each)
        db.execute(_PUT, row)
        most = MOST_NUMBERS // max(1, len(each.own_s) + len(each.data_s))
        if db.execute(_COUNT, row).fetchone()[0] > max(LEAST_ROWS, min(MOST_ROWS, most)):
            db.execute(_THIN, row)
