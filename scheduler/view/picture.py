"""One job as it is shown: what Slurm says, what its launcher reports, who sits where; pure.

None and the empty text mean that nobody who would know was heard; whoever shows them says "unknown".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deeplink.scheduler.slurm.nodeset import fold
from deeplink.scheduler.slurm.states import JobState
from deeplink.scheduler.view.folder import ranks_of
from deeplink.scheduler.view.output import expanded
from deeplink.scheduler.view.rates import TrainingRate, pace
from deeplink.scheduler.view.reasons import help_for, in_short, in_words, release_of
from deeplink.scheduler.watch.records import HealthSeverity, IncidentOutcome
from deeplink.text import printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deeplink.scheduler.slurm.parse import JobRow, NodeRow
    from deeplink.scheduler.view.folder import Left
    from deeplink.scheduler.view.queue import Queued
    from deeplink.scheduler.watch.records import AttemptRecord, Incident, NodeRecord
    from deeplink.scheduler.wish.decision import Recorded

FRESH_S = 15.0
"""A launcher beats once a second; after so long without a beat its word about the phase is no longer taken."""
SILENT_S = 3.0
"""An agent that its launcher has not heard for so long is called silent."""
_HOLDS = frozenset(
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
class JobNode:
    """A node of a job.

    Attributes:
        ranks: first and last rank on it; None where it runs none, or nobody says.
        spare: whether it rests.
        trouble: what is wrong with it, in words; empty where nothing is known to be.
    """

    node: str
    ranks: tuple[int, int] | None = None
    spare: bool = False
    trouble: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A job.

    Attributes:
        id: its raw id; its folder's name.
        label: what people call it.
        state: Slurm's word.
        reason: Slurm's reason, in words.
        phase: its launcher's word, if that is fresh.
        detail: why it is in that phase.
        attempt: the newest one's name.
        restarts: by Slurm; relaunches: inside this allocation.
        seats: its nodes, in rank order, those that rest last.
        end: how it ended, in words, by its launcher.
        open_incident: the newest without an end.
        remedies: commands that help it, or a node of its, as sentences.
        gone: Slurm does not know it any more.
        held: it waits until somebody releases it.
        local: it never was Slurm's (`deeplink run --local`).
        watched: whether it left anything that DeepLink can read.
    """

    id: int
    label: str
    name: str = ""
    user: str = ""
    partition: str = ""
    state: str = ""
    reason: str = ""
    phase: str = ""
    detail: str = ""
    attempt: str = ""
    restarts: int | None = None
    relaunches: int | None = None
    used_s: float | None = None
    limit_s: float | None = None
    start_unix: float | None = None
    seats: tuple[JobNode, ...] = ()
    world_size: int | None = None
    ring: int | None = None
    ring_stock: int | None = None
    pace: TrainingRate = field(default_factory=TrainingRate)
    decision: Recorded | None = None
    open_incident: Incident | None = None
    incidents: int = 0
    output: str = ""
    end: str = ""
    heard_unix: float | None = None
    gone: bool = False
    local: bool = False
    final: bool = False
    held: bool = False
    watched: bool = False
    remedies: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def picture(
    job: int, queued: Queued | None, left: Left, nodes: Mapping[str, NodeRow], now: float, *, asked: bool = True
) -> Picture:
    """Put together what is known of a job.

    Args:
        job: its raw id.
        queued: it as Slurm tells it; None where Slurm does not.
        left: what is in its folder.
        nodes: the cluster's nodes, by name; empty where unknown.
        now: seconds since 1970.
        asked: whether Slurm answered: if not, a job without `queued` is not gone, only unknown.
    """
    word = _word(queued, left, now)
    newest, current = word.newest, word.current
    row = queued.job if queued else None
    local = queued is None and (left.last("job-started") or {}).get("backend") == "local"
    gone = queued is None and asked and not local
    over = (row is not None and row.state.final) or gone or (local and word.lost)
    known = left.record
    said = newest if newest and not word.lost else None
    label = row.label if row else known.label if known else str(job)
    measured = pace(left.points)
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
        seats=seats(
            queued, None if word.lost and over else current, left.nodes, nodes, now, ranks=_ranks(left, current)
        ),
        world_size=(current.world_size or None) if current else None,
        ring=current.ring_crossings if current and current.nodes else None,
        ring_stock=current.ring_crossings_stock if current and current.nodes else None,
        pace=measured.standing if word.lost else measured,
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
    """Return what frees a job that waits for the very nodes that were wished for it."""
    wished = decision.decision.nodes if decision else ()
    if queued is None or queued.job.state is not JobState.PENDING or not wished:
        return ()
    if {*queued.required} != {*wished}:
        return ()
    command = f"scontrol update jobid={queued.job.label} ReqNodeList="
    return (f"it waits for the nodes that were wished for it, {fold(wished)}: `{command}` lets it start anywhere",)


def _remedies(row: JobRow | None, seen: Sequence[NodeRecord], nodes: Mapping[str, NodeRow]) -> tuple[str, ...]:
    """Return the commands that help: for a held job, and for nodes whose own checks found something."""
    found = [release_of(row)] if row else []
    for node in seen:
        wrong = [one for one in node.health if one.severity is not HealthSeverity.UNKNOWN]
        if wrong:
            said = "; ".join([*map(in_short, wrong), help_for(node.name, nodes.get(node.name), wrong)])
            found.append(f"{node.name}: {said}")
    return tuple(filter(None, found))


@dataclass(frozen=True, slots=True)
class _Word:
    """What a launcher said last, and for how much it counts.

    Attributes:
        older: Slurm has started the job again since, and the new run's launcher has not reported yet.
        lost: its word about how things go is not taken any more.
    """

    newest: AttemptRecord | None
    older: bool
    lost: bool

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
    waits = queued is not None and (queued.job.state is JobState.PENDING or queued.job.held)
    return _Word(newest, older=older, lost=older or (waits if newest.phase.ended else silent))


def _output(left: Left) -> str:
    started = left.last("job-started")
    return str(started.get("output") or "") if started else ""


def _end(left: Left) -> str:
    """Return how it ended: by its user's will, however that went for its launcher, or as that says."""
    went_on = left.last("resubmitted")
    if went_on:
        return f"submitted anew as job {went_on.get('as')}"
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
    holds = queued.job.nodes if queued and queued.job.state in _HOLDS else ()
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
