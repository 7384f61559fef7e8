"""Finds ranks that are late, and those of them that hang; pure, time is passed in.

A rank is late after five times what the job's own steps take, and 30 s at least. To restart wrongly a job that is
at something that takes long is worse than to restart a hung one late. So lateness alone restarts nobody:

- A rank is stopped (SIGSTOP) while another one is not: nothing will ever come of that. Hung, at a third of the
  limit, or once it was seen so for ten seconds, whatever was learned.
- All are stopped: somebody holds the whole job. Left alone.
- All are late, and it is seen why nothing will come: the ranks' network is broken, or those that the others
  wait for neither work nor move data (`hang_attribution.py`). Hung, at the limit.
- All are late, and nobody works: no rank, nor any process below one, uses the CPU. Hung after ten minutes: storage
  that all wait for looks like that.
- Somebody works: left alone, and told.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from deeplink.core.text import listed
from deeplink.scheduler.launch.hang_attribution import ActivityAnswer, RankActivity

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

# Learned from the job itself, per section: how long a rank may be silent before it is late.
SETUP, CHECKPOINT, STEPS = "setup", "checkpoint", ""
LEAST_S = 30.0  # storage and networks that stumble are back by then
FACTOR = 5.0
QUANTILE = 0.99
KEPT = 512  # silences of each section that are remembered, the newest
MOST_SECTIONS = 64
# Of a section that has never ended: first steps compile and tune kernels, a first evaluation takes what it takes.
UNKNOWN_S = 600.0
# A file system that is cold for ten thousand ranks at once, data that others fetch, a licence, compilation.
SETUP_S = 1800.0

STALL_S = 1.0  # if we ourselves did nothing for longer (the whole job was suspended), that time counts for no rank
STOPPED_SHARE = 1 / 3  # of the limit, after which a rank counts as hung that is stopped while others are not
IDLE_S = 600.0  # so long all were seen idle before that alone is a hang: more than storage is frozen for
UNHEARD_S = 30.0  # so long a rank must have been seen stopped where no rank ever reported

WINDOW = 16  # steps of every rank between two comparisons of their speed
IN_A_ROW = 4
SLOW_LEAST_S = 10.0  # steps of a millisecond fill four windows before that could be called lasting
SLOW_FACTOR = 1.25
SLOW_SHARE = 0.1  # of the step that the others wait for it, at least: ranks that load in a millisecond differ, too
DEVIATIONS = 6.0
SIGMA = 1.4826  # times the median absolute deviation is the standard deviation of a normal distribution
LEAST_RANKS = 3  # of two different ranks either may be the slow one


class Silences:
    """Silences learned of one job, over all its attempts."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[float]] = {}

    def learn(self, section: str, silence_s: float) -> None:
        """Take note of a silence that ended well."""
        if not math.isfinite(silence_s) or silence_s < 0:
            return
        if section in self._seen or len(self._seen) < MOST_SECTIONS:
            self._seen.setdefault(section, deque(maxlen=KEPT)).append(silence_s)

    def knows(self, section: str) -> bool:
        """Whether such a section has ever ended."""
        return section in self._seen

    def limit(self, section: str) -> float:
        """Return after how many seconds of silence a rank is late in the section, by what is known now."""
        if section not in self._seen:
            return SETUP_S if section == SETUP else UNKNOWN_S
        ordered = sorted(self._seen[section])
        usual = ordered[min(len(ordered) - 1, math.ceil(QUANTILE * len(ordered)))]
        return max(LEAST_S, FACTOR * usual)

    def as_text(self) -> str:
        """Return all of it as JSON, for `Silences.read`."""
        # An older version reads it, too: it wants to know of the longest silence, and of their number.
        sections = {
            name: {"silences": [round(one, 3) for one in seen], "longest": max(seen), "count": len(seen)}
            for name, seen in self._seen.items()
        }
        return json.dumps({"version": 1, "sections": sections})

    @classmethod
    def read(cls, text: str) -> Self:
        """Return what `as_text` wrote; what cannot be read counts as nothing learned."""
        silences = cls()
        try:
            found: dict[str, Any] = json.loads(text)
            for name, one in dict(found["sections"]).items():
                for silence_s in one["silences"]:
                    silences.learn(str(name), float(silence_s))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            return cls()
        return silences


@dataclass(frozen=True, slots=True)
class LateRank:
    """A rank nothing new was heard of for longer than its section may take."""

    rank: int
    section: str
    silent_s: float
    limit_s: float
    is_learned: bool

    @property
    def limit(self) -> str:
        """The limit, for people."""
        learned = "learned" if self.is_learned else "not learned"
        about = f" of {self.section}" if self.section else ""
        return f"the limit{about} is {self.limit_s:.0f} s, {learned}"


