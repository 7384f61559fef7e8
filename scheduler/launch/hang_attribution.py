"""Tells ranks that hang from ranks that wait for them; pure.

The signs, the surest first: a process that is stopped, gone or stuck in the kernel while others are not (gone or
stuck at most half of them: where most have ended, or storage holds most, they are not the odd ones); a rank in no
collective while others wait in one; the one rank that is elsewhere than all others, which are at one place; the
rank that is steps behind. Where none of them tells, nobody is blamed.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from deeplink.scheduler.launch.process_activity import HELD
from deeplink.text import counted

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from deeplink.types import NodeName

WORDS = {
    "T": "stopped (T)",
    "t": "held by a debugger (t)",
    "Z": "ended, and not taken away (Z)",
    "": "gone",
    "D": "stuck in the kernel (D)",
}
_SIGNS = (frozenset("T"), frozenset("t"), frozenset(("Z", "X", "")), frozenset("D"))
DEEP = 8
"""Frames from the innermost one on in which a collective is looked for."""
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
_PY_SPY = re.compile(r"^ {4}(?P<function>\S.*?) \((?P<file>[^()]*?)(?::\d+)?\)$")
_FAULTHANDLER = re.compile(r'^  File "(?P<file>[^"]*)", line \d+ in (?P<function>.+)$')
_THREAD = re.compile(r"^(?:Current )?[Tt]hread ")
_KERNEL = re.compile(r"^thread \d+ \(.*\): \S+ in (?P<function>\S+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Where one rank is.

    Attributes:
        state: of its process, as in proc(5); empty for none.
        frames: of its main thread, `function (file)`, the innermost first; empty where unknown.
        step: the newest it reported; None where it reports none.
    """

    rank: int
    node: NodeName
    state: str
    frames: tuple[str, ...] = ()
    step: int | None = None

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks, as far as its frames tell."""
        return any(_is_collective(frame) for frame in self.frames[:DEEP])


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """Whom the others wait for; nobody where it cannot be told.

    Attributes:
        why: what gives them away, for people.
    """

    ranks: tuple[Where, ...] = ()
    why: str = ""

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


def blame(ranks: Sequence[Where]) -> Blame:
    """Return which of these hang, and which only wait."""
    for states in _SIGNS:
        odd = [one for one in ranks if one.state in states]
        most = len(ranks) - 1 if states <= HELD else len(ranks) // 2
        if 0 < len(odd) <= most:
            return Blame(ranks=tuple(odd), why=f"{_named(odd)} {_is(odd)} {WORDS.get(odd[0].state, odd[0].state)}")
    known = [one for one in ranks if one.frames]
    waiting = [one for one in known if one.waits]
    odd = [one for one in known if not one.waits]
    if waiting and 0 < len(odd) <= len(known) // 2:
        return Blame(ranks=tuple(odd), why=f"{_named(odd)} {_is(odd)} in {_place(odd)}{_others(waiting)}")
    return _elsewhere(known) or _behind(ranks)


def _elsewhere(known: Sequence[Where]) -> Blame | None:
    places = Counter(one.frames for one in known)
    if len(places) == 2:  # noqa: PLR2004 - one place for all the others
        (frames, count), (_, few) = places.most_common()
        if few == 1 and count > 1:
            odd = [one for one in known if one.frames != frames]
            rest = [one for one in known if one.frames == frames]
            return Blame(ranks=tuple(odd), why=f"{_named(odd)} {_is(odd)} in {_place(odd)}{_others(rest)}")
    return None


def _behind(ranks: Sequence[Where]) -> Blame:
    steps = {one.rank: one.step for one in ranks if one.step is not None}
    last, first = min(steps.values(), default=0), max(steps.values(), default=0)
    odd = [one for one in ranks if one.step == last]
    if first - last > 1 and 2 * len(odd) < len(steps):
        return Blame(ranks=tuple(odd), why=f"{_named(odd)} {_is(odd)} {first - last} steps behind")
    return Blame()


def _named(ranks: Collection[Where]) -> str:
    named = ", ".join(f"{one.rank} on {one.node}" for one in list(ranks)[:MOST_NAMED])
    more = len(ranks) - MOST_NAMED
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {named}" + (f" and {more} more" if more > 0 else "")


def _is(ranks: Collection[Where]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _place(ranks: Sequence[Where]) -> str:
    return Counter(one.frames[0] for one in ranks).most_common(1)[0][0]


def _others(ranks: Sequence[Where]) -> str:
    collectives = [frame for one in ranks for frame in one.frames[:DEEP] if _is_collective(frame)]
    place = Counter(collectives).most_common(1)[0][0] if collectives else _place(ranks)
    return f", {counted(len(ranks), 'other')} in {place}"


def summary(ranks: Sequence[Where], blamed: Blame) -> str:
    """Return one line on where the ranks are; empty where nothing is known."""
    if blamed.ranks:
        return blamed.why
    places: Mapping[str, int] = Counter(one.frames[0] for one in ranks if one.frames)
    said = [f"{counted(count, 'rank')} in {place}" for place, count in Counter(places).most_common(3)]
    return f"nobody stands out: {', '.join(said)}" if said else ""
