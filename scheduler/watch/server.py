"""The watchdog's ear: launchers' beats and standing agents' words over gRPC, kept before they are answered."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health
from typing_extensions import override

from deeplink.plainrpc import TOKEN_HEADER
from deeplink.scheduler.watch.authorization import IDENTITY, REFUSAL, NotAuthorizedError
from deeplink.scheduler.watch.evidence import SLURMD
from deeplink.scheduler.watch.incident_merging import LONGEST_EVIDENCE
from deeplink.scheduler.watch.journal import JournalError
from deeplink.scheduler.watch.messages import beat_from_wire, finding_from_wire, node_from_wire
from deeplink.scheduler.watch.records import (
    HealthSeverity,
    Incident,
    IncidentKind,
    IncidentOutcome,
    RecordError,
    incident_id,
)
from deeplink.v1 import watch_pb2, watch_pb2_grpc
from deeplink.wire import bound_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from deeplink.clock import Clock
    from deeplink.metrics import WatchMetrics
    from deeplink.scheduler.watch import records
    from deeplink.scheduler.watch.authorization import Authorizer
    from deeplink.scheduler.watch.heartbeats import HeartbeatTable
    from deeplink.scheduler.watch.journal import Journal
    from deeplink.scheduler.watch.records import HealthFinding
    from deeplink.types import NodeName
    from deeplink.wire import BoundServer

SERVICE = watch_pb2.DESCRIPTOR.services_by_name["Watch"].full_name


class WatchServicer(watch_pb2_grpc.WatchServicer):
    """Takes beats: into the journal first, then into the book that the loop reads. Thread-safe.

    What is reported while the journal fails was heard, yet nothing is done for it.

    """

    def __init__(
        self,
        journal: Journal,
        book: HeartbeatTable,
        clock: Clock,
        metrics: WatchMetrics,
        authorizer: Authorizer,
    ) -> None:
        self._journal, self._book, self._clock, self._metrics = journal, book, clock, metrics
        self.authorizer = authorizer

    @override
    def Beat(self, request: watch_pb2.BeatRequest, context: grpc.ServicerContext) -> watch_pb2.BeatReply:
        """Keep a beat; INVALID_ARGUMENT where it cannot be kept, UNAVAILABLE where the journal fails.

        PERMISSION_DENIED where the job is not the caller's.
        """
        came, now_unix = self._clock.monotonic(), self._clock.unix()
        try:
            said = beat_from_wire(request, now_unix)
            with _aborting(context):
                owner = self.authorizer.owner(_token(context), said.attempt)
            beat = self._believed(replace(said, user=owner))
            failed = _failure(lambda: self._journal.record_beat(beat, now_unix))
        except RecordError as problem:
            self._metrics.beats.labels("refused").inc()
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(problem))
        current = self._book.hear(beat, came, kept=not failed)
        if failed:
            # Not answered, so the launcher sends its reports and incidents again.
            self._metrics.beats.labels("failed").inc()
            context.abort(grpc.StatusCode.UNAVAILABLE, failed)
        self._metrics.beats.labels("kept" if current else "late").inc()
        return watch_pb2.BeatReply(known=True)

    def _believed(self, beat: records.Beat) -> records.Beat:
        """Return a beat without the nodes that Slurm does not know.

        Raises:
            RecordError: it tells of an incident under an id that is not its job's.
        """
        for incident in beat.incidents:
            attempt = incident.attempt
            if attempt is None or not incident.id.startswith(f"{attempt}-"):
                raise RecordError(f"incident {incident.id!r}", "a launcher tells of its own attempts alone")
        return replace(
            beat, node_beats=tuple(node for node in beat.node_beats if self.authorizer.site.knows(node.name))
        )

    @override
    def Attend(self, request: watch_pb2.AttendRequest, context: grpc.ServicerContext) -> watch_pb2.AttendReply:
        """Keep what a standing agent says of its node, if Slurm knows it; the same errors as of a beat."""
        now, now_unix = self._clock.monotonic(), self._clock.unix()
        try:
            node = node_from_wire(request, now_unix)
            with _aborting(context):
                self.authorizer.agent(_token(context), node.name)
            missed = [finding_from_wire(finding) for finding in request.missed]
            if not self.authorizer.site.knows(node.name):
                return watch_pb2.AttendReply(known=False)
            news = self._book.is_news(node, now)
            incidents = _while_away(node.name, missed, now_unix)
            failed = _failure(lambda: self._keep(node if news else None, incidents))
        except RecordError as problem:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(problem))
        self._book.attend(node, now, kept=news, failed=bool(failed))
        if failed:
            context.abort(grpc.StatusCode.UNAVAILABLE, failed)
        return watch_pb2.AttendReply(known=True, unix=self._clock.unix())

    def _keep(self, node: records.NodeRecord | None, incidents: Iterable[Incident]) -> None:
        if node is not None:
            self._journal.record_node(node)
        for incident in incidents:
            self._journal.record_incident(incident)


def _failure(write: Callable[[], None]) -> str:
    """Write; return why the journal does not take it, empty where it does.

    Whoever spoke was heard all the same: that nothing can be written is no silence of his.
    """
    try:
        write()
    except JournalError as problem:
        return str(problem)
    return ""


def _while_away(node: NodeName, missed: Iterable[HealthFinding], now_unix: float) -> list[Incident]:
    """Return what was wrong with a node, and passed, while nobody listened: told twice, it is the same.

    One incident of all that makes a node sick, and one of its slurmd, which may only have been started anew.
    """
    passed = tuple(missed)
    grave = [
        one
        for one in passed
        if one.severity in {HealthSeverity.COMMENT, HealthSeverity.DRAIN} and one.check != SLURMD
    ]
    slurmd = [one for one in passed if one.severity is not HealthSeverity.UNKNOWN and one.check == SLURMD]
    return [
        Incident(
            id=f"{incident_id(None, kind, node)}@{began:.0f}",
            kind=kind,
            node=node,
            evidence=f"began and passed while the watchdog was away: {_told(found)}"[:LONGEST_EVIDENCE],
            began_unix=began,
            detected_unix=now_unix,
            recovered_unix=now_unix,
            outcome=IncidentOutcome.RECOVERED,
        )
        for kind, found in ((IncidentKind.NODE_SICK, grave), (IncidentKind.SLURMD_LOST, slurmd))
        if found and (began := min(one.since_unix for one in found))
    ]


def _told(found: Iterable[HealthFinding]) -> str:
    return "; ".join(f"{one.check} ({one.severity}): {one.problem}" for one in found)


class IdentityServicer(watch_pb2_grpc.IdentityServicer):
    """Gives callers that prove who they are the tokens that `WatchServicer` takes."""

    def __init__(self, authorizer: Authorizer) -> None:
        self._authorizer = authorizer

    @override
    def Challenge(
        self, request: watch_pb2.ChallengeRequest, context: grpc.ServicerContext
    ) -> watch_pb2.ChallengeReply:
        """Return a nonce for one proof within half a minute."""
        return watch_pb2.ChallengeReply(nonce=self._authorizer.challenge())

    @override
    def Prove(self, request: watch_pb2.ProveRequest, context: grpc.ServicerContext) -> watch_pb2.ProveReply:
        """Return a token for the job or node that a MUNGE credential speaks for."""
        with _aborting(context):
            return watch_pb2.ProveReply(token=self._authorizer.prove(request))


@contextlib.contextmanager
def _aborting(context: grpc.ServicerContext) -> Iterator[None]:
    try:
        yield
    except NotAuthorizedError as refused:
        context.abort(refused.status, str(refused))


def _token(context: grpc.ServicerContext) -> str:
    return str(dict(context.invocation_metadata() or ()).get(TOKEN_HEADER, ""))


def watch_server(bind: str, servicer: WatchServicer) -> BoundServer:
    """Return a server bound to `bind`, not yet serving; every call needs a token of the servicer's.

    Raises:
        ListenError: the address cannot be bound.
    """

    def register(server: grpc.Server) -> tuple[str, ...]:
        watch_pb2_grpc.add_WatchServicer_to_server(servicer, server)
        watch_pb2_grpc.add_IdentityServicer_to_server(IdentityServicer(servicer.authorizer), server)
        return SERVICE, IDENTITY

    return bound_server(
        bind,
        servicer.authorizer.is_valid,
        register,
        refusal=REFUSAL,
        open_services=(IDENTITY, health.SERVICE_NAME),
    )
