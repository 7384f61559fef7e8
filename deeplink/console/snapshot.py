"""Everything the page shows at one moment, as one frozen value made from what the sources said; pure."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from deeplink.console.collect import FactSource, SourceState
from deeplink.console.jobs import MOST_JOBS, CurveView, Drawn, JobView, job_views, seats
from deeplink.console.nodes import NodeView, ShownHealth, SwitchView, node_views, switch_views
from deeplink.core.text import counted
from deeplink.scheduler.journal.incident_json import cost
from deeplink.scheduler.liveness.heartbeats import KEEP_S
from deeplink.scheduler.recovery.records import Incident, IncidentOutcome
from deeplink.scheduler.slurm.states import JobState

if TYPE_CHECKING:
    from deeplink.console.collect import Readings
    from deeplink.console.feed import Document


MOST_FINDINGS = 2  # nodes whose findings stand in the page's first line
HEARD_S = 3 * KEEP_S  # so long after the last report on record, the watchdog hears no sender
STANDING_S = 86_400.0  # a standing agent that was last heard longer ago was removed


class Mood(Enum):
    """Gravity of the page's first line."""

    GOOD = "good"
    WARN = "warn"
    BAD = "bad"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Headline:
    """The page in one line."""

    mood: Mood
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleSnapshot:
    """Contents of the page. `jobs_known` counts also the jobs that are too many to be shown."""

    unix: float
    interval_s: float
    cluster: str
    headline: Headline
    sources: tuple[FactSource, ...]
    switches: tuple[SwitchView, ...]
    nodes: tuple[NodeView, ...]
    jobs: tuple[JobView, ...]
    jobs_known: int
    curves: tuple[tuple[int, CurveView], ...]
    incidents: tuple[Incident, ...]

    def document(self) -> Document:
        """Return the snapshot as JSON has it: tables keyed by name or id, so that changes can be named."""
        return {
            "schema": 1,
            "unix": self.unix,
            "interval_s": self.interval_s,
            "cluster": self.cluster,
            "jobs_known": self.jobs_known,
            "headline": _plain(self.headline),
            "sources": {each.name: {**_plain(each), "order": order} for order, each in enumerate(self.sources)},
            "switches": {each.name: _plain(each) for each in self.switches},
            "nodes": {each.name: _plain(each) for each in self.nodes},
            "jobs": {str(each.id): _plain(each) for each in self.jobs},
            "curves": {
                str(job): {"metric": curve.metric, "points": [list(point) for point in curve.points]}
                for job, curve in self.curves
            },
            "incidents": {each.id: _incident(each) for each in self.incidents},
        }


def build(readings: Readings) -> ConsoleSnapshot:
    """Return what the page shows for these readings."""
    drawn = job_views(readings)
    switches = switch_views(readings)
    nodes = node_views(readings, seats(drawn), switches)
    return ConsoleSnapshot(
        unix=round(readings.unix, 3),
        interval_s=readings.interval_s,
        cluster=readings.slurm.cluster,
        headline=headline(readings, nodes, drawn),
        sources=readings.sources,
        switches=switches,
        nodes=nodes,
        jobs=tuple(made.view for made in drawn[:MOST_JOBS]),
        jobs_known=len(drawn),
        curves=tuple((made.view.id, made.curve) for made in drawn[:MOST_JOBS] if made.curve is not None),
        incidents=readings.journal.incidents,
    )


