"""Whom the watchdog believes: the tokens of its callers, and whose heartbeats, reports and requests it takes."""

from __future__ import annotations

import base64
import contextlib
import hmac
import os
import pwd
import re
import threading
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

import grpc

from deeplink.core.errors import DeepLinkError
from deeplink.core.types import NodeName
from deeplink.rpc.channel import attempt_from_wire
from deeplink.rpc.tokens import TOKEN_HEADER
from deeplink.scheduler.liveness.watchdog_client import job_statement, node_statement, operator_statement
from deeplink.scheduler.slurm.client import JobVanishedError
from deeplink.scheduler.slurm.munge import Credential, CredentialError, MungeSocket, decoded
from deeplink.scheduler.slurm.nodeset import fold

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from deeplink.core.clock import Clock
    from deeplink.core.types import Attempt
    from deeplink.scheduler.journal.journal import Journal
    from deeplink.scheduler.watch.observer import Observer
    from deeplink.v1 import watch_pb2

PROVED_S = 86_400.0  # how long a token lasts that MUNGE was shown for; its holder proves himself again then
REFUSAL = (
    "the call carries no token of this watchdog, or one that has ended. With MUNGE the caller proves himself "
    "again; else `deeplink watch --mint USER` makes another for watch_token_file"
)
_MOST_PROOFS = 4  # proofs checked at once: each asks munged by a process of its own. As many more may wait
_PROOF_WAIT_S = 1.0
_MOST_QUESTIONS = 4
"""Jobs that Slurm is asked for at once: the rest of the server's threads are left to heartbeats of known jobs."""


NONCE_S = 30.0
_SECOND = re.compile(r"\d{1,12}", re.ASCII)
_CLAIMS = re.compile(
    r"u(?P<uid>\d{1,10})\.e(?P<until>\d{1,12})(?:(?P<operator>\.o)|\.j(?P<job>\d{1,18})\.(?P<restart>\d{1,9})|\.n(?P<node>[^:]{1,1024}))?",
    re.ASCII,
)


class NotAuthorizedError(DeepLinkError):
    """A call is not believed, or it cannot be found out whether it is to be."""

    def __init__(self, status: grpc.StatusCode, problem: str) -> None:
        super().__init__(problem)
        self.status, self.problem = status, problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The holder of a token."""

    uid: int  # the user's
    job: int = 0  # the one job that he may speak for, with its restart count; 0: any job of his
    restart: int = 0
    node: str = ""  # the one node that he may speak for; empty: none, or any
    operator: bool = False  # he asks for what people decide, and speaks for no job or node

    def speaks_for(self, attempt: Attempt) -> bool:
        """Return whether the token was made for this attempt's job; whose job that is, Slurm knows."""
        return not (self.node or self.operator) and (
            not self.job or (self.job, self.restart) == (attempt.job, attempt.restart)
        )

    def speaks_for_node(self, node: NodeName) -> bool:
        """Return whether the token was made for this node, or for none in particular."""
        return not (self.job or self.operator) and self.node in {"", node}


@dataclass(frozen=True, slots=True)
class TokenMint:
    """Makes tokens and reads them back; whoever has the secret makes the same ones."""

    secret: str

    def token(self, caller: Caller, until: float) -> str:
        """Return the token that names this caller until a moment, seconds since 1970.

        >>> TokenMint("s").token(Caller(uid=1000, job=17), 99.0)[:14]
        'u1000.e99.j17.'
        """
        claims = f"u{caller.uid}.e{int(until)}{'.o' * caller.operator}"
        if caller.job:
            claims += f".j{caller.job}.{caller.restart}"
        elif caller.node:
            claims += f".n{quote(caller.node, safe='')}"
        return f"{claims}:{self._digest(claims)}"

    def caller(self, token: str, unix: float) -> Caller | None:
        """Return whom a token names; None where it was not made here, or has ended by `unix`."""
        claims, _, digest = token.partition(":")
        found = _CLAIMS.fullmatch(claims)
        if not found or not hmac.compare_digest(digest.encode(), self._digest(claims).encode()):
            return None
        if unix >= int(found["until"]):
            return None
        return Caller(
            uid=int(found["uid"]),
            job=int(found["job"] or 0),
            restart=int(found["restart"] or 0),
            node=unquote(found["node"] or ""),
            operator=bool(found["operator"]),
        )

    def nonce(self, unix: float) -> str:
        """Return a nonce of this second, which the secret knows again: it does not have to be remembered."""
        return self._nonce(str(int(unix)))

    def made_lately(self, nonce: str, unix: float) -> bool:
        """Return whether a nonce was made here within the last half minute."""
        # Many callers may have the same one: MUNGE itself decodes no credential a second time.
        second = nonce.partition(":")[0]
        return (
            _SECOND.fullmatch(second) is not None
            and hmac.compare_digest(nonce.encode(), self._nonce(second).encode())
            and 0.0 <= unix - int(second) <= NONCE_S
        )

    def _nonce(self, second: str) -> str:
        return f"{second}:{self._digest(f'nonce {second}')}"

    def _digest(self, claims: str) -> str:
        digest = hmac.new(self.secret.encode(), f"deeplink watch {claims}".encode(), sha256).digest()
        return base64.urlsafe_b64encode(digest).decode().rstrip("=")


@dataclass(slots=True)
class Authorizer:
    """Believes heartbeats of the job's user, and reports on nodes of users who run agents. Thread-safe."""

    mint: TokenMint  # makes and reads the callers' tokens
    site: Observer  # whose jobs and which nodes there are
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
