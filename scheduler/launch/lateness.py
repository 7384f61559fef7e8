"""Which ranks are late, and whether those hang; pure, time is passed in.

Ranks that are late may be at something that takes long: the first step of an epoch, an evaluation nobody declared,
storage that is slow today. To restart such a job wrongly is worse than to restart a hung one late. So beside the
time it counts what the processes are doing:

- A rank is stopped (SIGSTOP) while another one is not: nothing will ever come of that. Hung, at the learned limit.
- All are stopped: somebody holds the whole job. Left alone.
- Nobody works: no rank, nor any process below one, uses the CPU for minutes. Hung, after ten minutes at least.
- Somebody works: left alone, and told. Collectives that wait busily (NCCL) look like that; torch ends them itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from deeplink.scheduler.launch.silences import FACTOR, SETUP, STEPS, Limit, Silences

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

STALL_S = 1.0
"""If we ourselves did nothing for longer than this (the whole job was suspended), that time counts for nobody."""
IDLE_S = 600.0
"""So long nobody works before that counts as a hang: NCCL's own patience, and more than storage is frozen for."""
IDLE_SETUP_S = 1800.0
"""The same while the job is being set up, where it may wait for data or a licence."""
IDLE_SHARE = 0.01
"""Who uses less of one CPU waits: threads that wake up to look at a clock use a thousandth."""
WATCHED_IDLE_S = 60.0
"""For how long all must have been seen idle, without a break."""
STOPPED = "T"
HELD = frozenset({"T", "t"})
ENDED = frozenset({"Z", "X", "x", ""})


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """One report of a rank.

    Attributes:
        step: None where it has done none.
        section: what it is about; empty for training steps.
    """

    rank: int
    step: int | None
    section: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """A rank's process as its agent saw it: state as in proc(5), CPU time so far of it and all below it."""

    state: str
    cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
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


class Pulse:
    """When each rank of an attempt was last heard of with something new.

    Args:
        silences: what was learned of the job; learns on.
        steps_s: the limit for training steps, where somebody set one; None: as learned.
    """

    def __init__(self, silences: Silences, steps_s: float | None = None) -> None:
        self._silences, self._steps_s = silences, steps_s
        self._ranks: dict[int, _Rank] = {}
        self._began = self._ticked = 0.0
        self._world = 0
        self.has_sections = False

    def begin(self, now: float, world: int) -> None:
        """A new attempt of so many ranks begins."""
        self._ranks, self._world = {}, world
        self._began = self._ticked = now
        self.has_sections = False

    def tick(self, now: float) -> None:
        """Called all the while; when we did not run ourselves, that time counts for nobody."""
        stall = now - self._ticked
        self._ticked = now
        if stall > STALL_S:
            self._began += stall
            for rank in self._ranks.values():
                rank.since += stall

    def take(self, news: News, now: float) -> None:
        """Take in what a rank reports; the same step in the same section is nothing new."""
        if news.section != STEPS and not (news.section == SETUP and news.step is None):
            self.has_sections = True
        known = self._ranks.get(news.rank)
        if known is None:
            # A report of steps ends the setup; one that says "setup" goes on with it.
            if news.step is not None:
                self._silences.learn(SETUP, now - self._began)
            since = self._began if news.section == SETUP else now
            self._ranks[news.rank] = _Rank(news.step, news.section, since)
            return
        is_newer = news.step is not None and (known.step is None or news.step > known.step)
        if not is_newer and news.section == known.section:
            return
        self._silences.learn(known.section, now - known.since)
        if is_newer:
            known.step = news.step
        known.section, known.since = news.section, now

    def silent_s(self, now: float) -> dict[int, float]:
        """Return for how long each rank that was ever heard of has had no news."""
        return {rank: now - one.since for rank, one in self._ranks.items()}

    @property
    def steps(self) -> dict[int, int]:
        """The newest step of each rank that reported one."""
        return {rank: one.step for rank, one in self._ranks.items() if one.step is not None}

    @property
    def is_setting_up(self) -> bool:
        """Whether no rank has done a step yet."""
        return not self.steps

    def late(self, now: float, share: float = 1.0) -> tuple[LateRank, ...]:
        """Return the ranks that have used up this share of their time, by rank.

        While nobody was heard of, that is nobody, unless the job is known to report: then all are being set up.
        """
        ranks = self._ranks
        if not ranks and self._steps_s is None and self._silences.knows(SETUP):
            ranks = {rank: _Rank(None, SETUP, self._began) for rank in range(self._world)}
        # Asked ten times a second, perhaps of ten thousand ranks: each section's limit is worked out once.
        limits = {section: self._limit(section) for section in {one.section for one in ranks.values()}}
        return tuple(
            LateRank(
                rank=rank,
                section=one.section,
                silent_s=now - one.since,
                limit_s=limits[one.section].seconds,
                is_learned=limits[one.section].is_learned,
            )
            for rank, one in sorted(ranks.items())
            if now - one.since > share * limits[one.section].seconds
        )

    def _limit(self, section: str) -> Limit:
        limit = self._silences.limit(section)
        if self._steps_s is None:
            return limit
        seconds = self._steps_s if section == STEPS else max(self._steps_s, limit.seconds)
        return replace(limit, seconds=seconds, is_learned=False)

    def are_all(self, late: Collection[LateRank]) -> bool:
        """Whether these are all ranks that were heard of: then nobody makes progress."""
        return bool(late) and len(late) >= len(self._ranks)

    def patience_s(self, late: Collection[LateRank]) -> float:
        """Return for how long ranks that do not work may be silent."""
        idle = IDLE_SETUP_S if self.is_setting_up else IDLE_S
        longest = max((self._silences.limit(one).longest_s for one in {one.section for one in late}), default=0.0)
        return max([idle, FACTOR * longest, *(one.limit_s for one in late)])


