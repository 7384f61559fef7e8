"""Tells ranks that hang from ranks that wait for them, and what late ranks' processes do; pure, time is passed in.

The signs, the surest first: a process that is stopped, gone or stuck in the kernel while others are not (gone or
stuck at most half of them: where most have ended, or storage holds most, they are not the odd ones); a rank in no
collective while others wait in one; the one rank that is elsewhere than all others, which are at one place; the
rank that is steps behind. Where none of them tells, nobody is blamed.

To be to blame is not to hang: who reads or writes, or works, keeps the others waiting as well (`deadlock`).
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from deeplink.core.text import counted

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from deeplink.core.types import NodeName

IDLE_SHARE = 0.01  # a process that uses less of one CPU waits: threads that wake up to look at a clock use 1/1000
UNBROKEN_S = 30.0  # between two looks further apart (the whole job may have been suspended) nothing is known
STOPPED = "T"
HELD = frozenset({"T", "t"})
ENDED = frozenset({"Z", "X", "x", ""})
WORDS = {
    "T": "stopped (T)",
    "t": "held by a debugger (t)",
    "Z": "ended, and not taken away (Z)",
    "": "gone",
    "D": "stuck in the kernel (D)",
}
_SIGNS = (frozenset("T"), frozenset("t"), frozenset(("Z", "X", "")), frozenset("D"))
DEEP = 8  # Frames from the innermost one on in which a collective is looked for
MOST_NAMED = 4
# Where ranks wait for each other: torch.distributed, the end of DDP's backward pass, mpi4py, Horovod.
_COLLECTIVE_FILES = frozenset({"distributed_c10d.py", "mpi_ops.py"})
_COLLECTIVES = frozenset(
    {
        "all_reduce",
        "all_gather",
        "barrier",
        "_engine_run_backward",
        "allreduce",
        "allgather",
        "Allreduce",
        "Barrier",
    }
)
# Where a rank moves data: torch's loader and ours, saves, the network. Storage may be long about it.
_DATA_FILES = frozenset(
    {
        "dataloader.py",
        "fetch.py",
        "serialization.py",
        "filesystem.py",
        "ssl.py",
        "socket.py",
        "client.py",
        "asyn.py",
        "reader.py",
    }
)
IDLE_S = 15.0  # so long a rank must have been seen idle, without a break, to count as one that does nothing
_PY_SPY = re.compile(r"^ {4}(?P<function>\S.*?) \((?P<file>[^()]*?)(?::\d+)?\)$")
_FAULTHANDLER = re.compile(r'^  File "(?P<file>[^"]*)", line \d+ in (?P<function>.+)$')
_THREAD = re.compile(r"^(?:Current )?[Tt]hread ")
_KERNEL = re.compile(r"^thread \d+ \(.*\): \S+ in (?P<function>\S+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSnapshot:
    """A rank's process as its agent saw it: state as in proc(5), CPU time so far of it and all below it."""

    state: str
    cpu_s: float


class ActivityAnswer(Enum):
    """A look at ranks that are late."""

    UNKNOWN = "unknown"
    STOPPED = "stopped"
    HELD = "held"
    IDLE = "idle"
    WORKING = "working"


@dataclass(frozen=True, slots=True)
class RankActivity:
    """Activity of the processes of an attempt's ranks."""

    answer: ActivityAnswer = ActivityAnswer.UNKNOWN
    ranks: tuple[int, ...] = ()  # those that are stopped, or that work


def activity(
    before: Mapping[int, ProcessSnapshot], now: Mapping[int, ProcessSnapshot], between_s: float, world: int
) -> RankActivity:
    """Return what ranks do, from two samples of their processes' CPU time and state."""
    both = {rank: (before[rank], now[rank]) for rank in sorted(before.keys() & now.keys())}
    here = {rank: two for rank, two in both.items() if two[1].state not in ENDED}
    if not here or between_s <= 0:
        return RankActivity()
    held = tuple(rank for rank, (first, last) in here.items() if first.state in HELD and last.state in HELD)
    stopped = tuple(rank for rank in held if here[rank][1].state == STOPPED)
    if stopped and len(held) < len(here):
        return RankActivity(ActivityAnswer.STOPPED, stopped)
    if held:
        return RankActivity(ActivityAnswer.HELD, held)
    working = tuple(here.keys() - idle_ranks(before, now, between_s))
    if working:
        return RankActivity(ActivityAnswer.WORKING, working)
    return RankActivity(ActivityAnswer.IDLE if len(both) >= world else ActivityAnswer.UNKNOWN)


