"""Reconnecting client for the watchdog service."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from deeplink.scheduler.watch.identity import MungeSocket, encoded, job_statement, node_statement
from deeplink.tokens import read_token
from deeplink.v1 import watch_pb2, watch_pb2_grpc
from deeplink.wire import attempt_to_wire, dialled, open_channel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from deeplink.types import Attempt

PROVE_S = 3.0
"""Bound on each call of a proof. With MUNGE's own bounds all of it ends before a launcher counts as hanging."""


class WatchdogClient:
    """A connection that is opened when it is needed and kept: a call that is late does not end it.

    A caller lives for weeks: the watchdog may come up after it, move, or have another secret meanwhile. After a
    failure the address and the token are looked at again; a new connection is made where one has changed.

    Args:
        address: `host:port` of the watchdog.
        token_file: a token that the operator made for this user; None: MUNGE proves who calls.
        speaks_for: the attempt or the node that the proof is for.
    """

    def __init__(self, address: str, token_file: Path | None, speaks_for: Attempt | str) -> None:
        self._address, self._token_file, self._speaks_for = address, token_file, speaks_for
        self._channel: grpc.Channel | None = None
        self._way: tuple[str, str] | None = None
        self._has_failed = False
        self._proved = ""
        self._socket = MungeSocket()

    def call(self, say: Callable[[Any], Any]) -> Any:
        """Return what `say` returns, which is given a stub of the watchdog's service and bounds the call itself.

        Raises:
            grpc.RpcError: the watchdog was not reached, or refused.
            TokenFileError: the token cannot be read.
            UnresolvedError: its address is not known.
            CredentialError: MUNGE refused.
            CommandMissingError, CommandTimeoutError, CommandError: MUNGE cannot be asked.
        """
        channel = self._connected()
        try:
            return say(watch_pb2_grpc.WatchStub(channel))
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
            if isinstance(self._speaks_for, str):
                request.node = self._speaks_for
                statement = node_statement(self._speaks_for, request.nonce)
            else:
                request.attempt.CopyFrom(attempt_to_wire(self._speaks_for))
                statement = job_statement(self._speaks_for, request.nonce)
            request.credential = encoded(statement, socket)
            token: str = stub.Prove(request, timeout=PROVE_S).token
            return token
