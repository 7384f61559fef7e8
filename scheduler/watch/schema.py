"""The tables of the journal. A change here is a new SCHEMA_VERSION, and a step in MIGRATIONS from the last one."""

APPLICATION_ID = 0x444C4A31  # "DLJ1", in the file's head: tells a journal from any other SQLite file
SCHEMA_VERSION = 5

_OF_INCIDENTS = """
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
"""

_HITS = """
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
"""Of an incident that was told more than once: under which id, for which node and job, and how that job is now."""

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
  boot_id TEXT NOT NULL DEFAULT ''
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
"""
    + _OF_INCIDENTS
    + _HITS
)

MIGRATIONS: dict[int, str] = {
    1: "ALTER TABLE nodes ADD COLUMN verified_bytes INTEGER",
    2: """
ALTER TABLE nodes ADD COLUMN health TEXT NOT NULL DEFAULT '[]';
ALTER TABLE nodes ADD COLUMN boot_id TEXT NOT NULL DEFAULT '';
ALTER TABLE incidents ADD COLUMN timeline TEXT NOT NULL DEFAULT '[]';
ALTER TABLE incidents ADD COLUMN ranks INTEGER NOT NULL DEFAULT 0;
ALTER TABLE incidents ADD COLUMN step_s REAL NOT NULL DEFAULT 0;
"""
    + _OF_INCIDENTS,
    3: _HITS,
    4: """
ALTER TABLE jobs ADD COLUMN label TEXT NOT NULL DEFAULT '';
ALTER TABLE incidents ADD COLUMN job_label TEXT NOT NULL DEFAULT '';
""",
}
"""Schema version -> the statements that lead from it to the next one."""
