"""Asks a member's cache service for everything but samples: what it holds, whole shards to and from it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NoReturn, Self, cast

import grpc

from deeplink.cache.described import from_replies
from deeplink.cache.errors import MemberError, MemberRefusedError, MemberSilentError
from deeplink.resolving import UnresolvedError
from deeplink.types import ShardId
from deeplink.v1 import cache_pb2, cache_pb2_grpc
from deeplink.wary import agent_channel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import TracebackType

    from deeplink.cache.described import ShardDescription
    from deeplink.types import Member

CHUNK_BYTES = 1 << 20
_ASK_S = 5.0
_DESCRIBE_S = 60.0
"""A page read per block: some thousand, on a cold disk."""
_SLOWEST_BYTES_PER_S = 4 << 20
"""A shard that moves slower than this counts as stuck."""


def raise_member_error(member: Member, problem: grpc.RpcError) -> NoReturn:
    """Raise what gRPC reports as one of the member errors.

    Raises:
        MemberSilentError: no answer in time, or no connection.
        MemberRefusedError: the token was refused.
        MemberError: anything else.
    """
    # Every RpcError of a call is also a grpc.Call; the types do not say so.
    call = cast("grpc.Call", problem)
    code, details = call.code(), call.details() or ""
    if code in {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}:
        raise MemberSilentError(member.name, f"{member.address}: {details}") from problem
    if code is grpc.StatusCode.UNAUTHENTICATED:
        raise MemberRefusedError(member.name) from problem
    raise MemberError(member.name, f"{code.name}: {details}") from problem


def member_channel(member: Member, token: str) -> grpc.Channel:
    """Return a channel to a member; see `agent_channel`.

    Raises:
        MemberSilentError: its address is not known.
    """
    try:
        return agent_channel(member.address, token)
    except UnresolvedError as problem:
        raise MemberSilentError(member.name, str(problem)) from problem


class MemberClient:
    """One member, over a channel of its own. Close it when done. Not to be carried across fork."""

    def __init__(self, member: Member, token: str) -> None:
        self.member, self._token = member, token
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all calls and the connection."""
        if self._channel is not None:
            self._channel.close()

    def _stub(self) -> Any:
        with self._lock:
            if self._channel is None:
                self._channel = member_channel(self.member, self._token)
            return cache_pb2_grpc.CacheStub(self._channel)

    def held(self) -> dict[ShardId, int]:
        """Return the shards the member holds and their sizes in bytes.

        Raises:
            MemberError: it does not say.
        """
        try:
            reply = self._stub().Stat(cache_pb2.StatRequest(), timeout=_ASK_S)
        except grpc.RpcError as problem:
            raise_member_error(self.member, problem)
        return {ShardId(shard.id): shard.bytes for shard in reply.shards}

    def put(self, shard: ShardId, path: Path) -> bool:
        """Send the shard in `path`; True once the member has verified and published it, False if it had it.

        Raises:
            MemberError: it did not take it.
            OSError: `path` cannot be read.
        """
        total = path.stat().st_size
        try:
            reply = self._stub().Put(_requests(shard, path, total), timeout=_move_s(total))
        except grpc.RpcError as problem:
            raise_member_error(self.member, problem)
        return bool(reply.stored)

    def get(self, shard: ShardId, total: int) -> Iterator[bytes]:
        """Yield a shard's file in pieces; `total` is its size as `held` said.

        Raises:
            MemberError: the member does not send it, or not to the end.
        """
        try:
            for reply in self._stub().Get(cache_pb2.GetRequest(id=shard), timeout=_move_s(total)):
                yield reply.chunk
        except grpc.RpcError as problem:
            raise_member_error(self.member, problem)

    def describe(self, shard: ShardId) -> ShardDescription:
        """Return what a shard that the member holds says of itself.

        Raises:
            MemberError: the member does not say.
            ShardCorruptError: what it says does not fit together.
        """
        try:
            replies = list(self._stub().Describe(cache_pb2.DescribeRequest(id=shard), timeout=_DESCRIBE_S))
        except grpc.RpcError as problem:
            raise_member_error(self.member, problem)
        return from_replies(shard, replies)


def _move_s(total: int) -> float:
    return 30.0 + total / _SLOWEST_BYTES_PER_S


def _requests(shard: ShardId, path: Path, total: int) -> Iterator[cache_pb2.PutRequest]:
    yield cache_pb2.PutRequest(id=shard, total_bytes=total)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield cache_pb2.PutRequest(chunk=chunk)
