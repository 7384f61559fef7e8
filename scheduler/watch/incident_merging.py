"""Merges two reports of one incident, within bounds. Pure."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from deeplink.scheduler.watch.records import (
    BEGAN,
    KNOWN_LATER,
    NODE_LOST,
    OF_THE_APPLICATION,
    RANKS_ENDED,
    Action,
    IncidentKind,
    IncidentOutcome,
    Moment,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deeplink.scheduler.watch.records import Incident, RankStack

LONGEST_EVIDENCE = 2_048
MOST_MOMENTS = 128
LONGEST_MOMENT = 512
LONGEST_STACK = 64 << 10
MOST_STACKS = 4_096
MOST_STACK_CHARACTERS = 1 << 20
"""Bounds on what is kept of one incident."""

_WEIGHTS: dict[str, int] = {Action.NONE: 0, Action.COMMENT: 1, Action.DRAIN: 1, Action.DRAIN_DOWN: 3}


def merged(old: Incident, new: Incident) -> Incident:
    """Return what two records of one incident say together.

    An end is never taken back, nor an action or a time: a late or repeated record changes nothing that is known.
    """
    ended = old if old.outcome is not IncidentOutcome.OPEN else new
    return dataclasses.replace(
        new,
        id=old.id,
        number=old.number or new.number,
        attempt=old.attempt or new.attempt,
        # Of a switch no node is to blame, whichever of its nodes somebody tells of.
        node=old.node if old.kind == IncidentKind.SWITCH_SUSPECT else old.node or new.node,
        kind=new.kind if _tells_more(old.kind, new.kind) else old.kind,
        action=max(old.action, new.action, key=_weight),
        evidence=_joined(old.evidence, new.evidence),
        began_unix=_earlier(old.began_unix, new.began_unix),
        detected_unix=_earlier(old.detected_unix, new.detected_unix),
        acted_unix=old.acted_unix or new.acted_unix,
        recovered_unix=old.recovered_unix or new.recovered_unix,
        outcome=ended.outcome,
        steps_repeated=max(old.steps_repeated, new.steps_repeated),
        timeline=united(old.timeline, new.timeline),
        ranks=old.ranks or new.ranks,
        step_s=old.step_s or new.step_s,
        stacks=new.stacks or old.stacks,
    )


def _tells_more(old: str, new: str) -> bool:
    """Whether what was called `old` turns out to be `new`."""
    if old in NODE_LOST:
        return new in KNOWN_LATER
    if new == IncidentKind.APPLICATION_FAILED:
        return old in OF_THE_APPLICATION
    return old in RANKS_ENDED and new in NODE_LOST


def united(*timelines: Iterable[Moment]) -> tuple[Moment, ...]:
    """Return the moments of all timelines in order, none twice; beyond MOST_MOMENTS the middle is left out.

    >>> [moment.what for moment in united([Moment(2.0, "b"), Moment(1.0, "a")], [Moment(2.0, "b")])]
    ['a', 'b']
    """
    cut = {Moment(moment.unix, moment.what[:LONGEST_MOMENT]) for timeline in timelines for moment in timeline}
    first = min((moment.unix for moment in cut if moment.what == BEGAN), default=0.0)
    listed = sorted(moment for moment in cut if moment.what != BEGAN or moment.unix == first)
    kept = MOST_MOMENTS // 2
    return tuple(listed if len(listed) <= MOST_MOMENTS else [*listed[:kept], *listed[-kept:]])


def within_bounds(stacks: Iterable[RankStack]) -> tuple[RankStack, ...]:
    """Return what is kept of the stacks of one incident: MOST_STACKS ranks; too long a text loses its end.

    Together they have at most MOST_STACK_CHARACTERS: where that is too little, the longest lose most.
    """
    ranks = sorted(stacks, key=lambda stack: stack.rank)[:MOST_STACKS]
    longest = _share(sorted(len(text) for stack in ranks for text in (stack.text, stack.flight)))
    return tuple(
        dataclasses.replace(
            stack,
            state=stack.state[:LONGEST_MOMENT],
            source=stack.source[:LONGEST_MOMENT],
            text=stack.text[:longest],
            # Half of a JSON document is none.
            flight=stack.flight if len(stack.flight) <= longest else "",
        )
        for stack in ranks
    )


def _share(lengths: list[int]) -> int:
    """The length to which each is cut (shortest first), so that all have room."""
    left = MOST_STACK_CHARACTERS
    for place, length in enumerate(lengths):
        share = left // (len(lengths) - place)
        if length > share:
            return min(share, LONGEST_STACK)
        left -= length
    return LONGEST_STACK


def _weight(action: str) -> int:
    """The rung that brought the job back tells more than what was done to the node beside it."""
    return _WEIGHTS.get(action, 2)


def _earlier(old: float, new: float) -> float:
    return min(old, new) if old and new else old or new


def _joined(old: str, new: str) -> str:
    if new in old:
        return old
    return new if old in new else f"{old}; {new}"[:LONGEST_EVIDENCE]