def idle_ranks(
    before: Mapping[int, ProcessSnapshot], now: Mapping[int, ProcessSnapshot], between_s: float
) -> set[int]:
    """Return the ranks that are there and have used next to no CPU time since."""
    return {
        rank
        for rank in before.keys() & now.keys()
        if now[rank].state not in ENDED and now[rank].cpu_s - before[rank].cpu_s <= IDLE_SHARE * between_s
    }


@dataclass(slots=True)
class ActivityHistory:
    """Activity of the processes of late ranks, look after look."""

    newest: RankActivity = RankActivity()  # what the last two looks say
    _before: Mapping[int, ProcessSnapshot] | None = None
    _looked: float = 0.0
    _idle_since: float | None = None
    _stopped_since: dict[int, float] = field(default_factory=dict)
    _each_idle_since: dict[int, float] = field(default_factory=dict)

    def forget(self) -> None:
        """No rank is late any more, or other ranks are."""
        self.newest, self._before, self._idle_since = RankActivity(), None, None
        self._stopped_since, self._each_idle_since = {}, {}

    def look(self, now: Mapping[int, ProcessSnapshot], at: float, world: int) -> None:
        """Take in one look."""
        if at - self._looked > UNBROKEN_S:
            self.forget()
        if self._before is not None:
            self.newest = activity(self._before, now, at - self._looked, world)
            if self.newest.answer is not ActivityAnswer.IDLE:
                self._idle_since = None
            elif self._idle_since is None:
                self._idle_since = self._looked
            idle = idle_ranks(self._before, now, at - self._looked)
            self._each_idle_since = {rank: self._each_idle_since.get(rank, self._looked) for rank in idle}
            still = self.newest.ranks if self.newest.answer is ActivityAnswer.STOPPED else ()
            self._stopped_since = {rank: self._stopped_since.get(rank, self._looked) for rank in still}
        self._before, self._looked = dict(now), at

    def idle_s(self) -> float:
        """Return for how long no rank has worked, as far as looked; 0 while one does."""
        return 0.0 if self._idle_since is None else self._looked - self._idle_since

    def idle(self) -> set[int]:
        """Return the ranks that have done nothing for `IDLE_S`, as far as looked."""
        return {rank for rank, since in self._each_idle_since.items() if self._looked - since >= IDLE_S}

    def stopped_s(self) -> float:
        """Return for how long a rank has been stopped while another was not, as far as looked; 0 where none is."""
        return self._looked - min(self._stopped_since.values(), default=self._looked)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where one rank is."""

    rank: int
    node: NodeName
    state: str  # of its process, as in proc(5); empty for none
    frames: tuple[str, ...] = ()  # of its main thread, `function (file)`, the innermost first; empty where unknown
    step: int | None = None  # the newest it reported; None where it reports none

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks, as far as its frames tell."""
        return any(_is_collective(frame) for frame in self.frames[:DEEP])

    @property
    def has_frames_of_python(self) -> bool:
        """Whether its own frames are known, and not the kernel's alone."""
        return any(frame.endswith(")") for frame in self.frames)

    @property
    def moves_data(self) -> bool:
        """Whether it reads or writes, or may."""
        return self.state == "D" or any(
            frame.rstrip(")").rpartition("(")[2] in _DATA_FILES for frame in self.frames
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """The ranks that the others wait for; none where it cannot be told."""

    ranks: tuple[RankPlace, ...] = ()
    why: str = ""  # what gives them away, for people

    @property
    def nodes(self) -> tuple[NodeName, ...]:
        """The nodes of those ranks."""
        return tuple(dict.fromkeys(one.node for one in self.ranks))


def main_frames(text: str) -> tuple[str, ...]:
    r"""Return the frames of the main thread in a text of py-spy, faulthandler or the kernel, the innermost first.

    >>> main_frames('Thread 7 (idle): "MainThread"\n    wait (queue.py:9)\n    main (/a/train.py:3)')
    ('wait (queue.py)', 'main (train.py)')
    """
    threads: list[list[str]] = []
    main: int | None = None
    for line in text.splitlines():
        if _THREAD.match(line):
            kernel = _KERNEL.match(line)
            if '"MainThread"' in line or (line.startswith("thread") and not threads):
                main = len(threads)  # of py-spy; the kernel's list begins with it
            threads.append([kernel["function"]] if kernel else [])
        elif threads and (found := _PY_SPY.match(line) or _FAULTHANDLER.match(line)):
            threads[-1].append(f"{found['function']} ({PurePosixPath(found['file']).name})")
    # faulthandler names none, and lists the newest first.
    return tuple(threads[-1 if main is None else main]) if threads else ()


def _is_collective(frame: str) -> bool:
    function, _, file = frame.rstrip(")").partition(" (")
    return file in _COLLECTIVE_FILES or function.rpartition(".")[2] in _COLLECTIVES


def blame(ranks: Sequence[RankPlace]) -> Blame:
    """Return which of these hang, and which only wait."""
    for states in _SIGNS:
        odd = [one for one in ranks if one.state in states]
        most = len(ranks) - 1 if states <= HELD else len(ranks) // 2
        if 0 < len(odd) <= most:
            return Blame(ranks=tuple(odd), why=f"{_are(odd)} {WORDS.get(odd[0].state, odd[0].state)}")
    known = [one for one in ranks if one.frames]
    return _outside(known) or _elsewhere(known) or _behind(ranks)


def deadlock(ranks: Sequence[RankPlace], idle: Collection[int], world: int) -> Blame:
    """Return who keeps the others waiting and does nothing itself, and why; nothing where that cannot be told."""
    # Whether a rank waits for storage only its own frames tell, not the kernel's.
    if len(ranks) < world or not all(one.state not in ENDED and one.has_frames_of_python for one in ranks):
        return Blame()
    if all(one.waits and one.rank in idle for one in ranks):
        return Blame(why=f"every rank waits for the others in {_place(ranks)}")
    blamed = _outside(ranks)
    if blamed is None or not all(one.rank in idle and not one.moves_data for one in blamed.ranks):
        return Blame()
    return replace(blamed, why=f"{blamed.why}, and works no more")


def _outside(known: Sequence[RankPlace]) -> Blame | None:
    waiting = [one for one in known if one.waits]
    odd = [one for one in known if not one.waits]
    if not waiting or not 0 < len(odd) <= len(known) // 2:
        return None
    return Blame(ranks=tuple(odd), why=f"{_are(odd)} in {_place(odd)}{_others(waiting)}")


def _elsewhere(known: Sequence[RankPlace]) -> Blame | None:
    places = Counter(one.frames for one in known)
    if len(places) == 2:  # noqa: PLR2004 - one place for all the others
        (frames, count), (_, few) = places.most_common()
        if few == 1 and count > 1:
            odd = [one for one in known if one.frames != frames]
            rest = [one for one in known if one.frames == frames]
            return Blame(ranks=tuple(odd), why=f"{_are(odd)} in {_place(odd)}{_others(rest)}")
    return None


def _behind(ranks: Sequence[RankPlace]) -> Blame:
    steps = {one.rank: one.step for one in ranks if one.step is not None}
    last, first = min(steps.values(), default=0), max(steps.values(), default=0)
    odd = [one for one in ranks if one.step == last]
    if first - last > 1 and 2 * len(odd) < len(steps):
        return Blame(ranks=tuple(odd), why=f"{_are(odd)} {first - last} steps behind")
    return Blame()


def _are(ranks: Sequence[RankPlace]) -> str:
    """Return "rank 3 on n1 is", or "ranks 3 on n1, 4 on n1 are"."""
    listed = ", ".join(f"{one.rank} on {one.node}" for one in ranks[:MOST_NAMED])
    more = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
    return f"rank {listed} is" if len(ranks) == 1 else f"ranks {listed}{more} are"


def _place(ranks: Sequence[RankPlace]) -> str:
    return Counter(one.frames[0] for one in ranks).most_common(1)[0][0]


def _others(ranks: Sequence[RankPlace]) -> str:
    collectives = [frame for one in ranks for frame in one.frames[:DEEP] if _is_collective(frame)]
    place = Counter(collectives).most_common(1)[0][0] if collectives else _place(ranks)
    return f", {counted(len(ranks), 'other')} in {place}"


def summary(ranks: Sequence[RankPlace], blamed: Blame) -> str:
    """Return one line on where the ranks are; empty where nothing is known."""
    if blamed.ranks:
        return blamed.why
    places = Counter(one.frames[0] for one in ranks if one.frames).most_common(3)
    said = [f"{counted(count, 'rank')} in {place}" for place, count in places]
    return f"no rank differs from the others: {', '.join(said)}" if said else ""
