"""Which hint Slurm gets for a job: a function of what it asks and of the cluster's state; pure.

The best nodes that are free now are named, unless Slurm's own choice is as good. Who gave the job
patience has few leaves asked for where those are better. In all other cases there is no hint, with the reason.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from deeplink.core.errors import DeepLinkError
from deeplink.core.text import counted, listed
from deeplink.scheduler.placement.hint.cluster_survey import Rooms, partition_of, rooms_of
from deeplink.scheduler.placement.hint.decision import Decision, HintKind, NodeChoice, Why
from deeplink.scheduler.placement.request import DEFAULT_COST, DataResidency, NoPlacementError, PlacementCluster
from deeplink.scheduler.placement.search import place, weigh

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from deeplink.core.types import NodeName
    from deeplink.scheduler.placement.hint.cluster_survey import ClusterState, KnownFabric
    from deeplink.scheduler.placement.hint.decision import Ask
    from deeplink.scheduler.placement.model import Constants, Profile
    from deeplink.scheduler.placement.predicted import StepTime
    from deeplink.scheduler.placement.request import Cost, PlacementRequest, Traits
    from deeplink.scheduler.placement.search import Candidate
    from deeplink.scheduler.topology.graph import Fabric

LEAST_GAIN = 0.2
"""Nodes are named where they cost less than Slurm's own by as much: a hint by name binds the job."""
LEAST_SHARE = 0.02
"""The same where steps are predicted: so much shorter, as a share of the step with Slurm's own. It is what the
model is wrong by at best (docs/decisions/0013), and twice what `placement.predicted` lets ties count."""
SHOWN = 5
LATER_S = 2.0
"""Start times are told in whole seconds, and the two trials are not made in the same one."""
# A text, compiled when it is needed. Only the words that are needed: 26.05 says `to start at TIME a using`.
_START = r"\bto start at ((\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d))\b.*? on nodes (\S+)"
SHAPES_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Scale:
    """What choices are compared by."""

    cost: Cost = DEFAULT_COST  # the cost
    # the predicted step of a choice; None where none is predicted
    step: Callable[[Traits], StepTime] | None = None
    note: str = ""  # why none is, for a job that has a profile

    @property
    def basis(self) -> str:
        """What the cost is: crossings of a ring of eight nodes, or seconds."""
        return "weights" if self.step is None else "predicted step"


@dataclass(frozen=True, slots=True)
class MachineSpeeds:
    """What is known of how fast the machines are."""

    constants: Constants | None = None  # None where nothing is
    problem: str = "no constants of the machines are set (`model`, made by `deeplink calibrate`)"  # why nothing is


def scale_of(ask: Ask, machines: MachineSpeeds, *, data: bool) -> Scale:
    """Return what choices are compared by for a job. Imports numpy where its step can be predicted."""
    if not ask.profile:
        return Scale()
    if machines.constants is None:
        return _weights(machines.problem)
    # Most jobs have no profile, and numpy comes with the prediction.
    from deeplink.scheduler.placement.model import profile_from  # noqa: PLC0415

    try:
        profile = profile_from(ask.profile, "the job's profile")
        lacking = _lacking(ask, profile, machines.constants) if data else ""
    except DeepLinkError as problem:
        return _weights(str(problem))
    if lacking:
        return _weights(lacking)
    from deeplink.scheduler.placement.predicted import Predicted  # noqa: PLC0415

    predicted = Predicted(profile.job, machines.constants, profile.ranks(ask.gpus))
    return Scale(predicted, predicted.step)


def _lacking(ask: Ask, profile: Profile, constants: Constants) -> str:
    from deeplink.scheduler.placement.predicted import reads_of  # noqa: PLC0415

    if not profile.job.sample_bytes:
        return "its profile has no sample_bytes, and where its data lies is to count"
    if reads_of(constants.reads, 1.0, ask.nodes) is None:
        return "reading was not timed (`deeplink calibrate --data`), and where its data lies is to count"
    return ""


def _weights(why: str) -> Scale:
    return Scale(note=f"its step is not predicted: {why}")


