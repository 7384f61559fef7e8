"""The steps that do and undo a fault, as values that can be written down. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self

from deeplink.scheduler.testbed.errors import SandboxError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from deeplink.scheduler.testbed.lab.scene import Scene
    from deeplink.scheduler.testbed.processes import ProcessId


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

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Self:
        """Read what was written as JSON."""
        return cls(Verb(raw["verb"]), str(raw["on"]), tuple(map(str, raw["words"])))


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
