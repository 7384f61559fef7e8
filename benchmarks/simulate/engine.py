"""Jobs that come, wait, run and end on a cluster: events in order, first come first served, with backfill; pure.

The queue is Slurm's with the default priority: in order of submission. When a job comes or ends, the first of the
queue start as long as they can. Every `interval_s` at most, jobs behind the first that waits are tried
(sched/backfill): the first has a reservation, the earliest moment at which enough nodes will be free by the time
limits of the running jobs, and those nodes; another may start now if it ends before, or keeps off those nodes.

Simpler than Slurm: only the first waiting job has a reservation (Slurm plans for up to `bf_max_job_test`), on the
nodes that come free first (Slurm asks its select plugin); a pass takes no time; priority is the age alone.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.simulate.floor import bits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.simulate.policies import Chooser
    from benchmarks.simulate.state import FreeGpuState, JobShape


@dataclass(frozen=True, slots=True)
class Work:
    """A job to be run.

    Attributes:
        number: its place in the queue, had all come at once.
        submit_s: when it comes.
        duration_s: how long it runs, on the best nodes there are.
        shape: what it asks for.
    """

    number: int
    submit_s: float
    duration_s: float
    shape: JobShape


class JobOutcome(NamedTuple):
    """What became of a job: when it started and ended, and where it ran."""

    work: Work
    start_s: float
    end_s: float
    nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How the queue is worked off.

    Attributes:
        interval_s: a pass of backfill has to be so long after the one before (Slurm's bf_interval).
        depth: so many waiting jobs are tried (Slurm's bf_max_job_test).
        overestimate: a job's time limit over what it needs on the best nodes; at least 1.
    """

    interval_s: float = 30.0
    depth: int = 500
    overestimate: float = 2.0


class Reservation(NamedTuple):
    """When the first waiting job starts at the latest, and on which nodes."""

    start_s: float
    nodes: int


class _Running(NamedTuple):
    limit_s: float
    number: int
    nodes: int
    shape: JobShape


class Engine:
    """One run.

    Args:
        state: the cluster, idle.
        chooser: who chooses nodes.
        rules: how the queue is worked off.
        slowed: by how much nodes lengthen a job; not at all when None.
        watch: called after each event with the time; what it is told of may be looked at, not changed.

    Attributes:
        outcomes: of all jobs that started, in that order.
        reserved: the first promise to each job that had to wait as the first of the queue.
    """

    def __init__(
        self,
        state: FreeGpuState,
        chooser: Chooser,
        rules: Rules,
        *,
        slowed: Callable[[Work, int], float] | None = None,
        watch: Callable[[float, Engine], None] | None = None,
    ) -> None:
        self.state, self._chooser, self._rules = state, chooser, rules
        self._slowed, self._watch = slowed, watch
        self.outcomes: list[JobOutcome] = []
        self.reserved: dict[int, Reservation] = {}
        self._queue: OrderedDict[int, Work] = OrderedDict()
        self._ends: list[tuple[float, int, int]] = []  # when, the job's number, its place in outcomes
        self._running: list[_Running] = []  # by time limit
        self._promise: Reservation | None = None  # to the first of the queue; None when it must be looked for
        self._next_pass = -math.inf
        self._news = False

    @property
    def waiting(self) -> int:
        """How many jobs wait."""
        return len(self._queue)

    def run(self, work: Sequence[Work]) -> list[JobOutcome]:
        """Run all jobs to their end, and return what became of them.

        Args:
            work: in order of submission; each fits on the empty cluster.
        """
        coming = 0
        while coming < len(work) or self._ends or self._queue:
            now = self._next_moment(work[coming].submit_s if coming < len(work) else math.inf)
            while self._ends and self._ends[0][0] <= now:
                self._end(heapq.heappop(self._ends))
            while coming < len(work) and work[coming].submit_s <= now:
                one = work[coming]
                self._queue[one.number] = one
                self._news = True
                coming += 1
            self._start_first(now)
            if self._queue and self._news and now >= self._next_pass:
                self._backfill(now)
                self._news = False
                self._next_pass = now + self._rules.interval_s
            if self._watch is not None:
                self._watch(now, self)
        return self.outcomes

    def _next_moment(self, comes: float) -> float:
        ends = self._ends[0][0] if self._ends else math.inf
        now = min(comes, ends)
        if self._queue and self._news:
            now = min(now, self._next_pass)
        if not math.isfinite(now):
            raise AssertionError(f"{len(self._queue)} jobs wait, and nothing runs")
        return now

    def _end(self, what: tuple[float, int, int]) -> None:
        done = self.outcomes[what[2]]
        self.state.give_back(done.nodes, done.work.shape)
        limit = self._limit(done)
        at = bisect_left(self._running, (limit, done.work.number))
        del self._running[at]
        self._promise = None
        self._news = True

    def _limit(self, done: JobOutcome) -> float:
        # Where slow nodes lengthen a job beyond its limit it is not killed: that would compare no queues.
        return max(done.start_s + done.work.duration_s * self._rules.overestimate, done.end_s)

    def _start_first(self, now: float) -> None:
        while self._queue:
            one = next(iter(self._queue.values()))
            if not self._start(one, now, 0):
                return
            self._promise = None

    def _start(self, one: Work, now: float, shut: int) -> bool:
        chosen = self._chooser.choose(self.state, one.shape, shut)
        if chosen is None:
            return False
        factor = self._slowed(one, chosen) if self._slowed is not None else 1.0
        done = JobOutcome(one, now, now + one.duration_s * factor, chosen)
        self.state.take(chosen, one.shape)
        heapq.heappush(self._ends, (done.end_s, one.number, len(self.outcomes)))
        self.outcomes.append(done)
        insort(self._running, _Running(self._limit(done), one.number, chosen, one.shape))
        del self._queue[one.number]
        return True

    def _backfill(self, now: float) -> None:
        waiting = list(islice(self._queue.values(), self._rules.depth))
        head = waiting[0]
        if self._promise is None:
            self._promise = promised(self.state, self._running, head.shape)
            self.reserved.setdefault(head.number, self._promise)
        promise = self._promise
        # What could not start keeps another of its shape from starting, unless that one is shorter.
        least: dict[JobShape, float] = {}
        for one in waiting[1:]:
            if self.state.used == self.state.gpus:
                return
            limit = one.duration_s * self._rules.overestimate
            if limit >= least.get(one.shape, math.inf):
                continue
            before = now + limit <= promise.start_s
            if not self._start(one, now, 0 if before else promise.nodes):
                # A short one has all nodes to choose from: where it finds none, no other will.
                least[one.shape] = -math.inf if before else limit


def promised(state: FreeGpuState, running: Sequence[_Running], shape: JobShape) -> Reservation:
    """Return when enough nodes will be free for a job at the latest, and these nodes.

    Args:
        state: as it is now, with too few.
        running: what runs, by time limit.
        shape: what the job asks for.
    """
    chosen = state.able(shape)
    missing = shape.nodes - chosen.bit_count()
    free: dict[int, int] = {}
    for one in running:
        for bit in bits(one.nodes & ~chosen):
            owned = state.owned(bit)
            free[bit] = owned if one.shape.whole else free.get(bit, state.free(bit)) + one.shape.gpus
            if free[bit] >= (owned if shape.whole else shape.gpus) and owned >= shape.gpus:
                chosen |= 1 << bit
                missing -= 1
                if not missing:
                    return Reservation(one.limit_s, chosen)
    raise AssertionError(f"{shape} fits on no cluster that is empty")