class Answer(Enum):
    """What is known of ranks that are late."""

    UNKNOWN = "unknown"
    STOPPED = "stopped"
    HELD = "held"
    IDLE = "idle"
    WORKING = "working"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the processes of an attempt's ranks do.

    Attributes:
        ranks: those that are stopped, or that work.
    """

    answer: Answer
    ranks: tuple[int, ...] = ()


def seen(before: Mapping[int, Sight], now: Mapping[int, Sight], between_s: float, world: int) -> Seen:
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
        return Seen(answer=Answer.UNKNOWN)
    held = [rank for rank, two in here.items() if two[0].state in HELD and two[1].state in HELD]
    stopped = [rank for rank in held if here[rank][1].state == STOPPED]
    free = [rank for rank in here if rank not in held]
    if stopped and free:
        return Seen(answer=Answer.STOPPED, ranks=tuple(stopped))
    if held:
        return Seen(answer=Answer.HELD, ranks=tuple(held))
    working = [rank for rank, two in here.items() if two[1].cpu_s - two[0].cpu_s > IDLE_SHARE * between_s]
    if working:
        return Seen(answer=Answer.WORKING, ranks=tuple(working))
    if len(both) < world:
        return Seen(answer=Answer.UNKNOWN)
    return Seen(answer=Answer.IDLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known of ranks that are late.

    Attributes:
        late: they.
        all_late: whether nobody else was ever heard of: nobody makes progress.
        seen: what the processes of all ranks do.
        idle_s: for how long none of them has worked, as far as looked.
        patience_s: how long they may be silent without working.
        is_set: whether somebody set the limit: then no more is asked.
    """

    late: tuple[LateRank, ...]
    all_late: bool
    seen: Seen
    idle_s: float
    patience_s: float
    is_set: bool


def hung(evidence: Evidence) -> str:
    """Return why the ranks count as hung; empty while they do not."""
    late, seen = evidence.late, evidence.seen
    if not late:
        return ""
    if seen.answer is Answer.STOPPED:
        longest = longest_late(late)
        who = f"{named(seen.ranks)} {'is' if len(seen.ranks) == 1 else 'are'} stopped by a signal"
        silent = f"nothing new of {named([one.rank for one in late])} for {longest.silent_s:.0f} s"
        return f"{who}, and {silent} ({longest.limit})"
    silent_s = min(one.silent_s for one in late)
    if evidence.is_set:
        return f"no progress for {silent_s:.0f} s" if evidence.all_late else ""
    is_idle = silent_s > evidence.patience_s and evidence.idle_s >= WATCHED_IDLE_S
    return f"no progress for {silent_s:.0f} s, and no rank works" if evidence.all_late and is_idle else ""


def longest_late(late: Collection[LateRank]) -> LateRank:
    """Return the rank nothing was heard of for longest."""
    return max(late, key=lambda one: one.silent_s)


def named(ranks: Collection[int]) -> str:
    """Return ranks for people, the first eight of them."""
    listed = ", ".join(str(rank) for rank in list(ranks)[:8]) + (", ..." if len(ranks) > 8 else "")  # noqa: PLR2004
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"


@dataclass(slots=True)
class Watch:
    """What the processes of late ranks did, look after look.

    Attributes:
        newest: what the last two looks say.
    """

    newest: Seen = field(default_factory=lambda: Seen(answer=Answer.UNKNOWN))
    _before: Mapping[int, Sight] | None = None
    _looked: float = 0.0
    _idle_since: float | None = None

    def forget(self) -> None:
        """Nobody is late any more, or other ranks are."""
        self.newest = Seen(answer=Answer.UNKNOWN)
        self._before, self._idle_since = None, None

    def look(self, now: Mapping[int, Sight], at: float, world: int) -> None:
        """Take in one look."""
        if self._before is not None:
            self.newest = seen(self._before, now, at - self._looked, world)
            if self.newest.answer is not Answer.IDLE:
                self._idle_since = None
            elif self._idle_since is None:
                self._idle_since = self._looked
        self._before, self._looked = dict(now), at

    def idle_s(self) -> float:
        """Return for how long nobody has worked, as far as looked; 0 while somebody does."""
        return 0.0 if self._idle_since is None else self._looked - self._idle_since
