"""One look at the waiting jobs: what to change about their wishes, and why; a pure function of what was seen.

What is held to, and proved in the tests:

1. Nodes are wished by name only while all of them are free, kept for no job before this one, and no job before
   this one may still be given any of them. Slurm can start the job on them whenever it could start it at all.
2. A wish that Slurm looked at and did not fulfil is dropped, and no nodes are wished for that job for a while. One
   whose nodes are not free any more before Slurm looked is replaced by one that meets 1, or dropped.
3. A wish for few switches is dropped at sight: a job that Slurm holds for one is passed by those behind it. Only
   who asked for patience keeps it, so long from the moment on at which as many nodes are free as he needs.
4. What the user wished himself, and what is not understood, is left alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from deeplink.scheduler.planner.ground import Ground, Had, wishes_nodes
from deeplink.scheduler.planner.queue import Row, in_order
from deeplink.scheduler.planner.reasons import refused_nodes, stopped
from deeplink.scheduler.slurm.nodeset import fold
from deeplink.scheduler.wish.decision import Ask, Decision, Kind, Why
from deeplink.wording import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deeplink.types import NodeName

UNSEEN_S = 60.0
"""How long a wish for nodes may stand that Slurm has not looked at: twice its default backfill interval."""
WARY_S = 300.0
"""After Slurm did not start a job on nodes that were free, none are wished for it for so long."""
MOST_REFUSALS = 3


class Deed(StrEnum):
    """What is to be done about a job's wish."""

    PIN = "pin"  # wish nodes by name, in place of whatever was wished
    DROP = "drop"  # wish nothing any more
    LEAVE = "leave"  # as it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What is kept of a job from round to round.

    Attributes:
        enough_since: since when as many nodes are free as it needs; None while they are not.
        wished_at: when nodes were last wished.
        wary_until: until when none are.
        refusals: how often Slurm refused to change it.
        told: what was last said of it.
    """

    enough_since: float | None = None
    wished_at: float = 0.0
    wary_until: float = 0.0
    refusals: int = 0
    told: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mine:
    """A job that was submitted with `deeplink sbatch`.

    Attributes:
        row: as the queue tells it.
        ask: what it asks.
        wish: what was last decided.
        wished_at: when that was.
        memory: of earlier rounds.
    """

    row: Row
    ask: Ask
    wish: Decision
    wished_at: float
    memory: Memory = field(default_factory=Memory)

    @property
    def pinned(self) -> bool:
        """Whether the nodes it requires are those that were wished for it."""
        return wishes_nodes(self.wish) and self.row.required == frozenset(self.wish.nodes)

    @property
    def few_leaves(self) -> bool:
        """Whether few switches were wished for it."""
        return self.wish.kind is Kind.SWITCHES and self.wish.switches > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """What is to be done about one job.

    Attributes:
        job: it.
        deed: what.
        decision: for the record; the wish as it will be then.
        memory: for the next round.
    """

    job: Mine
    deed: Deed
    decision: Decision
    memory: Memory

    @property
    def fields(self) -> dict[str, str]:
        """What is to be changed about the job, in scontrol's words; empty for nothing."""
        # Not `Switches=0`: cleared so before Slurm has first looked, a job is never started (measured with 22.05).
        switches = {"Switches": f"{self.job.ask.nodes}@00:00:00"} if self.job.few_leaves else {}
        if self.deed is Deed.PIN:
            return {"ReqNodeList": fold(self.decision.nodes), **switches}
        if self.deed is Deed.DROP:
            return {**({"ReqNodeList": ""} if self.job.pinned else {}), **switches}
        return {}


def before(row: Row, queue: Sequence[Row]) -> list[Row]:
    """Return the waiting jobs that Slurm may look at before this one.

    Partitions have tiers that count before priority: of jobs that could start in another partition nothing is
    known but that they may come first.
    """
    ahead = []
    reached = False
    for other in queue:
        reached = reached or other.id == row.id
        if other.id != row.id and (not reached or set(other.partitions) != set(row.partitions)):
            ahead.append(other)
    return ahead


def plan(mine: Sequence[Mine], queue: Sequence[Row], ground: Ground, now: float) -> list[Move]:
    """Return what to do about each job of `mine` that waits.

    Args:
        mine: jobs of ours.
        queue: all jobs of all users that have not ended.
        ground: the cluster.
        now: the time, seconds since 1970.
    """
    return _Round(in_order(list(queue)), ground, now).moves(mine)


