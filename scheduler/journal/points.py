"""Reports of training in the journal: each of the last minute, then fewer, and of an attempt so many at most."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.core.codec import to_row
from deeplink.scheduler.journal import schema

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Collection

    from deeplink.core.types import Attempt
    from deeplink.scheduler.recovery.records import ProgressPoint

KEPT_POINTS = 4_096
"""Progress points kept per attempt; beyond it every second one goes (the first and the newest stay)."""
EACH_POINT_S, SPARSE_S = 60.0, 10.0
"""So long each progress point is kept; of those before, the first one in each so many seconds of each rank is."""


def put(db: sqlite3.Connection, points: Collection[ProgressPoint]) -> None:
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
