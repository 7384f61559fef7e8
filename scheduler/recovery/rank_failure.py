"""Why ranks failed, as far as can be told, and whether starting them again makes sense; pure.

What is known of the first rank that failed - its exit code, what was said on standard error, what its node's own
checks find - makes a diagnosis. Whether that is worth another attempt depends on what was tried since the newest
step: progress, not a number of attempts, is what is allowed for.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from deeplink.core.finding import Severity
from deeplink.scheduler.recovery.records import IncidentKind

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from deeplink.core.finding import Finding
    from deeplink.core.types import NodeName

# What a shell, and our own starter of ranks, exit with where there is no such command.
NOT_EXECUTABLE, NOT_FOUND = 126, 127
_BY_SIGNAL = 128


class Clue(Enum):
    """A clue on the ranks' standard error shortly before they ended."""

    OUT_OF_MEMORY = "out of memory"
    IO_ERROR = "an input/output error"
    GPU_FAULT = "a fault of a GPU"


_HINTS = (
    (
        Clue.OUT_OF_MEMORY,
        # slurmstepd and srun, torch on GPU and CPU, Python itself.
        rb"oom[-_]kill event|: Out Of Memory|OutOfMemoryError|CUDA out of memory|can't allocate mem|^MemoryError",
    ),
    (
        Clue.IO_ERROR,
        # The last one is our own word, whatever error it was of the storage of checkpoints.
        (
            rb"\[Errno 5\]|Input/output error|Remote I/O error|Stale file handle"
            rb"|^deeplink\.checkpoints\S*\.(?:Storage\w+|FolderGone)Error"
        ),
    ),
    (Clue.GPU_FAULT, rb"uncorrectable ECC error|fallen off the bus|Unable to determine the device handle"),
)
_ANY_HINT = re.compile(b"|".join(b"(%s)" % pattern for _, pattern in _HINTS), re.MULTILINE)


def hints_in(written: bytes) -> frozenset[Clue]:
    """Return what some output hints at.

    >>> sorted(hint.name for hint in hints_in(b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate"))
    ['OUT_OF_MEMORY']
    """
    return frozenset(_HINTS[(found.lastindex or 1) - 1][0] for found in _ANY_HINT.finditer(written))


# A kill for want of memory so long before a step ended may have ended it: Slurm gives other ranks KillWait.
OOM_BEFORE_S = 60.0
OOM_AFTER_S = 5.0  # So much later it may be noticed
_OOM_FOUND = re.compile(r"want of memory|out of memory|\boom\b", re.IGNORECASE)


class Cause(Enum):
    """The cause of an attempt's end."""

    NODE_LOST = "a node was lost"
    HANG = "the ranks hung"
    INFRASTRUCTURE = "not the application"
    OUT_OF_MEMORY = "memory ran out"
    NOT_STARTED = "the ranks were not started"
    NO_COMMAND = "the command cannot be started"
    UNKNOWN = "not known"


@dataclass(frozen=True, slots=True)
class Setback:
    """Why an attempt was given up."""

    cause: Cause  # of its end
    code: int = 0  # its exit code; 0 where nothing exited
    # for how long it ran; 0 where that is not known. Says nothing of what two have in common
    ran_s: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The first rank that failed, as far as known."""

    said: str = ""  # for people; empty while none failed
    node: NodeName | None = None  # where it ran, or was to; None where unknown
    hints: frozenset[Clue] = frozenset()  # on standard error
    is_of_rank: bool = True  # False where what started the ranks failed, and no rank is known to have


@dataclass(frozen=True, slots=True)
class Ran:
    """When ranks ran, in Unix time by the clock of the node that tells of it."""

    began_unix: float
    ended_unix: float

    def may_have_ended_by(self, unix: float) -> bool:
        """Whether what happened then may be why they ended.

        >>> [Ran(1000.0, 1100.0).may_have_ended_by(unix) for unix in (0.0, 999.0, 1030.0, 1099.0, 1101.0, 1130.0)]
        [False, False, False, True, True, False]
        """
        return max(self.began_unix, self.ended_unix - OOM_BEFORE_S) <= unix <= self.ended_unix + OOM_AFTER_S


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why ranks failed."""

    cause: Cause
    kind: IncidentKind  # of the incident
    because: str  # for people
    suspects: tuple[NodeName, ...] = ()  # nodes better left out of the next attempt


