"""The processes of a node's ranks: found in /proc, by the ids that ranks reported, else by their environment.

And what slots say of theirs, one line of JSON at each change. Imported by slots: light.
"""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from deeplink.core.types import Attempt

_TICKS = os.sysconf("SC_CLK_TCK")
# Fields of /proc/PID/stat after the command's name, which may hold anything (proc(5)).
_STATE, _PARENT, _USER_TIME, _CHILDREN_SYSTEM_TIME, _START = 0, 1, 11, 14, 19
GONE = frozenset({"Z", "X", "x", ""})
STARTED_SLACK_S = 2.0
"""A process that was there when it reported began before that; its start is known to a clock tick."""
# How a rank is asked for its stacks. Imported by training processes: light.
ASKING = int(signal.SIGRTMAX) - 5
"""The signal that makes a rank write its stacks down. USR1 and USR2 are taken by Slurm's scripts, Lightning,
submitit and NCCL; of the real-time ones the lowest are used by C libraries, runtimes and debuggers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One line of the process table."""

    pid: int
    parent: int
    state: str  # as in proc(5)
    cpu_s: float  # CPU time it used, and those of its children that have ended, seconds
    started_unix: float  # when it was started


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """What a rank said of itself last: its process id (0: it does not say), and when, by this node's clock."""

    pid: int
    unix: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """A rank's process on this node."""

    rank: int
    pid: int
    state: str  # of its main thread; empty when there is no such process
    cpu_s: float  # CPU time of the process and of all below it, seconds


@dataclass(frozen=True, slots=True)
class ProcessTable:
    """The processes of this machine that are its user's."""

    proc: Path = Path("/proc")

    def all(self) -> dict[int, Process]:
        """Return every process of this process's own user, by number; those that end meanwhile may be missing."""
        uptime_s = float((self.proc / "uptime").read_text(encoding="ascii").split()[0])
        booted = time.time() - uptime_s
        user = os.getuid()
        found = {}
        for entry in self.proc.iterdir():
            if not entry.name.isdigit():
                continue
            try:
                if entry.stat().st_uid == user:
                    found[int(entry.name)] = _process(entry, booted)
            except (OSError, ValueError, IndexError):
                continue  # it has ended
        return found

    def environment(self, pid: int) -> dict[str, str]:
        """Return what a process was started with; empty when it has ended or is not ours."""
        try:
            raw = (self.proc / str(pid) / "environ").read_bytes()
        except OSError:
            return {}
        words = (os.fsdecode(word) for word in raw.split(b"\0") if b"=" in word)
        return dict(word.split("=", 1) for word in words)


SLOT_TAG = "DEEPLINK_SLOT"
"""In the environment of a rank and of all that it starts: which attempt's, and in which slot."""


def tagged(table: ProcessTable, tag: str) -> set[int]:
    """Return the processes that are there and were started by the rank with this tag, or by what it started."""
    alive = (pid for pid, one in table.all().items() if one.state not in GONE)
    return {pid for pid in alive if tag and table.environment(pid).get(SLOT_TAG) == tag}


def descendants(table: ProcessTable, pid: int, without: int = 0) -> set[int]:
    """Return the processes below this one that are there, but for one and all below it."""
    processes = table.all()
    below, found, queue = _children(processes.values()), set[int](), [pid]
    while queue:
        queue += (children := [one for one in below.get(queue.pop(), []) if one != without])
        found.update(children)
    return {one for one in found if processes[one].state not in GONE}


def _process(entry: Path, booted_unix: float) -> Process:
    text = (entry / "stat").read_text(encoding="utf-8", errors="replace")
    fields = text.rpartition(")")[2].split()
    used = sum(int(field) for field in fields[_USER_TIME : _CHILDREN_SYSTEM_TIME + 1])
    return Process(
        pid=int(entry.name),
        parent=int(fields[_PARENT]),
        state=fields[_STATE],
        cpu_s=used / _TICKS,
        started_unix=booted_unix + int(fields[_START]) / _TICKS,
    )


