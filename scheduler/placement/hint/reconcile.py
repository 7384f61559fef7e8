"""Compares the hints of waiting jobs with the cluster and says what to change; pure.

What is held to, and proved in the tests:

1. Nodes are named only while all of them are free, kept for no job before this one, and no job before
   this one may still be given any of them. Slurm can start the job on them whenever it could start it at all.
2. Nodes are named once while a job waits, by the same test of gain as at its submission, and never for a
   job of one node. What Slurm looked at and did not fulfil is dropped (`waiting.is_due`), as by the watchdog.
3. A hint for few switches is dropped at sight: a job that Slurm holds for one is passed by those behind it. Only
   who asked for patience keeps it, so long from the moment on at which as many nodes are free as he needs.
4. What the user asked for himself, and what is not understood, is left alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from deeplink.core.text import counted
from deeplink.core.types import JobId
from deeplink.scheduler.placement.hint.cluster_survey import (
    Row,
    in_order,
    is_due,
    naming,
    rooms_of,
    stopped,
    taking_back,
)
from deeplink.scheduler.placement.hint.decide import MachineSpeeds, Surroundings, decide
from deeplink.scheduler.placement.hint.decision import Ask, Decision, HintKind, Why
from deeplink.scheduler.placement.request import DataResidency, NoPlacementError, eligible
from deeplink.scheduler.slurm.states import JobState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from deeplink.core.types import NodeName
    from deeplink.scheduler.placement.hint.cluster_survey import ClusterState, KnownFabric
    from deeplink.scheduler.placement.hint.decide import Weighed

ASKED_AGAIN_S = 60.0
"""How often Slurm is asked where it would start a job itself: each time takes a job id."""
MOST_REFUSALS = 3


@dataclass(frozen=True, slots=True)
class Had:
    """What there is for one job."""

    free: frozenset[NodeName] = frozenset()  # nodes that it could start on now
    # the same, and those that Slurm keeps for some job, maybe for this one
    possible: frozenset[NodeName] = frozenset()
    problem: str = ""  # why it can never run; empty where it can


@dataclass(frozen=True, slots=True)
class SurveyedCluster:
    """The cluster at one moment."""

    now: ClusterState  # its nodes and partitions
    site: KnownFabric  # where they hang
    # holds a hint for a job that must not have these nodes against Slurm's own choice (`decide.tried`)
    settle: Callable[[Ask, Weighed, frozenset[NodeName]], Decision]
    # where the data of a job lies, by the names of its datasets
    residency: Mapping[tuple[str, ...], DataResidency] = field(default_factory=dict)
    machines: MachineSpeeds = field(default_factory=MachineSpeeds)  # how fast they are

    def had(self, ask: Ask, excluded: frozenset[NodeName]) -> Had:
        """Return what there is for a job."""
        try:
            free = self._free(self.now, ask, excluded)
            return Had(free, self._free(_unplanned(self.now), ask, excluded))
        except NoPlacementError as limit:
            return Had(problem=str(limit))

    def nodes_of(self, partitions: Iterable[str]) -> frozenset[NodeName]:
        """Return the nodes of partitions; all there are where one is not known."""
        found: frozenset[NodeName] = frozenset()
        for name in partitions:
            if name not in self.now.partitions:
                return frozenset(self.now.nodes)
            found |= frozenset(self.now.partitions[name].nodes)
        return found

    def best(self, ask: Ask, kept: frozenset[NodeName]) -> Decision:
        """Return the decision for a job that may have any free node but those `kept` for others."""
        around = Surroundings(
            now=self.now,
            site=self.site,
            residency=self.residency.get(ask.data, DataResidency()),
            taken=kept,
            machines=self.machines,
        )
        return self.settle(ask, decide(ask, around), kept)

    def _free(self, now: ClusterState, ask: Ask, excluded: frozenset[NodeName]) -> frozenset[NodeName]:
        rooms = rooms_of(ask, now, dead=self.site.ties.dead, taken=excluded)
        return frozenset(eligible(rooms.rooms.items(), rooms.request))


def _unplanned(now: ClusterState) -> ClusterState:
    """Return the cluster with idle nodes free that Slurm keeps for some job, or for some time."""
    if all(node.ready or node.dead or not node.idle for node in now.nodes.values()):
        return now
    nodes = {
        name: replace(node, ready=True) if node.idle and not node.dead else node
        for name, node in now.nodes.items()
    }
    return replace(now, nodes=nodes)


class Deed(StrEnum):
    """What is to be done about a job's hint."""

    PIN = "pin"  # name nodes, in place of whatever was asked for
    DROP = "drop"  # no hint any more
    LEAVE = "leave"  # as it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What is kept of a job from round to round."""

    enough_since: float | None = None  # since when as many nodes are free as it needs; None while they are not
    asked_at: float = float("-inf")  # when Slurm was last asked where it would start the job itself
    wished_at: float = 0.0  # when nodes were last named
    named: bool = False  # nodes were named for it, and none are again
    refusals: int = 0  # how often Slurm refused to change it
    told: str = ""  # what was last said of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Mine:
    """A job that was submitted with `deeplink sbatch`."""

    row: Row  # as the queue tells it
    ask: Ask  # what it asks
    wish: Decision  # what was last decided
    wished_at: float  # when that was
    memory: Memory = field(default_factory=Memory)  # of earlier rounds

    @property
    def pinned(self) -> bool:
        """Whether the nodes it requires are those that were named for it."""
        return self.row.wished

    @property
    def few_leaves(self) -> bool:
        """Whether few switches were asked for it."""
        return self.wish.kind is HintKind.SWITCHES and self.wish.switches > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HintChange:
    """What is to be done about one job."""

    job: Mine
    deed: Deed
    decision: Decision  # for the record; the hint as it will be then
    memory: Memory  # for the next round

    @property
    def fields(self) -> dict[str, str]:
        """What is to be changed about the job, in scontrol's words; empty for nothing."""
        # Not `Switches=0`: cleared so before Slurm has first looked, a job is never started (measured with 22.05).
        switches = {"Switches": f"{self.job.ask.nodes}@00:00:00"} if self.job.few_leaves else {}
        if self.deed is Deed.PIN:
            return {**naming(self.job.row.comment, self.decision.nodes), **switches}
        if self.deed is Deed.DROP:
            return {**(taking_back(self.job.row.comment) if self.job.pinned else {}), **switches}
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