def diagnose(
    code: int,
    failed: Failed,
    active: Collection[NodeName],
    health: Mapping[NodeName, Collection[Finding]],
    ran: Mapping[NodeName, Ran],
) -> Diagnosis:
    """Return why ranks that exited with `code` failed, all nodes being in reach."""
    said = failed.said or f"the ranks exited {code}"
    where = (failed.node,) if failed.node is not None else ()
    blamed = where or tuple(active)
    found = {node: [one for one in health.get(node, ()) if one.severity is Severity.ERROR] for node in blamed}
    sick = {node: findings[0] for node, findings in found.items() if findings}
    told = ", ".join(f"{node} has {finding.check}: {finding.text}" for node, finding in sick.items())
    if not failed.is_of_rank:
        kind, because = (IncidentKind.NODE_SICK, f"{said}; {told}") if sick else (IncidentKind.LAUNCH_FAILED, said)
        return Diagnosis(Cause.NOT_STARTED, kind, because, tuple(sick) or where)
    if code in {NOT_FOUND, NOT_EXECUTABLE}:
        return Diagnosis(Cause.NO_COMMAND, IncidentKind.APPLICATION_FAILED, said)
    is_killed = code == _BY_SIGNAL + signal.SIGKILL
    short = [node for node in blamed if node in ran and _ran_short(health.get(node, ()), ran[node])]
    if Clue.OUT_OF_MEMORY in failed.hints or (is_killed and short):
        why = f"{', '.join(short)} killed processes for want of memory" if short else "memory ran out"
        return Diagnosis(Cause.OUT_OF_MEMORY, IncidentKind.OUT_OF_MEMORY, f"{said}; {why}", where)
    if sick:
        return Diagnosis(Cause.INFRASTRUCTURE, IncidentKind.NODE_SICK, f"{said}; {told}", tuple(sick))
    if is_killed:
        outside = "killed from outside, and nothing says for want of memory"
    elif code == _BY_SIGNAL + signal.SIGBUS:
        outside = "a bus error: a mapped file or shared memory could not be read"
    else:
        hints = (hint for hint in (Clue.GPU_FAULT, Clue.IO_ERROR) if hint in failed.hints)
        outside = next((f"its output reports {hint.value}" for hint in hints), "")
    if outside:
        return Diagnosis(Cause.INFRASTRUCTURE, IncidentKind.RANK_FAILED, f"{said}; {outside}", where)
    return Diagnosis(Cause.UNKNOWN, IncidentKind.RANK_FAILED, said, where)


def _ran_short(findings: Collection[Finding], ran: Ran) -> bool:
    # Such a finding stands for minutes: a kill of before these ranks, or of long before their end, says nothing.
    short = (one for one in findings if one.check == "memory" and _OOM_FOUND.search(one.text))
    return any(ran.may_have_ended_by(one.since_unix) for one in short)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaunchLimits:
    """Limits for starting ranks again."""

    most_fruitless: int = 2  # relaunches from one point without a newer step, whatever the causes
    most_relaunches: int | None = None  # in all, progress or not; None: no such bound
    retries: bool = True  # whether ranks that failed by themselves are started again at all
    final_codes: frozenset[int] = frozenset()  # exit codes that say how the run ends: nothing is started again


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """The attempts so far."""

    since_progress: tuple[Setback, ...] = ()  # setbacks since the newest step, the oldest first
    relaunches: int = 0  # in all
    best: int | None = None  # the newest step of any attempt; None before the first

    @property
    def point(self) -> str:
        """The run's newest step, for people."""
        return "before the first step" if self.best is None else f"at step {self.best}"


_MORE_MEMORY = "ask for more memory (--mem, --gpus-per-node), or take smaller batches"


def stop_for(
    cause: Cause, code: int, kind: IncidentKind, tried: Tried, limits: RelaunchLimits
) -> tuple[IncidentKind, str] | None:
    """Return as what an attempt goes down, and why it is the last one; None where another one makes sense.

    >>> again = Tried(since_progress=(Setback(Cause.UNKNOWN, 1),), relaunches=1, best=12)
    >>> stop_for(Cause.UNKNOWN, 1, IncidentKind.RANK_FAILED, again, RelaunchLimits())[1]
    'exit code 1 again at step 12: the application'
    """
    exited = cause not in {Cause.NODE_LOST, Cause.HANG, Cause.NOT_STARTED}
    recent = tried.since_progress
    stop = None
    if exited and (code in limits.final_codes or not limits.retries):
        stop = (kind, f"exit code {code} is final" if limits.retries else "no retry is wanted")
    elif cause is Cause.NO_COMMAND:
        stop = (kind, "there is no such command")
    elif limits.most_relaunches is not None and tried.relaunches >= limits.most_relaunches:
        # Whose failure it was is not known from one look: it is not called the application's.
        stop = (kind, f"{tried.relaunches} relaunches are as many as are allowed")
    elif cause is Cause.OUT_OF_MEMORY and any(before.cause is cause for before in recent):
        stop = (IncidentKind.OUT_OF_MEMORY, f"out of memory again {tried.point}: {_MORE_MEMORY}")
    elif cause is Cause.UNKNOWN and any(before == Setback(cause, code) for before in recent):
        stop = (IncidentKind.APPLICATION_FAILED, f"exit code {code} again {tried.point}: the application")
    elif len(recent) >= limits.most_fruitless:
        # Launches that failed, and nodes that were lost, say nothing against the application.
        own = sum(before.cause is Cause.UNKNOWN for before in recent)
        kind = IncidentKind.APPLICATION_FAILED if cause is Cause.UNKNOWN and own >= limits.most_fruitless else kind
        stop = (kind, f"{len(recent)} relaunches since the newest step, giving up")
    return stop
