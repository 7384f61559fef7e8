"""What people had the watchdog do: who, when, why, with which commands, and how it ended. Kept in the journal."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deeplink.core.codec import from_row, to_row
from deeplink.core.text import printable

if TYPE_CHECKING:
    from collections.abc import Collection

    from deeplink.scheduler.journal.journal import Journal

KEPT = 20_000
"""So many are kept, the newest."""
_COLUMNS = "request verb target nodes why force person via saw commands asked_unix"
_PUT = (
    f"INSERT INTO operations ({', '.join(_COLUMNS.split())}) "  # noqa: S608 - constants of ours
    f"VALUES ({', '.join(f':{name}' for name in _COLUMNS.split())}) ON CONFLICT (request) DO NOTHING"
)
_THIN = "DELETE FROM operations WHERE done_unix > 0 AND number <= (SELECT max(number) FROM operations) - ?"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRecord:
    """One thing a person asked for: written before its first command, closed after its last."""

    request: str  # the caller's id of it: the same one twice does one thing
    verb: str
    target: str  # node, job, dataset or incident, as it was named
    nodes: str = ""  # of a dataset: onto which
    why: str = ""
    force: bool = False
    person: str  # who asked
    via: str = ""  # whose token it came with, where that is somebody else's: a console's
    saw: str = ""  # what it depends on, as it was when the person agreed; JSON
    commands: tuple[str, ...] = ()  # as a shell takes them
    asked_unix: float = 0.0
    done_unix: float = 0.0  # 0 while it is under way
    outcome: str = ""  # done, refused, failed
    result: str = ""  # for people

    @property
    def is_open(self) -> bool:
        """Whether it is under way."""
        return not self.done_unix


class OperationLog:
    """The operations in a journal. Thread-safe, as the journal is. Raises `JournalError`."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def begin(self, record: OperationRecord) -> OperationRecord:
        """Write down an intent, durably; return what is on record under its id, from before perhaps."""
        row = {**to_row(record), "commands": json.dumps(record.commands)}
        with self._journal._transaction(durable=True) as db:  # noqa: SLF001 - of one package
            db.execute(_PUT, row)
            db.execute(_THIN, (KEPT,))
        found = self.of(record.request)
        return found or record

    def end(self, request: str, outcome: str, result: str, now_unix: float) -> None:
        """Write down how an operation ended; a second end changes nothing."""
        with self._journal._transaction(durable=True) as db:  # noqa: SLF001 - of one package
            db.execute(
                "UPDATE operations SET done_unix = ?, outcome = ?, result = ? WHERE request = ? AND done_unix = 0",
                (now_unix, outcome, printable(result), request),
            )

    def of(self, request: str) -> OperationRecord | None:
        """Return the operation of this id, or None."""
        found = self._found("WHERE request = ?", (request,))
        return found[0] if found else None

    def unfinished(self) -> tuple[OperationRecord, ...]:
        """Return those under way, the oldest first."""
        return self._found("WHERE done_unix = 0 ORDER BY number", ())

    def newest(self, targets: Collection[str] = (), limit: int = 100) -> tuple[OperationRecord, ...]:
        """Return the newest operations, on these targets or on all, the newest first."""
        where = f"WHERE target IN ({', '.join('?' * len(targets))}) " if targets else ""
        return self._found(f"{where}ORDER BY number DESC LIMIT ?", (*targets, limit))

    def last_done(self, verbs: Collection[str], target: str = "") -> OperationRecord | None:
        """Return the newest one of these verbs that was done, on this target or on any."""
        about = " AND target = ?" if target else ""
        where = f"WHERE verb IN ({', '.join('?' * len(verbs))}) AND outcome = 'done'{about} "
        found = self._found(f"{where}ORDER BY number DESC LIMIT 1", (*verbs, *filter(None, (target,))))
        return found[0] if found else None

    def _found(self, where: str, values: tuple[Any, ...]) -> tuple[OperationRecord, ...]:
        rows = self._journal._rows(f"SELECT * FROM operations {where}", values)  # noqa: S608, SLF001 - constants of ours
        return tuple([from_row(OperationRecord, row) for row in rows])
