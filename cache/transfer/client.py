"""Asks a member's cache service for everything but samples: what it holds, whole shards to and from it."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self, cast

import grpc

from deeplink.cache.errors import MemberError, MemberSilentError
from deeplink.core.types import ShardId
from deeplink.rpc.channel import agent_channel
from deeplink.rpc.resolving import UnresolvedError
from deeplink.v1 import cache_pb2, cache_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from deeplink.cache.store.described import ShardDescription
    from deeplink.core.types import Member

CHUNK_BYTES = 1 << 20
_SILENT = {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
_ASK_S = 5.0
_DESCRIBE_S = 60.0
"""A page read per block: some thousand, on a cold disk."""
_SLOWEST_BYTES_PER_S = 4 << 20
"""A shard that moves slower than this counts as stuck."""


@contextmanager
def _grpc_errors(member: Member) -> Iterator[None]:
    """Raise what a gRPC call to `member` meets as one of the member errors."""
    try:
        yield
    except grpc.RpcError as problem:
        # Every RpcError of a call is also a grpc.Call; the types do not say so.
        call = cast("grpc.Call", problem)
        code, details = call.code(), call.details() or ""
        if code in _SILENT:
            raise MemberSilentError(member.name, f"{member.address}: {details}") from problem
        if code is grpc.StatusCode.UNAUTHENTICATED:
            raise MemberError.refused(member.name) from problem
        raise MemberError(member.name, f"{code.name}: {details}") from problem


@contextmanager
def member_channel(member: Member, token: str) -> Iterator[grpc.Channel]:
    """Give a channel to a member; what calls over it meet is raised as one of the member errors."""
    with _channel(member, token) as channel, _grpc_errors(member):
        yield channel


def _channel(member: Member, token: str) -> grpc.Channel:
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

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """End all calls and the connection."""
        if self._channel is not None:
            self._channel.close()

    def _stub(self) -> Any:
        with self._lock:
            if self._channel is None:
                self._channel = _channel(self.member, self._token)
            return cache_pb2_grpc.CacheStub(self._channel)

    def held(self) -> dict[ShardId, int]:
        """Return the shards the member holds and their sizes in bytes."""
        with _grpc_errors(self.member):
            reply = self._stub().Stat(cache_pb2.StatRequest(), timeout=_ASK_S)
            return {ShardId(shard.id): shard.bytes for shard in reply.shards}

    def put(self, shard: ShardId, path: Path) -> bool:
        """Send the shard in `path`; True once the member has verified and published it, False if it had it."""
        total = path.stat().st_size
        with _grpc_errors(self.member):
            reply = self._stub().Put(_requests(shard, path, total), timeout=_move_s(total))
            return bool(reply.stored)

    def get(self, shard: ShardId, total: int) -> Iterator[bytes]:
        """Yield a shard's file in pieces; `total` is its size as `held` said."""
        with _grpc_errors(self.member):
            for reply in self._stub().Get(cache_pb2.GetRequest(id=shard), timeout=_move_s(total)):
                yield reply.chunk

    def describe(self, shard: ShardId) -> ShardDescription:
        """Return what a shard that the member holds says of itself."""
        from deeplink.cache.store.described import from_replies  # noqa: PLC0415 - pyarrow: no agent needs it to start

        with _grpc_errors(self.member):
            replies = list(self._stub().Describe(cache_pb2.DescribeRequest(id=shard), timeout=_DESCRIBE_S))
        return from_replies(shard, replies)


def _move_s(total: int) -> float:
    return 30.0 + total / _SLOWEST_BYTES_PER_S


def _requests(shard: ShardId, path: Path, total: int) -> Iterator[cache_pb2.PutRequest]:
    yield cache_pb2.PutRequest(id=shard, total_bytes=total)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield cache_pb2.PutRequest(chunk=chunk)
