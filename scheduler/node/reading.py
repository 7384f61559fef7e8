"""Small files of /proc and /sys, which may not be there."""

from __future__ import annotations

import json
import logging
import socket
import threading
from pathlib import Path

from deeplink.core.publish import kept_object, write_unsynced

_LONGEST = 1 << 20
log = logging.getLogger(__name__)
MOST = 512


def text_of(path: Path) -> str | None:
    """Return what a file says, without blanks around it; None where it is not there or does not say."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(_LONGEST).strip()
    except OSError:  # "Invalid argument" of the carrier of an interface that is down, say
        return None


def number_of(path: Path) -> int | None:
    """Return the whole number a file begins with; None where there is none."""
    words = (text_of(path) or "").split()
    try:
        return int(words[0]) if words else None
    except ValueError:
        return None


def table_of(path: Path) -> dict[str, int]:
    """Return the numbers of a file of lines such as `oom_kill 3` or `MemTotal:  1024 kB`, by their names."""
    found = {}
    for line in (text_of(path) or "").splitlines():
        name, *rest = line.split()
        if rest and rest[0].isascii() and rest[0].isdigit():
            found[name.rstrip(":")] = int(rest[0])
    return found


def group_oom_kills(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return how many processes of our own cgroup (v2) were killed for want of memory; None if nobody counts."""
    for line in (text_of(proc / "self" / "cgroup") or "").splitlines():
        if line.startswith("0::/"):
            folder = cgroup / line.removeprefix("0::/")
            # Where the task's own group has no such file, the step's has the limit, or the job's.
            groups = [folder, *(one for one in folder.parents if "/job_" in str(one))]
            counts = (table_of(one / "memory.events").get("oom_kill") for one in groups)
            return next((count for count in counts if count is not None), None)
    return None


def file_in(state: Path) -> Path:
    """Return where a state folder keeps what this host had: a home is mostly that of many nodes."""
    return state / f"health-seen-{socket.gethostname()}.json"


class HighWaterMarks:
    """Numbers by name, the greatest there were. Thread-safe."""

    def __init__(self, path: Path | None = None) -> None:
        self._path, self._lock = path, threading.Lock()
        self._best = _loaded(path) if path is not None else {}
        self._complained = False

    def best(self, name: str, now: float = 0.0) -> float:
        """Return the greatest number there was of this name, `now` included."""
        with self._lock:
            before = self._best.get(name)
            if before is not None and before >= now:
                return before
            if now <= 0 or len(self._best) >= MOST:
                return now
            self._best[name] = now
            text = json.dumps(self._best, indent=1, sort_keys=True)
        self._keep(text)
        return now

    def names(self, prefix: str) -> list[str]:
        """Return what is known of that begins with `prefix`, without the prefix."""
        with self._lock:
            return sorted(name.removeprefix(prefix) for name in self._best if name.startswith(prefix))

    def _keep(self, text: str) -> None:
        if self._path is None:
            return
        try:
            write_unsynced(self._path, text.encode())
        except OSError as problem:
            if not self._complained:
                log.warning("%s: %s", self._path, problem)
            self._complained = True


def _loaded(path: Path) -> dict[str, float]:
    numbers = [(name, value) for name, value in kept_object(path).items() if isinstance(value, int | float)]
    return {str(name): float(value) for name, value in numbers[:MOST]}