def plan(mine: Sequence[Mine], queue: Sequence[Row], cluster: SurveyedCluster, now: float) -> list[HintChange]:
    """Return what to do about each job of `mine` that waits."""
    return _Round(in_order(list(queue)), cluster, now).moves(mine)


def kept_before(
    ask: Ask, queue: Sequence[Row], cluster: SurveyedCluster, partition: str
) -> frozenset[NodeName] | None:
    """Return the nodes that waiting jobs get before a new one; None where one may be given just any."""
    last = max((row.id for row in queue), default=0) + 1
    new = Row(
        id=JobId(last),
        label=str(last),
        state=JobState.PENDING,
        reason="",
        user="",
        partitions=(partition,),
        nodes=ask.nodes,
        priority=-1,
        required=frozenset(),
        excluded=frozenset(ask.excluded),
        planned=frozenset(),
        reservation="",
    )
    had = cluster.had(ask, new.excluded)
    return _Round(in_order([*queue, new]), cluster, 0.0).kept(new, had)


class _Round:
    """One round; `_promised` holds the nodes that jobs looked at earlier in it are to get."""

    def __init__(self, queue: Sequence[Row], cluster: SurveyedCluster, now: float) -> None:
        self._queue, self._cluster, self._now = queue, cluster, now
        self._promised: dict[int, frozenset[NodeName]] = {}

    def moves(self, mine: Sequence[Mine]) -> list[HintChange]:
        by_id: dict[int, list[Mine]] = {}
        for job in mine:
            by_id.setdefault(job.row.id, []).append(job)
        found = []
        for row in self._queue:
            for job in by_id.get(row.id, ()):
                if job.row.label == row.label:
                    move = self._move(job)
                    found.append(move)
                    if move.decision.names_nodes:
                        self._promised[row.id] = frozenset(move.decision.nodes)
        return found

    def _move(self, job: Mine) -> HintChange:
        move = self._wanted(job)
        if move.fields and job.memory.refusals >= 2 * MOST_REFUSALS:
            return _leave(job, Why.UNKNOWN, "Slurm refuses every change of it")
        return move

    def _wanted(self, job: Mine) -> HintChange:
        untouched = self._not_ours_to_move(job)
        if untouched or job.pinned:
            return untouched or self._pinned(replace(job, memory=replace(job.memory, named=True)))
        ask = replace(job.ask, later="", patience_s=0, array=False)
        had = self._cluster.had(ask, job.row.excluded)
        if had.problem:
            return _drop(job, Why.IMPOSSIBLE, had.problem)
        enough = len(had.possible) >= ask.nodes
        since = (job.memory.enough_since or self._now) if enough else None
        job = replace(job, memory=replace(job.memory, enough_since=since))
        if job.few_leaves:
            return self._waiting_for_leaves(job, ask, had)
        if not enough:
            return _leave(job, Why.BUSY, _few_words(ask))
        return self._weighed(job, ask, had)

    def _not_ours_to_move(self, job: Mine) -> HintChange | None:
        """Return what becomes of a job that no choice of nodes would help, or that is not understood."""
        if job.row.required and not job.pinned:
            return _leave(job, Why.NOT_ASKED, "its nodes were named by somebody else")
        reason = _not_understood(job)
        if reason:
            return _drop(job, Why.NOT_UNDERSTOOD, reason)
        held = stopped(job.row.reason)
        return self._held(job, held) if held else None

    def _held(self, job: Mine, held: str) -> HintChange:
        words = f"Slurm starts it on no nodes ({held})"
        if job.pinned or (job.few_leaves and not job.ask.patience_s):
            return _drop(job, Why.STARTS_LATER, words)
        return _leave(job, Why.STARTS_LATER, words)

    def _pinned(self, job: Mine) -> HintChange:
        if is_due(job.row.reason, self._now - max(job.wished_at, job.memory.wished_at)):
            return _drop(
                job, Why.WITHDRAWN, f"Slurm has not started it there ({job.row.reason or 'not looked at'})"
            )
        return _leave(job, job.wish.why, job.wish.words)

    def _waiting_for_leaves(self, job: Mine, ask: Ask, had: Had) -> HintChange:
        since, patience = job.memory.enough_since, job.ask.patience_s or 0
        if patience and since is None:
            return _leave(job, Why.BUSY, _few_words(ask))
        if self._now - (since or 0.0) < patience:
            return _leave(job, Why.SCATTERED, f"better nodes are waited for, {patience} s at most, as was asked")
        words = "it waited as long as was asked" if patience else "jobs behind it would pass it meanwhile"
        move = self._weighed(job, ask, had)
        if move.deed is Deed.PIN:
            return move
        return _drop(replace(job, memory=move.memory), Why.WITHDRAWN, f"few switches are not waited for: {words}")

    def _weighed(self, job: Mine, ask: Ask, had: Had) -> HintChange:
        """Return the hint for the best nodes that no one before this job may be given, or why there is none."""
        why_not = self._not_to_be_weighed(job, ask, had)
        if why_not is not None:
            return _leave(job, *why_not)
        kept = self.kept(job.row, had) or frozenset()
        decision = self._cluster.best(ask, kept | job.row.excluded)
        memory = replace(job.memory, asked_at=self._now)
        if not decision.names_nodes or not frozenset(decision.nodes) <= had.free - kept:
            return _leave(replace(job, memory=memory), decision.why, decision.words)
        memory = replace(memory, wished_at=self._now, named=True)
        return HintChange(job=job, deed=Deed.PIN, decision=decision, memory=memory)

    def _not_to_be_weighed(self, job: Mine, ask: Ask, had: Had) -> tuple[Why, str] | None:
        kept = self.kept(job.row, had)
        if ask.nodes == 1:
            found = Why.NOTHING_TO_GAIN, "a job of one node takes the one that Slurm gives it"
        elif len(had.free - (kept or frozenset())) <= ask.nodes:
            found = Why.NOTHING_TO_GAIN, "there is no choice: no more nodes are free than it needs"
        elif not job.row.single:
            found = Why.NOT_UNDERSTOOD, "tasks of an array start one by one: Slurm chooses their nodes"
        elif kept is None:
            found = Why.STARTS_LATER, "a job before it may be given any of the free nodes"
        elif job.memory.named or job.memory.refusals >= MOST_REFUSALS:
            found = Why.LATER_WITH_IT, "a hint for nodes did not help it to start"
        elif self._now - job.memory.asked_at < ASKED_AGAIN_S:
            found = job.wish.why, job.wish.words
        else:
            return None
        return found

    def kept(self, row: Row, had: Had) -> frozenset[NodeName] | None:
        """Return the nodes that jobs before this one get; None where one may be given any free one."""
        ahead = before(row, self._queue)
        if any(self._may_take(other, had) for other in ahead):
            return None
        return frozenset().union(*map(self._settled, ahead))

    def _settled(self, other: Row) -> frozenset[NodeName]:
        """Return the nodes of a waiting job that Slurm plans, we promised in this round, or somebody named."""
        named = other.required if len(other.required) >= other.nodes > 0 else frozenset()
        return other.planned | self._promised.get(other.id, frozenset()) | named

    def _may_take(self, other: Row, had: Had) -> bool:
        if stopped(other.reason) or self._settled(other):
            return False
        return not had.free.isdisjoint(self._cluster.nodes_of(other.partitions))


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


def _leave(job: Mine, why: Why, words: str) -> HintChange:
    return HintChange(
        job=job, deed=Deed.LEAVE, decision=replace(job.wish, why=why, words=words), memory=job.memory
    )


def _drop(job: Mine, why: Why, words: str) -> HintChange:
    if not (job.pinned or job.few_leaves):
        return _leave(job, why, words)
    decision = Decision(kind=HintKind.NOTHING, why=why, words=words)
    return HintChange(job=job, deed=Deed.DROP, decision=decision, memory=job.memory)
