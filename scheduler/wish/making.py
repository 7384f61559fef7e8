"""From what a job asks to a decision: survey, weigh, and ask Slurm itself before nodes are wished by name."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from deeplink.errors import DeepLinkError
from deeplink.scheduler.placement.request import DataResidency
from deeplink.scheduler.slurm.command import CommandTimeoutError
from deeplink.scheduler.wish.amounts import time_text
from deeplink.scheduler.wish.decide import Surroundings, decide, unasked
from deeplink.scheduler.wish.decision import Decision, HintKind, Why
from deeplink.scheduler.wish.dry_run_check import tried
from deeplink.scheduler.wish.scale import MachineSpeeds
from deeplink.scheduler.wish.shapes import other_shapes
from deeplink.scheduler.wish.submitting import alone
from deeplink.scheduler.wish.survey import Sources, survey

if TYPE_CHECKING:
    from collections.abc import Callable

    from deeplink.scheduler.wish.decide import Weighed
    from deeplink.scheduler.wish.decision import Ask
    from deeplink.scheduler.wish.dry_run_check import Trial
    from deeplink.types import NodeName


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What a decision is made with.

    Attributes:
        sources: of the survey.
        trial: asks Slurm what it would do with the job, given these further options of sbatch.
        agreed: why nobody would look after a wish by name; empty where somebody agreed to.
        kept: returns the nodes that waiting jobs will get; None where one may be given any of the free ones.
        residency: where the job's data lies.
        notes: what is not known of it.
        machines: how fast they are.
    """

    sources: Sources
    trial: Callable[[tuple[str, ...]], Trial]
    agreed: Callable[[], str]
    kept: Callable[[Ask, Surroundings], frozenset[NodeName] | None]
    residency: DataResidency = field(default_factory=DataResidency)
    notes: tuple[str, ...] = ()
    machines: MachineSpeeds = field(default_factory=MachineSpeeds)


@dataclass(frozen=True, slots=True)
class HeldDecision:
    """A decision. Where nodes are wished by name, no other submission of this user decides before `release`.

    Attributes:
        decision: it is.
        place: is given up by `release`.
        unreachable: whether slurmctld did not answer in time.
    """

    decision: Decision
    place: ExitStack = field(default_factory=ExitStack)
    unreachable: bool = False

    def release(self) -> None:
        """Let other submissions decide: the job is in the queue, or will not be."""
        self.place.close()


def options_of(decision: Decision, comment: str = "") -> tuple[str, ...]:
    """Return sbatch's options for a decision about a job with this comment of its user's."""
    if decision.kind is HintKind.NODES:
        # It takes time that most submissions need not spend.
        from deeplink.scheduler.wish.binding import marked  # noqa: PLC0415

        return (f"--nodelist={','.join(decision.nodes)}", f"--comment={marked(comment, decision.nodes)}")
    if decision.kind is HintKind.SWITCHES:
        return (f"--switches={decision.switches}@{time_text(decision.patience_s)}",)
    return ()


def make(ask: Ask, means: Means, *, dry: bool = False) -> HeldDecision:
    """Decide what to wish for a job. Whatever cannot be had leads to no wish, with the reason.

    Args:
        ask: what it asks.
        means: what to decide with.
        dry: whether nothing will be submitted. Then it is also told on how many other nodes the same GPUs would
            be faster.
    """
    if ask.no_wish:
        return HeldDecision(unasked(Why.NOT_UNDERSTOOD, ask.no_wish, means.notes))
    try:
        now, site = survey(means.sources)
    except DeepLinkError as problem:
        words = f"the cluster's state is not known: {problem}"
        silent = isinstance(problem, CommandTimeoutError)
        return HeldDecision(unasked(Why.UNKNOWN, words, means.notes), unreachable=silent)
    around = Surroundings(now, site, means.residency, frozenset(), means.notes, means.machines)
    weighed = decide(ask, around)
    with ExitStack() as place:
        stands = partial(_standing, ask=ask, around=around, means=means, place=None if dry else place)
        decision = tried(weighed, means.trial, stands)
        if dry:
            decision = replace(decision, notes=(*decision.notes, *other_shapes(ask, weighed, around)))
        kept = place.pop_all() if decision.kind is HintKind.NODES and not dry else ExitStack()
    return HeldDecision(decision, kept)


def _standing(
    weighed: Weighed, *, ask: Ask, around: Surroundings, means: Means, place: ExitStack | None
) -> Weighed:
    """Return the wish where it is looked after, on nodes that no waiting job will get; else none, with why."""
    problem = means.agreed()
    if problem:
        return without(weighed, Why.NOT_LOOKED_AFTER, problem)
    if place is not None and not place.enter_context(alone(means.sources.folder, means.sources.clock)):
        words = "another submission of yours decides now, or the state folder takes no writes"
        return without(weighed, Why.UNKNOWN, words)
    kept = means.kept(ask, around)
    if kept is None:
        return without(weighed, Why.STARTS_LATER, "a job before it may be given any of the free nodes")
    return decide(ask, replace(around, taken=kept)) if kept & {*weighed.decision.nodes} else weighed


def without(weighed: Weighed, why: Why, words: str) -> Weighed:
    """Return what was weighed with no wish, and why."""
    nothing = replace(weighed.decision, kind=HintKind.NOTHING, why=why, words=words, nodes=(), expected=())
    return replace(weighed, decision=nothing)
