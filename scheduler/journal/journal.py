"""The journal: what the watchdog and the launchers remember, in one SQLite file that survives being killed.

Every write is one transaction and idempotent: written twice, or begun and cut off by a kill, it leaves what it
should. The file is opened by one writer (the watchdog holds a lock) and any number
of readers.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Self, TypeVar

from deeplink.core.codec import from_row, to_row
from deeplink.core.errors import DeepLinkError
from deeplink.core.private import PrivateFolderError, check_private_file
from deeplink.core.text import printable
from deeplink.core.types import Attempt, NodeName
from deeplink.scheduler.journal import incident_rows, progress_rows, schema
from deeplink.scheduler.journal.incident_json import IncidentNews
from deeplink.scheduler.journal.schema import APPLICATION_ID, CREATE, MIGRATIONS, OPERATIONS, SCHEMA_VERSION
from deeplink.scheduler.journal.standby import Standby, takes_no_writes
from deeplink.scheduler.recovery.records import (
    ActionRecord,
    AttemptRecord,
    Incident,
    IncidentOutcome,
    JobRecord,
    Moment,
    NodeRecord,
    ProgressPoint,
    RankStack,
    RankTimes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from deeplink.scheduler.recovery.records import Beat

T = TypeVar("T")
_PROBLEMS = (sqlite3.Error, PrivateFolderError, OSError)

BUSY_TIMEOUT_S = 10.0
KEPT_CURVES, CURVES_S = 1_000, 7 * 86_400.0
"""Jobs whose progress is kept, up to half a megabyte for each attempt; and for how long at least."""
KEPT_JOBS, JOBS_S = 10_000, 30 * 86_400.0
THINNED_AT_ONCE = 5  # heartbeats wait meanwhile: a transaction of some ten milliseconds


def default_journal(state: Path) -> Path:
    """Return where the watchdog's journal lies below the folder `Config.state`."""
    return state / "watch.sqlite"


class JournalError(DeepLinkError):
    """A journal cannot be used; it is left as it is."""

    def __init__(self, path: Path, problem: str, remedy: str, *, corrupt: bool = False) -> None:
        super().__init__(f"journal {path}: {problem}", remedy=remedy)
        self.path, self.problem = path, problem
        self.corrupt = corrupt  # the file is damaged, or is no journal at all


