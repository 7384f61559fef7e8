"""Reconnecting client for the watchdog service, and how it proves who it is.

A MUNGE credential is exchanged for a token that names its user, and a job or a node besides.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deeplink.core.clock import SystemClock
from deeplink.rpc.channel import attempt_to_wire, dialled, open_channel
from deeplink.rpc.resolving import UnresolvedError, addresses, split_address
from deeplink.rpc.tokens import read_token
from deeplink.scheduler.slurm.munge import MungeSocket, encoded
from deeplink.v1 import watch_pb2, watch_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from deeplink.core.types import Attempt

PROVE_S = 3.0  # bound on each call of a proof; with MUNGE's own all of it ends before a launcher counts as hanging
ANSWER_S = 1.0  # how long it may take to answer, for who only wants to know
BINDINGS = "deeplink.bindings"
"""The health service's name for: nodes hinted by name are taken off jobs that wait for them."""
_REFUSED = (
    "it refuses our token, which is not of this watchdog or has ended: `deeplink watch --mint USER` makes one for "
    "watch_token_file"
)


def job_statement(attempt: Attempt, nonce: str) -> str:
    """Return what a job's launcher has MUNGE vouch for."""
    return f"deeplink watch job {attempt} {nonce}"


def node_statement(node: str, nonce: str) -> str:
    """Return what a standing agent has MUNGE vouch for."""
    return f"deeplink watch node {quote(node, safe='')} {nonce}"


def operator_statement(nonce: str) -> str:
    """Return what an operator has MUNGE vouch for."""
    return f"deeplink watch operator {nonce}"


class WatchdogClient:
    """A connection that is opened when it is needed and kept: a call that is late does not end it.

    A caller lives for weeks: the watchdog may come up after it, move, or have another secret meanwhile. After a
    failure the address and the token are looked at again; a new connection is made where one has changed.
    """

    def __init__(self, address: str, token_file: Path | None, speaks_for: Attempt | str | None) -> None:
        """Speak for a job, a node, or as an operator where `speaks_for` is None."""
        self._address, self._token_file, self._speaks_for = address, token_file, speaks_for
        self._channel: grpc.Channel | None = None
        self._way: tuple[str, str] | None = None
        self._has_failed = False
        self._proved = ""
        self._socket = MungeSocket()

    def call(self, say: Callable[[Any], Any]) -> Any:
        """Return what `say` returns, called with a stub of the watchdog's service; `say` bounds the call."""
        channel = self._connected()
        stub = watch_pb2_grpc.OperationsStub if self._speaks_for is None else watch_pb2_grpc.WatchStub
        try:
            return say(stub(channel))
        except grpc.RpcError as problem:
            self._has_failed = True
            if problem.code() is grpc.StatusCode.UNAUTHENTICATED:
                self._proved = ""
            raise

    def _connected(self) -> grpc.Channel:
        if self._channel is not None and not self._has_failed:
            return self._channel
        token = self._token()
        way = (dialled(self._address), token)
        if self._channel is None or way != self._way:
            self.close()
            self._channel, self._way = open_channel(self._address, token), way
        self._has_failed = False
        return self._channel

    def close(self) -> None:
        """Give up a call under way; the next one connects again."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _token(self) -> str:
        if self._token_file is not None:
            return read_token(self._token_file)
        if not self._proved:
            self._proved = self._prove()
        return self._proved

    def _prove(self) -> str:
        socket = self._socket.path()  # first: Slurm may take longer to answer than a nonce lasts
        with open_channel(self._address, "") as channel:
            stub = watch_pb2_grpc.IdentityStub(channel)
            request = watch_pb2.ProveRequest(
                nonce=stub.Challenge(watch_pb2.ChallengeRequest(), timeout=PROVE_S).nonce
            )
            if self._speaks_for is None:
                request.operator = True
                statement = operator_statement(request.nonce)
            elif isinstance(self._speaks_for, str):
                request.node = self._speaks_for
                statement = node_statement(self._speaks_for, request.nonce)
            else:
                request.attempt.CopyFrom(attempt_to_wire(self._speaks_for))
                statement = job_statement(self._speaks_for, request.nonce)
            request.credential = encoded(statement, socket)
            token: str = stub.Prove(request, timeout=PROVE_S).token
            return token


# What a watchdog's health service says.


def bindings_of(user: str) -> str:
    """Return the same for the jobs of one user: a watchdog without an operator's rights changes only its own."""
    return f"{BINDINGS}.{user}"


def looks_after(address: str, user: str) -> str:
    """Return why a watchdog does not take hinted nodes off a user's waiting jobs; empty where it does."""
    # On the loopback, one that looks after its user's jobs alone does not count: it may end with the login
    # session.
    problem = asked_watchdog(address, service=BINDINGS)
    if not problem.startswith("not found"):
        return problem
    if _is_loopback(address):
        return "it does not look after all users' jobs, and your own does not count on the loopback"
    return asked_watchdog(address, service=bindings_of(user))


def _is_loopback(address: str) -> bool:
    """Whether a host that answered lies on this host's loopback; true as well where that cannot be found out."""
    try:
        found = addresses(*split_address(address), SystemClock())
        hosts = [ip_address(str(where[0]).partition("%")[0]) for *_, where in found]
    except (UnresolvedError, ValueError):
        return True
    return any((getattr(host, "ipv4_mapped", None) or host).is_loopback or host.is_unspecified for host in hosts)


def asked_watchdog(address: str, token: str = "", *, service: str = "", timeout_s: float = ANSWER_S) -> str:
    """Ask the watchdog whether it is well, or does one thing; return what is wrong, empty where nothing is."""
    # It needs no token, but a token that is given has to be a valid one.
    try:
        channel = open_channel(address, token)
    except UnresolvedError as problem:
        return str(problem)
    try:
        request = health_pb2.HealthCheckRequest(service=service)
        reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
    except grpc.RpcError as problem:
        if problem.code() is grpc.StatusCode.UNAUTHENTICATED:
            return _REFUSED
        return f"{problem.code().name.lower().replace('_', ' ')}: {problem.details()}"
    finally:
        channel.close()
    return "" if reply.status == health_pb2.HealthCheckResponse.SERVING else "it says that it does not serve"
