"""One planner per user and cluster: a lock that dies with its holder, and says who holds it."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING

from deeplink.errors import DeepLinkError
from deeplink.private import private_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


class PlannerRunsError(DeepLinkError):
    """A planner of this user runs already."""

    def __init__(self, path: Path, who: str) -> None:
        super().__init__(
            f"a planner runs already: {who}",
            remedy="One is enough: it looks after all your jobs. `deeplink plan --dry-run` shows what it sees.",
        )
        self.path, self.who = path, who


class PlannerLockError(DeepLinkError):
    """Whether a planner of this user runs cannot be found out."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(
            f"{path}: {problem}", remedy="The state folder (DEEPLINK_STATE) must be one that you can write."
        )
        self.path, self.problem = path, problem


def folder_of(state: Path) -> Path:
    """Return where planners keep their lock and log."""
    return state / "plan"


def name_of(env: Mapping[str, str]) -> str:
    """Return what tells this cluster's planner from another one's in the same home.

    >>> name_of({"SLURM_CONF": "/etc/slurm/slurm.conf"}) == name_of({})
    False
    """
    return f"{zlib.crc32(env.get('SLURM_CONF', '').encode(errors='surrogateescape')):08x}"


def lock_path(state: Path, env: Mapping[str, str]) -> Path:
    """Return the lock of this user's planner for this cluster."""
    return folder_of(state) / f"{name_of(env)}.lock"


@contextmanager
def holding(path: Path, since_unix: float) -> Iterator[None]:
    """Be the only planner, until the end of the block; a killed one's place is free at once.

    Raises:
        PlannerRunsError: another one is.
        PlannerLockError: the lock cannot be made.
    """
    try:
        private_folder(path.parent)
        opened = path.open("a+", encoding="utf-8")
    except OSError as problem:
        raise PlannerLockError(path, problem.strerror or str(problem)) from problem
    with opened as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PlannerRunsError(path, _who(path)) from None
        lock.truncate(0)
        lock.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since_unix": since_unix}))
        lock.flush()
        try:
            yield
        finally:
            lock.truncate(0)


def runs(path: Path) -> bool:
    """Whether a planner holds the lock at this moment."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # storage without locks: then nobody holds one
        return False
    finally:
        os.close(lock)
    return False


def _who(path: Path) -> str:
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        return f"process {int(said['pid'])} on {said['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "it has not said which process it is"
