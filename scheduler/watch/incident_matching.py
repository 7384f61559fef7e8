"""Matches a report to an incident on record: one fault is one incident. Pure.

Launcher and watchdog look with different eyes, at different moments, each at its own attempt; two jobs may have
the node; and of a switch the launchers see only the nodes. Told apart is by node or job, and by time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.scheduler.watch.records import (
    KNOWN_LATER,
    NODE_LOST,
    OF_THE_APPLICATION,
    RANKS_ENDED,
    IncidentKind,
    IncidentOutcome,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    from deeplink.scheduler.watch.records import Incident
    from deeplink.types import NodeName

SLACK_S = 5.0
"""Two clocks, and two who count a silence from another moment."""
LONGEST_S = 3_600.0
"""An incident without an end takes nothing up that begins so long after it."""
RANKS_FIRST_S = 10.0
"""A rank fails of its node's loss so long, at most, before the node is told to be lost."""
_OF_SLURM = frozenset({IncidentKind.PREEMPTED, IncidentKind.TIME_LIMIT})
_CONSEQUENCES = frozenset({IncidentKind.JOB_STRANDED, IncidentKind.LAUNCHER_LOST})
"""Kinds that, where no node is named, are what became of a loss that is on record."""


def is_same(old: Incident, new: Incident, below: Collection[NodeName] = ()) -> bool:
    """Whether `new`, told under another id, tells of the fault that `old` is.

    Args:
        old: on record.
        new: told just now.
        below: the nodes that `old`, about a switch, stands for.
    """
    if old.attempt is not None and old.attempt == new.attempt and _same_of_attempt(old, new):
        return True
    if old.kind == new.kind == IncidentKind.STORAGE_FROZEN:
        return _together(old, new)
    if new.kind in _CONSEQUENCES and new.node is None:
        loss = old.kind in NODE_LOST or old.kind == IncidentKind.SWITCH_SUSPECT
        return loss and _same_job(old, new) and _lasts(old) and _together(old, new)
    return new.kind in NODE_LOST and new.node is not None and _same_loss(old, new, below)


def _same_loss(old: Incident, new: Incident, below: Collection[NodeName]) -> bool:
    if old.kind == IncidentKind.SWITCH_SUSPECT:
        return new.node in below and _together(old, new)
    if old.node != new.node:
        return False
    if old.kind in RANKS_ENDED:
        soon = abs(new.began_unix - old.detected_unix) <= RANKS_FIRST_S
        return _same_job(old, new) and _lasts(old) and soon
    return old.kind in NODE_LOST and _together(old, new)


def is_part(old: Incident, new: Incident, below: Collection[NodeName]) -> bool:
    """Whether `old`, the loss of a node, is part of `new`, which blames the switch of these nodes."""
    return old.kind in NODE_LOST and old.node in below and _together(old, new)


def _same_of_attempt(old: Incident, new: Incident) -> bool:
    if {old.kind, new.kind} <= NODE_LOST:
        return old.node is not None and old.node == new.node
    if {old.kind, new.kind} <= OF_THE_APPLICATION and IncidentKind.APPLICATION_FAILED in {old.kind, new.kind}:
        return True  # whoever counts its starts says what its ranks' failure was
    return old.kind == new.kind and old.kind in OF_THE_APPLICATION | _OF_SLURM and None in {old.node, new.node}


def _same_job(old: Incident, new: Incident) -> bool:
    return old.attempt is not None and new.attempt is not None and old.attempt.job == new.attempt.job


def _lasts(incident: Incident) -> bool:
    """Whether its job has not trained since: one that failed may yet go on."""
    return incident.outcome is not IncidentOutcome.RECOVERED


def _together(old: Incident, new: Incident) -> bool:
    """Whether both were at one time. While its job has not trained again, a job's loss of a node goes on."""
    ours = _same_job(old, new) and _lasts(old)
    return new.began_unix <= _end(old, lasts=ours) + SLACK_S and old.began_unix <= _end(new) + SLACK_S


def _end(incident: Incident, *, lasts: bool = False) -> float:
    # Of a node that came back its next loss, to another job, is another one.
    if lasts or (incident.outcome is IncidentOutcome.OPEN and incident.kind not in KNOWN_LATER):
        return incident.began_unix + LONGEST_S
    seen = (moment.unix for moment in incident.timeline)
    return incident.recovered_unix or max(incident.detected_unix, *seen, incident.began_unix)
