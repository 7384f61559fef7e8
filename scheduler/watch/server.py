"""Takes heartbeats, reports and operators' requests over gRPC; what is reported is kept before it is answered."""

from __future__ import annotations

import contextlib
import shlex
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health
from typing_extensions import override

from deeplink.core.errors import DeepLinkError
from deeplink.core.finding import Finding, Severity
from deeplink.rpc.grpc_server import bound_server
from deeplink.scheduler.journal.journal import JournalError
from deeplink.scheduler.liveness.heartbeats import beat_from_wire, finding_from_wire, node_from_wire
from deeplink.scheduler.recovery.evidence import SLURMD
from deeplink.scheduler.recovery.incident_merging import LONGEST_EVIDENCE
from deeplink.scheduler.recovery.records import (
    Incident,
    IncidentKind,
    IncidentOutcome,
    RecordError,
    incident_id,
)
from deeplink.scheduler.watch.authorizer import REFUSAL, aborting, token_in
from deeplink.scheduler.watch.operator_actions import TooManyOperationsError
from deeplink.scheduler.watch.operator_requests import UNDO, OperationError, OperatorRequest, check_person
from deeplink.v1 import watch_pb2, watch_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from deeplink.core.clock import Clock
    from deeplink.core.metrics import WatchMetrics
    from deeplink.core.types import NodeName
    from deeplink.rpc.grpc_server import BoundServer
    from deeplink.scheduler.journal.journal import Journal
    from deeplink.scheduler.liveness.heartbeats import HeartbeatTable
    from deeplink.scheduler.recovery import records
    from deeplink.scheduler.watch.authorizer import Authorizer
    from deeplink.scheduler.watch.operator_actions import OperatorActor

SERVICE = watch_pb2.DESCRIPTOR.services_by_name["Watch"].full_name
IDENTITY = watch_pb2.DESCRIPTOR.services_by_name["Identity"].full_name
OPERATIONS = watch_pb2.DESCRIPTOR.services_by_name["Operations"].full_name
MOST_CALLS = 4
"""Requests looked at, or waited for, at once: the rest of the server's threads are left to heartbeats."""


class WatchServicer(watch_pb2_grpc.WatchServicer):
    """Takes heartbeats: into the journal first, then into the heartbeats that the loop reads. Thread-safe.

    What is reported while the journal fails was heard, yet nothing is done for it.
    """

    def __init__(
        self,
        journal: Journal,
        heartbeats: HeartbeatTable,
        clock: Clock,
        metrics: WatchMetrics,
        authorizer: Authorizer,
    ) -> None:
        self._journal, self._book, self._clock, self._metrics = journal, heartbeats, clock, metrics
        self.authorizer = authorizer

    @override
    def Beat(self, request: watch_pb2.BeatRequest, context: grpc.ServicerContext) -> watch_pb2.BeatReply:
        """Keep a heartbeat; INVALID_ARGUMENT where it cannot be kept, UNAVAILABLE where the journal fails."""
        # PERMISSION_DENIED where the job is not the caller's.
        came, now_unix = self._clock.monotonic(), self._clock.unix()
        try:
            said = beat_from_wire(request, now_unix)
            with aborting(context):
                owner = self.authorizer.owner(token_in(context), said.attempt)
            beat = self._believed(replace(said, user=owner))
            nodes = tuple(self._book.with_findings(node, came) for node in beat.node_beats)
            failed = _failure(lambda: self._journal.record_beat(replace(beat, node_beats=nodes), now_unix))
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
        """Return a heartbeat without the nodes that Slurm does not know."""
        for incident in beat.incidents:
            attempt = incident.attempt
            if attempt is None or not incident.id.startswith(f"{attempt}-"):
                raise RecordError(f"incident {incident.id!r}", "a launcher tells of its own attempts alone")
        return replace(
            beat, node_beats=tuple(node for node in beat.node_beats if self.authorizer.site.knows(node.name))
        )

    @override
    def Attend(self, request: watch_pb2.AttendRequest, context: grpc.ServicerContext) -> watch_pb2.AttendReply:
        """Keep what a standing agent says of its node, if Slurm knows it; the same errors as of a heartbeat."""
        now, now_unix = self._clock.monotonic(), self._clock.unix()
        try:
            node = node_from_wire(request, now_unix)
            with aborting(context):
                self.authorizer.agent(token_in(context), node.name)
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
    """Write; return why the journal does not take it, empty where it does."""
    # Whoever spoke was heard all the same: that nothing can be written is no silence of his.
    try:
        write()
    except JournalError as problem:
        return str(problem)
    return ""