class JournalMissingError(JournalError):
    """There is no journal where one is to be read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "there is none", "`deeplink watch` and `deeplink run` write them; see --journal.")


class Journal:
    """An open journal. Thread-safe: one connection, one lock.

    With an `emergency` file it goes on there while its own takes no writes, and makes its own anew where that is
    gone or damaged: the write that finds it fails, the next one does not.
    """

    def __init__(
        self,
        path: Path,
        *,
        shared_file_system: bool = False,
        read_only: bool = False,
        emergency: Path | None = None,
    ) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._listeners: list[Callable[[], None]] = []
        self.changes = 0  # counts what was written here of incidents and actions
        if read_only and not path.exists():
            raise JournalMissingError(path)
        self._standby = Standby(path, emergency, _opened) if emergency else None
        try:
            self._open(shared_file_system=shared_file_system, read_only=read_only)
        except JournalError as problem:
            cause = problem.__cause__
            if self._standby is None or not isinstance(cause, Exception) or not takes_no_writes(cause):
                raise
            self._db = self._standby.begin(None, cause)
        else:
            self._db = self._standby.begin(self._db) if self._standby else self._db

    def _open(self, *, shared_file_system: bool, read_only: bool) -> None:
        try:
            self._db = _reading(self.path) if read_only else _writing(self.path)
        except _PROBLEMS as problem:
            raise self._error(problem) from problem
        try:
            self._prepare(shared_file_system=shared_file_system, read_only=read_only)
        except _PROBLEMS as problem:
            self._db.close()
            raise self._error(problem) from problem
        except BaseException:
            self._db.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; what was written stays."""
        with self._lock:
            self._db.close()

    # Writing.

    def record_beat(self, beat: Beat, now_unix: float) -> None:
        """Keep what a launcher said: its job, attempt, nodes, progress and incidents."""
        row = to_row(beat, leave_out=("node_beats", "progress", "rank_times", "incidents"))
        row |= {"unix": now_unix, "ended": now_unix if beat.phase.ended else 0.0}
        with self._transaction(durable=bool(beat.incidents)) as db:
            for statement in (schema.PUT_JOB, schema.PUT_ATTEMPT, schema.END_OLDER):
                db.execute(statement, row)
            db.executemany(schema.PUT_NODE, list(map(to_row, beat.node_beats)))
            progress_rows.put_points(db, beat.progress)
            progress_rows.put_times(db, beat.rank_times)
            for incident in beat.incidents:
                incident_rows.put(db, incident)
            settled = incident_rows.settle(db, to_row(beat.attempt), now_unix)
        if beat.incidents or settled:
            self._tell_listeners()

    def record_node(self, node: NodeRecord) -> None:
        """Keep what a node's standing agent said."""
        with self._transaction() as db:
            db.execute(schema.PUT_NODE, {**to_row(node), "attended_unix": node.seen_unix})

    def record_incident(self, incident: Incident, below: Collection[NodeName] = ()) -> Incident:
        """Keep an incident, or add to what is known of it; return what is now on record, with its number."""
        # One fault is one incident: a second report of it, under another id, joins the first
        # (`recovery.incident_merging`). Where this one blames a switch, what is on record of the loss of the
        # nodes `below` it becomes a part of it.
        with self._transaction(durable=True) as db:
            kept = incident_rows.put(db, incident, below)
        self._tell_listeners()
        return kept

    def record_moment(self, incident: str, unix: float, what: str) -> None:
        """Add to the timeline of the incident of this id, if it is on record."""
        with self._transaction() as db:
            incident_rows.put_moment(db, incident, Moment(unix, what))

    def close_incidents(self, job: int, outcome: IncidentOutcome, now_unix: float = 0.0) -> None:
        """Give every open incident of a job its end: the job's own, which it had at `now_unix`."""
        with self._transaction(durable=True) as db:
            found = incident_rows.close(db, job, outcome, now_unix)
        if found:
            self._tell_listeners()

    def begin_action(self, action: ActionRecord) -> bool:
        """Write down an intent, before its first command; False if it was begun before (then finish it)."""
        with self._transaction(durable=True) as db:
            begun = db.execute(schema.PUT_ACTION, to_row(action)).rowcount == 1
            if begun:
                what = f"begun: {action.remedy}{f' of {action.node}' if action.node else ''}"
                incident_rows.put_moment(db, action.incident, Moment(action.began_unix, what))
        self._tell_listeners()
        return begun

    def end_action(self, key: str, result: str, now_unix: float, acted: Incident | None = None) -> None:
        """Write down how an action ended, and with it what its incident is then; a second end changes nothing."""
        with self._transaction(durable=True) as db:
            open_one = db.execute("SELECT * FROM actions WHERE key = ? AND done_unix = 0", (key,)).fetchone()
            if open_one is None:
                return
            ended = (now_unix, printable(result), key)
            db.execute("UPDATE actions SET done_unix = ?, result = ? WHERE key = ?", ended)
            incident_rows.put_moment(
                db, open_one["incident"], Moment(now_unix, f"ended: {open_one['remedy']}: {result}")
            )
            if acted:
                incident_rows.put(db, acted)
        self._tell_listeners()

    def set_excluded(self, job: int, nodes: Mapping[NodeName, float]) -> None:
        """Remember which nodes of a job's ExcNodeList are there because of us, not of its user, and since when."""
        with self._transaction(durable=True) as db:
            db.execute(schema.PUT_EXCLUDED, {"job": job, "excluded": json.dumps(dict(nodes))})

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` after every incident that begins or changes here: it must not wait, nor raise."""
        self._listeners.append(listener)

    def open_channel(self, channel: str) -> None:
        """Begin to keep account of what a channel was told, from the next incident on, unless that has begun."""
        with self._transaction() as db:
            db.execute(schema.OPEN_CHANNEL, {"channel": channel})

    def note_sent(self, channel: str, results: Mapping[tuple[str, str], str], now_unix: float) -> None:
        """Write down what became of telling a channel: incident and state -> "sent", or why it will not be."""
        with self._transaction() as db:
            told = [
                {"channel": channel, "incident": incident, "state": state, "unix": now_unix, "result": result}
                for (incident, state), result in results.items()
            ]
            db.executemany(schema.PUT_NOTICE, told)
            db.execute(schema.MOVE_CHANNEL, {"channel": channel, "unix": now_unix})
            db.execute(schema.THIN_NOTICES, {"channel": channel})

    def beat(self, who: str, now_unix: float) -> float:
        """Write when `who` was alive, or did what it does once in a while; return when before, 0 for never."""
        with self._transaction() as db:
            before = db.execute("SELECT unix FROM pulse WHERE who = ?", (who,)).fetchone()
            db.execute(
                "INSERT INTO pulse (who, unix) VALUES (?, ?) ON CONFLICT (who) DO UPDATE SET unix = excluded.unix",
                (who, now_unix),
            )
        return float(before["unix"]) if before else 0.0

    def thin(self, now_unix: float, *, curves: int = KEPT_CURVES, jobs: int = KEPT_JOBS) -> int:
        """Forget progress and jobs of long ago, a few at a time; return of how many jobs. Incidents stay."""
        # What was heard of in the last week, or month, stays in any case, and what something is open about.
        old = {"kept": curves, "before": now_unix - CURVES_S, "limit": THINNED_AT_ONCE}
        older = {"kept": jobs, "before": now_unix - JOBS_S, "limit": THINNED_AT_ONCE}
        with self._transaction() as db:
            found = [(row["job"],) for row in db.execute(schema.OLD_CURVES, old).fetchall()]
            gone = [(row["job"],) for row in db.execute(schema.OLD_JOBS, older).fetchall()]
            for forget in (schema.FORGET_CURVE, progress_rows.FORGET_TIMES):
                db.executemany(forget, [*found, *gone])
            for statement in schema.FORGET_JOB:
                db.executemany(statement, gone)
        return len({*found, *gone})

    # Reading.

    def jobs(self, *, limit: int = 1_000, since_unix: float = math.inf) -> tuple[JobRecord, ...]:
        """Return the jobs heard of last, and all heard since then, the newest first, with all their attempts."""
        return _jobs(self._rows(schema.JOBS, {"limit": limit, "job": None, "since": since_unix}))

    def job(self, job: int) -> JobRecord | None:
        """Return one job, or None if it is not on record."""
        found = _jobs(self._rows(schema.JOBS, {"limit": 1, "job": job, "since": math.inf}))
        return found[0] if found else None

    def excluded(self, job: int) -> dict[NodeName, float]:
        """Return the nodes that `set_excluded` was given last, and since when; 0 in an older journal."""
        found = self._rows("SELECT excluded FROM jobs WHERE job = ?", (job,))
        known = json.loads(found[0]["excluded"]) if found else {}
        since = known if isinstance(known, dict) else dict.fromkeys(known, 0.0)
        return {NodeName(name): float(unix) for name, unix in since.items()}

    def points(self, job: int, *, after_unix: float = 0.0, limit: int = 100_000) -> tuple[ProgressPoint, ...]:
        """Return a job's reports in order of attempt and step: its loss curve."""
        return _all(ProgressPoint, self._rows(schema.POINTS, (job, after_unix, limit)))

    def first_steps(self, attempts: Iterable[Attempt]) -> dict[Attempt, float]:
        """Return when attempts reported their first step, of those whose progress is still here."""
        found = {attempt: self._rows(schema.FIRST_POINT, to_row(attempt)) for attempt in attempts}
        return {attempt: float(rows[0]["unix"]) for attempt, rows in found.items() if rows}

    def rank_times(self, job: int, *, after_unix: float = 0.0) -> tuple[RankTimes, ...]:
        """Return how long the ranks' own part of a step was, in order of attempt and time."""
        return _all(RankTimes, self._rows(progress_rows.TIMES_OF_JOB, (job, after_unix)))

    def nodes(self) -> tuple[NodeRecord, ...]:
        """Return every node a launcher spoke of, by name, with the shards in its store."""
        return _all(NodeRecord, self._rows("SELECT * FROM nodes ORDER BY name"))

    def incidents(
        self,
        *,
        job: int | None = None,
        kind: str | None = None,
        node: str | None = None,
        since_unix: float = 0.0,
        until_unix: float = 0.0,
        outcome: str = "",
        only_open: bool = False,
        limit: int = 1_000,
    ) -> tuple[Incident, ...]:
        """Return incidents, the newest first: of this job, kind, node, time and end, as far as that is asked."""
        # Asked for a job's, one that hit several is returned as that job knows it: with its attempt and outcome.
        wanted = {"job": job, "kind": kind, "node": node, "since": since_unix, "until": until_unix}
        wanted |= {"open": only_open, "outcome": outcome}
        found = _all(Incident, self._rows(schema.incidents(**wanted), {**wanted, "limit": limit}))
        theirs = self._rows(schema.HITS_OF_JOB, (job,)) if job is not None else []
        newest = {row["incident"]: row for row in theirs}
        return tuple([_as_hit(each, newest[each.id]) if each.id in newest else each for each in found])

    def open_incidents(self) -> int:
        """Return how many incidents have no end."""
        return int(self._rows("SELECT count(*) AS open FROM incidents WHERE outcome = 'open'")[0]["open"])

    def incident(self, name: str) -> Incident | None:
        """Return the incident of this number or id, also of one that was joined to another; or None."""
        number = int(name) if name.isascii() and name.isdigit() and len(name) < 19 else -1  # noqa: PLR2004 - 63 bits
        found = self._rows("SELECT * FROM incidents WHERE number = ? OR id = ?", (number, name))
        if not found:
            found = self._rows(schema.INCIDENT_BY_HIT, (number, name))
        return from_row(Incident, found[0]) if found else None

    def newest_incident(self, name: str) -> Incident | None:
        """Return the newest incident that was told under this id: what comes again is another one."""
        found = self._rows(schema.INCIDENTS_BY_ID, {"id": name})
        return from_row(Incident, found[0]) if found else None

    def stacks(self, incident: str) -> tuple[RankStack, ...]:
        """Return where the ranks were, by rank, of the incident of this id; none where no one asked them."""
        return _all(RankStack, self._rows(schema.STACKS, (incident,)))

    def unsent(self, channel: str, *, limit: int = 1_000) -> tuple[IncidentNews, ...]:
        """Return what a channel (see `open_channel`) was not told, the oldest incident first."""
        found = self._rows(schema.UNSENT, {"channel": channel, "limit": limit})
        return tuple([IncidentNews(from_row(Incident, row), bool(row["opened_told"])) for row in found])

    def action(self, key: str) -> ActionRecord | None:
        """Return the action of this key, or None."""
        found = self._rows("SELECT * FROM actions WHERE key = ?", (key,))
        return from_row(ActionRecord, found[0]) if found else None

    def actions(self, *, only_open: bool = False, incident: str | None = None) -> tuple[ActionRecord, ...]:
        """Return what the watchdog did or is doing, the oldest first."""
        return _all(ActionRecord, self._rows(schema.ACTIONS, {"open": only_open, "incident": incident}))

    def drained(self) -> dict[NodeName, float]:
        """Return the nodes we ever set out to drain, and when last."""
        return {NodeName(row["node"]): row["unix"] for row in self._rows(schema.DRAINED)}

    def revision(self) -> int:
        """Return a number that changes when another process has written: cheap to ask often."""
        return int(self._rows("PRAGMA data_version")[0]["data_version"])

    def look_after(self, unix: float) -> tuple[str, ...]:
        """See to it that the file is there and written; return what is new about that, in sentences."""
        if self._standby is None:
            return ()
        with self._lock:
            with suppress(*_PROBLEMS, JournalError):  # it is tried again
                self._db = self._standby.looked_after(self._db, unix)
            return self._standby.told()

    # Inside.

    def _failed(self, problem: Exception) -> JournalError:
        """Return what to raise; the next write goes elsewhere, where that helps."""
        before = self._db
        if self._standby is not None:
            with suppress(*_PROBLEMS, JournalError):
                self._db = self._standby.instead(before, problem, time.time())
        if self._db is before:
            return self._error(problem)
        return JournalError(self.path, str(problem), "It goes on in another file.")

    def _prepare(self, *, shared_file_system: bool, read_only: bool) -> None:
        self._db.row_factory = sqlite3.Row
        application = self._pragma("application_id")
        version = self._pragma("user_version")
        tables = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if (tables or read_only) and application != APPLICATION_ID:
            raise self._corrupt("it is an SQLite file, but no journal of DeepLink")
        if version > SCHEMA_VERSION:
            problem = f"schema {version} is newer than this DeepLink's {SCHEMA_VERSION}"
            remedy = "Use the DeepLink that wrote it, or name another file with --journal."
            raise JournalError(self.path, problem, remedy)
        if 0 < version < min(MIGRATIONS):
            raise self._corrupt(f"schema {version} is of before the first release of DeepLink")
        if read_only:
            # It leaves an older schema as it is: what that lacks is empty for it.
            for name, create in (("operations", OPERATIONS), ("rank_times", progress_rows.CREATE_TIMES)):
                if not self._db.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (name,)).fetchone():
                    schema.execute_each(self._db, create.replace("CREATE TABLE", "CREATE TEMP TABLE"))
            return
        self._db.execute(f"PRAGMA journal_mode = {'TRUNCATE' if shared_file_system else 'WAL'}").fetchone()
        while version < SCHEMA_VERSION:
            with self._transaction(durable=True) as db:
                version = self._pragma("user_version")  # another process may have been quicker
                if version < SCHEMA_VERSION:
                    schema.execute_each(db, MIGRATIONS[version] if version else CREATE)
                    version = version + 1 if version else SCHEMA_VERSION
                    db.execute(f"PRAGMA user_version = {version}")
                    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        self._db.execute(progress_rows.CREATE_TIMES)

    def _tell_listeners(self) -> None:
        self.changes += 1
        for listener in self._listeners:
            listener()

    def _pragma(self, name: str) -> int:
        return int(self._db.execute(f"PRAGMA {name}").fetchone()[0])

    def _error(self, problem: Exception) -> JournalError:
        if isinstance(problem, sqlite3.OperationalError):
            hint = "Is the disk full, or the folder not yours? Another process may hold the file."
            return JournalError(self.path, str(problem), hint)
        if isinstance(problem, sqlite3.DatabaseError):
            return self._corrupt(str(problem))
        if isinstance(problem, PrivateFolderError):
            return JournalError(self.path, problem.problem, problem.remedy)
        return JournalError(self.path, str(problem), "Name another file with --journal.")

    def _corrupt(self, problem: str) -> JournalError:
        aside = f"mv {self.path} {self.path}.broken"
        remedy = f"Move it aside ({aside}) to begin a new one, or restore it from a copy."
        return JournalError(self.path, problem, remedy, corrupt=True)

    @contextmanager
    def _transaction(self, *, durable: bool = False) -> Iterator[sqlite3.Connection]:
        # A kill loses nothing either way; `durable` also outlives a power cut, at the price of an fsync.
        with self._lock:
            try:
                self._db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    yield self._db
                    self._db.commit()  # a full disk may show only here, and would leave the transaction open
                except BaseException:
                    self._db.rollback()
                    raise
            except _PROBLEMS as problem:
                raise self._failed(problem) from problem

    def _rows(self, statement: str, values: Sequence[object] | dict[str, Any] = ()) -> list[dict[str, Any]]:
        with self._lock:
            try:
                return list(map(dict, self._db.execute(statement, values)))
            except sqlite3.Error as problem:
                raise self._failed(problem) from problem


def _opened(path: Path) -> sqlite3.Connection:
    return Journal(path)._db  # noqa: SLF001 - with its tables made


def _all(kind: type[T], rows: Iterable[dict[str, Any]]) -> tuple[T, ...]:
    return tuple([from_row(kind, row) for row in rows])


def _jobs(found: Iterable[dict[str, Any]]) -> tuple[JobRecord, ...]:
    """Return the jobs of rows that each have an attempt, those of one job together."""
    jobs = []
    for _, group in groupby(found, itemgetter("job")):
        rows = list(group)
        attempts = tuple([from_row(AttemptRecord, row) for row in rows])
        label = rows[0].get("label", "")  # an older schema has none
        row = rows[0]
        jobs.append(JobRecord(job=row["job"], name=row["name"], user=row["user"], attempts=attempts, label=label))
    return tuple(jobs)


def _as_hit(incident: Incident, hit: dict[str, Any]) -> Incident:
    """Return an incident as another job that it has hit knows it: with its own attempt and outcome."""
    attempt = Attempt(hit["job"], hit["restart"], hit["relaunch"])
    return replace(incident, attempt=attempt, outcome=IncidentOutcome(hit["outcome"]))


def _writing(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    check_private_file(path)
    return sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)


def _reading(path: Path) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode=ro"
    if not path.with_name(path.name + "-wal").exists() and not os.access(path.parent, os.W_OK):
        uri += "&immutable=1"  # no one writes, and the shared memory that readers need could not be made
    return sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