def rank_processes(
    table: ProcessTable, attempt: Attempt, node: str, reported: Mapping[int, Reported]
) -> list[RankProcess]:
    """Return the ranks of an attempt that this node runs, in their order.

    A rank's process is the one it reported, if that is of our user, of this attempt by its environment, and not
    younger than the report. Ranks that have not reported, or from within a container, where numbers are others,
    are found by what `deeplink run` put into their environment: the first process of each, Python's before a
    shell's. Who starts other ranks, as torchrun does, is none itself, whatever number it was given.
    """
    processes = table.all()
    numbers: dict[int, int] = {}
    ranks: dict[int, list[int]] = {}
    named: dict[int, int] = {}
    ours = set()
    for pid in processes:
        environment = table.environment(pid)
        if environment.get("DEEPLINK_ATTEMPT") != str(attempt):
            continue
        ours.add(pid)
        if environment.get("DEEPLINK_NODE") == node and environment.get("RANK", "").isdigit():
            numbers[pid] = int(environment["RANK"])
    starters = _starters(numbers, processes)
    for pid, rank in numbers.items():
        if pid not in starters:
            ranks.setdefault(rank, []).append(pid)
    for rank, said in reported.items():
        process = processes.get(said.pid)
        if process and said.pid in ours and process.started_unix <= said.unix + STARTED_SLACK_S:
            named[rank] = said.pid
    for rank, pids in ranks.items():
        named.setdefault(rank, _first(table, pids, processes))
    below = _children(processes.values())
    found = [
        RankProcess(rank=rank, pid=pid, state=processes[pid].state, cpu_s=_used(pid, processes, below))
        for rank, pid in named.items()
    ]
    gone = [
        RankProcess(rank=rank, pid=said.pid, state="", cpu_s=0.0)
        for rank, said in reported.items()
        if rank not in named and said.pid
    ]
    return sorted([*found, *gone], key=lambda one: one.rank)


def _starters(numbers: Mapping[int, int], processes: Mapping[int, Process]) -> set[int]:
    """Return the processes below which one bears the number of another rank."""
    found: set[int] = set()
    for pid, rank in numbers.items():
        above = processes[pid].parent
        while above in numbers and above not in found:
            if numbers[above] != rank:
                found.add(above)
            above = processes[above].parent
    return found


def _first(table: ProcessTable, pids: Iterable[int], processes: Mapping[int, Process]) -> int:
    def order(pid: int) -> tuple[bool, bool, float, int]:
        process = processes[pid]
        try:
            name = (table.proc / str(pid) / "comm").read_text(encoding="utf-8", errors="replace")
        except OSError:
            name = ""
        return process.state in GONE, not name.startswith(("python", "pt_main")), process.started_unix, pid

    return min(pids, key=order)


def _children(processes: Iterable[Process]) -> dict[int, list[int]]:
    below: dict[int, list[int]] = {}
    for process in processes:
        below.setdefault(process.parent, []).append(process.pid)
    return below


def _used(pid: int, processes: Mapping[int, Process], below: Mapping[int, list[int]]) -> float:
    total, queue = 0.0, [pid]
    while queue:
        one = queue.pop()
        total += processes[one].cpu_s
        queue += below.get(one, [])
    return total


def answer_file(folder: Path, pid: int) -> Path:
    """Return where the rank with this process id, as it knows itself, writes its stacks."""
    return folder / f"stacks-{pid}"


def catches(status: Iterable[str], number: int) -> bool:
    """Return whether a process catches a signal, by the lines of its /proc/PID/status; else it would end it."""
    masks = [line.split(":", 1)[1].strip() for line in status if line.startswith("SigCgt:")]
    return bool(masks) and bool(int(masks[0], 16) >> (number - 1) & 1)


# What a slot says to its node's agent.

_SOCKET = "slots"


@contextmanager
def agents_socket(folder: Path) -> Iterator[str]:
    """Give a path of an agent's socket for slots, in its folder, that is short however long the folder's is."""
    there = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{there}/{_SOCKET}"
    finally:
        os.close(there)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotReport:
    """What a slot says: who it is, and what it runs, or ran last."""

    step: int  # its step, as the launcher numbers them
    slot: int  # its number on this node, from 0
    pid: int
    step_id: int = -1  # its step, as Slurm numbers them; -1: it does not know
    attempt: str = ""  # of its rank; empty before the first one
    rank: int = 0
    rank_pid: int = 0
    tag: str = ""  # what all that the rank started bears in its environment
    code: int | None = None  # how the rank's own process exited: 128 + n for signal n; None while it runs
    exited: float = 0.0  # when, monotonic: one clock for all of a machine
    ended: bool = False  # and nothing that it started is left
    out_of_memory: bool = False  # processes of its cgroup were killed for want of memory
    preloaded: bool = False  # a process waits that has the next rank's imports done
    unstarted: str = ""  # why the rank's command could not even be started

    @classmethod
    def of(cls, line: bytes) -> SlotReport:
        """Read a line; raises ValueError or TypeError where it is none."""
        return cls(**json.loads(line))

    @property
    def is_running(self) -> bool:
        """Whether anything of its rank may be there."""
        return bool(self.attempt) and not self.ended