@dataclass(slots=True)
class _Rank:
    step: int | None
    section: str
    since: float


class ProgressClock:
    """When each rank of an attempt was last heard of with something new."""

    def __init__(self, silences: Silences, steps_s: float | None = None) -> None:
        self._silences, self._steps_s = silences, steps_s
        self._ranks: dict[int, _Rank] = {}
        self._began = self._ticked = 0.0
        self._world = 0

    def begin(self, now: float, world: int) -> None:
        """A new attempt of so many ranks begins."""
        self._ranks, self._world = {}, world
        self._began = self._ticked = now

    def tick(self, now: float) -> None:
        """Called all the while; when we did not run ourselves, that time does not count."""
        stall = now - self._ticked
        self._ticked = now
        if stall > STALL_S:
            self._began += stall
            for rank in self._ranks.values():
                rank.since += stall

    def take(self, rank: int, step: int | None, section: str, now: float) -> None:
        """Take in a report of a rank, `step` None where it has done none. The same step and section is not new."""
        known = self._ranks.get(rank)
        if known is None:
            # A report of steps ends the setup; one that says "setup" goes on with it.
            if step is not None:
                self._silences.learn(SETUP, now - self._began)
            self._ranks[rank] = _Rank(step, section, self._began if section == SETUP else now)
            return
        is_newer = step is not None and (known.step is None or step > known.step)
        if is_newer or section != known.section:
            self._silences.learn(known.section, now - known.since)
            self._ranks[rank] = _Rank(step if is_newer else known.step, section, now)

    @property
    def steps(self) -> dict[int, int]:
        """The newest step of each rank that reported one."""
        return {rank: one.step for rank, one in self._ranks.items() if one.step is not None}

    @property
    def moving_data(self) -> set[int]:
        """The ranks in sections in which they may wait for storage, wherever they are seen."""
        return {rank for rank, one in self._ranks.items() if one.section in {SETUP, CHECKPOINT}}

    @property
    def is_heard(self) -> bool:
        """Whether any rank has reported in this attempt."""
        return bool(self._ranks)

    @property
    def is_setting_up(self) -> bool:
        """Whether no rank has done a step yet."""
        return not self.steps

    def late(self, now: float, share: float = 1.0) -> tuple[LateRank, ...]:
        """Return the ranks that have used up this share of their time, by rank."""
        # While none was heard of, that is none, unless the job is known to report: then all are being set up.
        ranks = self._ranks
        if not ranks and self._steps_s is None and self._silences.knows(SETUP):
            ranks = self._set_up
        # Asked ten times a second, perhaps of ten thousand ranks: each section's limit is worked out once.
        limits = {section: self._limit(section) for section in {one.section for one in ranks.values()}}
        learned = {section: self._steps_s is None and self._silences.knows(section) for section in limits}
        return tuple(
            LateRank(rank, one.section, now - one.since, limits[one.section], learned[one.section])
            for rank, one in sorted(ranks.items())
            if now - one.since > share * limits[one.section]
        )

    def quiet(self, now: float, share: float = 1.0) -> set[int]:
        """Return the ranks without news for this share of the shortest limit there is, whatever was learned."""
        # Also those that were never heard of, where none was, or where most others were: then this one should
        # have been, too. No other rank can be late.
        least_s = LEAST_S if self._steps_s is None else min(LEAST_S, self._steps_s)
        ranks = self._ranks
        if len(ranks) < self._world and (not ranks or 2 * len(ranks) > self._world):
            ranks = self._set_up | ranks
        return {rank for rank, one in ranks.items() if now - one.since > share * least_s}

    @property
    def _set_up(self) -> dict[int, _Rank]:
        return {rank: _Rank(None, SETUP, self._began) for rank in range(self._world)}

    def _limit(self, section: str) -> float:
        if section == STEPS and self._steps_s is not None:
            return self._steps_s
        return max(self._steps_s or 0.0, self._silences.limit(section))

    def are_all(self, late: Collection[LateRank]) -> bool:
        """Whether these are all ranks that were heard of: then nobody makes progress."""
        return bool(late) and len(late) >= len(self._ranks)


def hung(
    late: Collection[LateRank],
    *,
    all_late: bool,  # no other rank was ever heard of: none makes progress
    why: str,  # nothing will come of waiting, as far as was seen; empty where that cannot be told
    idle_s: float,  # for how long none of them has worked, as far as looked
    is_set: bool,  # the limit was set: then no more is asked
) -> str:
    """Return why the ranks count as hung; empty while they do not."""
    if not late or not all_late:
        return ""
    silent_s = min(one.silent_s for one in late)
    if not why and not is_set and idle_s >= IDLE_S:
        why = f"no rank has worked for {idle_s:.0f} s"
    if not why and not is_set:
        return ""
    return f"no progress for {silent_s:.0f} s" + (f" ({longest_late(late).limit}), and {why}" if why else "")


