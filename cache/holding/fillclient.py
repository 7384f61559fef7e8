"""Asks a member to bring shards, or to drop them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc

from deeplink.cache.client import member_channel, raise_member_error
from deeplink.types import format_members
from deeplink.v1 import cache_pb2, cache_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from deeplink.cache.index import Index
    from deeplink.types import Member, ShardId

_START_S = 120.0
_SLOWEST_BYTES_PER_S = 1 << 20
"""A member that is slower than this, over all it is to bring, counts as stuck: sources are slow."""
_EVICT_S = 600.0
_MOST_AT_ONCE = 10_000


def fill(
    member: Member, token: str, name: str, index: Index, numbers: Sequence[int], *, members: Sequence[Member]
) -> Iterator[cache_pb2.FillReply]:
    """Have a member bring shards; yield what became of each as it is known.

    Args:
        member: whom to ask.
        token: what the call carries.
        name: the dataset.
        index: its version.
        numbers: of the shards.
        members: who may have copies.

    Raises:
        MemberError: the member does not do it, or not to the end.
    """
    size = sum(index.shards[number].bytes for number in numbers)
    request = cache_pb2.FillRequest(
        name=name, version=index.version, shards=numbers, members=format_members(tuple(members))
    )
    with member_channel(member, token) as channel:
        try:
            yield from cache_pb2_grpc.CacheStub(channel).Fill(
                request, timeout=_START_S + size / _SLOWEST_BYTES_PER_S
            )
        except grpc.RpcError as problem:
            raise_member_error(member, problem)


def evict(
    member: Member, token: str, shards: Sequence[ShardId], *, force: bool, dry_run: bool
) -> list[cache_pb2.EvictedShard]:
    """Have a member drop shards; return what became of each.

    Args:
        member: whom to ask.
        token: what the call carries.
        shards: which.
        force: also those that a job needs or that may not be had again.
        dry_run: only say what would be dropped.

    Raises:
        MemberError: the member does not do it.
    """
    found: list[cache_pb2.EvictedShard] = []
    with member_channel(member, token) as channel:
        stub = cache_pb2_grpc.CacheStub(channel)
        for start in range(0, len(shards), _MOST_AT_ONCE):
            request = cache_pb2.EvictRequest(
                shards=shards[start : start + _MOST_AT_ONCE], force=force, dry_run=dry_run
            )
            try:
                found.extend(stub.Evict(request, timeout=_EVICT_S).shards)
            except grpc.RpcError as problem:
                raise_member_error(member, problem)
    return found
