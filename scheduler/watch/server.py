"""Takes launchers' heartbeats and standing agents' reports over gRPC; keeps them before they are answered."""

from __future__ import annotations

import contextlib
import hmac
import os
import pwd
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import grpc
from grpc_health.v1 import health
from typing_extensions import override

from deeplink.core.errors import DeepLinkError
from deeplink.core.finding import Finding, Severity
from deeplink.core.types import NodeName
from deeplink.rpc.channel import attempt_from_wire, bound_server
from deeplink.rpc.tokens import TOKEN_HEADER
from deeplink.scheduler.journal.journal import JournalError
from deeplink.scheduler.liveness.heartbeats import beat_from_wire, finding_from_wire, node_from_wire
from deeplink.scheduler.liveness.watchdog_client import job_statement, node_statement, operator_statement
from deeplink.scheduler.recovery.evidence import SLURMD
from deeplink.scheduler.recovery.incident_merging import LONGEST_EVIDENCE
from deeplink.scheduler.recovery.records import (
    Incident,
    IncidentKind,
    IncidentOutcome,
    RecordError,
    incident_id,
)
from deeplink.scheduler.slurm.client import JobVanishedError
from deeplink.scheduler.slurm.munge import Credential, CredentialError, MungeSocket, decoded
from deeplink.scheduler.slurm.nodeset import fold
from deeplink.scheduler.watch.caller_tokens import Caller, TokenMint
from deeplink.v1 import watch_pb2, watch_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from deeplink.core.clock import Clock
    from deeplink.core.metrics import WatchMetrics
    from deeplink.core.types import Attempt
    from deeplink.rpc.channel import BoundServer
    from deeplink.scheduler.journal.journal import Journal
    from deeplink.scheduler.liveness.heartbeats import HeartbeatTable
    from deeplink.scheduler.recovery import records

# Decides whose heartbeats and reports the watchdog believes.


PROVED_S = 86_400.0  # how long a token lasts that MUNGE was shown for; its holder proves himself again then
IDENTITY = watch_pb2.DESCRIPTOR.services_by_name["Identity"].full_name
REFUSAL = (
    "the call carries no token of this watchdog, or one that has ended. With MUNGE the caller proves himself "
    "again; else `deeplink watch --mint USER` makes another for watch_token_file"
)
_MOST_PROOFS = 4  # proofs checked at once: each asks munged by a process of its own. As many more may wait
_PROOF_WAIT_S = 1.0
_MOST_QUESTIONS = 4
"""Jobs that Slurm is asked for at once: the rest of the server's threads are left to heartbeats of known jobs."""


class NotAuthorizedError(DeepLinkError):
    """A call is not believed, or it cannot be found out whether it is to be."""

    def __init__(self, status: grpc.StatusCode, problem: str) -> None:
        super().__init__(problem)
        self.status, self.problem = status, problem


class SlurmRecords(Protocol):
    """Slurm's jobs and nodes. Called from any thread."""

    @property
    def is_silent(self) -> bool:
        """Whether Slurm did not answer when it was asked last for its jobs, or was not asked yet."""
        ...

    def owner(self, job: int) -> str:
        """Return the user whose job it is, by what Slurm said last; empty where it said nothing of it."""
        ...

    def asked_owner(self, job: int) -> str:
        """Ask Slurm whose job it is, for a short time."""
        ...

    def knows(self, name: NodeName) -> bool:
        """Return whether Slurm knows a node of this name; True as well while Slurm has not been heard."""
        ...

    def nodes_at(self, hosts: Collection[str]) -> frozenset[NodeName] | None:
        """Return the nodes that have one of these host names or addresses; None while Slurm has not been heard."""
        ...


