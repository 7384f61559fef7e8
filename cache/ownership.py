"""Which members a shard belongs on: rendezvous hashing, so that nobody is asked and little moves. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deeplink.types import NodeName, ShardId


def ranked(shard: ShardId, members: Iterable[NodeName]) -> tuple[NodeName, ...]:
    """Return the members in the order in which they are to hold `shard`.

    The order of two members does not depend on the others: when one leaves, only the shards it held move, and they
    move to all the others alike.

    >>> ranked("00" * 20, ["n0", "n1", "n2"]) == ranked("00" * 20, ["n2", "n0", "n1"])
    True
    """
    return tuple(sorted(members, key=lambda member: (-_weight(shard, member), member)))


def owners(shard: ShardId, members: Iterable[NodeName], replicas: int) -> tuple[NodeName, ...]:
    """Return the `replicas` members a shard belongs on, the first one first; all members when there are fewer."""
    return ranked(shard, members)[:replicas]


def _weight(shard: ShardId, member: NodeName) -> int:
    return xxhash.xxh3_64_intdigest(f"{shard}\0{member}".encode())