class _Round:
    """One round; `_promised` holds the nodes that jobs looked at earlier in it are to get."""

    def __init__(self, queue: Sequence[Row], ground: Ground, now: float) -> None:
        self._queue, self._ground, self._now = queue, ground, now
        self._promised: dict[int, frozenset[NodeName]] = {}

    def moves(self, mine: Sequence[Mine]) -> list[Move]:
        by_id: dict[int, list[Mine]] = {}
        for job in mine:
            by_id.setdefault(job.row.id, []).append(job)
        found = []
        for row in self._queue:
            for job in by_id.get(row.id, ()):
                if job.row.label == row.label:
                    move = self._move(job)
                    found.append(move)
                    if wishes_nodes(move.decision):
                        self._promised[row.id] = frozenset(move.decision.nodes)
        return found

    def _move(self, job: Mine) -> Move:
        move = self._wanted(job)
        if move.fields and job.memory.refusals >= 2 * MOST_REFUSALS:
            return _leave(job, Why.UNKNOWN, "Slurm refuses every change of it")
        return move

    def _wanted(self, job: Mine) -> Move:
        untouched = self._not_ours_to_move(job)
        if untouched:
            return untouched
        ask = replace(job.ask, later="", patience_s=0, array=False)
        had = self._ground.had(ask, job.row.excluded)
        if had.problem:
            return _drop(job, Why.IMPOSSIBLE, had.problem)
        enough = len(had.possible) >= ask.nodes
        since = (job.memory.enough_since or self._now) if enough else None
        job = replace(job, memory=replace(job.memory, enough_since=since))
        if job.pinned:
            return self._pinned(job, ask, had)
        if job.few_leaves:
            return self._waiting_for_leaves(job, ask, had)
        if not enough:
            return _leave(job, Why.BUSY, _few_words(ask))
        return self._free_to_wish(job, ask, had, Why.FREE_NOW) or _leave(job, *self._why_not(job, ask, had))

    def _not_ours_to_move(self, job: Mine) -> Move | None:
        """Return what becomes of a job that no choice of nodes would help, or that is not understood."""
        if job.row.required and not job.pinned:
            return _leave(job, Why.NOT_ASKED, "its nodes were named by somebody else")
        reason = _not_understood(job)
        if reason:
            return _drop(job, Why.NOT_UNDERSTOOD, reason)
        held = stopped(job.row.reason)
        return self._held(job, held) if held else None

    def _held(self, job: Mine, held: str) -> Move:
        words = f"Slurm starts it on no nodes ({held})"
        if job.pinned or (job.few_leaves and not job.ask.patience_s):
            return _drop(job, Why.STARTS_LATER, words)
        return _leave(job, Why.STARTS_LATER, words)

    def _pinned(self, job: Mine, ask: Ask, had: Had) -> Move:
        nodes = job.row.required
        gone = nodes - had.free
        kept = nodes & self._kept(job)
        lost = _lost_words(gone, kept) if gone or kept or not self._is_clear(job, had) else ""
        if refused_nodes(job.row.reason):
            # It was held by the wish, once: not again, or a second lost race would hold it longer.
            words = lost or f"Slurm does not start it there ({job.row.reason})"
            return _drop(self._wary(job), Why.WITHDRAWN, words)
        if lost:
            return self._free_to_wish(job, ask, had, Why.MENDED, lost) or _drop(job, Why.WITHDRAWN, lost)
        if self._now - max(job.wished_at, job.memory.wished_at) > UNSEEN_S:
            return _drop(self._wary(job), Why.WITHDRAWN, f"not looked at by Slurm for {UNSEEN_S:.0f} s")
        return _leave(job, job.wish.why, job.wish.words)

    def _waiting_for_leaves(self, job: Mine, ask: Ask, had: Had) -> Move:
        since, patience = job.memory.enough_since, job.ask.patience_s or 0
        if patience and since is None:
            return _leave(job, Why.BUSY, _few_words(ask))
        if self._now - (since or 0.0) < patience:
            return _leave(job, Why.SCATTERED, f"better nodes are waited for, {patience} s at most, as was asked")
        words = "it waited as long as was asked" if patience else "jobs behind it would pass it meanwhile"
        words = f"few switches are not waited for: {words}"
        return self._free_to_wish(job, ask, had, Why.FREE_NOW) or _drop(job, Why.WITHDRAWN, words)

    def _free_to_wish(self, job: Mine, ask: Ask, had: Had, why: Why, lost: str = "") -> Move | None:
        """Return the wish for the best of the nodes that nobody before this job may be given; None for none."""
        open_nodes = had.free - self._kept(job)
        wary = self._now < job.memory.wary_until or job.memory.refusals >= MOST_REFUSALS
        if wary or not job.row.single or not self._is_clear(job, had) or len(open_nodes) <= ask.nodes:
            return None  # with as many nodes as it needs, Slurm has no choice either
        decision = self._ground.best(ask, self._kept(job) | job.row.excluded)
        if not wishes_nodes(decision) or not frozenset(decision.nodes) <= open_nodes:
            return None
        words = f"{lost}; {decision.words}" if lost else decision.words
        memory = replace(job.memory, wished_at=self._now)
        return Move(job=job, deed=Deed.PIN, decision=replace(decision, why=why, words=words), memory=memory)

    def _kept(self, job: Mine) -> frozenset[NodeName]:
        """Return the nodes that are kept for jobs before this one."""
        ahead = before(job.row, self._queue)
        kept = [other.planned | self._promised.get(other.id, frozenset()) for other in ahead]
        return frozenset().union(*kept)

    def _is_clear(self, job: Mine, had: Had) -> bool:
        """Whether no job before this one may still be given just any of its nodes."""
        return not any(self._may_take(other, had) for other in before(job.row, self._queue))

    def _may_take(self, other: Row, had: Had) -> bool:
        if stopped(other.reason) or other.planned or other.id in self._promised:
            return False
        return not had.free.isdisjoint(self._ground.nodes_of(other.partitions))

    def _why_not(self, job: Mine, ask: Ask, had: Had) -> tuple[Why, str]:
        if len(had.free) <= ask.nodes:
            return Why.NOTHING_TO_GAIN, "there is no choice: no more nodes are free than it needs"
        if not job.row.single:
            return Why.NOT_UNDERSTOOD, "tasks of an array start one by one: Slurm chooses their nodes"
        if not self._is_clear(job, had):
            return Why.STARTS_LATER, "a job before it may be given any of the free nodes"
        if self._now < job.memory.wary_until or job.memory.refusals >= MOST_REFUSALS:
            return Why.LATER_WITH_IT, "a wish for nodes did not help it to start"
        return Why.AS_GOOD, "Slurm's own choice is as good"

    def _wary(self, job: Mine) -> Mine:
        return replace(job, memory=replace(job.memory, wary_until=self._now + WARY_S))


