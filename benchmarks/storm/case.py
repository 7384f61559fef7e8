"""One case of the storm as a value, and as a line of text that can be run again. Pure.

`3+1 operator; node-killed last @40+3 for 20; watchdog-killed ctl @40+5 for 5` is a job of three ranks and one
spare with a watchdog of an operator's rights. Three seconds after its step 40 the last rank's node loses its
power, for 20 s; two seconds later the watchdog is killed, and started again after 5 s.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self

from typing_extensions import override

from benchmarks.watchdog.scenarios import Rights
from deeplink.core.errors import DeepLinkError

MOST_NODES, MOST_INJECTIONS = 8, 6
RIGHTS = MappingProxyType({"operator": Rights.OPERATOR, "user": Rights.USER, "none": Rights.NONE})
"""Who runs the watchdog, by its word in a case."""


class CaseTextError(DeepLinkError):
    """A text is no case of the storm."""

    def __init__(self, text: str, problem: str) -> None:
        super().__init__(f"{text!r}: {problem}; a case reads `3+1 operator; node-killed last @40+3 for 20`")


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectionKind:
    """What is known beforehand of one fault of the laboratory.

    Attributes:
        places: where it may come.
        hold_s: the shortest and the longest time it is in effect; zeros where it is over at once.
        costs: whether an attempt may end for it. A healthy training is not to be restarted for any other.
        from_step: it is not drawn to come before this step of the job.
        weight: how often it is drawn, beside the others.
    """

    places: tuple[str, ...]
    hold_s: tuple[float, float] = (0.0, 0.0)
    costs: bool = False
    from_step: int = 0
    weight: int = 2

    def may_cost(self, place: str) -> bool:
        """Whether an attempt may end for it there: a resting spare has no rank to lose."""
        return self.costs and place != SPARE


BATCH, FIRST, LAST, SPARE, LEAF, CTL, ALL = "batch", "first", "last", "spare", "leaf", "ctl", "all"
"""Places: the batch host, the node of the first or the last rank, a resting spare, the last rank's leaf, the
controller's host, everything."""
_RANKED = (BATCH, FIRST, LAST)
_NODES = (*_RANKED, SPARE)
# Slurm takes a node that it does not hear for longer than SlurmdTimeout from its job, whatever we do.
_SLURMD_S = (3.0, 7.0)
KINDS = MappingProxyType(
    {
        "node-killed": InjectionKind(places=_NODES, hold_s=(10, 30), costs=True, weight=4),
        "node-cut": InjectionKind(places=_NODES, hold_s=(6, 30), costs=True, weight=4),
        "fast-reboot": InjectionKind(places=_NODES, costs=True),
        "leaf-cut": InjectionKind(places=(LEAF,), hold_s=(10, 30), costs=True),
        "sends-dropped": InjectionKind(places=_NODES, hold_s=(6, 30), costs=True),
        "receives-dropped": InjectionKind(places=_NODES, hold_s=(6, 30), costs=True),
        "data-dropped": InjectionKind(places=_RANKED, hold_s=(40, 50), costs=True),
        "agent-dropped": InjectionKind(places=_NODES, hold_s=(3, 25)),
        "slurmd-dropped": InjectionKind(places=_RANKED, hold_s=_SLURMD_S),
        "rank-stopped": InjectionKind(places=_RANKED, hold_s=(40, 50), costs=True),
        "rank-killed": InjectionKind(places=_RANKED, costs=True),
        "rank-terminated": InjectionKind(places=_RANKED, costs=True, weight=1),
        "agent-killed": InjectionKind(places=_NODES),
        "agent-terminated": InjectionKind(places=_NODES, weight=1),
        "agent-stopped": InjectionKind(places=_NODES, hold_s=(3, 30)),
        "launcher-killed": InjectionKind(places=(BATCH,)),
        "launcher-stopped": InjectionKind(places=(BATCH,), hold_s=(3, 30)),
        "rank-exit": InjectionKind(places=(ALL,), hold_s=(5, 10), costs=True),
        "slow-rank": InjectionKind(places=_RANKED, hold_s=(5, 20), weight=1),
        "controller-cut": InjectionKind(places=(CTL,), hold_s=_SLURMD_S),
        "slurmd-killed": InjectionKind(places=_RANKED, hold_s=_SLURMD_S),
        # One that dies before it has saved that a job runs, every 5 s, starts it a second time, drains its node
        # for that (Duplicate jobid) and holds it (measured, 22.05.8): that is between Slurm and its operator.
        "controller-down": InjectionKind(places=(CTL,), hold_s=(5, 30), from_step=40),
        "controller-frozen": InjectionKind(places=(CTL,), hold_s=(5, 30)),
        "controller-terminated": InjectionKind(places=(CTL,), hold_s=(1, 20), weight=1),
        "slurmd-stopped": InjectionKind(places=_RANKED, hold_s=_SLURMD_S, weight=1),
        "slurmd-terminated": InjectionKind(places=_RANKED, hold_s=_SLURMD_S, weight=1),
        "watchdog-killed": InjectionKind(places=(CTL,), hold_s=(1, 10)),
        "watchdog-stopped": InjectionKind(places=(CTL,), hold_s=(3, 20)),
        "watchdog-terminated": InjectionKind(places=(CTL,), hold_s=(1, 10), weight=1),
        "agents-silent": InjectionKind(places=(ALL,), hold_s=(3, 25)),
        "node-drained": InjectionKind(places=_NODES, hold_s=(5, 30)),
        "storage-frozen": InjectionKind(places=(ALL,), hold_s=(3, 20)),
        "storage-full": InjectionKind(places=(ALL,), hold_s=(3, 15), costs=True),
        "storage-readonly": InjectionKind(places=_NODES, hold_s=(3, 15), costs=True),
        "checkpoints-unreadable": InjectionKind(places=(ALL,), hold_s=(3, 15), costs=True),
        "checkpoint-torn": InjectionKind(places=(ALL,), hold_s=(15, 30)),
        "disk-full": InjectionKind(places=_NODES, hold_s=(5, 20), weight=1),
        "disk-readonly": InjectionKind(places=_NODES, hold_s=(5, 20), weight=1),
        "disk-failing": InjectionKind(places=_NODES, hold_s=(5, 20)),
        "folder-squatted": InjectionKind(places=_NODES, hold_s=(5, 20), weight=1),
    }
)
"""Every fault that the storm draws from, by its name in the laboratory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StormJob:
    """The job of a case, and who watches it.

    Attributes:
        watch: a word of `RIGHTS`.
        array: whether it is a task of an array, whose other task sleeps beside it on as many nodes.
        standing: whether every node has an agent as a system service; takes an operator's watchdog.
        children: whether each rank starts a process that leaves its session and writes on.
    """

    ranks: int
    spares: int = 0
    watch: str = "operator"
    array: bool = False
    standing: bool = False
    children: bool = False

    @property
    def nodes(self) -> int:
        """Nodes that all tasks of the job take."""
        return (self.ranks + self.spares) * (2 if self.array else 1)

    @override
    def __str__(self) -> str:
        flags = [name for name in FLAGS if getattr(self, name)]
        return " ".join([f"{self.ranks}+{self.spares}", self.watch, *flags])


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """One fault of a case.

    Attributes:
        what: a key of `KINDS`.
        place: one of that kind's.
        step: it comes not before the job has made this step; 0: not before it is submitted.
        wait_s: and so long after that.
        hold_s: for how long it is in effect; 0 where it is over at once.
    """

    what: str
    place: str
    step: int
    wait_s: float
    hold_s: float = 0.0

    @override
    def __str__(self) -> str:
        held = f" for {self.hold_s:g}" if self.hold_s else ""
        return f"{self.what} {self.place} @{self.step}+{self.wait_s:g}{held}"

    @property
    def may_cost(self) -> bool:
        """Whether an attempt may end for it."""
        return KINDS[self.what].may_cost(self.place)


FLAGS = ("array", "standing", "children")
_JOB = re.compile(r"(\d{1,3})\+(\d{1,3}) (operator|user|none)( array)?( standing)?( children)?")
_NUMBER = r"\d{1,4}(?:\.\d{1,3})?"
_INJECTION = re.compile(rf"([a-z-]+) ([a-z]+) @(\d{{1,5}})\+({_NUMBER})(?: for ({_NUMBER}))?")


@dataclass(frozen=True, slots=True)
class StormCase:
    """A job, and the faults that come to it."""

    job: StormJob
    injections: tuple[Injection, ...] = ()

    @override
    def __str__(self) -> str:
        return "; ".join(map(str, (self.job, *self.injections)))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `str` wrote.

        Raises:
            CaseTextError: it is no case.

        >>> str(StormCase.parse("3+1 none array;  rank-killed last @40+2.5"))
        '3+1 none array; rank-killed last @40+2.5'
        """
        job, *others = (" ".join(part.split()) for part in text.split(";"))
        return cls(_job(job), tuple(map(_injection, others)))


