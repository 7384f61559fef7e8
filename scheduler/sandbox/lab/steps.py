"""What is done to a sandbox for a fault, and to undo it: plain values that can be written down. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from deeplink.scheduler.sandbox.processes import ProcessId


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
    """One step.

    Attributes:
        on: a machine or switch; empty where it is about none.
        words: see `Verb`.
    """

    verb: Verb
    on: str = ""
    words: tuple[str, ...] = ()

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Self:
        """Read what was written as JSON.

        Raises:
            KeyError, ValueError, TypeError: it is something else.
        """
        return cls(Verb(raw["verb"]), str(raw["on"]), tuple(map(str, raw["words"])))


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """How a fault is done, and undone."""

    do: tuple[FaultStep, ...]
    undo: tuple[FaultStep, ...] = ()


def process_words(processes: Iterable[ProcessId]) -> tuple[str, ...]:
    """Return processes as words of a step.

    >>> from deeplink.scheduler.sandbox.processes import ProcessId
    >>> process_words([ProcessId(17, 4711)])
    ('17:4711',)
    """
    return tuple(f"{process.pid}:{process.start}" for process in processes)
