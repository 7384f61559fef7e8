"""Tells ranks that hang from ranks that wait for them, and which node's network is broken.

By what late ranks' processes do, and where they are; pure, time is passed in.

The signs, the surest first: a process that is stopped, gone or stuck in the kernel while others are not (gone or
stuck at most half of them: where most have ended, or storage holds most, they are not the odd ones); a rank in no
collective while others wait in one; the one rank that is elsewhere than all others, which are at one place; the
rank that is steps behind. Where none of them tells, nobody is blamed.

To be to blame is not to hang: who reads or writes, or works, keeps the others waiting as well (`deadlock`).
"""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import grpc

from deeplink.core.text import counted, listed
from deeplink.v1 import node_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from deeplink.core.clock import Clock
    from deeplink.core.types import NodeName

log = logging.getLogger(__name__)

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
    _stopped_since: dict[int, float] = field(default_factory=dict)
    _idle_since: dict[int, float] = field(default_factory=dict)

    def forget(self) -> None:
        """No rank is late any more, or other ranks are."""
        self.newest, self._before = RankActivity(), None
        self._stopped_since, self._idle_since = {}, {}

    def look(self, now: Mapping[int, ProcessSnapshot], at: float, world: int) -> None:
        """Take in one look."""
        if at - self._looked > UNBROKEN_S:
            self.forget()
        if self._before is not None:
            self.newest = activity(self._before, now, at - self._looked, world)
            # Where one is held or stopped it is not for the others to work.
            is_held = self.newest.answer in {ActivityAnswer.HELD, ActivityAnswer.STOPPED}
            idle = () if is_held else idle_ranks(self._before, now, at - self._looked)
            self._idle_since = {rank: self._idle_since.get(rank, self._looked) for rank in idle}
            still = self.newest.ranks if self.newest.answer is ActivityAnswer.STOPPED else ()
            self._stopped_since = {rank: self._stopped_since.get(rank, self._looked) for rank in still}
        self._before, self._looked = dict(now), at

    def idle_s(self) -> float:
        """Return for how long no rank has worked, as far as looked; 0 while one does."""
        is_idle = self.newest.answer is ActivityAnswer.IDLE
        return self._looked - max(self._idle_since.values()) if is_idle else 0.0

    def idle(self) -> set[int]:
        """Return the ranks that have done nothing for `IDLE_S`, as far as looked."""
        return {rank for rank, since in self._idle_since.items() if self._looked - since >= IDLE_S}

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
    """Why ranks wait, and for whom."""

    why: str = ""  # for people; empty while it cannot be told
    ranks: tuple[RankPlace, ...] = ()  # that the others wait for; none where it cannot be told
    nodes: tuple[NodeName, ...] = ()  # to blame, where it can be told


def _blame(odd: Sequence[RankPlace], why: str) -> Blame:
    return Blame(why=why, ranks=tuple(odd), nodes=tuple(dict.fromkeys(one.node for one in odd)))


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
            return _blame(odd, f"{_are(odd)} {WORDS.get(odd[0].state, odd[0].state)}")
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
    return _blame(odd, f"{_are(odd)} in {_place(odd)}{_others(waiting)}")


def _elsewhere(known: Sequence[RankPlace]) -> Blame | None:
    places = Counter(one.frames for one in known)
    if len(places) == 2:  # noqa: PLR2004 - one place for all the others
        (frames, count), (_, few) = places.most_common()
        if few == 1 and count > 1:
            odd = [one for one in known if one.frames != frames]
            rest = [one for one in known if one.frames == frames]
            return _blame(odd, f"{_are(odd)} in {_place(odd)}{_others(rest)}")
    return None


def _behind(ranks: Sequence[RankPlace]) -> Blame:
    steps = {one.rank: one.step for one in ranks if one.step is not None}
    last, first = min(steps.values(), default=0), max(steps.values(), default=0)
    odd = [one for one in ranks if one.step == last]
    if first - last > 1 and 2 * len(odd) < len(steps):
        return _blame(odd, f"{_are(odd)} {first - last} steps behind")
    return Blame()


def _are(ranks: Sequence[RankPlace]) -> str:
    """Return "rank 3 on n1 is", or "ranks 3 on n1, 4 on n1 are"."""
    those = ", ".join(f"{one.rank} on {one.node}" for one in ranks[:MOST_NAMED])
    more = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
    return f"rank {those} is" if len(ranks) == 1 else f"ranks {those}{more} are"


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


# Which node's network is broken, when ranks hang: neighbours in the ring exchange bytes as ranks do.
#
# First each pair of neighbours, all at once. Where some are broken, somebody who reached a neighbour, or a spare,
# is the witness: those of the pairs that do not exchange bytes with the witness either are to blame. Two rounds,
# each of which takes `ROUND_S` at most. Nothing counts as broken in a job no pair of which could while the ranks
# made progress: a site may let through nothing but what its ranks need.

ROUND_S = 2.0
LISTEN_S, TRY_S = 0.7, 1.0  # of it: for agents to listen, and for the bytes, which on a fabric take a millisecond
AGAIN_S = 60.0  # after a round in which the first pair could not, while ranks make progress

Pair = tuple["NodeName", "NodeName"]  # the first one connects to the second one


def ring(nodes: Sequence[NodeName]) -> tuple[Pair, ...]:
    """Return the pairs of neighbours, each once.

    >>> ring("abc"), ring("ab"), ring("a")
    ((('a', 'b'), ('b', 'c'), ('c', 'a')), (('a', 'b'),), ())
    """
    pairs = zip(nodes, [*nodes[1:], *nodes[:1]], strict=True)
    return tuple(pairs)[: len(nodes) if len(nodes) > 2 else len(nodes) - 1]  # noqa: PLR2004 - two are one pair