def _while_away(node: NodeName, missed: Iterable[Finding], now_unix: float) -> list[Incident]:
    """Return what was wrong with a node, and passed, while no one listened: told twice, it is the same."""
    # One incident of all that makes a node sick, and one of its slurmd, which may only have been started again.
    passed = tuple(missed)
    grave = [one for one in passed if one.severity in {Severity.WARNING, Severity.ERROR} and one.check != SLURMD]
    slurmd = [one for one in passed if one.severity is not Severity.UNKNOWN and one.check == SLURMD]
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


def _told(found: Iterable[Finding]) -> str:
    return "; ".join(f"{one.check} ({one.severity.action}): {one.text}" for one in found)


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
        with aborting(context):
            return watch_pb2.ProveReply(token=self._authorizer.prove(request))


class OperationsServicer(watch_pb2_grpc.OperationsServicer):
    """Answers operators. Thread-safe.

    INVALID_ARGUMENT where a request cannot be understood, RESOURCE_EXHAUSTED where there are too many, UNAVAILABLE
    where Slurm or the journal does not answer.
    """

    def __init__(self, actor: OperatorActor, authorizer: Authorizer) -> None:
        self._actor, self._authorizer = actor, authorizer
        self._places = threading.Semaphore(MOST_CALLS)

    @override
    def Plan(self, request: watch_pb2.OperationRequest, context: grpc.ServicerContext) -> watch_pb2.OperationPlan:
        """Return what would be done now, and the commands."""
        person, _ = self._persons(request, context)
        with self._answering(context):
            plan = self._actor.planner.plan(_asked(request), person)
        return watch_pb2.OperationPlan(
            commands=list(map(shlex.join, plan.commands)),
            saw=plan.saw,
            undo=plan.undo,
            remarks=plan.remarks,
            refused=plan.refused,
            remedy=plan.remedy,
        )

    @override
    def Act(self, request: watch_pb2.OperationRequest, context: grpc.ServicerContext) -> watch_pb2.OperationReply:
        """Have it done, and return how it stands after a while."""
        person, via = self._persons(request, context)
        with self._answering(context):
            asked = _asked(request)
            record = self._actor.submit(request.request, asked, request.saw, person, via=via)
        return watch_pb2.OperationReply(
            outcome=record.outcome,
            result=record.result,
            undo=UNDO.get(asked.verb, ""),
            asked_unix=record.asked_unix,
            done_unix=record.done_unix,
            commands=record.commands,
        )

    @override
    def Role(self, request: watch_pb2.RoleRequest, context: grpc.ServicerContext) -> watch_pb2.RoleReply:
        """Return the operator's name, and whether the watchdog acts."""
        with aborting(context):
            user = self._authorizer.operator(token_in(context))
        return watch_pb2.RoleReply(user=user, acting=self._actor.planner.acts, paused=self._actor.paused)

    def _persons(self, request: watch_pb2.OperationRequest, context: grpc.ServicerContext) -> tuple[str, str]:
        """Return who asks, and whose token it is where that is another."""
        with aborting(context):
            user = self._authorizer.operator(token_in(context), request.person)
        if request.person in {"", user}:
            return user, ""
        with self._answering(context):
            return check_person(request.person), user

    @contextlib.contextmanager
    def _answering(self, context: grpc.ServicerContext) -> Iterator[None]:
        if not self._places.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many requests at once; try again")
        try:
            yield
        except OperationError as problem:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, _said(problem))
        except TooManyOperationsError as problem:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, _said(problem))
        except DeepLinkError as problem:
            context.abort(grpc.StatusCode.UNAVAILABLE, _said(problem))
        finally:
            self._places.release()


def _asked(request: watch_pb2.OperationRequest) -> OperatorRequest:
    return OperatorRequest.of(
        request.verb, request.target, nodes=request.nodes, why=request.why, force=request.force
    )


def _said(problem: DeepLinkError) -> str:
    return f"{problem}. {problem.remedy}" if problem.remedy else str(problem)


def watch_server(bind: str, servicer: WatchServicer, operations: OperationsServicer | None = None) -> BoundServer:
    """Return a server bound to `bind`, not yet serving; every call needs a token of the servicer's."""

    def register(server: grpc.Server) -> tuple[str, ...]:
        watch_pb2_grpc.add_WatchServicer_to_server(servicer, server)
        watch_pb2_grpc.add_IdentityServicer_to_server(IdentityServicer(servicer.authorizer), server)
        if operations is not None:
            watch_pb2_grpc.add_OperationsServicer_to_server(operations, server)
            return SERVICE, OPERATIONS, IDENTITY
        return SERVICE, IDENTITY

    return bound_server(
        bind,
        servicer.authorizer.is_valid,
        register,
        refusal=REFUSAL,
        open_services=(IDENTITY, health.SERVICE_NAME),
    )