@dataclass(frozen=True, slots=True)
class Weighed:
    """A decision, and what Slurm's own choice of nodes can be weighed by."""

    decision: Decision  # NODES means: to be tried with Slurm first (`settle`)
    cluster: PlacementCluster | None = None  # what was weighed; None where nothing was
    request: PlacementRequest | None = None
    scale: Scale = field(default_factory=Scale)

    def option(self, nodes: Collection[NodeName]) -> NodeChoice | None:
        """Return a choice of nodes as it is weighed here; None where it cannot be had by what is known here."""
        if self.cluster is None or self.request is None:
            return None
        found = weigh(self.cluster, self.request, nodes, self.scale.cost)
        return _option(found, self.scale) if found else None


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a decision is made in."""

    now: ClusterState  # the cluster's nodes
    site: KnownFabric  # where they hang
    residency: DataResidency = field(default_factory=DataResidency)  # where the job's data lies
    taken: frozenset[NodeName] = frozenset()  # nodes that another job is about to get
    notes: tuple[str, ...] = ()  # what was not known
    machines: MachineSpeeds = field(default_factory=MachineSpeeds)  # how fast they are


def gains(ours: NodeChoice, theirs: NodeChoice) -> bool:
    """Tell whether one choice of nodes is so much better than another that it is worth a hint by name."""
    if ours.step_s is None or theirs.step_s is None:
        return theirs.cost - ours.cost >= LEAST_GAIN
    return theirs.step_s - ours.step_s >= LEAST_SHARE * theirs.step_s


def unasked(why: Why, words: str, notes: Iterable[str] = ()) -> Decision:
    """Return the decision that hints nothing."""
    return Decision(kind=HintKind.NOTHING, why=why, words=words, notes=tuple(notes))


def nothing(decision: Decision, why: Why, words: str, expected: tuple[NodeName, ...] = ()) -> Decision:
    """Return a decision with its hint taken out, and why."""
    return replace(decision, kind=HintKind.NOTHING, why=why, words=words, nodes=(), expected=expected)


def decide(ask: Ask, around: Surroundings) -> Weighed:
    """Decide which hint a job gets."""
    notes = (*around.site.notes, *around.notes)
    if ask.no_wish:
        return Weighed(unasked(Why.NOT_UNDERSTOOD, ask.no_wish, notes))
    try:
        partition = partition_of(ask, around.now)
        rooms = rooms_of(ask, around.now, dead=around.site.ties.dead, taken=around.taken)
    except NoPlacementError as limit:
        return Weighed(unasked(Why.IMPOSSIBLE, str(limit), notes))
    if rooms.unread:
        notes = (
            *notes,
            f"what Slurm says of the GPUs of {listed(rooms.unread)} is not understood: they count as busy",
        )
    if rooms.able < ask.nodes:
        words = f"{counted(ask.nodes, 'node')} wanted; of those that would do, {rooms.able:,} are well"
        return Weighed(unasked(Why.BUSY, words, notes))
    if partition.shares and not ask.exclusive:
        why = f"jobs share CPUs in partition {partition.name}, which is not weighed"
        return Weighed(unasked(Why.NOT_UNDERSTOOD, why, notes))
    if not partition.up or ask.later or ask.array:
        reason = Why.STARTS_LATER if partition.up else Why.BUSY
        words = "" if partition.up else f"partition {partition.name} is not up"
        plain = unasked(reason, words or ask.later or "its tasks start one by one", notes)
        return Weighed(_few_leaves(ask, around, rooms, plain))
    return _now(ask, around, rooms, notes)


def _now(ask: Ask, around: Surroundings, rooms: Rooms, notes: tuple[str, ...]) -> Weighed:
    ties = around.site.ties
    lost = sum(not ties.fabric.path(node) for node in rooms.rooms)
    if lost and ties.fabric.paths:
        notes = (*notes, f"{counted(lost, 'node')} of {len(rooms.rooms):,} hang on no switch that is known")
    scale = scale_of(ask, around.machines, data=bool(around.residency.total))
    notes = (*notes, scale.note) if scale.note else notes
    cluster = PlacementCluster(
        fabric=ties.fabric, rooms=rooms.rooms, speeds=ties.speeds, residency=around.residency
    )
    try:
        found = place(cluster, rooms.request, scale.cost, most=SHOWN)
    except NoPlacementError:
        why = f"{counted(ask.nodes, 'node')} wanted, {rooms.free:,} of {rooms.able:,} have the room now"
        return Weighed(_few_leaves(ask, around, rooms, unasked(Why.BUSY, why, notes)))
    candidates = tuple(_option(one, scale) for one in found)
    best = candidates[0]
    predicted = () if scale.step is None else tuple(scale.step(found[0].traits).lines())
    fewest = fewest_leaves(ties.fabric, rooms.rooms, ask.nodes)
    if best.leaves > fewest:
        why = f"the best free nodes lie on {best.leaves} leaves, where {fewest} would do"
        waited = _few_leaves(ask, around, rooms, unasked(Why.SCATTERED, why, notes))
        if waited.kind is HintKind.SWITCHES:
            waited = replace(waited, candidates=candidates, cost=scale.basis, predicted=predicted)
            return Weighed(waited, cluster, rooms.request, scale)
    words = f"the best nodes are free: {found[0].said(best.price)}"
    decision = Decision(
        kind=HintKind.NODES,
        why=Why.FREE_NOW,
        words=words,
        nodes=best.nodes,
        candidates=candidates,
        expected=best.nodes,
        notes=notes,
        cost=scale.basis,
        predicted=predicted,
    )
    return Weighed(decision, cluster, rooms.request, scale)


def _few_leaves(ask: Ask, around: Surroundings, rooms: Rooms, plain: Decision) -> Decision:
    """Hint for as few leaves as the job could touch on an idle cluster, where that gains anything over `plain`.

    Not unless the user gave it patience: Slurm lets jobs behind one that it holds for switches pass, so that it
    may wait for longer than it says (docs/decisions/0015).
    """
    tree, patience = around.site.slurm, ask.patience_s or 0
    leaves = {tree.leaf(node) for node in rooms.rooms if tree.path(node)}
    fewest = fewest_leaves(tree, rooms.rooms, ask.nodes)
    if not patience:
        return replace(plain, words=f"{plain.words}; it is not to wait for better ones")
    if not leaves:
        return replace(plain, why=Why.NOTHING_TO_GAIN, words=f"{plain.words}; Slurm knows no switches to hint at")
    if min(ask.nodes, len(leaves)) <= fewest:
        words = f"{plain.words}; any nodes are as near to each other"
        return replace(plain, why=Why.NOTHING_TO_GAIN, words=words)
    leaf = "one leaf" if fewest == 1 else f"{fewest} leaves"
    words = f"{plain.words}; {leaf} waited for, {patience} s at most"
    return replace(plain, kind=HintKind.SWITCHES, words=words, switches=fewest, patience_s=patience)


def fewest_leaves(fabric: Fabric, nodes: Iterable[NodeName], wanted: int) -> int:
    """Return on how few leaves so many nodes fit, were all free; those of unknown place count as one leaf."""
    sizes = sorted(Counter(fabric.leaf(node) for node in nodes).values(), reverse=True)
    left, used = wanted, 0
    for size in sizes:
        if left <= 0:
            break
        left, used = left - size, used + 1
    return used


def _option(candidate: Candidate, scale: Scale) -> NodeChoice:
    return NodeChoice(
        nodes=candidate.nodes,
        cost=round(candidate.cost, 6),
        crossings=candidate.crossings,
        leaves=candidate.leaves,
        percent_local=round(candidate.percent_local, 3),
        given_up=candidate.given_up,
        step_s=None if scale.step is None else scale.step(candidate.traits).step_s,
    )


@dataclass(frozen=True, slots=True)
class Trial:
    """What Slurm says it would do with a job."""

    start: str = ""  # when it would start it, as it says it; empty where it would not
    start_s: float = 0.0  # the same in seconds of the local clock
    nodes: tuple[NodeName, ...] = ()  # where
    refused: str = ""  # why it would not, in Slurm's words


def trial_of(text: str, unfold: Callable[[str], tuple[NodeName, ...]]) -> Trial:
    """Read what `sbatch --test-only` wrote to standard error (SLURM_TIME_FORMAT=standard)."""
    found = re.search(_START, text)
    if not found:
        said = text.strip().splitlines()
        return Trial(refused=said[-1] if said else "it said nothing")
    year, month, day, hour, minute, second = map(int, found.groups()[1:7])
    # Days of a year that is counted in equal months: all that is asked is which of two is later, and by how much.
    start_s = ((((year * 12 + month) * 31 + day) * 24 + hour) * 60 + minute) * 60.0 + second
    return Trial(found[1], start_s, unfold(found[8]))


def without_wish(weighed: Weighed, plain: Trial) -> Decision | None:
    """Return the decision where Slurm's own choice settles it; None where the hint must be tried, too."""
    decision = weighed.decision
    if not plain.start:
        return unasked(Why.IMPOSSIBLE, f"Slurm would not take it: {plain.refused}", decision.notes)
    theirs = weighed.option(plain.nodes)
    if theirs is None:
        words = f"Slurm's own choice cannot be weighed: {_briefly(plain.nodes)}"
        return nothing(decision, Why.UNKNOWN, words, plain.nodes)
    if gains(decision.candidates[0], theirs):
        return None
    words = f"Slurm's own choice is as good: {_briefly(plain.nodes)}"
    return nothing(replace(decision, own=theirs), Why.AS_GOOD, words, plain.nodes)


