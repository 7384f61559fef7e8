"""What a fault needs to know of a sandbox to be planned, and the steps that do and undo it, as values."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import dropwhile
from pathlib import Path
from typing import TYPE_CHECKING, Self

from deeplink.scheduler.testbed.errors import SandboxError
from deeplink.scheduler.testbed.processes import ProcessId, arguments, descendants, table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from deeplink.scheduler.testbed.cluster import Sandbox

_LISTENS = "0A"
_CHECKPOINT = re.compile(r"step-(\d+)\.a(\d+)(?:-(\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A program as it was started, to be started so again."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)  # its environment
    log: str = ""  # the file its output went to; empty where that was none
    uid: int = 0  # who it ran as
    gid: int = 0

    def packed(self) -> str:
        """Return it as one word."""
        return json.dumps(asdict(self))

    @classmethod
    def unpacked(cls, word: str) -> Self:
        """Read what `packed` wrote."""
        raw = json.loads(word)
        return cls(**{**raw, "argv": tuple(raw["argv"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What a fault finds."""

    fault: str = ""  # its name
    target: str = ""  # the machine, the leaf or the folder it is to hit; empty where it hits all
    # processes of each rank on the target
    ranks: Mapping[int, tuple[ProcessId, ...]] = field(default_factory=dict)
    daemon: ProcessId | None = None  # the target's Slurm daemon
    watchdogs: tuple[tuple[ProcessId, Started], ...] = ()  # those on the target, each with how it was started
    # processes of jobs' `deeplink VERB` on the target, by verb
    programs: Mapping[str, tuple[ProcessId, ...]] = field(default_factory=dict)
    homes: str = ""  # the shared folder
    # the ports on which node agents listen, by machine
    agents: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    torn: tuple[str, str] | None = None  # the file to tear, and where the whole one is to be kept
    mode: str | None = None  # of the folder, octal; None where it holds no checkpoint
    rank: int | None = None  # which rank was asked for; None for the first one there
    step: int = 0  # at which step, where the fault waits for one
    always: bool = False  # whether it is to happen at each attempt
    share: float = 0.5  # of the time that a slow rank stands still


def processes_on(sandbox: Sandbox, machine: str) -> list[ProcessId]:
    """Return a machine's processes; none where it is powered off."""
    first = sandbox.hardware.process_1(machine)
    if first is None:
        return []
    processes = table()
    found = set(descendants(first.pid, processes))
    if sandbox.has_network:
        # What `exec` brought in lies below none of the machine's own, but sees what they see.
        space = _pid_space(first.pid)
        found |= {ProcessId(pid, entry.start) for pid, entry in processes.items() if _pid_space(pid) == space}
    return sorted((who for who in found - {first} if who.alive), key=lambda who: who.start)


def _pid_space(pid: int) -> int | None:
    """Return the number of the namespace a process has its number in; None when it is gone."""
    try:
        return (Path("/proc") / str(pid) / "ns" / "pid").stat().st_ino
    except OSError:
        return None


