"""Where a journal goes on when its file takes no writes, is gone, or is damaged: in another file.

Of a file that takes no writes until it does again; then what was kept elsewhere is put back.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from deeplink.core.private import private_folder

if TYPE_CHECKING:
    from collections.abc import Callable

_HISTORY = frozenset({"progress", "rank_times", "stacks"})
"""Large, and needed by no decision: not copied where room is short."""
_TABLES = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
_NO_WRITES = frozenset(
    {sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN}
)
_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_BESIDE = ("", "-wal", "-shm")
_MEMORY = Path("/dev/shm")  # noqa: S108 - a private folder is made below it


def emergency_of(journal: Path) -> Path:
    """Return the file in which a journal goes on, in memory, in a folder of this user's own; makes the folder."""
    base = _MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    folder = base / f"deeplink-watch-{os.getuid()}"
    private_folder(folder)
    return folder / f"{sha256(os.fsencode(journal)).hexdigest()[:16]}.sqlite"


TRY_S = 10.0  # how often a file that took no writes is tried again


class Standby:
    """What stands in for one journal's file. Not thread-safe: its journal's lock is held."""

    def __init__(self, path: Path, emergency: Path, opened: Callable[[Path], sqlite3.Connection]) -> None:
        self._path, self._emergency, self._opened = path, emergency, opened
        self._is_elsewhere = False
        self._own: sqlite3.Connection | None = None  # to the file itself meanwhile, where it could be opened
        self._tried = 0.0
        self._inode = (0, 0)
        self._news: list[str] = []

    def begin(self, own: sqlite3.Connection | None, problem: Exception | None = None) -> sqlite3.Connection:
        """Return what to write to: the file itself, with what was left elsewhere; for a problem with it, there."""
        self._inode = _inode(self._path)
        if own is not None and not self._emergency.exists():
            return own
        there = self._opened(self._emergency)
        if own is not None:
            try:
                self._take_back(there, own)
            except sqlite3.Error as refused:
                problem = refused
            else:
                return own
        self._is_elsewhere, self._own = True, own
        self._news.append(f"journal {self._path}: {problem}; going on in {self._emergency}")
        return there

    def told(self) -> tuple[str, ...]:
        """Return what has become of the file since this was asked last, in sentences."""
        told, self._news = tuple(self._news), []
        return told

    def instead(self, db: sqlite3.Connection, problem: Exception, unix: float) -> sqlite3.Connection:
        """Return what to write to after this problem: `db`, where nothing helps."""
        if self._is_elsewhere:
            return db
        if _code(problem) in _DAMAGED:
            return self._renewed(db, f"it is damaged ({problem})", unix)
        if not takes_no_writes(problem):
            return db
        remove(self._emergency)
        there = self._filled(self._emergency, db, history=False)
        self._is_elsewhere, self._own, self._tried = True, db, unix
        self._news.append(f"journal {self._path}: {problem}; going on in {self._emergency}")
        return there

    def looked_after(self, db: sqlite3.Connection, unix: float) -> sqlite3.Connection:
        """Return what to write to: the file itself where it can be written again, a new one where it is gone."""
        if not self._is_elsewhere:
            gone = _inode(self._path) != self._inode
            return self._renewed(db, "its file was removed or replaced", unix) if gone else db
        if unix - self._tried < TRY_S:
            return db
        self._tried = unix
        self._own = self._own or self._opened(self._path)
        self._take_back(db, self._own)
        self._is_elsewhere, self._inode = False, _inode(self._path)
        return self._own

    def _take_back(self, there: sqlite3.Connection, own: sqlite3.Connection) -> None:
        copy(there, own, history=True)
        there.close()
        remove(self._emergency)
        self._news.append(f"journal {self._path}: it is written again, with what was kept elsewhere meanwhile")

    def _renewed(self, db: sqlite3.Connection, why: str, unix: float) -> sqlite3.Connection:
        aside = set_aside(self._path, unix)
        new = self._filled(self._path, db, history=True)
        db.close()
        self._inode = _inode(self._path)
        self._news.append(f"journal {self._path}: {why}: made anew; what was left of it is {aside}")
        return new

    def _filled(self, path: Path, db: sqlite3.Connection, *, history: bool) -> sqlite3.Connection:
        new = self._opened(path)
        try:
            copy(db, new, history=history)
        except BaseException:
            new.close()
            raise
        return new


def takes_no_writes(problem: Exception) -> bool:
    """Whether a file's disk is full, read-only, ill or gone."""
    return _code(problem) in _NO_WRITES


def _code(problem: Exception) -> int:
    return getattr(problem, "sqlite_errorcode", 0) & 0xFF


def _inode(path: Path) -> tuple[int, int]:
    """Return which file it is; that of none where there is none."""
    try:
        found = path.stat()
    except OSError:
        return (0, 0)
    return found.st_dev, found.st_ino


def copy(source: sqlite3.Connection, target: sqlite3.Connection, *, history: bool) -> None:
    """Put the rows of one journal into another, in one transaction; what cannot be read is left out."""
    target.execute("BEGIN IMMEDIATE")
    try:
        for (table,) in target.execute(_TABLES).fetchall():
            rows = []
            if table in _HISTORY and not history:
                continue
            with contextlib.suppress(sqlite3.Error):
                rows = [dict(row) for row in source.execute(f"SELECT * FROM {table}")]  # noqa: S608 - a name of ours
            if rows:
                names = list(rows[0])
                values = ", ".join(f":{name}" for name in names)
                put = f"INSERT OR REPLACE INTO {table} ({', '.join(names)}) VALUES ({values})"  # noqa: S608 - as above
                target.executemany(put, rows)
        target.commit()
    except BaseException:
        target.rollback()
        raise


def set_aside(path: Path, unix: float) -> Path:
    """Move a file, and what SQLite keeps beside it, out of the way; return where to. One that is gone is none."""
    aside = path.with_name(f"{path.name}.aside-{unix:.0f}")
    for suffix in _BESIDE:
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(aside.with_name(aside.name + suffix))
    return aside


def remove(path: Path) -> None:
    """Remove a journal's file, and what SQLite keeps beside it."""
    for suffix in _BESIDE:
        path.with_name(path.name + suffix).unlink(missing_ok=True)