def settle(weighed: Weighed, plain: Trial, wished: Trial) -> Decision:
    """Return the decision, once Slurm has told when the job would start with the hint, and when without."""
    theirs = weighed.option(plain.nodes)
    decision = replace(weighed.decision, own=theirs)
    if wished.start and wished.start_s - plain.start_s <= LATER_S:
        beside = f"; Slurm's own choice, {_briefly(plain.nodes)}: {theirs.price}" if theirs else ""
        return replace(decision, words=decision.words + beside)
    when = f"{wished.start}, not {plain.start}" if wished.start else wished.refused
    words = f"with {_briefly(decision.nodes)} it would start later ({when})"
    return nothing(decision, Why.LATER_WITH_IT, words, plain.nodes)


def tried(
    weighed: Weighed,
    trial: Callable[[tuple[str, ...]], Trial],
    stands: Callable[[Weighed], Weighed],
) -> Decision:
    """Hold a hint for nodes by name against what Slurm would do without it, and with it: the one test of gain."""
    if weighed.decision.kind is not HintKind.NODES:
        return weighed.decision
    try:
        plain = trial(())
        settled = without_wish(weighed, plain)
        if settled is not None:
            return settled
        weighed = stands(weighed)
        if weighed.decision.kind is not HintKind.NODES:
            return weighed.decision
        settled = without_wish(weighed, plain)
        return settled or settle(weighed, plain, trial((f"--nodelist={','.join(weighed.decision.nodes)}",)))
    except DeepLinkError as problem:
        return unasked(Why.UNKNOWN, f"Slurm could not be asked about it: {problem}", weighed.decision.notes)