def environment(pid: int) -> dict[str, str]:
    """Return the environment a process was started with; empty when it is gone."""
    try:
        raw = (Path("/proc") / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    words = (os.fsdecode(word).partition("=") for word in raw.split(b"\0") if b"=" in word)
    return {name: value for name, _, value in words}


def ranks_on(sandbox: Sandbox, machine: str) -> dict[int, tuple[ProcessId, ...]]:
    """Return the processes of each rank on a machine: those with a RANK, whoever started them."""
    found: dict[int, list[ProcessId]] = {}
    for who in processes_on(sandbox, machine):
        rank = environment(who.pid).get("RANK", "")
        if rank.isdigit():
            found.setdefault(int(rank), []).append(who)
    return {rank: tuple(those) for rank, those in found.items()}


def is_verb(argv: Sequence[str], verb: str) -> bool:
    """Whether an argument list is `deeplink VERB` or `python -m deeplink VERB`, with options before the verb."""
    words = list(argv)
    if words and Path(words[0]).name.startswith("python"):
        words = list(dropwhile(lambda word: word.startswith("-"), words[1:]))
    if not words or Path(words[0]).name != "deeplink":
        return False
    return next((word for word in words[1:] if not word.startswith("-")), "") == verb


def listening(text: str) -> dict[int, int]:
    """Return the port of each listening socket by its inode, from /proc/net/tcp."""
    found = {}
    for line in text.splitlines()[1:]:
        words = line.split()
        if len(words) > 9 and words[3] == _LISTENS:  # noqa: PLR2004 - columns of proc(5)
            found[int(words[9])] = int(words[1].rpartition(":")[2], 16)
    return found


def ports_of(pid: int) -> tuple[int, ...]:
    """Return the TCP ports a process listens on, in the order in which it opened them."""
    proc = Path("/proc") / str(pid)
    try:
        tables = [(proc / "net" / name).read_text(encoding="ascii") for name in ("tcp", "tcp6")]
        handles = sorted((proc / "fd").iterdir(), key=lambda handle: int(handle.name))
    except OSError:
        return ()
    ports = {f"socket:[{inode}]": port for text in tables for inode, port in listening(text).items()}
    found = (ports.get(_target(handle)) for handle in handles)
    return tuple(dict.fromkeys(port for port in found if port is not None))


def _target(handle: Path) -> str:
    """Return what an open file is, as `socket:[1]`; empty when it was closed meanwhile."""
    try:
        return os.readlink(handle)  # noqa: PTH115 - it is no path
    except OSError:
        return ""


def agents_on(sandbox: Sandbox, machine: str) -> tuple[int, ...]:
    """Return the ports of the node agents on a machine."""
    agents = [who.pid for who in processes_on(sandbox, machine) if is_verb(arguments(who.pid), "node")]
    return tuple(sorted({port for pid in agents for port in ports_of(pid)}))


def programs_on(sandbox: Sandbox, machine: str) -> dict[str, tuple[ProcessId, ...]]:
    """Return the processes of jobs' own `deeplink run` and `deeplink node` on a machine, by verb."""
    those = [who for who in processes_on(sandbox, machine) if "SLURM_JOB_ID" in environment(who.pid)]
    return {verb: tuple(who for who in those if is_verb(arguments(who.pid), verb)) for verb in ("run", "node")}


def watchdogs_on(sandbox: Sandbox, machine: str) -> tuple[tuple[ProcessId, Started], ...]:
    """Return the watchdogs on a machine, each with how it was started."""
    return tuple(
        (who, _started(who.pid)) for who in processes_on(sandbox, machine) if is_verb(arguments(who.pid), "watch")
    )


def _started(pid: int) -> Started:
    proc = Path("/proc") / str(pid)
    try:
        log = os.readlink(proc / "fd" / "1")  # noqa: PTH115 - it may be no path
        owner = proc.stat()
    except OSError:
        return Started(argv=tuple(arguments(pid)), env=environment(pid))
    return Started(
        argv=tuple(arguments(pid)),
        env=environment(pid),
        log=log if Path(log).is_file() else "",
        uid=owner.st_uid,
        gid=owner.st_gid,
    )


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint's folder, by claim, step and repetition; None where there is none."""
    try:
        names = [entry.name for entry in folder.iterdir() if entry.is_dir()]
    except OSError:
        return None
    found = [
        (int(hit[2]), int(hit[1]), int(hit[3] or 0), name)  # claim, step, repetition
        for name in names
        if (hit := _CHECKPOINT.fullmatch(name))
    ]
    return folder / max(found)[3] if found else None


def largest_file(folder: Path) -> Path | None:
    """Return the largest file of a folder that is not its manifest; None where there is none."""
    files = [
        path
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink() and path.name != "manifest.json"
    ]
    return max(files, key=lambda path: (path.stat().st_size, str(path)), default=None)


class Verb(StrEnum):
    """One kind of step. All may be done twice: the second time nothing changes."""

    CUT = "cut"  # the cable of `on`
    HEAL = "heal"
    OFF = "off"  # the power of `on`, its cable cut first
    BOOT = "boot"
    PAUSE = "pause"  # words: seconds
    SIGNAL = "signal"  # words: its name, then `pid:start` of each process
    RUN = "run"  # words: a command, as root on `on`
    DAEMON = "daemon"  # Slurm's on `on`, if it does not run
    FREEZE = "freeze"  # the shared folder
    THAW = "thaw"
    AGAIN = "again"  # start on `on` what was there: words: JSON of a `Started`
    DUTY = "duty"  # stop and continue processes by turns: words: share, period, `pid:start`...
    REST = "rest"  # end such a turn
    TEAR = "tear"  # words: file, where the whole one is kept
    MEND = "mend"
    CHMOD = "chmod"  # words: folder, the mode it is to have now, the mode it gets; octal
    WRITE = "write"  # words: file, text
    REMOVE = "remove"  # words: file


@dataclass(frozen=True, slots=True)
class FaultStep:
    """One step."""

    verb: Verb
    on: str = ""  # a machine or switch; empty where it is about none
    words: tuple[str, ...] = ()  # see `Verb`


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """How a fault is done, and undone."""

    do: tuple[FaultStep, ...]
    undo: tuple[FaultStep, ...] = ()


class FaultTarget(StrEnum):
    """What a fault hits."""

    NODE = "node"
    RANK = "a node's rank"
    LEAF = "leaf"
    CONTROL = "ctl"
    ALL = "everything"
    FOLDER = "folder"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault."""

    name: str
    target: FaultTarget
    like: str  # what it stands for on real machines, for people
    undone: str  # how it ends when it is undone, for people
    plan: Callable[[Scene], FaultPlan]  # from what is there to what is done
    network: bool = True  # whether it takes machines with networks and mounts of their own
    lasting: bool = True  # whether it is in effect until it is undone; else it is over once it is done
    mounts: bool = False  # whether it lies over the node's SSD: the newest of such hides the others


def no_target(fault: str, target: str, lacking: str) -> SandboxError:
    """Return the error of a fault that has nothing to hit: no rank, daemon or checkpoint is there."""
    return SandboxError(
        f"{fault}: {lacking}{f' on {target}' if target else ''}",
        remedy="`deeplink sandbox fault --list` says what each hits, `deeplink sandbox status` what is up.",
    )


def process_words(processes: Iterable[ProcessId]) -> tuple[str, ...]:
    """Return processes as words of a step."""
    return tuple(f"{process.pid}:{process.start}" for process in processes)


def signalled(name: str, processes: Iterable[ProcessId]) -> FaultStep:
    """Return the step that sends a signal."""
    return FaultStep(Verb.SIGNAL, words=(name, *process_words(processes)))


def as_root(machine: str, do: str, undo: str) -> FaultPlan:
    """Return the plan of two shell scripts that root runs on a machine."""
    return FaultPlan(
        (FaultStep(Verb.RUN, machine, ("sh", "-c", do)),), (FaultStep(Verb.RUN, machine, ("sh", "-c", undo)),)
    )
