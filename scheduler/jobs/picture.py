"""One job as it is shown: what Slurm says and why, what its launcher reports, who sits where; pure.

None and the empty text mean that no one who would know was heard; whoever shows them says "unknown".
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from deeplink.core import process_metrics
from deeplink.core.finding import Severity
from deeplink.core.text import printable
from deeplink.scheduler.jobs.job_folder import expanded, ranks_of
from deeplink.scheduler.jobs.measured import BYTES, SAMPLES, measured
from deeplink.scheduler.recovery.evidence import TAG
from deeplink.scheduler.recovery.records import IncidentOutcome
from deeplink.scheduler.slurm.nodeset import fold
from deeplink.scheduler.slurm.states import JobState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deeplink.core.finding import Finding
    from deeplink.scheduler.jobs.job_folder import Left
    from deeplink.scheduler.jobs.job_view import Queued
    from deeplink.scheduler.jobs.measured import Binding
    from deeplink.scheduler.placement.hint.decision import Recorded
    from deeplink.scheduler.recovery.records import AttemptRecord, Incident, NodeRecord, ProgressPoint
    from deeplink.scheduler.slurm.parse import JobRow, NodeRow

_WORDS = {
    "Priority": "jobs of higher priority are before it",
    "Resources": "no suitable nodes are free",
    "Dependency": "it waits for another job",
    "DependencyNeverSatisfied": "what it waits for can never come true: cancel it, or update --dependency",
    "BeginTime": "its start was put off (--begin, or a requeue, after which Slurm holds a job for a while)",
    "JobHeldUser": "its user holds it",
    "job requeued in held state": "it was put back into the queue and is held",
    "JobHeldAdmin": "an administrator holds it",
    "JobArrayTaskLimit": "so many tasks of its array run already as may at once",
    "ReqNodeNotAvail": "nodes it asks for are not available",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition is inactive",
    "PartitionNodeLimit": "it asks for more nodes than its partition allows",
    "PartitionTimeLimit": "it asks for more time than its partition allows",
    "PartitionConfig": "its partition does not allow what it asks for",
    "NodeDown": "a node it needs is down",
    "BadConstraints": "no node has what it asks for (--constraint)",
    "Reservation": "it waits for its reservation",
    "Licenses": "it waits for a licence",
    "NonZeroExitCode": "it ended with an exit code other than 0",
    "RaisedSignal": "a signal ended it",
    "JobLaunchFailure": "it could not be launched; its nodes' prolog may have failed",
    "TimeLimit": "its time was up",
    "InactiveLimit": "it did nothing for too long",
    "SystemFailure": "Slurm, a file system or the network failed",
    "Cleaning": "it is being cleaned up after",
    "Prolog": "its prolog runs",
    "FailedNode": "a node failed",
    "InvalidAccount": "its account is not valid",
    "InvalidQOS": "its QOS is not valid",
    "BurstBufferResources": "no burst buffer is free",
    "FrontEndDown": "no front end is available",
    "launch failed requeued held": "a launch failed, and it is held",
    "user env retrieval failed requeued held": "its user's environment could not be read, and it is held",
    "JobHoldMaxRequeue": "it was put back into the queue as often as may be, and is held",
}
_HOLDS = re.compile(r"JobH[eo]ld|requeued (in )?held")
"""In the reasons of jobs that wait until somebody releases them."""
_LIMITS = (("QOS", "a limit of its QOS"), ("Assoc", "a limit of its account"))


def in_words(reason: str) -> str:
    """Return what a reason means, the reason itself first; as it is where there are no words for it."""
    key = reason.partition(",")[0].partition("(")[0].strip()
    words = _WORDS.get(key, "")
    if not words:
        words = next((f"{limit} is reached" for start, limit in _LIMITS if key.startswith(start)), "")
    return f"{reason}: {words}" if words else reason


def release_of(job: JobRow, *, whole: bool = False) -> str:
    """Return the command that lets a held job, or its whole array, start; empty where no one holds it."""
    # Also while its last run still ends: Slurm calls it COMPLETING then, and has the reason of the hold.
    if not job.held and (job.state.final or not _HOLDS.search(job.reason)):
        return ""
    command = f"`scontrol release {job.address.whole if whole or job.address.is_component else job.address}`"
    if job.reason.startswith("JobHeldAdmin"):
        return f"held by an administrator: an operator's {command} lets it start"
    return f"held: {command} lets it start"


def in_short(finding: Finding) -> str:
    """Return what a check of a node finds wrong, in one line."""
    return f"{finding.check} ({finding.severity.action}): {finding.text}"


def help_for(name: str, row: NodeRow | None, findings: Sequence[Finding]) -> str:
    """Return the command that helps a node of which checks found something, or that we drained; else nothing."""
    if row is not None and row.reason.startswith(TAG) and (row.drained or row.down):
        return f"once it is mended: `scontrol update nodename={name} state=resume`"
    return f"`deeplink health` on {name} looks again" if findings else ""


_RATE_POINTS = 32
SAMPLES_PER_S = "samples_per_s"
COUNTED = "samples"
TOTAL_STEPS = "total_steps"
"""Metrics of the user's that mean something here: a rate, samples so far, steps of the whole training."""
FRESH_S = 15.0
"""A launcher beats once a second; after so long without a beat its word about the phase is no longer taken."""
SILENT_S = 3.0
"""An agent that its launcher has not heard for so long is called silent."""
_HAS_NODES = frozenset(
    {
        JobState.RUNNING,
        JobState.COMPLETING,
        JobState.CONFIGURING,
        JobState.SUSPENDED,
        JobState.STOPPED,
        JobState.SIGNALING,
        JobState.RESIZING,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRate:
    """Samples that rank 0 and its DataLoader workers have read so far."""

    local: int
    peer: int
    home: int = 0
    source: int
    per_s: float | None = None  # read now; None where that is not known
    bytes: int = 0
    waited_s: float | None = None  # for what was not on the node, of all workers together; None: not reported

    @property
    def total(self) -> int:
        """All of them; above 0."""
        return self.local + self.peer + self.home + self.source


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The last whole checkpoint."""

    step: int
    unix: float
    every: int | None  # steps between it and the one before; None with only one


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRate:
    """What the reports say. None: they do not."""

    step: int | None = None
    unix: float | None = None  # when the last one was made
    metric: str = "loss"  # name of the number shown: `loss`, or the first by name
    value: float | None = None  # may be no finite number
    steps_per_s: float | None = None
    samples_per_s: float | None = None
    loaded_per_s: float | None = None  # samples that rank 0 got of its DataLoaders
    reads: ReadRate | None = None
    saved: Saved | None = None
    total_steps: int | None = None
    left_s: float | None = None  # how long the rest will take at this pace

    @property
    def standing(self) -> TrainingRate:
        """The same of a job that does not go on, or of which no one knows."""
        reads = replace(self.reads, per_s=None) if self.reads else None
        return replace(self, steps_per_s=None, samples_per_s=None, loaded_per_s=None, left_s=None, reads=reads)


def pace(points: Sequence[ProgressPoint]) -> TrainingRate:
    """Return how fast a job is by its newest reports, in order of attempt and step."""
    if not points:
        return TrainingRate()
    last = points[-1]
    recent = [point for point in points[-_RATE_POINTS:] if point.attempt == last.attempt]
    steps_per_s = _rate([(point.unix, float(point.step)) for point in recent])
    counted = [(point.unix, point.metrics[COUNTED]) for point in recent if COUNTED in point.metrics]
    total = last.metrics.get(TOTAL_STEPS)
    known = total is not None and math.isfinite(total) and total >= last.step
    metric = _metric(last.metrics)
    return TrainingRate(
        step=last.step,
        unix=last.unix,
        metric=metric,
        value=last.metrics.get(metric),
        steps_per_s=steps_per_s,
        samples_per_s=last.metrics.get(SAMPLES_PER_S, _rate(counted)),
        loaded_per_s=_rate(
            [(point.unix, point.metrics.get(process_metrics.LOADED_SAMPLES, 0)) for point in recent]
        ),
        reads=_reads(recent),
        saved=_saved(last.metrics),
        total_steps=int(total) if known and total is not None else None,
        left_s=(total - last.step) / steps_per_s if known and total is not None and steps_per_s else None,
    )


def _metric(metrics: Mapping[str, float]) -> str:
    known = {COUNTED, SAMPLES_PER_S, TOTAL_STEPS}
    names = [name for name in metrics if not name.startswith(process_metrics.PREFIX) and name not in known]
    return "loss" if "loss" in names or not names else min(names)


def _rate(seen: Sequence[tuple[float, float]]) -> float | None:
    if len(seen) < 2:  # noqa: PLR2004
        return None
    seconds, amount = seen[-1][0] - seen[0][0], seen[-1][1] - seen[0][1]
    return amount / seconds if seconds > 0 and amount > 0 else None


def _reads(recent: Sequence[ProgressPoint]) -> ReadRate | None:
    found = _read(recent[-1].metrics)
    if not any(found.values()):
        return None
    return ReadRate(
        **found,
        per_s=_rate([(point.unix, float(sum(_read(point.metrics).values()))) for point in recent]),
        waited_s=recent[-1].metrics.get(process_metrics.WAITED_S),
        bytes=int(sum(recent[-1].metrics.get(name, 0) for name in BYTES.values())),
    )


def _read(metrics: Mapping[str, float]) -> dict[str, int]:
    return {place: int(metrics.get(name, 0)) for place, name in SAMPLES.items()}


def _saved(metrics: Mapping[str, float]) -> Saved | None:
    step, unix = metrics.get(process_metrics.CHECKPOINT_STEP), metrics.get(process_metrics.CHECKPOINT_UNIX)
    if step is None or unix is None:
        return None
    every = metrics.get(process_metrics.CHECKPOINT_EVERY)
    return Saved(step=int(step), unix=unix, every=int(every) if every else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobNode:
    """A node of a job."""

    node: str
    ranks: tuple[int, int] | None = None  # first and last rank on it; None where it runs none, or no one says
    spare: bool = False  # whether it rests
    trouble: str = ""  # what is wrong with it, in words; empty where nothing is known to be


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A job."""

    id: int  # its raw id; its folder's name
    label: str  # what people call it
    name: str = ""
    user: str = ""
    partition: str = ""
    state: str = ""  # Slurm's word
    reason: str = ""  # Slurm's reason, in words
    phase: str = ""  # its launcher's word, if that is fresh
    detail: str = ""  # why it is in that phase
    attempt: str = ""  # the newest one's name
    restarts: int | None = None  # by Slurm; relaunches: inside this allocation
    relaunches: int | None = None
    used_s: float | None = None
    limit_s: float | None = None
    start_unix: float | None = None
    seats: tuple[JobNode, ...] = ()  # its nodes, in rank order, those that rest last
    world_size: int | None = None
    ring: int | None = None
    ring_stock: int | None = None
    pace: TrainingRate = field(default_factory=TrainingRate)
    binds: Binding | None = None  # where its steps go; None where that was not measured
    decision: Recorded | None = None
    open_incident: Incident | None = None  # the newest without an end
    incidents: int = 0
    output: str = ""
    end: str = ""  # how it ended, in words, by its launcher
    heard_unix: float | None = None
    gone: bool = False  # Slurm does not know it any more
    local: bool = False  # it never was Slurm's (`deeplink run --local`)
    final: bool = False
    held: bool = False  # it waits until somebody releases it
    watched: bool = False  # whether it left anything that DeepLink can read
    remedies: tuple[str, ...] = ()  # commands that help it, or a node of its, as sentences
    problems: tuple[str, ...] = ()


def picture(
    job: int, queued: Queued | None, left: Left, nodes: Mapping[str, NodeRow], now: float, *, asked: bool = True
) -> Picture:
    """Put together what is known of a job."""
    word = _word(queued, left, now)
    newest, current = word.newest, word.current
    row = queued.job if queued else None
    local = queued is None and (left.last("job-started") or {}).get("backend") == "local"
    gone = queued is None and asked and not local
    over = (row is not None and row.state.final) or gone or (local and word.lost)
    known = left.record
    said = newest if newest and not word.lost else None
    label = row.label if row else known.label if known else str(job)
    rate, ranks = pace(left.points), _ranks(left, current)
    where = measured(left.points, left.rank_times, nodes=ranks)
    return Picture(
        id=job,
        label=label,
        name=(row.name if row else "") or (known.name if known else ""),
        user=(row.user if row else "") or (known.user if known else ""),
        partition=queued.partition if queued else "",
        state=row.state.value if row else "",
        reason=in_words(row.reason) if row else "",
        phase=said.phase.value if said else "",
        detail=said.detail if said else "",
        attempt=f"{label}.{newest.attempt.restart}.{newest.attempt.relaunch}" if newest else "",
        restarts=row.restarts if row else newest.attempt.restart if newest else None,
        relaunches=newest.attempt.relaunch if newest else None,
        used_s=queued.used_s if queued else None,
        limit_s=queued.limit_s if queued else None,
        start_unix=queued.start_unix if queued else None,
        seats=seats(queued, None if word.lost and over else current, left.nodes, nodes, now, ranks=ranks),
        world_size=(current.world_size or None) if current else None,
        ring=current.ring_crossings if current and current.nodes else None,
        ring_stock=current.ring_crossings_stock if current and current.nodes else None,
        pace=rate.standing if word.lost else rate,
        binds=where.binds,
        decision=left.decision,
        open_incident=next((one for one in left.incidents if one.outcome is IncidentOutcome.OPEN), None),
        incidents=len(left.incidents),
        output=printable(expanded(queued.output, queued.job) if queued else _output(left)),
        end=_end(left) if not word.older else "",
        heard_unix=newest.beat_unix if newest else None,
        gone=gone,
        local=local,
        final=over or (newest is not None and newest.phase.ended and queued is None),
        held=row is not None and bool(release_of(row)),
        watched=not left.empty,
        remedies=(
            *_freed(queued, left.decision),
            *_remedies(row, left.nodes if said and not said.phase.ended else (), nodes),
        ),
        problems=left.problems,
    )


def _freed(queued: Queued | None, decision: Recorded | None) -> tuple[str, ...]:
    """Return what frees a job that waits for the very nodes that were named for it."""
    wished = decision.decision.nodes if decision else ()
    if queued is None or queued.job.state is not JobState.PENDING or not wished:
        return ()
    if {*queued.required} != {*wished}:
        return ()
    command = f"scontrol update jobid={queued.job.label} ReqNodeList="
    return (f"it waits for the nodes that were hinted for it, {fold(wished)}: `{command}` lets it start anywhere",)


def _remedies(row: JobRow | None, seen: Sequence[NodeRecord], nodes: Mapping[str, NodeRow]) -> tuple[str, ...]:
    """Return the commands that help: for a held job, and for nodes whose own checks found something."""
    found = [release_of(row)] if row else []
    for node in seen:
        wrong = [one for one in node.health if one.severity is not Severity.UNKNOWN]
        if wrong:
            said = "; ".join([*map(in_short, wrong), help_for(node.name, nodes.get(node.name), wrong)])
            found.append(f"{node.name}: {said}")
    return tuple(filter(None, found))


@dataclass(frozen=True, slots=True)
class _Word:
    """What a launcher said last, and for how much it counts."""

    newest: AttemptRecord | None
    older: bool  # Slurm has started the job again since, and the new run's launcher has not reported yet
    lost: bool  # its word about how things go is not taken any more

    @property
    def current(self) -> AttemptRecord | None:
        """The attempt, if it is of the run that Slurm tells of."""
        return None if self.older else self.newest


def _word(queued: Queued | None, left: Left, now: float) -> _Word:
    newest = left.record.newest if left.record else None
    if newest is None:
        return _Word(None, older=False, lost=True)
    older = queued is not None and newest.attempt.restart < queued.job.restarts
    final = queued is not None and queued.job.state.final
    silent = final or now - newest.beat_unix > FRESH_S
    # Back in the queue: its run has ended, and not the job.
    waits = queued is not None and (queued.job.state is JobState.PENDING or bool(release_of(queued.job)))
    return _Word(newest, older=older, lost=older or (waits if newest.phase.ended else silent))


def _output(left: Left) -> str:
    started = left.last("job-started")
    return str(started.get("output") or "") if started else ""


def _end(left: Left) -> str:
    """Return how it ended: by its user's will, however that went for its launcher, or as that says."""
    went_on = left.last("resubmitted")
    if went_on:
        return f"submitted again as job {went_on.get('as')}"
    event, asked_to = left.last("cancelled", "ended", "attempt-started"), left.last("cancelled")
    began = left.last("attempt-started")
    if event is None or event["event"] == "attempt-started":
        return ""
    if asked_to and (began is None or asked_to["unix"] >= began["unix"]):
        return f"cancelled by {asked_to.get('by') or 'its user'}"
    because = str(event.get("because") or "")
    return f"ended with exit code {event.get('code', 'unknown')}" + (f": {because}" if because else "")


def _ranks(left: Left, newest: AttemptRecord | None) -> dict[str, range]:
    event = left.last("attempt-started")
    return ranks_of(event) if newest and event and event.get("attempt") == str(newest.attempt) else {}


def seats(
    queued: Queued | None,
    newest: AttemptRecord | None,
    seen: Sequence[NodeRecord],
    nodes: Mapping[str, NodeRow],
    now: float,
    *,
    ranks: Mapping[str, range],
) -> tuple[JobNode, ...]:
    """Return who sits where: by the launcher's word, else by Slurm's, which knows no ranks."""
    holds = queued.job.nodes if queued and queued.job.state in _HAS_NODES else ()
    by_launcher = newest is not None and bool(newest.nodes) and (queued is None or set(newest.nodes) <= {*holds})
    if newest is None or not by_launcher:
        return tuple(JobNode(node=name, trouble=_trouble(name, {}, nodes)) for name in holds)
    fresh = now - newest.beat_unix <= FRESH_S and not newest.phase.ended
    silent: dict[str, float] = {one.name: one.silent_s for one in seen if fresh and one.silent_s >= SILENT_S}
    found = [
        JobNode(
            node=name,
            ranks=(ranks[name][0], ranks[name][-1]) if name in ranks else None,
            trouble=_trouble(name, silent, nodes),
        )
        for name in newest.nodes
    ]
    found += [JobNode(node=name, spare=True, trouble=_trouble(name, silent, nodes)) for name in newest.spares]
    known = {seat.node for seat in found}
    found += [JobNode(node=name, trouble=_trouble(name, silent, nodes)) for name in holds if name not in known]
    return tuple(found)


def _trouble(name: str, silent: Mapping[str, float], nodes: Mapping[str, NodeRow]) -> str:
    said = []
    if name in silent:
        said.append(f"silent for {silent[name]:.0f} s")
    row = nodes.get(name)
    if row is not None and row.down:
        said.append("down by Slurm's word")
    elif row is not None and not row.responding:
        said.append("not answering Slurm")
    if row is not None and row.drained:
        said.append("draining" + (f" ({row.reason})" if row.reason else ""))
    return ", ".join(said)
