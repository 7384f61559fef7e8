"""Processes by identity, not by number: a number is given to another process in time, and that one is not ours."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


_PROC = Path("/proc")
_DEAD = frozenset("ZXx")
# Fields of /proc/PID/stat after the command's name, which may hold anything (proc(5)).
_STATE, _PARENT, _START = 0, 1, 19


def _stat(pid: int) -> list[str] | None:
    try:
        return (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process: its number, and the moment it started (clock ticks since boot), which no successor shares."""

    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> Self | None:
        """Return who has this number now; None when no one, or only a zombie, has it."""
        fields = _stat(pid)
        return None if fields is None or fields[_STATE] in _DEAD else cls(pid, int(fields[_START]))

    @classmethod
    def kept(cls, file: Path) -> Self | None:
        """Return who `keep` wrote down; None when that is no one, or one that has ended."""
        try:
            pid, start = file.read_text(encoding="utf-8").split()
        except (FileNotFoundError, ValueError):
            return None
        who = cls(int(pid), int(start))
        return who if who.alive else None

    def keep(self, file: Path) -> None:
        """Write down who this is."""
        file.write_text(f"{self.pid} {self.start}\n", encoding="utf-8")

    @property
    def alive(self) -> bool:
        """Whether the process runs. A zombie does not: `kill -0` would call it alive."""
        return ProcessId.of(self.pid) == self

    def send(self, number: signal.Signals) -> bool:
        """Send a signal to this process and to none that has its number by now; tell whether it was there."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            if not self.alive:
                return False
            signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(handle)
        return True


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit())


@dataclass(frozen=True, slots=True)
class ProcessEntry:
    """One line of a process table."""

    parent: int
    start: int


def table() -> dict[int, ProcessEntry]:
    """Return all processes that there are, zombies included, by number."""
    found = {}
    for pid in _pids():
        fields = _stat(pid)
        if fields is not None:
            found[pid] = ProcessEntry(int(fields[_PARENT]), int(fields[_START]))
    return found


def descendants(root: int, processes: Mapping[int, ProcessEntry]) -> list[ProcessId]:
    """Return all processes below `root`, each after its parent."""
    children: dict[int, list[ProcessId]] = {}
    for pid, entry in processes.items():
        children.setdefault(entry.parent, []).append(ProcessId(pid, entry.start))
    found: list[ProcessId] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(0), [])
        found += below
        queue += [who.pid for who in below]
    return found


def arguments(pid: int) -> list[str]:
    """Return the argument list a process was started with; empty when it is gone."""
    try:
        raw = (_PROC / str(pid) / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [os.fsdecode(word) for word in raw.split(b"\0")[:-1]]


def first_processes(argvs: Sequence[Sequence[str]]) -> dict[tuple[str, ...], ProcessId]:
    """Find process 1 of pid namespaces, by the argument lists those were started with."""
    wanted = {tuple(argv) for argv in argvs}
    found = {}
    for pid in _pids():
        argv = tuple(arguments(pid))
        if argv in wanted and _is_first(pid):
            who = ProcessId.of(pid)
            if who is not None:
                found[argv] = who
    return found


def _is_first(pid: int) -> bool:
    """Whether a process is number 1 of its pid namespace, and root outside of it."""
    try:
        status = (_PROC / str(pid) / "status").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    numbers = fields.get("NSpid", "").split()
    return len(numbers) > 1 and numbers[-1] == "1" and fields.get("Uid", "").split()[:1] == ["0"]


def marked(variable: str) -> list[ProcessId]:
    """Return our own user's processes that were started with `NAME=VALUE` in their environment."""
    found = []
    for pid in _pids():
        try:
            variables = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # gone, or somebody else's
        who = ProcessId.of(pid) if os.fsencode(variable) in variables else None
        if who is not None:
            found.append(who)
    return found