@dataclass(slots=True)
class Authorizer:
    """Believes heartbeats of the job's user, and reports on nodes of users who run agents. Thread-safe."""

    mint: TokenMint  # makes and reads the callers' tokens
    site: SlurmRecords  # whose jobs and which nodes there are
    journal: Journal  # knows the users of jobs while Slurm does not answer
    clock: Clock  # time
    agents: Collection[int] = ()  # users whose standing agents are believed, besides root and the watchdog's own
    operators: Collection[int] = ()  # users that MUNGE may name as operators, besides the same two
    _callers: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(2 * _MOST_PROOFS))
    _proofs: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(_MOST_PROOFS))
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _asking: set[int] = field(default_factory=set)
    _socket: MungeSocket = field(default_factory=MungeSocket)

    def challenge(self) -> str:
        """Return a nonce for one proof."""
        return self.mint.nonce(self.clock.unix())

    def prove(self, request: watch_pb2.ProveRequest) -> str:
        """Return a token for the job or the node that a MUNGE credential speaks for."""
        if not self.mint.made_lately(request.nonce, self.clock.unix()):
            raise NotAuthorizedError(grpc.StatusCode.FAILED_PRECONDITION, "the nonce is unknown or too old")
        attempt = attempt_from_wire(request.attempt)
        if request.operator:
            said = operator_statement(request.nonce)
        elif request.node:
            said = node_statement(request.node, request.nonce)
        else:
            said = job_statement(attempt, request.nonce)
        credential = self._decoded(request.credential)
        if not hmac.compare_digest(credential.statement.encode(), said.encode()):
            raise _denied("the credential was made for something else")
        if request.operator:
            if credential.uid not in {0, os.getuid(), *self.operators}:
                raise _denied(f"user {_name_of(credential.uid)} is no operator (`deeplink watch --operators`)")
            return self._token(Caller(uid=credential.uid, operator=True))
        if not request.node:
            caller = Caller(uid=credential.uid, job=attempt.job, restart=attempt.restart)
            self._check_owner(caller, attempt)
            return self._token(caller)
        origins = self.site.nodes_at(credential.hosts)
        if origins is None:
            problem = f"which host is node {request.node}? Slurm has told no nodes yet; try again"
            raise NotAuthorizedError(grpc.StatusCode.UNAVAILABLE, problem)
        if origins and request.node not in origins:
            raise _denied(f"the host of {fold(origins)} cannot report for {request.node}")
        caller = Caller(uid=credential.uid, node=request.node)
        self._check_agent(caller, NodeName(request.node))
        return self._token(caller)

    def owner(self, token: str, attempt: Attempt) -> str:
        """Return the name of the attempt's user, whose token this is."""
        return self._check_owner(self._caller(token), attempt)

    def agent(self, token: str, node: NodeName) -> None:
        """Check that this is the token of a standing agent of this node."""
        self._check_agent(self._caller(token), node)

    def operator(self, token: str, person: str = "") -> str:
        """Return the name of the operator whose token this is; the watchdog's own user alone asks for another."""
        caller = self._caller(token)
        if not caller.operator:
            raise _denied(f"the token of {_name_of(caller.uid)} is no operator's")
        name = _name_of(caller.uid)
        if person not in {"", name} and caller.uid not in {0, os.getuid()}:
            problem = f"{name} asks in the name of another: for that a console needs the credential of the "
            raise _denied(f"{problem}watchdog's own user, {_name_of(os.getuid())}")
        return name

    def is_valid(self, token: str) -> bool:
        """Return whether a token was made here, and has not ended."""
        return self.mint.caller(token, self.clock.unix()) is not None

    def _token(self, caller: Caller) -> str:
        return self.mint.token(caller, self.clock.unix() + PROVED_S)

    def _caller(self, token: str) -> Caller:
        caller = self.mint.caller(token, self.clock.unix())
        if caller is None:
            raise NotAuthorizedError(grpc.StatusCode.UNAUTHENTICATED, REFUSAL)
        return caller

    def _decoded(self, credential: str) -> Credential:
        with _held(self._callers, 0.0):
            socket = self._socket.path()
            with _held(self._proofs, _PROOF_WAIT_S):
                try:
                    return decoded(credential, socket)
                except CredentialError as refused:
                    if self._socket.is_known:
                        raise _denied(str(refused)) from refused
                    raise NotAuthorizedError(grpc.StatusCode.UNAVAILABLE, str(refused)) from refused
                except DeepLinkError as problem:
                    raise NotAuthorizedError(grpc.StatusCode.UNAVAILABLE, str(problem)) from problem

    def _check_owner(self, caller: Caller, attempt: Attempt) -> str:
        owner = self.site.owner(attempt.job)
        if not owner and self.site.is_silent:
            owner = self._recorded_owner(attempt.job)
        owner = owner or self._asked_owner(attempt.job)
        if not caller.speaks_for(attempt) or owner != _name_of(caller.uid):
            raise _denied(f"job {attempt.job} is not of user {_name_of(caller.uid)}")
        return owner

    def _recorded_owner(self, job: int) -> str:
        record = self.journal.job(job)
        return record.user if record else ""

    def _asked_owner(self, job: int) -> str:
        with self._lock:
            if job in self._asking or len(self._asking) >= _MOST_QUESTIONS:
                problem = f"whose job is {job}? Slurm is asked already; try again"
                raise NotAuthorizedError(grpc.StatusCode.UNAVAILABLE, problem)
            self._asking.add(job)
        try:
            return self.site.asked_owner(job)
        except JobVanishedError as unknown:
            raise _denied(str(unknown)) from unknown
        except DeepLinkError as problem:
            owner = self._recorded_owner(job)
            if not owner:
                said = f"whose job is {job}? {problem}"
                raise NotAuthorizedError(grpc.StatusCode.UNAVAILABLE, said) from problem
            return owner
        finally:
            with self._lock:
                self._asking.discard(job)

    def _check_agent(self, caller: Caller, node: NodeName) -> None:
        if caller.uid not in {0, os.getuid(), *self.agents} or not caller.speaks_for_node(node):
            raise _denied(f"user {_name_of(caller.uid)} does not report for node {node}")


@contextlib.contextmanager
def _held(places: threading.Semaphore, wait_s: float) -> Iterator[None]:
    if not places.acquire(timeout=wait_s):
        raise NotAuthorizedError(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many proofs at once; try again")
    try:
        yield
    finally:
        places.release()


def _denied(problem: str) -> NotAuthorizedError:
    return NotAuthorizedError(grpc.StatusCode.PERMISSION_DENIED, problem)


def _name_of(uid: int) -> str:
    """Return what Slurm calls a user here: the name, or the number where there is none."""
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    return str(uid)


SERVICE = watch_pb2.DESCRIPTOR.services_by_name["Watch"].full_name
OPERATIONS = watch_pb2.DESCRIPTOR.services_by_name["Operations"].full_name


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


@contextlib.contextmanager
def aborting(context: grpc.ServicerContext) -> Iterator[None]:
    """End a call that is not believed with the status that says so."""
    try:
        yield
    except NotAuthorizedError as refused:
        context.abort(refused.status, str(refused))


def token_in(context: grpc.ServicerContext) -> str:
    """Return the token that a call carries; empty where it carries none."""
    return str(dict(context.invocation_metadata() or ()).get(TOKEN_HEADER, ""))


def watch_server(
    bind: str, servicer: WatchServicer, operations: watch_pb2_grpc.OperationsServicer | None = None
) -> BoundServer:
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