def _job(text: str) -> StormJob:
    hit = _JOB.fullmatch(text)
    if hit is None:
        raise CaseTextError(text, f"expected RANKS+SPARES, one of {'/'.join(RIGHTS)}, then of {', '.join(FLAGS)}")
    ranks, spares, watch, *flags = hit.groups()
    job = StormJob(
        ranks=int(ranks), spares=int(spares), watch=watch, **dict(zip(FLAGS, map(bool, flags), strict=True))
    )
    if not (job.ranks and job.nodes <= MOST_NODES):
        raise CaseTextError(text, f"a job has a rank, and at most {MOST_NODES} nodes")
    if job.standing and job.watch != "operator":
        raise CaseTextError(text, "standing agents take an operator's watchdog")
    return job


def _injection(text: str) -> Injection:
    hit = _INJECTION.fullmatch(text)
    if hit is None:
        raise CaseTextError(text, "expected FAULT PLACE @STEP+SECONDS, then `for SECONDS`")
    kind = KINDS.get(hit[1])
    if kind is None:
        raise CaseTextError(text, f"no such fault; there are {', '.join(KINDS)}")
    if hit[2] not in kind.places:
        raise CaseTextError(text, f"{hit[1]} comes at {', '.join(kind.places)}")
    return Injection(what=hit[1], place=hit[2], step=int(hit[3]), wait_s=float(hit[4]), hold_s=float(hit[5] or 0))
