"""Heartbeats of launchers and agents: as messages, and the newest of each, with the time of receipt.

What cannot be kept is refused as it is read. The table is filled by the watchdog's server, and read by its loop.
"""

from __future__ import annotations

import math
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from deeplink.core.codec import from_message, to_message
from deeplink.core.finding import Finding, Severity
from deeplink.scheduler.recovery.incident_merging import MOST_MOMENTS, MOST_STACKS, united, within_bounds
from deeplink.scheduler.recovery.records import Beat, Incident, NodeRecord, Phase, RecordError
from deeplink.v1 import common_pb2, watch_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from deeplink.core.types import NodeName
    from deeplink.scheduler.recovery.evidence import WatchPolicy
    from deeplink.scheduler.recovery.records import AttemptRecord, JobRecord

MOST_JOBS = 10_000
MOST_NODES = 16_384
KEEP_S = 30.0  # what a standing agent says again and again is written down no more often than this
ALARM_S = 0.6  # an agent silent for so long is reason to look at once
# Bounds on what one heartbeat may hold; a launcher with more sends it in several.
MOST_POINTS = 4_096
MOST_INCIDENTS = 1_024
MOST_METRICS = 96
MOST_RANK_TIMES, MOST_RANK_NUMBERS = 64, 4_096
MOST_FINDINGS = 256


# Messages.


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    try:
        yield
    except ValueError as problem:
        raise RecordError(what, str(problem)) from None


def _bounded(what: str, counts: dict[str, tuple[int, int]]) -> None:
    for things, (count, most) in counts.items():
        if count > most:
            raise RecordError(what, f"{count} {things}, at most {most} are kept")


def _trimmed(incident: Incident) -> Incident:
    return replace(incident, timeline=united(incident.timeline), stacks=within_bounds(incident.stacks))


def incident_from_wire(message: watch_pb2.IncidentRecord) -> Incident:
    """Return an incident as a launcher told it."""
    what = f"incident {message.id!r}"
    moments, stacks = len(message.timeline), len(message.stacks)
    _bounded(what, {"moments": (moments, MOST_MOMENTS), "stacks": (stacks, MOST_STACKS)})
    with _refusing(what):
        return _trimmed(from_message(Incident, message))


def finding_to_wire(finding: Finding) -> common_pb2.Finding:
    """Return the message for what a health check found."""
    return to_message(finding, common_pb2.Finding)


def finding_from_wire(message: common_pb2.Finding) -> Finding:
    """Return what `finding_to_wire` was given; a severity without a name here is UNKNOWN."""
    if not message.check:
        raise RecordError("finding", "it names no check")
    with _refusing(f"finding of {message.check!r}"):
        return from_message(Finding, message)


def beat_to_wire(beat: Beat) -> watch_pb2.BeatRequest:
    """Return the message a launcher sends."""
    return to_message(
        replace(beat, incidents=tuple([_trimmed(each) for each in beat.incidents])), watch_pb2.BeatRequest
    )


def beat_from_wire(message: watch_pb2.BeatRequest, now_unix: float) -> Beat:
    """Return what a launcher said at `now_unix`, by our clock."""
    job = message.attempt.job
    if not job:
        raise RecordError("beat", "it names no attempt")
    _bounded(
        "beat",
        {
            "nodes": (len(message.nodes) + len(message.spares), MOST_NODES),
            "node beats": (len(message.node_beats), MOST_NODES),
            "progress points": (len(message.progress), MOST_POINTS),
            "incidents": (len(message.incidents), MOST_INCIDENTS),
            "rows of ranks' times": (len(message.rank_times), MOST_RANK_TIMES),
            "findings": (sum([len(node.health) for node in message.node_beats]), MOST_FINDINGS + MOST_NODES),
        },
    )
    # A launcher speaks for its own job alone: it must not be able to write into another's record.
    jobs = {each.attempt.job for each in message.progress} | {each.attempt.job for each in message.incidents}
    jobs |= {each.attempt.job for each in message.rank_times}
    if jobs - {job}:
        raise RecordError(f"beat of job {job}", f"it speaks for jobs {sorted(jobs)}")
    for point in message.progress:
        _bounded("progress", {"metrics": (len(point.metrics), MOST_METRICS)})
    for times in message.rank_times:
        _check_rank_times(times)
    for node in message.node_beats:
        _check_findings(node)
    incidents = tuple([incident_from_wire(incident) for incident in message.incidents])
    with _refusing("beat"):
        beat = from_message(Beat, message, leave_out=("incidents",))
    looked_unix = now_unix - beat.waited_s
    return replace(
        beat,
        incidents=incidents,
        node_beats=tuple(
            [replace(node, job=job, seen_unix=looked_unix - node.silent_s) for node in beat.node_beats]
        ),
    )


