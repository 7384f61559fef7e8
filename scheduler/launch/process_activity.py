"""Tells from two samples of CPU time and state what the processes of late ranks do; pure, time is passed in."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

IDLE_SHARE = 0.01
"""Who uses less of one CPU waits: threads that wake up to look at a clock use a thousandth."""
UNBROKEN_S = 30.0
"""Between two looks further apart (the whole job may have been suspended) nobody knows what was."""
STOPPED = "T"
HELD = frozenset({"T", "t"})
ENDED = frozenset({"Z", "X", "x", ""})


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSnapshot:
    """A rank's process as its agent saw it: state as in proc(5), CPU time so far of it and all below it."""

    state: str
    cpu_s: float


class ActivityAnswer(Enum):
    """What is known of ranks that are late."""

    UNKNOWN = "unknown"
    STOPPED = "stopped"
    HELD = "held"
    IDLE = "idle"
    WORKING = "working"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankActivity:
    """What the processes of an attempt's ranks do.

    Attributes:
        ranks: those that are stopped, or that work.
    """

    answer: ActivityAnswer
    ranks: tuple[int, ...] = ()


def seen(
    before: Mapping[int, ProcessSnapshot], now: Mapping[int, ProcessSnapshot], between_s: float, world: int
) -> RankActivity:
    """Return what ranks do, from two looks at them.

    Args:
        before: at the first look, by rank; ranks of nodes that did not answer are missing.
        now: at the second.
        between_s: seconds from the one to the other.
        world: how many ranks there should be.
    """
    both = {rank: (before[rank], now[rank]) for rank in sorted(before.keys() & now.keys())}
    here = {rank: two for rank, two in both.items() if two[1].state not in ENDED}
    if not here or between_s <= 0:
        return RankActivity(answer=ActivityAnswer.UNKNOWN)
    held = [rank for rank, two in here.items() if two[0].state in HELD and two[1].state in HELD]
    stopped = [rank for rank in held if here[rank][1].state == STOPPED]
    free = [rank for rank in here if rank not in held]
    if stopped and free:
        return RankActivity(answer=ActivityAnswer.STOPPED, ranks=tuple(stopped))
    if held:
        return RankActivity(answer=ActivityAnswer.HELD, ranks=tuple(held))
    working = [rank for rank, two in here.items() if two[1].cpu_s - two[0].cpu_s > IDLE_SHARE * between_s]
    if working:
        return RankActivity(answer=ActivityAnswer.WORKING, ranks=tuple(working))
    if len(both) < world:
        return RankActivity(answer=ActivityAnswer.UNKNOWN)
    return RankActivity(answer=ActivityAnswer.IDLE)


@dataclass(slots=True)
class Watch:
    """What the processes of late ranks did, look after look.

    Attributes:
        newest: what the last two looks say.
    """

    newest: RankActivity = field(default_factory=lambda: RankActivity(answer=ActivityAnswer.UNKNOWN))
    _before: Mapping[int, ProcessSnapshot] | None = None
    _looked: float = 0.0
    _idle_since: float | None = None
    _stopped_since: dict[int, float] = field(default_factory=dict)

    def forget(self) -> None:
        """Nobody is late any more, or other ranks are."""
        self.newest = RankActivity(answer=ActivityAnswer.UNKNOWN)
        self._before, self._idle_since, self._stopped_since = None, None, {}

    def look(self, now: Mapping[int, ProcessSnapshot], at: float, world: int) -> None:
        """Take in one look."""
        if at - self._looked > UNBROKEN_S:
            self.forget()
        if self._before is not None:
            self.newest = seen(self._before, now, at - self._looked, world)
            if self.newest.answer is not ActivityAnswer.IDLE:
                self._idle_since = None
            elif self._idle_since is None:
                self._idle_since = self._looked
            still = self.newest.ranks if self.newest.answer is ActivityAnswer.STOPPED else ()
            self._stopped_since = {rank: self._stopped_since.get(rank, self._looked) for rank in still}
        self._before, self._looked = dict(now), at

    def idle_s(self) -> float:
        """Return for how long nobody has worked, as far as looked; 0 while somebody does."""
        return 0.0 if self._idle_since is None else self._looked - self._idle_since

    def stopped_s(self) -> float:
        """Return for how long a rank has been stopped while another was not, as far as looked; 0 where none is."""
        return self._looked - min(self._stopped_since.values(), default=self._looked)