def found(
    nodes: Sequence[NodeName],
    spares: Sequence[NodeName],
    talk: Callable[[Collection[Pair]], Mapping[Pair, bool]],  # asks pairs; those that cannot tell are missing
) -> Blame:
    """Return what is broken among the nodes; each of the two rounds is one call of `talk`."""
    first = talk(ring(nodes))
    broken = [pair for pair, reached in first.items() if not reached]
    if not broken:
        return Blame()
    doubted = tuple(dict.fromkeys(node for pair in broken for node in pair))
    witnesses = [*(node for pair, reached in first.items() if reached for node in pair), *spares]
    witnesses.sort(key=doubted.__contains__)
    asked = [(witness, node) for witness in witnesses[:1] for node in doubted if node != witness]
    second = talk([*broken, *asked])
    broken = [pair for pair in broken if second.get(pair) is False]
    if not broken:
        return Blame()
    cut = tuple(node for witness, node in asked if second.get((witness, node)) is False)
    if len(cut) == len(asked) > 1:  # it is the witness, or all of the network
        cut = ()
    pairs = listed([f"{one} and {other}" for one, other in broken])
    why = f"no bytes pass between {pairs} on the ranks' network"
    return Blame(why=f"{why}: {listed(cut)} is cut off" if cut else why, nodes=cut)


class NeighbourTest:
    """Has the agents of one launch exchange bytes, in a thread; the supervising thread asks how it went."""

    def __init__(
        self,
        nodes: Sequence[NodeName],  # in the order of the ring
        hosts: Mapping[NodeName, str],  # the address of each, and of spares besides
        stubs: Callable[[Iterable[NodeName]], Mapping[NodeName, Any]],  # what calls their agents
        clock: Clock,
        *,
        are_ports_open: bool = False,
    ) -> None:
        self._nodes, self._hosts, self._ask_for_stubs, self._clock = nodes, hosts, stubs, clock
        self.are_ports_open = are_ports_open  # whether a pair of this job's exchanged bytes while all was well
        self._stubs: Mapping[NodeName, Any] = {}
        self._thread: threading.Thread | None = None
        self._learned_at = float("-inf")
        self.answer: Blame | None = None  # of the newest test; None while it is under way

    @property
    def is_under_way(self) -> bool:
        """Whether a test runs: it takes two rounds at most."""
        return self._thread is not None and self._thread.is_alive()

    def learn(self) -> None:
        """Find out whether the first pair can, while all is well; asked all the while, rarely. Does not wait."""
        # Not of all pairs: of many agents the launcher calls a few.
        now = self._clock.monotonic()
        if not self.are_ports_open and now - self._learned_at >= AGAIN_S and not self.is_under_way:
            self._learned_at = now
            self._start(self._learn, self._nodes[:2])

    def start(self) -> None:
        """Find out what is broken; `answer` says it. Does not wait."""
        self.answer = None if self.are_ports_open else Blame()
        if self.are_ports_open:
            self._start(self._test, self._hosts)

    def _start(self, target: Callable[[], None], nodes: Iterable[NodeName]) -> None:
        self._stubs = self._ask_for_stubs(nodes)  # here: its owner is the supervising thread
        self._thread = threading.Thread(target=target, name="deeplink-ring-test", daemon=True)
        self._thread.start()

    def _learn(self) -> None:
        self.are_ports_open = any(self._talk(ring(self._nodes)[:1]).values())

    def _test(self) -> None:
        answer = Blame()
        try:
            answer = found(self._nodes, [*(self._hosts.keys() - {*self._nodes})], self._talk)
        finally:
            self.answer = answer

    def _talk(self, pairs: Collection[Pair]) -> dict[Pair, bool]:
        """Have each pair exchange bytes, all at once; a pair one of whose agents does not answer is missing."""
        deadline = self._clock.monotonic() + ROUND_S
        listeners = {
            node: self._ask(node, LISTEN_S, listen_on=self._hosts[node], for_s=ROUND_S)
            for node in {other for _, other in pairs} & self._stubs.keys()
        }
        ports = {node: reply.port for node, reply in _replies(listeners).items()}
        peers = {pair: f"{self._hosts[pair[1]]}:{ports[pair[1]]}" for pair in pairs if pair[1] in ports}
        left_s = deadline - self._clock.monotonic()
        calls = {
            node: self._ask(node, left_s, peers=[peers[pair] for pair in peers if pair[0] == node], for_s=TRY_S)
            for node in {one for one, _ in peers} & self._stubs.keys()
        }
        replies = _replies(calls)
        return {pair: peers[pair] in replies[pair[0]].reached for pair in peers if pair[0] in replies}

    def _ask(self, node: NodeName, timeout_s: float, **question: Any) -> Any:
        try:
            return self._stubs[node].TestPeers.future(node_pb2.TestPeersRequest(**question), timeout=timeout_s)
        except ValueError:  # the connection was closed meanwhile
            return None


def _replies(calls: Mapping[NodeName, Any]) -> dict[NodeName, node_pb2.TestPeersReply]:
    replies = {}
    for node, call in calls.items():
        try:
            if call is not None:
                replies[node] = call.result()
        except grpc.RpcError as problem:
            log.info("%s cannot exchange bytes with its neighbours now: %s", node, problem)
    return replies
