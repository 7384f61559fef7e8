"""The tables of the journal. A change here is a new SCHEMA_VERSION, and a step in MIGRATIONS from the last one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sqlite3

APPLICATION_ID = 0x444C4A31  # "DLJ1", in the file's head: tells a journal from any other SQLite file
SCHEMA_VERSION = 7

OPERATIONS = """
CREATE TABLE operations (
  number INTEGER PRIMARY KEY AUTOINCREMENT,
  request TEXT NOT NULL UNIQUE,
  verb TEXT NOT NULL,
  target TEXT NOT NULL,
  nodes TEXT NOT NULL,
  why TEXT NOT NULL,
  force INTEGER NOT NULL,
  person TEXT NOT NULL,
  via TEXT NOT NULL,
  saw TEXT NOT NULL,
  commands TEXT NOT NULL,
  asked_unix REAL NOT NULL,
  done_unix REAL NOT NULL DEFAULT 0,
  outcome TEXT NOT NULL DEFAULT '',
  result TEXT NOT NULL DEFAULT ''
);
CREATE INDEX operations_of_target ON operations (target);
CREATE INDEX operations_of_verb ON operations (verb);
"""
"""What people had the watchdog do (`operations`)."""

CREATE = (
    """
CREATE TABLE jobs (
  job INTEGER PRIMARY KEY,
  name TEXT NOT NULL,
  user TEXT NOT NULL,
  excluded TEXT NOT NULL DEFAULT '[]',
  label TEXT NOT NULL DEFAULT ''
);
CREATE TABLE attempts (
  job INTEGER NOT NULL,
  restart INTEGER NOT NULL,
  relaunch INTEGER NOT NULL,
  phase TEXT NOT NULL,
  nodes TEXT NOT NULL,
  spares TEXT NOT NULL,
  world_size INTEGER NOT NULL,
  began_unix REAL NOT NULL,
  beat_unix REAL NOT NULL,
  ended_unix REAL NOT NULL DEFAULT 0,
  ring_crossings INTEGER NOT NULL,
  ring_crossings_stock INTEGER NOT NULL,
  step_timeout_s REAL NOT NULL,
  detail TEXT NOT NULL,
  first_step INTEGER,
  last_step INTEGER,
  last_step_unix REAL NOT NULL DEFAULT 0,
  PRIMARY KEY (job, restart, relaunch)
) WITHOUT ROWID;
CREATE TABLE progress (
  job INTEGER NOT NULL,
  restart INTEGER NOT NULL,
  relaunch INTEGER NOT NULL,
  rank INTEGER NOT NULL,
  step INTEGER NOT NULL,
  unix REAL NOT NULL,
  metrics TEXT NOT NULL,
  PRIMARY KEY (job, restart, relaunch, rank, step)
) WITHOUT ROWID;
CREATE TABLE nodes (
  name TEXT PRIMARY KEY,
  topology_address TEXT NOT NULL,
  seen_unix REAL NOT NULL,
  silent_s REAL NOT NULL,
  shards INTEGER NOT NULL,
  shard_bytes INTEGER NOT NULL,
  free_bytes INTEGER NOT NULL,
  job INTEGER NOT NULL,
  verified_bytes INTEGER,
  health TEXT NOT NULL DEFAULT '[]',
  boot_id TEXT NOT NULL DEFAULT '',
  attended_unix REAL NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE TABLE incidents (
  number INTEGER PRIMARY KEY AUTOINCREMENT,
  id TEXT NOT NULL UNIQUE,
  kind TEXT NOT NULL,
  node TEXT,
  job INTEGER,
  restart INTEGER,
  relaunch INTEGER,
  action TEXT NOT NULL,
  evidence TEXT NOT NULL,
  began_unix REAL NOT NULL,
  detected_unix REAL NOT NULL,
  acted_unix REAL NOT NULL,
  recovered_unix REAL NOT NULL,
  outcome TEXT NOT NULL,
  steps_repeated INTEGER NOT NULL,
  timeline TEXT NOT NULL DEFAULT '[]',
  ranks INTEGER NOT NULL DEFAULT 0,
  step_s REAL NOT NULL DEFAULT 0,
  job_label TEXT NOT NULL DEFAULT ''
);
CREATE INDEX incidents_of_job ON incidents (job);
CREATE TABLE actions (
  key TEXT PRIMARY KEY,
  incident TEXT NOT NULL,
  remedy TEXT NOT NULL,
  job INTEGER,
  restart INTEGER,
  relaunch INTEGER,
  node TEXT,
  exclude TEXT NOT NULL,
  reason TEXT NOT NULL,
  began_unix REAL NOT NULL,
  done_unix REAL NOT NULL DEFAULT 0,
  result TEXT NOT NULL DEFAULT ''
) WITHOUT ROWID;
CREATE TABLE stacks (
  incident TEXT NOT NULL,
  rank INTEGER NOT NULL,
  pid INTEGER NOT NULL,
  state TEXT NOT NULL,
  source TEXT NOT NULL,
  text TEXT NOT NULL,
  flight TEXT NOT NULL,
  UNIQUE (incident, rank)
);
CREATE TABLE notices (
  channel TEXT NOT NULL,
  incident TEXT NOT NULL,
  state TEXT NOT NULL,
  unix REAL NOT NULL,
  result TEXT NOT NULL,
  PRIMARY KEY (channel, incident, state)
) WITHOUT ROWID;
CREATE TABLE channels (
  channel TEXT PRIMARY KEY,
  after_number INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE pulse (
  who TEXT PRIMARY KEY,
  unix REAL NOT NULL
) WITHOUT ROWID;
-- What was told more than once: under which id, for which node and job, and how that job is now.
CREATE TABLE hits (
  id TEXT PRIMARY KEY,
  incident TEXT NOT NULL,
  number INTEGER,
  node TEXT,
  job INTEGER,
  restart INTEGER,
  relaunch INTEGER,
  outcome TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX hits_of_incident ON hits (incident);
CREATE INDEX hits_of_job ON hits (job);
CREATE INDEX hits_of_node ON hits (node);
CREATE INDEX incidents_of_node ON incidents (node);
"""
    + OPERATIONS
)

MIGRATIONS: dict[int, str] = {
    4: """
ALTER TABLE jobs ADD COLUMN label TEXT NOT NULL DEFAULT '';
ALTER TABLE incidents ADD COLUMN job_label TEXT NOT NULL DEFAULT '';
""",
    5: OPERATIONS,
    6: "ALTER TABLE nodes ADD COLUMN attended_unix REAL NOT NULL DEFAULT 0",
}
"""Schema version -> the statements that lead from it to the next one. No release wrote an older one than these."""


def execute_each(db: sqlite3.Connection, script: str) -> None:
    """Execute the statements of a script inside a transaction."""
    # Not executescript, which commits: a schema is made whole or not at all.
    for statement in filter(str.strip, script.split(";")):
        db.execute(statement)


# Statements. The columns have the names of the records' fields (`core.codec`).


def _insert(table: str, columns: str) -> str:
    """Return the statement that adds a row of values named as the columns are."""
    names = columns.split()
    return f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join(f':{name}' for name in names)})\n"  # noqa: S608 - constants of ours


def _set(columns: str, value: str) -> str:
    return ", ".join([f"{name} = {value.format(name)}" for name in columns.split()])


_LABEL = "ifnull((SELECT label FROM jobs WHERE jobs.job = :job), '')"
_INCIDENT = (
    "kind node job restart relaunch action evidence began_unix detected_unix acted_unix recovered_unix outcome "
    "steps_repeated timeline ranks step_s job_label"
)
_NODE = "seen_unix silent_s shards shard_bytes verified_bytes free_bytes job health"
_STACK = "pid state source text flight"

PUT_JOB = """
INSERT INTO jobs (job, name, user, label) VALUES (:job, :job_name, :user, :job_label)
ON CONFLICT (job) DO UPDATE SET
  label = CASE excluded.label WHEN '' THEN label ELSE excluded.label END,
  name = CASE excluded.name WHEN '' THEN name ELSE excluded.name END,
  user = CASE excluded.user WHEN '' THEN user ELSE excluded.user END
"""
LABEL = "SELECT label FROM jobs WHERE job = ? AND label != ''"
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
PUT_NODE = f"""{_insert("nodes", f"name topology_address boot_id attended_unix {_NODE}")}
ON CONFLICT (name) DO UPDATE SET {_set(_NODE, "excluded.{0}")},
  attended_unix = max(attended_unix, excluded.attended_unix),
  {_set("topology_address boot_id", "CASE excluded.{0} WHEN '' THEN {0} ELSE excluded.{0} END")}
WHERE excluded.seen_unix >= seen_unix OR excluded.job = job
"""
PUT_POINT = f"""{_insert("progress", "job restart relaunch rank step unix metrics")}
ON CONFLICT (job, restart, relaunch, rank, step) DO UPDATE SET {_set("unix metrics", "excluded.{0}")}
"""
NOTE_STEP = """
UPDATE attempts SET first_step = min(ifnull(first_step, :step), :step),
  last_step = max(ifnull(last_step, :step), :step), last_step_unix = max(last_step_unix, :unix)
WHERE job = :job AND restart = :restart AND relaunch = :relaunch
"""
THIS = "job = :job AND restart = :restart AND relaunch = :relaunch"
COUNT_POINTS = f"SELECT count(*) FROM progress WHERE {THIS}"  # noqa: S608 - a constant of ours
THIN_POINTS = f"""
DELETE FROM progress WHERE {THIS} AND (rank, step) IN (
  SELECT rank, step FROM (SELECT rank, step, row_number() OVER (PARTITION BY rank ORDER BY step) AS place,
    count(*) OVER (PARTITION BY rank) AS places FROM progress WHERE {THIS})
  WHERE place % 2 = 0 AND place < places)
"""  # noqa: S608 - a constant of ours
LAST_STEP_UNIX = f"SELECT last_step_unix FROM attempts WHERE {THIS}"  # noqa: S608 - a constant of ours
SPARSE_POINTS = f"""
DELETE FROM progress WHERE {THIS} AND unix < :before AND (rank, step) IN (
  SELECT rank, step FROM (SELECT rank, step, row_number()
    OVER (PARTITION BY rank, CAST(unix / :every AS INTEGER) ORDER BY step) AS place FROM progress WHERE {THIS})
  WHERE place > 1)
"""  # noqa: S608 - a constant of ours
FIRST_POINT = f"SELECT unix FROM progress WHERE {THIS} ORDER BY rank, step LIMIT 1"  # noqa: S608 - a constant of ours
FIRST_STEP = f"""
SELECT a.first_step, (SELECT min(unix) FROM progress WHERE {THIS}) FROM attempts a WHERE {THIS}
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
NEW_INCIDENT = _insert("incidents", f"id {_INCIDENT}").replace(":job_label", _LABEL)
CHANGE_INCIDENT = f"UPDATE incidents SET {_set(_INCIDENT, ':{0}')} WHERE id = :id".replace(":job_label", _LABEL)  # noqa: S608 - constants of ours
PUT_STACK = f"""{_insert("stacks", f"incident rank {_STACK}")}
ON CONFLICT (incident, rank) DO UPDATE SET {_set(_STACK, "excluded.{0}")}
"""
STACKS = "SELECT * FROM stacks WHERE incident = ? ORDER BY rank"
THIN_STACKS = """
DELETE FROM stacks WHERE incident NOT IN (
  SELECT incident FROM stacks GROUP BY incident ORDER BY max(rowid) DESC LIMIT ?)
"""
NEWEST_STEPS = f"""
SELECT step, unix FROM progress WHERE {THIS} AND rank = 0 ORDER BY step DESC LIMIT :limit
"""  # noqa: S608 - a constant of ours
WORLD_SIZE = f"SELECT world_size FROM attempts WHERE {THIS}"  # noqa: S608 - a constant of ours
CANDIDATES = """
SELECT *, number IN (SELECT number FROM incidents WHERE node = :node UNION SELECT incidents.number
    FROM incidents JOIN hits ON hits.incident = incidents.id WHERE hits.node = :node) AS shares_node
FROM incidents WHERE number IN (
  SELECT number FROM incidents WHERE node = :node
  UNION SELECT number FROM incidents WHERE job = :job
  UNION SELECT number FROM incidents WHERE kind = :kind AND kind = 'storage-frozen'
  UNION SELECT incidents.number FROM incidents JOIN hits ON hits.incident = incidents.id
    WHERE hits.node = :node OR hits.job = :job)
ORDER BY number DESC LIMIT :limit
"""
INCIDENT_BY_ID = "SELECT * FROM incidents WHERE id = ? OR id = (SELECT incident FROM hits WHERE id = ?)"
# What comes again under an id is `<id>@2`; '@' is followed by 'A'.
INCIDENTS_BY_ID = """
SELECT * FROM incidents WHERE id = :id OR id IN (SELECT incident FROM hits WHERE id = :id)
  OR id > :id || '@' AND id < :id || 'A' ORDER BY number DESC
"""
TIMES = "SELECT count(*) FROM incidents WHERE id = :id OR id > :id || '@' AND id < :id || 'A'"
OPEN_OF_JOB = """
SELECT * FROM incidents WHERE outcome = 'open'
  AND (job = :job OR id IN (SELECT incident FROM hits WHERE job = :job AND outcome = 'open'))
"""
HIT = "SELECT * FROM hits WHERE id = ?"
INCIDENT_BY_HIT = """
SELECT incidents.* FROM incidents JOIN hits ON hits.incident = incidents.id WHERE hits.number = ? OR hits.id = ?
"""
HITS_OF_JOB = "SELECT * FROM hits WHERE job = ? ORDER BY restart, relaunch"
PUT_HIT = f"""{_insert("hits", "id incident number node job restart relaunch outcome")}
ON CONFLICT (id) DO UPDATE SET incident = excluded.incident
"""
END_HITS = (
    "UPDATE hits SET outcome = :outcome WHERE incident = :incident AND job = :job AND outcome != 'recovered'"
)
OTHERS_HIT = """
SELECT count(*) FROM hits WHERE incident = :incident AND job IS NOT NULL AND job != :job AND outcome = 'open'
"""
TAKE_OVER = (
    "UPDATE actions SET incident = :incident WHERE incident = :id",
    "UPDATE OR REPLACE stacks SET incident = :incident WHERE incident = :id",
    "UPDATE hits SET incident = :incident WHERE incident = :id",
    "DELETE FROM notices WHERE incident = :id",
    "DELETE FROM incidents WHERE id = :id",
)
"""What becomes of an incident that turns out to be part of another."""
PUT_ACTION = f"""{_insert("actions", "key incident remedy job restart relaunch node exclude reason began_unix")}
ON CONFLICT (key) DO NOTHING
"""
JOBS = """
SELECT jobs.*, attempts.* FROM attempts JOIN jobs USING (job)
WHERE attempts.job IN (
  SELECT job FROM attempts WHERE :job IS NULL OR job = :job
  GROUP BY job ORDER BY max(beat_unix) DESC, job DESC
  LIMIT max(:limit, (SELECT count(DISTINCT job) FROM attempts WHERE beat_unix >= :since)))
ORDER BY max(beat_unix) OVER (PARTITION BY attempts.job) DESC, attempts.job DESC, restart, relaunch
"""
_BEYOND = """
SELECT job FROM (SELECT job, max(beat_unix) AS newest FROM attempts GROUP BY job ORDER BY newest DESC, job DESC
  LIMIT -1 OFFSET :kept) AS old
WHERE newest < :before
  AND job NOT IN (SELECT job FROM incidents WHERE outcome = 'open' AND job IS NOT NULL)
  AND job NOT IN (SELECT job FROM hits WHERE outcome = 'open' AND job IS NOT NULL)
  AND job NOT IN (SELECT job FROM actions WHERE done_unix = 0 AND job IS NOT NULL)
"""
OLD_CURVES = f"""
{_BEYOND} AND EXISTS (SELECT 1 FROM progress WHERE progress.job = old.job) ORDER BY newest LIMIT :limit
"""  # noqa: S608 - a constant of ours
OLD_JOBS = f"""
{_BEYOND} AND job NOT IN (SELECT job FROM jobs WHERE excluded NOT IN ('[]', '{{}}')) ORDER BY newest LIMIT :limit
"""  # noqa: S608 - a constant of ours
FORGET_CURVE = "DELETE FROM progress WHERE job = ?"
FORGET_JOB = ("DELETE FROM attempts WHERE job = ?", "DELETE FROM jobs WHERE job = ?")
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
PUT_NOTICE = f"""{_insert("notices", "channel incident state unix result")}
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


def incidents(**asked: object) -> str:
    """Return the statement that finds the incidents asked for; what is None or False is not asked."""
    # Not one statement for all: none of the indexes could be used.
    conditions = {
        "job": "(job = :job OR id IN (SELECT incident FROM hits WHERE job = :job))",
        "node": "(node = :node OR id IN (SELECT incident FROM hits WHERE node = :node))",
        "kind": "kind = :kind",
        "since": "began_unix >= :since",
        "until": "began_unix <= :until",
        "outcome": "outcome = :outcome",
        "open": "outcome = 'open'",
    }
    wanted = [condition for name, condition in conditions.items() if asked.get(name)]
    where = f"WHERE {' AND '.join(wanted)} " if wanted else ""
    return f"SELECT * FROM incidents {where}ORDER BY number DESC LIMIT :limit"  # noqa: S608 - constants of ours