def _briefly(nodes: tuple[NodeName, ...]) -> str:
    shown = 8
    return ", ".join(nodes[:shown]) + (f" and {len(nodes) - shown} more" if len(nodes) > shown else "")


def other_shapes(ask: Ask, weighed: Weighed, around: Surroundings) -> tuple[str, ...]:
    """Say on how many other nodes the job's GPUs would make a shorter step, the shortest first."""
    own = weighed.decision.candidates[0].step_s if weighed.decision.candidates else None
    if own is None or not ask.gpus:
        return ()
    better = [(option, gpus) for gpus, option in _others(ask, around) if _step(option) <= own * (1 - LEAST_SHARE)]
    better.sort(key=lambda one: _step(one[0]))
    return tuple(
        f"the same GPUs as {counted(len(option.nodes), 'node')} with {gpus} each: {option.price}, "
        f"not {1e3 * own:.1f} ms"
        for option, gpus in better[:SHAPES_SHOWN]
    )


def _others(ask: Ask, around: Surroundings) -> Iterator[tuple[int, NodeChoice]]:
    """Yield GPUs of each node, and the best choice of nodes with as many."""
    all_gpus = ask.nodes * ask.gpus
    most = max((node.gpus(ask.gpu_type) or 0 for node in around.now.nodes.values()), default=0)
    for gpus in range(1, min(most, all_gpus) + 1):
        if all_gpus % gpus == 0 and gpus != ask.gpus:
            other = replace(ask, nodes=all_gpus // gpus, gpus=gpus, patience_s=0)
            candidates = decide(other, around).decision.candidates
            if candidates and candidates[0].step_s is not None:
                yield gpus, candidates[0]


def _step(option: NodeChoice) -> float:
    return option.step_s or 0.0