def node_from_wire(message: watch_pb2.AttendRequest, now_unix: float) -> NodeRecord:
    """Return what a standing agent said of its node at `now_unix`, by our clock."""
    if not message.node:
        raise RecordError("attendance", "it names no node")
    _bounded("beat", {"findings": (len(message.health) + len(message.missed), MOST_FINDINGS)})
    _check_findings(message)
    with _refusing(f"attendance of {message.node!r}"):
        return replace(from_message(NodeRecord, message), seen_unix=now_unix)


def _check_rank_times(message: watch_pb2.RankTimes) -> None:
    count = len(message.own_s)
    _bounded("ranks' times", {"ranks": (max(count, len(message.data_s)), MOST_RANK_NUMBERS)})
    if not all(0.0 <= seconds < math.inf for seconds in (*message.own_s, *message.data_s)):
        raise RecordError("ranks' times", "a time in it is no number")


def _check_findings(message: watch_pb2.NodeBeat | watch_pb2.AttendRequest) -> None:
    for finding in message.health:
        if not finding.check:
            raise RecordError("finding", "it names no check")


# The newest heartbeats.


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherHeartbeat:
    """The newest heartbeat of one job."""

    beat: Beat
    heard_at: float  # when it came, monotonic; or when we came back, after an absence of ours
    ourselves: bool = True  # it came since
    missed_s: float = 0.0  # how long before we came back it came; 0 where it came since
    boots: Mapping[NodeName, str] = field(default_factory=dict)  # kernels as first reported in this attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentHeartbeat:
    """The newest report of one standing agent."""

    node: NodeRecord
    heard_at: float  # when it came, monotonic; or when we came back, after an absence of ours
    ourselves: bool = True  # it came since; else it is from the journal, and says nothing of how the node is now
    kept_at: float = 0.0  # when its word was last written down, monotonic


class HeartbeatTable:
    """The newest heartbeat of each job, and the newest report of each standing agent. Thread-safe, bounded.

    Beyond 10,000 jobs, or 16,384 agents, the one heard longest ago goes.
    """

    def __init__(self, alarm: threading.Event | None = None) -> None:
        self.alarm = alarm or threading.Event()  # set when a heartbeat gives reason to look at once
        self._lock = threading.Lock()
        self._heard: dict[int, LauncherHeartbeat] = {}
        self._attended: dict[NodeName, AgentHeartbeat] = {}

    def hear(self, beat: Beat, now: float, *, kept: bool = True) -> bool:
        """Record a heartbeat; False if a newer attempt of its job, or a newer heartbeat, was heard."""
        job = beat.attempt.job
        if not kept and beat.phase is Phase.STRANDED:  # what is asked of us waits until it is on record
            beat = replace(beat, phase=Phase.RECOVERING)
        with self._lock:
            before = self._heard.get(job)
            if before and before.beat.attempt > beat.attempt:
                return False
            same = before if before and before.beat.attempt == beat.attempt else None
            if same and same.ourselves and same.heard_at > now:
                return False
            boots = dict(same.boots) if same else {}
            for node in beat.node_beats:
                if node.boot_id:
                    boots.setdefault(node.name, node.boot_id)
            # Newest last, so that the first is the one to forget.
            self._heard.pop(job, None)
            self._heard[job] = LauncherHeartbeat(beat=beat, heard_at=now, boots=boots)
            if len(self._heard) > MOST_JOBS:
                del self._heard[next(iter(self._heard))]
        news = before is None or before.beat.phase is not beat.phase
        if news or any(node.silent_s >= ALARM_S for node in beat.node_beats):
            self.alarm.set()
        return True

    def with_findings(self, node: NodeRecord, now: float) -> NodeRecord:
        """Return a launcher's word on a node, with what the checks of its standing agent found lately."""
        # A job's agent runs the cheap checks alone: that it found nothing ends no finding of the others.
        with self._lock:
            other = self._attended.get(node.name)
        if other is None or not other.ourselves or now - other.heard_at >= KEEP_S:
            return node
        return replace(node, health=_gravest(other.node.health, node.health))

    def is_news(self, node: NodeRecord, now: float) -> bool:
        """Return whether a standing agent says something that is to be written down."""
        with self._lock:
            before = self._attended.get(node.name)
        return before is None or now - before.kept_at >= KEEP_S or _essence(before.node) != _essence(node)

    def attend(self, node: NodeRecord, now: float, *, kept: bool, failed: bool = False) -> None:
        """Note what a standing agent said of its node."""
        with self._lock:
            before = self._attended.pop(node.name, None)
            kept_at = now if kept or before is None else before.kept_at
            kept_at = float("-inf") if failed else kept_at
            self._attended[node.name] = AgentHeartbeat(node=node, heard_at=now, kept_at=kept_at)
            if len(self._attended) > MOST_NODES:
                del self._attended[next(iter(self._attended))]
        news = before is None or before.node.boot_id != node.boot_id or before.node.health != node.health
        if news and any(finding.severity is Severity.ERROR for finding in node.health):
            self.alarm.set()
        if before is not None and before.node.boot_id != node.boot_id:
            self.alarm.set()

    def restore(
        self,
        jobs: Iterable[JobRecord],
        now: float,
        unix: float,
        nodes: Iterable[NodeRecord] = (),
        *,
        since_unix: float | None = None,
    ) -> None:
        """Begin with the journal's jobs and nodes; silence counts from `since_unix`, else from our return."""
        with self._lock:
            for node in nodes:
                if not node.job and node.name not in self._attended:
                    self._attended[node.name] = AgentHeartbeat(
                        node=node, heard_at=now, ourselves=False, kept_at=now
                    )
            for job in jobs:
                if not job.newest.phase.ended and job.job not in self._heard:
                    self._heard[job.job] = _restored(
                        job, job.newest, now, unix, unix if since_unix is None else since_unix
                    )

    def forgive(self, now: float, *, away: bool = True) -> None:
        """Let every silence begin again: it was we who were away, or heard nobody."""
        with self._lock:
            self._heard = {
                job: replace(
                    heard,
                    heard_at=now,
                    ourselves=heard.ourselves and not away,
                    missed_s=heard.missed_s + now - heard.heard_at,
                )
                for job, heard in self._heard.items()
            }
            self._attended = {
                name: replace(one, heard_at=now, ourselves=False) for name, one in self._attended.items()
            }

    def forget(self, job: int) -> None:
        """Drop a job that Slurm has forgotten."""
        with self._lock:
            self._heard.pop(job, None)

    def of(self, job: int) -> LauncherHeartbeat | None:
        """Return the newest heartbeat of a job; None where it never beat."""
        with self._lock:
            return self._heard.get(job)

    def all(self) -> tuple[LauncherHeartbeat, ...]:
        """Return the newest heartbeat of every job."""
        with self._lock:
            return tuple(self._heard.values())

    def attended(self) -> tuple[AgentHeartbeat, ...]:
        """Return the newest report of every standing agent."""
        with self._lock:
            return tuple(self._attended.values())


