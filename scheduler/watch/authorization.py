"""Decides whose beats and reports the watchdog believes."""

from __future__ import annotations

import contextlib
import hmac
import os
import pwd
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import grpc

from deeplink.errors import DeepLinkError
from deeplink.scheduler.slurm.client import JobVanishedError
from deeplink.scheduler.slurm.nodeset import fold
from deeplink.scheduler.watch.identity import (
    PROVED_S,
    Caller,
    Credential,
    CredentialError,
    MungeSocket,
    TokenMint,
    decoded,
    job_statement,
    node_statement,
)
from deeplink.types import NodeName
from deeplink.v1 import watch_pb2
from deeplink.wire import attempt_from_wire

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from deeplink.clock import Clock
    from deeplink.scheduler.watch.journal import Journal
    from deeplink.types import Attempt

IDENTITY = watch_pb2.DESCRIPTOR.services_by_name["Identity"].full_name
REFUSAL = (
    "the call carries no token of this watchdog, or one that has ended. With MUNGE the caller proves himself "
    "anew; else `deeplink watch --mint USER` makes another for watch_token_file"
)
_MOST_PROOFS = 4
"""Proofs checked at once: each asks munged by a process of its own. As many more may wait."""
_PROOF_WAIT_S = 1.0
_MOST_QUESTIONS = 4
"""Jobs that Slurm is asked for at once: the rest of the server's threads are left to beats of known jobs."""


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
        """Ask Slurm whose job it is, for a short time.

        Raises:
            JobVanishedError: Slurm knows no such job.
            DeepLinkError: Slurm does not answer.
        """
        ...

    def knows(self, name: NodeName) -> bool:
        """Return whether Slurm knows a node of this name; True as well while Slurm has not been heard."""
        ...

    def nodes_at(self, hosts: Collection[str]) -> frozenset[NodeName] | None:
        """Return the nodes that have one of these host names or addresses; None while Slurm has not been heard."""
        ...


@dataclass(slots=True)
class Authorizer:
    """A beat is believed from the user whose job it is, a node's report from a user who runs agents. Thread-safe.

    Attributes:
        mint: makes and reads the callers' tokens.
        site: whose jobs and which nodes there are.
        journal: knows the users of jobs while Slurm does not answer; they were proved when they were recorded.
        clock: time.
        agents: users whose standing agents are believed, besides root and the watchdog's own.
    """

    mint: TokenMint
    site: SlurmRecords
    journal: Journal
    clock: Clock
    agents: Collection[int] = ()
    _callers: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(2 * _MOST_PROOFS))
    _proofs: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(_MOST_PROOFS))
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _asking: set[int] = field(default_factory=set)
    _socket: MungeSocket = field(default_factory=MungeSocket)

    def challenge(self) -> str:
        """Return a nonce for one proof."""
        return self.mint.nonce(self.clock.unix())

    def prove(self, request: watch_pb2.ProveRequest) -> str:
        """Return a token for the job or the node that a MUNGE credential speaks for.

        Raises:
            NotAuthorizedError: it is not the caller's, or MUNGE or Slurm cannot be asked.
        """
        if not self.mint.made_lately(request.nonce, self.clock.unix()):
            raise NotAuthorizedError(grpc.StatusCode.FAILED_PRECONDITION, "the nonce is unknown or too old")
        attempt = attempt_from_wire(request.attempt)
        said = (
            node_statement(request.node, request.nonce) if request.node else job_statement(attempt, request.nonce)
        )
        credential = self._decoded(request.credential)
        if not hmac.compare_digest(credential.statement.encode(), said.encode()):
            raise _denied("the credential was made for something else")
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
        """Return the name of the attempt's user, whose token this is.

        Raises:
            NotAuthorizedError: it is another's, or Slurm does not say whose job it is.
        """
        return self._check_owner(self._caller(token), attempt)

    def agent(self, token: str, node: NodeName) -> None:
        """Check that this is the token of a standing agent of this node.

        Raises:
            NotAuthorizedError: it is not.
        """
        self._check_agent(self._caller(token), node)

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