def _not_understood(job: Mine) -> str:
    if job.ask.no_wish:
        return job.ask.no_wish
    if "+" in job.row.label:
        return "a job of several components is not weighed"
    if job.row.reservation:
        return "its nodes are those of a reservation"
    if len(job.row.partitions) > 1:
        return "several partitions may get the job"
    if job.row.nodes and job.row.nodes != job.ask.nodes:
        return f"it asked for {counted(job.ask.nodes, 'node')}, and was changed to {job.row.nodes}"
    return ""


def _few_words(ask: Ask) -> str:
    return f"fewer than {counted(ask.nodes, 'node')} are free: Slurm would not start it"


def _lost_words(gone: frozenset[NodeName], kept: frozenset[NodeName]) -> str:
    if gone:
        return f"{fold(gone)} {'are' if len(gone) > 1 else 'is'} not free any more"
    if kept:
        return f"{fold(kept)} {'are' if len(kept) > 1 else 'is'} kept for a job before it"
    return "a job before it may be given any of its nodes"


def _leave(job: Mine, why: Why, words: str) -> Move:
    return Move(job=job, deed=Deed.LEAVE, decision=replace(job.wish, why=why, words=words), memory=job.memory)


def _drop(job: Mine, why: Why, words: str) -> Move:
    if not (job.pinned or job.few_leaves):
        return _leave(job, why, words)
    decision = Decision(kind=Kind.NOTHING, why=why, words=words)
    return Move(job=job, deed=Deed.DROP, decision=decision, memory=job.memory)
