"""Finds ranks that are late, and those of them that hang; pure, time is passed in.

Ranks that are late may be at something that takes long: the first step of an epoch, an evaluation nobody declared,
storage that is slow today. To restart such a job wrongly is worse than to restart a hung one late. So beside the
time it counts what the processes are doing:

- A rank is stopped (SIGSTOP) while another one is not: nothing will ever come of that. Hung, at the learned limit,
  or once it was seen so for ten seconds, whatever was learned.
- All are stopped: somebody holds the whole job. Left alone.
- Nobody works: no rank, nor any process below one, uses the CPU for minutes. Hung, after ten minutes at least.
- Somebody works: left alone, and told. Collectives that wait busily (NCCL) look like that; torch ends them itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from deeplink.scheduler.launch.process_activity import ActivityAnswer, RankActivity
from deeplink.scheduler.launch.timeout_learning import FACTOR, LEAST_S, SETUP, STEPS, SilenceLimit, Silences
from deeplink.text import listed

if TYPE_CHECKING:
    from collections.abc import Collection

STALL_S = 1.0
"""If we ourselves did nothing for longer than this (the whole job was suspended), that time counts for nobody."""
IDLE_S = 600.0
"""So long nobody works before that counts as a hang: NCCL's own patience, and more than storage is frozen for."""
IDLE_SETUP_S = 1800.0
"""The same while the job is being set up, where it may wait for data or a licence."""
UNHEARD_S = 30.0
"""For so long a rank must have been seen stopped where no rank ever reported: who knows what the others do."""
WATCHED_IDLE_S = 60.0
"""For how long all must have been seen idle, without a break."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """One report of a rank.

    Attributes:
        step: None where it has done none.
        section: what it is about; empty for training steps.
    """

    rank: int
    step: int | None
    section: str = ""


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


class ProgressClock:
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

    def take(self, news: RankReport, now: float) -> None:
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
    def is_heard(self) -> bool:
        """Whether any rank has reported in this attempt."""
        return bool(self._ranks)

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

    def quiet(self, now: float, share: float = 1.0) -> tuple[LateRank, ...]:
        """Return the ranks without news for this share of the shortest limit there is, whatever was learned.

        Also those that were never heard of, where nobody was, or where most others were: then this one should
        have been, too. Nobody else can be late.
        """
        least = LEAST_S if self._steps_s is None else min(LEAST_S, self._steps_s)
        ranks = self._ranks
        if len(ranks) < self._world and (not ranks or 2 * len(ranks) > self._world):
            ranks = {rank: _Rank(None, SETUP, self._began) for rank in range(self._world)} | ranks
        return tuple(
            LateRank(rank=rank, section=one.section, silent_s=now - one.since, limit_s=least, is_learned=False)
            for rank, one in sorted(ranks.items())
            if now - one.since > share * least
        )

    def _limit(self, section: str) -> SilenceLimit:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LatenessEvidence:
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
    seen: RankActivity
    idle_s: float
    patience_s: float
    is_set: bool


def hung(evidence: LatenessEvidence) -> str:
    """Return why the ranks count as hung; empty while they do not."""
    late, seen = evidence.late, evidence.seen
    if not late:
        return ""
    if seen.answer is ActivityAnswer.STOPPED:
        longest = longest_late(late)
        who = _stopped(seen)
        silent = f"nothing new of {named([one.rank for one in late])} for {longest.silent_s:.0f} s"
        return f"{who}, and {silent} ({longest.limit})"
    silent_s = min(one.silent_s for one in late)
    if evidence.is_set:
        return f"no progress for {silent_s:.0f} s" if evidence.all_late else ""
    is_idle = silent_s > evidence.patience_s and evidence.idle_s >= WATCHED_IDLE_S
    return f"no progress for {silent_s:.0f} s, and no rank works" if evidence.all_late and is_idle else ""


def stopped(seen: RankActivity, stopped_s: float, *, is_heard: bool) -> str:
    """Return why ranks hang that may not even be late: one has been stopped for long; empty where none was.

    Args:
        seen: what the processes of all ranks do.
        stopped_s: for how long a rank has been seen stopped while another was not.
        is_heard: whether any rank has reported.
    """
    if seen.answer is not ActivityAnswer.STOPPED or stopped_s < (LEAST_S if is_heard else UNHEARD_S):
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