def headline(readings: Readings, nodes: tuple[NodeView, ...], drawn: tuple[Drawn, ...]) -> Headline:
    """Say the most important things first: jobs in trouble, sources that fail, nodes that are not well."""
    jobs = [made.view for made in drawn]
    running = sum(job.phase == "running" or (not job.phase and job.slurm_state == "RUNNING") for job in jobs)
    says: list[tuple[Mood, str]] = []
    says += [(Mood.BAD, f"job {job.label} is stranded") for job in jobs if job.phase == "stranded"]
    says += [(Mood.WARN, f"job {job.label} is recovering") for job in jobs if job.phase == "recovering"]
    says += [(Mood.WARN, f"job {job.label} is held") for job in jobs if job.remedy and job.watched]
    says += _failing(readings)
    says += _unwell(nodes)
    found = [node for node in nodes if node.unfit]
    says += [(Mood.WARN, f"{node.name}: {node.findings[0]}") for node in found[:MOST_FINDINGS]]
    if len(found) > MOST_FINDINGS:
        says.append((Mood.WARN, f"findings on {len(found) - MOST_FINDINGS} more nodes"))
    says += _unheard(readings)
    opened = sum(each.outcome is IncidentOutcome.OPEN for each in readings.journal.incidents)
    if opened:
        says.append((Mood.WARN, f"{opened} incident{'s' * (opened > 1)} open"))
    if not says and not nodes and not jobs:
        return Headline(Mood.UNKNOWN, "Nothing known yet")
    mood = next((worst for worst in (Mood.BAD, Mood.WARN) if any(worst is each for each, _ in says)), Mood.GOOD)
    work = f"{running} job{'s' * (running != 1)} running"
    if not says:
        says.append((Mood.GOOD, f"all {len(nodes)} nodes well" if nodes else "no nodes known"))
    text = " · ".join([*dict.fromkeys(text for _, text in says), work])
    return Headline(mood, text[0].upper() + text[1:])


def _failing(readings: Readings) -> list[tuple[Mood, str]]:
    says = []
    failing = [each for each in readings.sources if each.state is SourceState.FAILING]
    names = {each.name for each in failing}
    # Slurm is one thing that is asked several questions: one line for it is enough.
    if names & {"nodes", "jobs"}:
        knew = any(each.at_unix for each in failing if each.name in {"nodes", "jobs"})
        says.append((Mood.BAD, "Slurm stopped answering") if knew else (Mood.WARN, "Slurm does not answer"))
    elif "switches" in names:
        says.append((Mood.WARN, "Slurm's switch tree cannot be read"))
    if "journal" in names:
        says.append((Mood.BAD, "the watchdog's journal cannot be read"))
    return says


def _unheard(readings: Readings) -> list[tuple[Mood, str]]:
    """Say that the watchdog hears no caller, though one should call: a standing agent of late, a job on record."""
    journal = readings.journal
    standing = any(not node.job and readings.unix - node.seen_unix <= STANDING_S for node in journal.nodes)
    running = {int(row.id) for row in readings.slurm.jobs if row.state is JobState.RUNNING}
    runs = any(job.job in running and not job.newest.phase.ended for job in journal.jobs)
    is_read = any(each.name == "journal" and each.state is SourceState.OK for each in readings.sources)
    if not is_read or not (standing or runs):
        return []
    beats = [job.newest.beat_unix for job in journal.jobs]
    heard = max([*(node.seen_unix for node in journal.nodes), *beats], default=0.0)
    if readings.unix - heard <= HEARD_S:
        return []
    since = f" for {counted(round((readings.unix - heard) / 60), 'minute')}" if heard else ""
    return [(Mood.WARN, f"the watchdog has heard no agent and no launcher{since}")]


def _unwell(nodes: tuple[NodeView, ...]) -> list[tuple[Mood, str]]:
    tally = Counter(node.health for node in nodes)
    words = {
        ShownHealth.DOWN: (Mood.BAD, "down"),
        ShownHealth.SILENT: (Mood.BAD, "not answering"),
        ShownHealth.DRAINING: (Mood.WARN, "draining"),
        ShownHealth.DRAINED: (Mood.WARN, "drained"),
        ShownHealth.UNKNOWN: (Mood.WARN, "in an unknown state"),
    }
    return [
        (mood, f"{tally[health]} node{'s' * (tally[health] > 1)} {word}")
        for health, (mood, word) in words.items()
        if tally[health]
    ]


def _incident(each: Incident) -> dict[str, Any]:
    plain = _plain(dataclasses.replace(each, timeline=(), stacks=()))
    attempt = each.attempt
    # Its timeline and its stacks are asked for when somebody opens it, and again when there are more moments.
    del plain["timeline"], plain["stacks"]
    return {
        **plain,
        "attempt": each.attempt_name,
        "job_label": each.job,
        "job": attempt.job if attempt else None,
        "moments": len(each.timeline),
        "rank_hours": cost(each).total_h,
    }


def _plain(value: Any) -> dict[str, Any]:
    return {field.name: _json(getattr(value, field.name)) for field in dataclasses.fields(value)}


def _json(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [_json(each) for each in value]
    if dataclasses.is_dataclass(value):
        return _plain(value)
    return value
