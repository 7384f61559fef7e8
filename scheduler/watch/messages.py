"""Beats and incidents to wire messages and back; what cannot be kept is refused here."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from deeplink.scheduler.watch.incident_merging import MOST_MOMENTS, MOST_STACKS, united, within_bounds
from deeplink.scheduler.watch.records import (
    Beat,
    HealthFinding,
    HealthSeverity,
    Incident,
    IncidentOutcome,
    Moment,
    NodeRecord,
    Phase,
    ProgressPoint,
    RankStack,
    RecordError,
)
from deeplink.types import NodeName
from deeplink.v1 import common_pb2, node_pb2, watch_pb2
from deeplink.wire import attempt_from_wire, attempt_to_wire

if TYPE_CHECKING:
    from collections.abc import Iterable

MOST_NODES = 16_384
MOST_POINTS = 4_096
MOST_INCIDENTS = 1_024
MOST_METRICS = 64
MOST_FINDINGS = 256
LONGEST_TEXT = 4_096
LARGEST = (1 << 63) - 1
"""Bounds on what one beat may hold; a launcher with more sends it in several."""

_PHASES = {
    watch_pb2.PHASE_STARTING: Phase.STARTING,
    watch_pb2.PHASE_RUNNING: Phase.RUNNING,
    watch_pb2.PHASE_RECOVERING: Phase.RECOVERING,
    watch_pb2.PHASE_STRANDED: Phase.STRANDED,
    watch_pb2.PHASE_SUCCEEDED: Phase.SUCCEEDED,
    watch_pb2.PHASE_FAILED: Phase.FAILED,
}
_WIRE_PHASES = {phase: number for number, phase in _PHASES.items()}


def incident_to_wire(incident: Incident) -> watch_pb2.IncidentRecord:
    """Return the message for an incident; its number stays at home."""
    return watch_pb2.IncidentRecord(
        id=incident.id,
        kind=incident.kind,
        node=incident.node or "",
        attempt=attempt_to_wire(incident.attempt) if incident.attempt else None,
        action=incident.action,
        evidence=incident.evidence,
        began_unix=incident.began_unix,
        detected_unix=incident.detected_unix,
        acted_unix=incident.acted_unix,
        recovered_unix=incident.recovered_unix,
        outcome=incident.outcome.value,
        steps_repeated=incident.steps_repeated,
        timeline=[watch_pb2.Moment(unix=moment.unix, what=moment.what) for moment in united(incident.timeline)],
        ranks=incident.ranks,
        step_s=incident.step_s,
        stacks=[stack_to_wire(stack) for stack in within_bounds(incident.stacks)],
    )


def incident_from_wire(message: watch_pb2.IncidentRecord) -> Incident:
    """Return what `incident_to_wire` was given.

    Raises:
        RecordError: an outcome that is none, an id, kind or action that cannot be kept, a time that is no number,
            or more moments or stacks than are kept.
    """
    try:
        outcome = IncidentOutcome(message.outcome or "open")
    except ValueError:
        raise RecordError(f"incident {message.id!r}", f"outcome {message.outcome!r} is none") from None
    times = (message.began_unix, message.detected_unix, message.acted_unix, message.recovered_unix)
    moments = [Moment(moment.unix, moment.what) for moment in message.timeline]
    _finite(f"incident {message.id!r}", (*times, message.step_s, *(moment.unix for moment in moments)))
    for what, count, most in (
        ("moments", len(moments), MOST_MOMENTS),
        ("stacks", len(message.stacks), MOST_STACKS),
    ):
        if count > most:
            raise RecordError(f"incident {message.id!r}", f"{count} {what}, at most {most} are kept")
    return Incident(
        id=message.id,
        kind=message.kind,
        node=NodeName(message.node) if message.node else None,
        attempt=attempt_from_wire(message.attempt) if message.attempt.job else None,
        action=message.action or "none",
        evidence=message.evidence[:LONGEST_TEXT],
        began_unix=message.began_unix,
        detected_unix=message.detected_unix,
        acted_unix=message.acted_unix,
        recovered_unix=message.recovered_unix,
        outcome=outcome,
        steps_repeated=message.steps_repeated,
        timeline=united(moments),
        ranks=message.ranks,
        step_s=message.step_s,
        stacks=within_bounds(stack_from_wire(stack) for stack in message.stacks),
    )


def stack_to_wire(stack: RankStack) -> node_pb2.RankStack:
    """Return the message for where a rank was."""
    return node_pb2.RankStack(
        rank=stack.rank,
        pid=stack.pid,
        state=stack.state,
        source=stack.source,
        text=stack.text,
        flight=stack.flight,
    )


def stack_from_wire(message: node_pb2.RankStack) -> RankStack:
    """Return what `stack_to_wire` was given."""
    return RankStack(
        rank=message.rank,
        pid=message.pid,
        state=message.state,
        source=message.source,
        text=message.text,
        flight=message.flight,
    )


def point_to_wire(point: ProgressPoint) -> common_pb2.Progress:
    """Return the message for one report of a training loop."""
    return common_pb2.Progress(
        rank=point.rank,
        attempt=attempt_to_wire(point.attempt),
        step=point.step,
        unix=point.unix,
        metrics=dict(point.metrics),
    )


def point_from_wire(message: common_pb2.Progress) -> ProgressPoint:
    """Return what `point_to_wire` was given.

    A metric that is no finite number is kept: a loss of NaN is news.

    Raises:
        RecordError: no attempt, too many metrics, or a time that is no number.
    """
    if not message.attempt.job:
        raise RecordError("progress", "it names no attempt")
    if len(message.metrics) > MOST_METRICS:
        raise RecordError("progress", f"{len(message.metrics)} metrics, at most {MOST_METRICS} are kept")
    _finite("progress", (message.unix,))
    return ProgressPoint(
        attempt=attempt_from_wire(message.attempt),
        step=message.step,
        unix=message.unix,
        rank=message.rank,
        metrics=dict(message.metrics),
    )


def finding_to_wire(finding: HealthFinding) -> common_pb2.Finding:
    """Return the message for what a health check found."""
    return common_pb2.Finding(
        check=finding.check,
        severity=finding.severity,
        problem=finding.problem,
        since_unix=finding.since_unix,
    )


def finding_from_wire(message: common_pb2.Finding) -> HealthFinding:
    """Return what `finding_to_wire` was given; a severity without a name here is UNKNOWN.

    Raises:
        RecordError: it names no check, or its time is no number.
    """
    if not message.check:
        raise RecordError("finding", "it names no check")
    _finite(f"finding of {message.check!r}", (message.since_unix,))
    known = message.severity in HealthSeverity.__members__.values()
    return HealthFinding(
        check=message.check[:LONGEST_TEXT],
        severity=HealthSeverity(message.severity) if known else HealthSeverity.UNKNOWN,
        problem=message.problem[:LONGEST_TEXT],
        since_unix=message.since_unix,
    )


def node_beat_to_wire(node: NodeRecord) -> watch_pb2.NodeBeat:
    """Return the message for what a launcher knows of one node."""
    return watch_pb2.NodeBeat(
        node=node.name,
        topology_address=node.topology_address,
        silent_s=node.silent_s,
        shards=node.shards,
        shard_bytes=node.shard_bytes,
        verified_bytes=node.verified_bytes,
        free_bytes=node.free_bytes,
        health=[finding_to_wire(finding) for finding in node.health],
        boot_id=node.boot_id,
    )


def beat_to_wire(beat: Beat) -> watch_pb2.BeatRequest:
    """Return the message a launcher sends."""
    return watch_pb2.BeatRequest(
        attempt=attempt_to_wire(beat.attempt),
        phase=_WIRE_PHASES[beat.phase],
        user=beat.user,
        job_name=beat.job_name,
        job_label=beat.job_label,
        nodes=beat.nodes,
        spares=beat.spares,
        world_size=beat.world_size,
        node_beats=[node_beat_to_wire(node) for node in beat.node_beats],
        progress=[point_to_wire(point) for point in beat.progress],
        incidents=[incident_to_wire(incident) for incident in beat.incidents],
        ring_crossings=beat.ring_crossings,
        ring_crossings_stock=beat.ring_crossings_stock,
        step_timeout_s=beat.step_timeout_s,
        detail=beat.detail,
        waited_s=beat.waited_s,
    )


def beat_from_wire(message: watch_pb2.BeatRequest, now_unix: float) -> Beat:
    """Return what a launcher said at `now_unix`, by our clock.

    Raises:
        RecordError: it names no attempt or no phase, or holds more, or other, than can be kept.
    """
    if not message.attempt.job:
        raise RecordError("beat", "it names no attempt")
    if message.phase not in _PHASES:
        raise RecordError("beat", f"phase {message.phase} is none")
    _bounded("nodes", len(message.nodes) + len(message.spares), MOST_NODES)
    _bounded("node beats", len(message.node_beats), MOST_NODES)
    _bounded("progress points", len(message.progress), MOST_POINTS)
    _bounded("incidents", len(message.incidents), MOST_INCIDENTS)
    _bounded("findings", sum(len(node.health) for node in message.node_beats), MOST_FINDINGS + MOST_NODES)
    _finite("beat", (message.step_timeout_s, message.waited_s, *(node.silent_s for node in message.node_beats)))
    _own_job(message)
    _fitting(message)
    looked_unix = now_unix - message.waited_s
    return Beat(
        attempt=attempt_from_wire(message.attempt),
        phase=_PHASES[message.phase],
        user=message.user[:LONGEST_TEXT],
        job_name=message.job_name[:LONGEST_TEXT],
        job_label=message.job_label[:LONGEST_TEXT],
        nodes=tuple(NodeName(name) for name in message.nodes),
        spares=tuple(NodeName(name) for name in message.spares),
        world_size=message.world_size,
        node_beats=tuple(_node(node, message.attempt.job, looked_unix) for node in message.node_beats),
        progress=tuple(point_from_wire(point) for point in message.progress),
        incidents=tuple(incident_from_wire(incident) for incident in message.incidents),
        ring_crossings=message.ring_crossings,
        ring_crossings_stock=message.ring_crossings_stock,
        step_timeout_s=message.step_timeout_s,
        detail=message.detail[:LONGEST_TEXT],
        waited_s=message.waited_s,
    )


def node_from_wire(message: watch_pb2.AttendRequest, now_unix: float) -> NodeRecord:
    """Return what a standing agent said of its node at `now_unix`, by our clock.

    Raises:
        RecordError: it names no node, or holds more, or other, than can be kept.
    """
    if not message.node:
        raise RecordError("attendance", "it names no node")
    _bounded("findings", len(message.health) + len(message.missed), MOST_FINDINGS)
    if max(message.shards, message.shard_bytes, message.verified_bytes, message.free_bytes) > LARGEST:
        raise RecordError(f"attendance of {message.node!r}", "a number in it is too large")
    return NodeRecord(
        name=NodeName(message.node),
        topology_address=message.topology_address,
        seen_unix=now_unix,
        shards=message.shards,
        shard_bytes=message.shard_bytes,
        verified_bytes=message.verified_bytes,
        free_bytes=message.free_bytes,
        health=tuple(finding_from_wire(finding) for finding in message.health),
        boot_id=message.boot_id[:LONGEST_TEXT],
    )


def _node(message: watch_pb2.NodeBeat, job: int, looked_unix: float) -> NodeRecord:
    return NodeRecord(
        name=NodeName(message.node),
        topology_address=message.topology_address,
        seen_unix=looked_unix - message.silent_s,
        silent_s=message.silent_s,
        shards=message.shards,
        shard_bytes=message.shard_bytes,
        verified_bytes=message.verified_bytes if message.HasField("verified_bytes") else None,
        free_bytes=message.free_bytes,
        job=job,
        health=tuple(finding_from_wire(finding) for finding in message.health),
        boot_id=message.boot_id[:LONGEST_TEXT],
    )


def _own_job(message: watch_pb2.BeatRequest) -> None:
    # A launcher speaks for its own job alone: it must not be able to write into another's record.
    jobs = {point.attempt.job for point in message.progress}
    jobs.update(incident.attempt.job for incident in message.incidents)
    if jobs - {message.attempt.job}:
        raise RecordError(f"beat of job {message.attempt.job}", f"it speaks for jobs {sorted(jobs)}")


def _fitting(message: watch_pb2.BeatRequest) -> None:
    # The wire has 64 bits without a sign, the journal 63.
    numbers = [message.attempt.job, *(point.step for point in message.progress)]
    numbers += [incident.steps_repeated for incident in message.incidents]
    for node in message.node_beats:
        numbers += [node.shards, node.shard_bytes, node.verified_bytes, node.free_bytes]
    if max(numbers) > LARGEST:
        raise RecordError("beat", "a number in it is too large")


def _bounded(what: str, count: int, most: int) -> None:
    if count > most:
        raise RecordError("beat", f"{count} {what}, at most {most} are kept")


def _finite(what: str, numbers: Iterable[float]) -> None:
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise RecordError(what, "a time in it is no number")
