"""What to wish of Slurm for a job: a function of what it asks and of the cluster's state; pure.

The best nodes that are free now are wished by name, unless Slurm's own choice is as good. Who gave the job
patience has few leaves wished where those are better. In all other cases nothing is wished, with the reason.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from deeplink.scheduler.placement.request import DataResidency, NoPlacementError, PlacementCluster
from deeplink.scheduler.placement.search import place
from deeplink.scheduler.wish.decision import Decision, HintKind, NodeChoice, Why
from deeplink.scheduler.wish.room import CannotRunError, Rooms, partition_of, rooms_of
from deeplink.scheduler.wish.scale import MachineSpeeds, Scale, scale_of
from deeplink.text import counted, listed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from deeplink.scheduler.placement.request import PlacementRequest
    from deeplink.scheduler.placement.search import Candidate
    from deeplink.scheduler.topology.graph import Fabric
    from deeplink.scheduler.wish.decision import Ask
    from deeplink.scheduler.wish.site import KnownFabric
    from deeplink.scheduler.wish.state import ClusterState
    from deeplink.types import NodeName

LEAST_GAIN = 0.2
"""Nodes are wished by name where they cost less than Slurm's own by as much: a wish by name binds the job."""
LEAST_SHARE = 0.02
"""The same where steps are predicted: so much shorter, as a share of the step with Slurm's own. It is what the
model is wrong by at best (docs/decisions/0013), and twice what `placement.predicted` lets ties count."""
SHOWN = 5


@dataclass(frozen=True, slots=True)
class Weighed:
    """A decision, and what Slurm's own choice of nodes can be weighed by.

    Attributes:
        decision: NODES means: to be tried with Slurm first (`dry_run_check`).
        cluster, request: what was weighed; None where nothing was.
        scale: by what.
    """

    decision: Decision
    cluster: PlacementCluster | None = None
    request: PlacementRequest | None = None
    scale: Scale = field(default_factory=Scale)

    def option(self, nodes: Collection[NodeName]) -> NodeChoice | None:
        """Return a choice of nodes as it is weighed here; None where it cannot be had by what is known here."""
        if self.cluster is None or self.request is None or len(nodes) != self.request.nodes:
            return None
        wanted = frozenset(nodes)
        try:
            found = place(self.cluster, replace(self.request, required=wanted), self.scale.cost, most=1)
        except NoPlacementError:
            return None
        return _option(found[0], self.scale)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a decision is made in.

    Attributes:
        now: the cluster's nodes.
        site: where they hang.
        residency: where the job's data lies.
        taken: nodes that another job is about to get.
        notes: what was not known.
        machines: how fast they are.
    """

    now: ClusterState
    site: KnownFabric
    residency: DataResidency = field(default_factory=DataResidency)
    taken: frozenset[NodeName] = frozenset()
    notes: tuple[str, ...] = ()
    machines: MachineSpeeds = field(default_factory=MachineSpeeds)


def gains(ours: NodeChoice, theirs: NodeChoice) -> bool:
    """Tell whether one choice of nodes is so much better than another that it is worth a wish by name."""
    if ours.step_s is None or theirs.step_s is None:
        return theirs.cost - ours.cost >= LEAST_GAIN
    return theirs.step_s - ours.step_s >= LEAST_SHARE * theirs.step_s


def unasked(why: Why, words: str, notes: Iterable[str] = ()) -> Decision:
    """Return the decision to wish nothing."""
    return Decision(kind=HintKind.NOTHING, why=why, words=words, notes=tuple(notes))


def decide(ask: Ask, around: Surroundings) -> Weighed:
    """Decide what to wish for a job."""
    notes = (*around.site.notes, *around.notes)
    if ask.no_wish:
        return Weighed(unasked(Why.NOT_UNDERSTOOD, ask.no_wish, notes))
    try:
        partition = partition_of(ask, around.now)
        rooms = rooms_of(ask, around.now, dead=around.site.ties.dead, taken=around.taken)
    except CannotRunError as limit:
        return Weighed(unasked(Why.IMPOSSIBLE, limit.problem, notes))
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
            waited = replace(waited, candidates=candidates, cost=scale.basis.value, predicted=predicted)
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
        cost=scale.basis.value,
        predicted=predicted,
    )
    return Weighed(decision, cluster, rooms.request, scale)


def _few_leaves(ask: Ask, around: Surroundings, rooms: Rooms, plain: Decision) -> Decision:
    """Wish for as few leaves as the job could touch on an idle cluster, where that gains anything over `plain`.

    Not unless the user gave it patience: Slurm lets jobs behind one that it holds for switches pass, so that it
    may wait for longer than it says (docs/decisions/0015).
    """
    tree, patience = around.site.slurm, ask.patience_s or 0
    leaves = {tree.leaf(node) for node in rooms.rooms if tree.path(node)}
    fewest = fewest_leaves(tree, rooms.rooms, ask.nodes)
    if not patience:
        return replace(plain, words=f"{plain.words}; it is not to wait for better ones")
    if not leaves:
        return replace(plain, why=Why.NOTHING_TO_GAIN, words=f"{plain.words}; Slurm knows no switches to wish for")
    if min(ask.nodes, len(leaves)) <= fewest:
        words = f"{plain.words}; any nodes are as near to each other"
        return replace(plain, why=Why.NOTHING_TO_GAIN, words=words)
    leaf = "one leaf" if fewest == 1 else f"{fewest} leaves"
    words = f"{plain.words}; {leaf} waited for, {patience} s at most"
    return replace(plain, kind=HintKind.SWITCHES, words=words, switches=fewest, patience_s=patience)


def fewest_leaves(fabric: Fabric, nodes: Iterable[NodeName], wanted: int) -> int:
    """Return on how few leaves so many nodes fit, were all of them free.

    Nodes nobody knows the place of count as one leaf.
    """
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
        given_up=tuple(map(str, candidate.given_up)),
        step_s=None if scale.step is None else scale.step(candidate.traits).step_s,
    )