def stopped(
    seen: RankActivity,
    stopped_s: float,
    late: Collection[LateRank],
    *,
    is_heard: bool,  # `late`: at STOPPED_SHARE
) -> str:
    """Return why ranks hang that may not even be late: one is stopped; empty where none is, or not for long."""
    if seen.answer is not ActivityAnswer.STOPPED:
        return ""
    if late:
        longest = longest_late(late)
        silent = f"nothing new of {named([one.rank for one in late])} for {longest.silent_s:.0f} s"
        return f"{_stopped(seen)}, and {silent} ({longest.limit})"
    if stopped_s < (STOPPED_SHARE * LEAST_S if is_heard else UNHEARD_S):
        return ""
    return f"{_stopped(seen)}, for {stopped_s:.0f} s, and the others are not"


def _stopped(seen: RankActivity) -> str:
    return f"{named(seen.ranks)} {'is' if len(seen.ranks) == 1 else 'are'} stopped by a signal"


def longest_late(late: Collection[LateRank]) -> LateRank:
    """Return the rank nothing was heard of for longest."""
    return max(late, key=lambda one: one.silent_s)


def named(ranks: Collection[int]) -> str:
    """Return ranks for people, the first eight of them."""
    return f"rank {listed(ranks)}" if len(ranks) == 1 else f"ranks {listed(ranks)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that the others wait for."""

    rank: int
    factor: float  # how many times as long its work takes as that of the rank in the middle
    work_s: float  # how long, seconds
    median_s: float  # of all ranks
    steps: int  # for how many steps it has been slow


def slow_ranks(work_s: Mapping[int, float]) -> dict[int, float]:
    """Return the ranks that are slow in one window, and by which factor."""
    # More than a third of them are no stragglers: the job's ranks differ.
    if len(work_s) < LEAST_RANKS:
        return {}
    middle = statistics.median(work_s.values())
    spread = SIGMA * statistics.median(abs(one - middle) for one in work_s.values())
    limit = max(SLOW_FACTOR * middle, middle + DEVIATIONS * spread)
    slow = {rank: one / middle for rank, one in work_s.items() if one > limit and middle > 0}
    return slow if 3 * len(slow) <= len(work_s) else {}


class Stragglers:
    """Compares the ranks of an attempt, window after window."""

    def __init__(self) -> None:
        self._newest: dict[int, int] = {}
        self._said: dict[int, deque[float]] = {}  # in this window
        self._from: int | None = None
        self._began = 0.0  # this window
        self._through: set[int] = set()  # the ranks that are through with this window
        self._rows: dict[int, int] = {}
        self._since: dict[int, float] = {}  # the end of the first window in which each was slow
        self.found: dict[int, Straggler] = {}

    def take(self, rank: int, step: int, work_s: float, now: float) -> None:
        """Take in what a rank says of its own work; 0 where it does not measure it. `now` is monotonic."""
        if not 0 < work_s < float("inf"):
            return
        self._newest[rank] = step
        self._said.setdefault(rank, deque(maxlen=WINDOW)).append(work_s)
        if self._from is None:
            self._from, self._began = step, now
        elif step >= self._from + WINDOW:
            self._through.add(rank)
        if self._through and len(self._through) == len(self._newest):
            newest = max(self._newest.values())
            self._compare(now, (now - self._began) / (newest - self._from))
            self._from, self._began = newest, now
            self._through.clear()
            self._said.clear()

    def _compare(self, now: float, step_s: float) -> None:
        # The lower one of two in the middle: half a window is not most of it.
        work_s = {rank: statistics.median_low(said) for rank, said in self._said.items()}
        middle = statistics.median(work_s.values())
        slow = {
            rank: factor
            for rank, factor in slow_ranks(work_s).items()
            if work_s[rank] - middle >= SLOW_SHARE * step_s
        }
        self._rows = {rank: self._rows.get(rank, 0) + 1 for rank in slow}
        self._since = {rank: self._since.get(rank, now) for rank in slow}
        self.found = {
            rank: Straggler(
                rank=rank, factor=factor, work_s=work_s[rank], median_s=middle, steps=self._rows[rank] * WINDOW
            )
            for rank, factor in slow.items()
            if self._rows[rank] >= IN_A_ROW and now - self._since[rank] >= SLOW_LEAST_S
        }
