"""Merges two reports of one incident, within bounds. Pure."""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from deeplink.scheduler.recovery.records import (
    BEGAN,
    KNOWN_LATER,
    LONGEST_STACK,
    NODE_LOST,
    OF_THE_APPLICATION,
    RANKS_ENDED,
    Action,
    Incident,
    IncidentKind,
    IncidentOutcome,
    Moment,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from deeplink.scheduler.recovery.records import Incident, RankStack

LONGEST_EVIDENCE = 2_048
MOST_MOMENTS = 128
LONGEST_MOMENT = 512
MOST_STACKS = 4_096
MOST_STACK_CHARACTERS = 1 << 20  # bounds on what is kept of one incident

_WEIGHTS: dict[str, int] = {Action.NONE: 0, Action.COMMENT: 1, Action.DRAIN: 1, Action.DRAIN_DOWN: 3}


def merged(old: Incident, new: Incident) -> Incident:
    """Return what two records of one incident say together."""
    # An end is never taken back, nor an action or a time: a late or repeated record changes nothing that is known.
    ended = old if old.outcome is not IncidentOutcome.OPEN else new
    return dataclasses.replace(
        new,
        id=old.id,
        number=old.number or new.number,
        attempt=old.attempt or new.attempt,
        # Of a switch no node is to blame, whichever of its nodes somebody reports.
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
    return old in RANKS_ENDED | {IncidentKind.LAUNCHER_LOST} and new in NODE_LOST


def united(*timelines: Iterable[Moment]) -> tuple[Moment, ...]:
    """Return the moments of all timelines in order, none twice; beyond MOST_MOMENTS the middle is left out.

    >>> [moment.what for moment in united([Moment(2.0, "b"), Moment(1.0, "a")], [Moment(2.0, "b")])]
    ['a', 'b']
    """
    cut = {
        moment if len(moment.what) <= LONGEST_MOMENT else Moment(moment.unix, moment.what[:LONGEST_MOMENT])
        for timeline in timelines
        for moment in timeline
    }
    first = min([moment.unix for moment in cut if moment.what == BEGAN], default=0.0)
    listed = sorted([moment for moment in cut if moment.what != BEGAN or moment.unix == first])
    kept = MOST_MOMENTS // 2
    return tuple(listed if len(listed) <= MOST_MOMENTS else [*listed[:kept], *listed[-kept:]])


def within_bounds(stacks: Iterable[RankStack]) -> tuple[RankStack, ...]:
    """Return what is kept of the stacks of one incident: MOST_STACKS ranks; too long a text loses its end."""
    # Together they have at most MOST_STACK_CHARACTERS: where that is too little, the longest lose most.
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


# One fault under two ids: of several jobs, or of an attempt and the next one. Pure.


SLACK_S = 5.0  # two clocks, and two who count a silence from another moment
LONGEST_S = 3_600.0  # an incident without an end takes nothing up that begins so long after it


def is_another(old: Incident, new: Incident) -> bool:
    """Whether what is told under an id began after what is known under it had ended."""
    if old.outcome is IncidentOutcome.OPEN or new.outcome is not IncidentOutcome.OPEN:
        return False
    # A launcher that fails ends its incident, and its job may be held for it; hours later it is another job.
    after_s = 0.0 if old.outcome is IncidentOutcome.RECOVERED else LONGEST_S
    return new.began_unix > _end(old) + after_s


def is_same(old: Incident, new: Incident, *, shares_node: bool) -> bool:
    """Whether `new`, told under another id, is the fault that `old` is: one node's loss, or one job's at once."""
    if old.kind == new.kind == IncidentKind.STORAGE_FROZEN:
        return are_together(old, new)
    if new.kind not in NODE_LOST or new.node is None:
        return False
    at_once = abs(new.began_unix - old.began_unix) <= SLACK_S
    if shares_node and old.kind in NODE_LOST | {IncidentKind.SWITCH_SUSPECT}:
        return are_together(old, new)
    # Nodes that a job loses at once have one reason: a supply, a cable. A rank fails of its node's loss.
    return at_once and _same_job(old, new) and (old.kind in NODE_LOST or (shares_node and old.kind in RANKS_ENDED))


def _same_job(old: Incident, new: Incident) -> bool:
    return old.attempt is not None and new.attempt is not None and old.attempt.job == new.attempt.job


def are_together(old: Incident, new: Incident) -> bool:
    """Whether both were at one time. While its job has not trained again, a job's loss of a node goes on."""
    ours = _same_job(old, new) and old.outcome is not IncidentOutcome.RECOVERED
    return new.began_unix <= _end(old, lasts=ours) + SLACK_S and old.began_unix <= _end(new) + SLACK_S


def _end(incident: Incident, *, lasts: bool = False) -> float:
    # Of a node that came back its next loss, to another job, is another one.
    if lasts or (incident.outcome is IncidentOutcome.OPEN and incident.kind not in KNOWN_LATER):
        return incident.began_unix + LONGEST_S
    seen = (moment.unix for moment in incident.timeline)
    return incident.recovered_unix or max(incident.detected_unix, *seen, incident.began_unix)


# An incident's timeline, computed from its record. Pure.


def with_timeline(whole: Incident, old: Incident | None, new: Incident) -> Incident:
    """Return `whole`, which is on record from now on, with the moments that `new` brings into its timeline."""
    moments = [Moment(whole.began_unix, BEGAN)] if whole.began_unix else []
    seen = f"detected: {new.kind}: {new.evidence}".rstrip(": ")[:LONGEST_MOMENT]
    again = (
        old is not None and new.detected_unix == old.detected_unix
    )  # told once more, with all that is known now
    if new.detected_unix and not again and not any(moment.what == seen for moment in whole.timeline):
        moments.append(Moment(new.detected_unix, seen))
    # What the watchdog did has an end in words, at the same instant.
    if new.acted_unix and not any(moment.unix == new.acted_unix for moment in whole.timeline):
        moments.append(Moment(new.acted_unix, f"done: {new.action}"))
    if old is None or old.outcome is not whole.outcome:
        moments += _end_step(whole)
    return replace(whole, timeline=united(whole.timeline, moments))


def _end_step(whole: Incident) -> list[Moment]:
    if whole.outcome is not IncidentOutcome.RECOVERED or not whole.recovered_unix:
        return []
    if whole.attempt is None:
        return [Moment(whole.recovered_unix, "over")]
    again = whole.steps_repeated
    steps = f", {again} step{'s' * (again != 1)} done again" if again else ""
    return [Moment(whole.recovered_unix, f"training again{steps}")]


def step_seconds(points: Sequence[tuple[int, float]]) -> float:
    """Return the usual seconds of one step, from (step, Unix time) in order of steps; 0 where that is not known.

    The median: a checkpoint or an evaluation in between does not count.

    >>> step_seconds([(0, 10.0), (1, 10.5), (2, 11.0), (4, 12.0), (5, 40.0)])
    0.5
    """
    each = [
        (later[1] - earlier[1]) / (later[0] - earlier[0]) for earlier, later in pairwise(points) if later > earlier
    ]
    return max(0.0, statistics.median(each)) if each else 0.0
