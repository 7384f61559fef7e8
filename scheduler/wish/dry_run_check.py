"""Compares a hint of nodes by name with Slurm's own choice (`sbatch --test-only`); pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from deeplink.errors import DeepLinkError
from deeplink.scheduler.wish.decide import gains, unasked
from deeplink.scheduler.wish.decision import HintKind, Why

if TYPE_CHECKING:
    from collections.abc import Callable

    from deeplink.scheduler.wish.decide import Weighed
    from deeplink.scheduler.wish.decision import Decision
    from deeplink.types import NodeName

LATER_S = 2.0
"""Start times are told in whole seconds, and the two trials are not made in the same one."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What Slurm says it would do with a job.

    Attributes:
        start: when it would start it, as it says it; empty where it would not.
        start_s: the same in seconds of the local clock.
        nodes: where.
        refused: why it would not, in Slurm's words.
    """

    start: str = ""
    start_s: float = 0.0
    nodes: tuple[NodeName, ...] = ()
    refused: str = ""


# A text: compiled when it is needed.
# Only the words that are needed: 26.05 says `to start at TIME a using`.
_START = r"\bto start at ((\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d))\b.*? on nodes (\S+)"


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
    """Return the decision where Slurm's own choice settles it; None where the wish must be tried, too."""
    decision = weighed.decision
    if not plain.start:
        return unasked(Why.IMPOSSIBLE, f"Slurm would not take it: {plain.refused}", decision.notes)
    theirs = weighed.option(plain.nodes)
    if theirs is None:
        words = f"Slurm's own choice cannot be weighed: {_briefly(plain.nodes)}"
        return replace(
            decision, kind=HintKind.NOTHING, why=Why.UNKNOWN, words=words, nodes=(), expected=plain.nodes
        )
    if gains(decision.candidates[0], theirs):
        return None
    return replace(
        decision,
        kind=HintKind.NOTHING,
        why=Why.AS_GOOD,
        words=f"Slurm's own choice is as good: {_briefly(plain.nodes)}",
        nodes=(),
        expected=plain.nodes,
        own=theirs,
    )


def settle(weighed: Weighed, plain: Trial, wished: Trial) -> Decision:
    """Return the decision, once Slurm has told when the job would start with the wish, and when without."""
    theirs = weighed.option(plain.nodes)
    decision = replace(weighed.decision, own=theirs)
    if wished.start and wished.start_s - plain.start_s <= LATER_S:
        beside = f"; Slurm's own choice, {_briefly(plain.nodes)}: {theirs.price}" if theirs else ""
        return replace(decision, words=decision.words + beside)
    when = f"{wished.start}, not {plain.start}" if wished.start else wished.refused
    return replace(
        decision,
        kind=HintKind.NOTHING,
        why=Why.LATER_WITH_IT,
        words=f"with {_briefly(decision.nodes)} it would start later ({when})",
        nodes=(),
        expected=plain.nodes,
    )


def tried(
    weighed: Weighed,
    trial: Callable[[tuple[str, ...]], Trial],
    stands: Callable[[Weighed], Weighed],
) -> Decision:
    """Hold a wish for nodes by name against what Slurm would do without it, and with it.

    The one test of gain, of a submission and of whoever looks after a job that waits.

    Args:
        weighed: the wish.
        trial: asks Slurm what it would do with the job, given these further options of sbatch.
        stands: asked where there is something to gain: returns the wish, another one, or why there is none.
    """
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
