"""An incident's timeline, computed from its record. Pure."""

from __future__ import annotations

import statistics
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from deeplink.scheduler.watch.incident_merging import LONGEST_MOMENT, united
from deeplink.scheduler.watch.records import BEGAN, Incident, IncidentOutcome, Moment

if TYPE_CHECKING:
    from collections.abc import Sequence


def with_timeline(whole: Incident, old: Incident | None, new: Incident) -> Incident:
    """Return `whole`, which is on record from now on, with the moments that `new` brings into its timeline.

    Args:
        whole: what was known, and `new`, together.
        old: what was known; None for a new incident.
        new: what was just told.
    """
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
        moments += _end(whole)
    return replace(whole, timeline=united(whole.timeline, moments))


def _end(whole: Incident) -> list[Moment]:
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
