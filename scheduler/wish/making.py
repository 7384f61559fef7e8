"""From what a job asks to a decision: survey, weigh, and ask Slurm itself before nodes are wished by name."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from deeplink.errors import DeepLinkError
from deeplink.scheduler.placement.request import Residency
from deeplink.scheduler.slurm.command import CommandTimeoutError
from deeplink.scheduler.wish.amounts import time_text
from deeplink.scheduler.wish.claims import Claims, locked
from deeplink.scheduler.wish.decide import Surroundings, decide, unasked
from deeplink.scheduler.wish.decision import Decision, Kind, Why
from deeplink.scheduler.wish.scale import Machines
from deeplink.scheduler.wish.settle import settle, without_wish
from deeplink.scheduler.wish.shapes import other_shapes
from deeplink.scheduler.wish.survey import Sources, survey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from deeplink.scheduler.wish.decide import Weighed
    from deeplink.scheduler.wish.decision import Ask
    from deeplink.scheduler.wish.settle import Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What a decision is made with.

    Attributes:
        sources: of the survey.
        trial: asks Slurm what it would do with the job, given these further options of sbatch.
        residency: where the job's data lies.
        notes: what is not known of it.
        machines: how fast they are.
    """

    sources: Sources
    trial: Callable[[tuple[str, ...]], Trial]
    residency: Residency = field(default_factory=Residency)
    notes: tuple[str, ...] = ()
    machines: Machines = field(default_factory=Machines)


@dataclass(frozen=True, slots=True)
class Made:
    """A decision, while nobody else of this user decides.

    Attributes:
        decision: it is.
        claims: to be released where nothing is submitted; None where nothing was claimed.
        unreachable: whether slurmctld did not answer in time.
    """

    decision: Decision
    claims: Claims | None = None
    unreachable: bool = False

    def release(self) -> None:
        """Take back what was claimed: nothing was submitted."""
        if self.claims is not None:
            self.claims.release()


def options_of(decision: Decision) -> tuple[str, ...]:
    """Return sbatch's options for a decision."""
    if decision.kind is Kind.NODES:
        return (f"--nodelist={','.join(decision.nodes)}",)
    if decision.kind is Kind.SWITCHES:
        return (f"--switches={decision.switches}@{time_text(decision.patience_s)}",)
    return ()


def make(ask: Ask, means: Means, *, claim: bool = True) -> Made:
    """Decide what to wish for a job. Whatever cannot be had leads to no wish, with the reason.

    Args:
        ask: what it asks.
        means: what to decide with.
        claim: whether the nodes it will probably get count as taken for the next seconds. Where not, it is also
            told on how many other nodes the same GPUs would be faster.
    """
    if ask.no_wish:
        return Made(unasked(Why.NOT_UNDERSTOOD, ask.no_wish, means.notes))
    try:
        now, site = survey(means.sources)
    except DeepLinkError as problem:
        words = f"the cluster's state is not known: {problem}"
        silent = isinstance(problem, CommandTimeoutError)
        return Made(unasked(Why.UNKNOWN, words, means.notes), unreachable=silent)
    with _claims(means.sources, claim=claim) as claims:
        around = Surroundings(now, site, means.residency, claims.taken(), means.notes, means.machines)
        weighed = decide(ask, around)
        decision = _tried(weighed, means)
        if claim and decision.expected:
            claims.add(decision.expected)
            return Made(decision, claims)
    if not claim:
        decision = replace(decision, notes=(*decision.notes, *other_shapes(ask, weighed, around)))
    return Made(decision)


@contextmanager
def _claims(sources: Sources, *, claim: bool) -> Iterator[Claims]:
    claims = Claims(sources.folder, sources.clock, sources.cluster)
    if not claim:
        yield claims
        return
    with locked(sources.folder, sources.clock):
        # Also where the lock could not be had: better to know of the others' claims than not.
        yield claims


def _tried(weighed: Weighed, means: Means) -> Decision:
    """Hold a wish for nodes by name against what Slurm would do with it, and without."""
    if weighed.decision.kind is not Kind.NODES:
        return weighed.decision
    try:
        plain = means.trial(())
        settled = without_wish(weighed, plain)
        return settled or settle(weighed, plain, means.trial(options_of(weighed.decision)))
    except DeepLinkError as problem:
        return unasked(Why.UNKNOWN, f"Slurm could not be asked about it: {problem}", weighed.decision.notes)