def _essence(node: NodeRecord) -> tuple[object, ...]:
    return node.topology_address, node.health, node.boot_id, node.shards, node.verified_bytes


def _restored(
    job: JobRecord, attempt: AttemptRecord, now: float, unix: float, since_unix: float
) -> LauncherHeartbeat:
    beat = Beat(
        attempt=attempt.attempt,
        phase=attempt.phase,
        user=job.user,
        job_name=job.name,
        job_label=job.label,
        nodes=attempt.nodes,
        spares=attempt.spares,
        world_size=attempt.world_size,
        step_timeout_s=attempt.step_timeout_s,
    )
    return LauncherHeartbeat(
        beat=beat,
        heard_at=now - max(0.0, unix - max(since_unix, attempt.beat_unix)),
        ourselves=since_unix < unix and attempt.beat_unix >= since_unix,
        missed_s=max(0.0, since_unix - attempt.beat_unix),
    )


# Merges what standing agents and job agents report about each node. Pure.


@dataclass(frozen=True, slots=True)
class AgentReport:
    """What is said of one node."""

    findings: tuple[Finding, ...] = ()  # reported lately; of several agents' on one check the gravest
    heard_s: float | None = None  # since an agent on it was last heard; None where none ever was
    attended_s: float | None = None  # since its standing agent was; None where none is known
    boot_id: str = ""  # its kernel's, by the newest report; empty where unknown


NOTHING_SAID = AgentReport()


def words(
    attended: Iterable[AgentHeartbeat],
    heard: Iterable[tuple[LauncherHeartbeat, frozenset[NodeName]]],
    now: float,
    policy: WatchPolicy,
) -> dict[NodeName, AgentReport]:
    """Return what is said of each node of which anything is."""
    said: dict[NodeName, AgentReport] = {}
    for one in attended:
        age = max(0.0, now - one.heard_at)
        fresh = one.ourselves and age < policy.told_s
        said[one.node.name] = AgentReport(
            one.node.health if fresh else (), age if one.ourselves else None, age, one.node.boot_id
        )
    for beat, theirs in heard:
        since = max(0.0, now - beat.heard_at) + beat.beat.waited_s
        for node in beat.beat.node_beats if beat.ourselves and not beat.missed_s else ():
            if node.name in theirs:
                before = said.get(node.name, NOTHING_SAID)
                age = since + node.silent_s
                # Who is missed is not heard, though the word on it is the newest.
                newest = node.silent_s < policy.doubt_s and (before.heard_s is None or age < before.heard_s)
                said[node.name] = AgentReport(
                    _gravest(before.findings, node.health) if age < policy.told_s else before.findings,
                    age if newest else before.heard_s,
                    before.attended_s,
                    node.boot_id if node.boot_id and (newest or not before.boot_id) else before.boot_id,
                )
    return said


def _gravest(*told: tuple[Finding, ...]) -> tuple[Finding, ...]:
    if not any(told[1:]):
        return told[0]
    by_check: dict[str, Finding] = {}
    for finding in (finding for findings in told for finding in findings):
        before = by_check.get(finding.check)
        if before is None or finding.severity > before.severity:
            by_check[finding.check] = finding
    return tuple(by_check.values())
