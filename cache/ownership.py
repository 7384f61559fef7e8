"""Which members a shard belongs on: weighted rendezvous hashing, so that nobody is asked and little moves. Pure.

A member's weight is the size of its SSD's share for us: the store's budget in GiB, rounded down to a power of two
(`weight_of`). It is fixed where the list of members is made, and travels in it (`NAME=HOST:PORT*WEIGHT`): by
`deeplink run` for a job, by the site for standing agents. So whoever has the list agrees on the order, whatever an
SSD has become since, and budgets that differ by a few per cent are alike. Who has a list without weights, or an
older one, finds a shard all the same: the order says only whom to ask first.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from deeplink.types import Member, NodeName, ShardId

_GIB = 1 << 30
_HASHES = float(1 << 64)


def weight_of(budget: int) -> int:
    """Return the weight of a member whose store may hold so many bytes: GiB, rounded down to a power of two.

    >>> weight_of(7 << 40), weight_of(100), weight_of(3 << 30)
    (4096, 1, 2)
    """
    return 1 << (max(budget // _GIB, 1).bit_length() - 1)


def weights(members: Iterable[Member]) -> dict[NodeName, int]:
    """Return each member's weight by name, as `ranked` takes them."""
    return {member.name: member.weight for member in members}


def ranked(
    shard: ShardId, members: Iterable[NodeName], weight: Mapping[NodeName, int] | None = None
) -> tuple[NodeName, ...]:
    """Return the members in the order in which they are to hold `shard`.

    The order of two members does not depend on the others: when one leaves, only the shards it held move, and they
    move to all the others in proportion to their weights. The score is the logarithmic method of Schindelhauer and
    Schomaker ("Weighted Distributed Hash Tables", SPAA 2005), as Jason Resch put it for rendezvous hashing (SNIA
    SDC 2015): -weight / ln(hash), the hash uniform in (0, 1). Equal scores: by hash, then by name.

    >>> ranked("00" * 20, ["n0", "n1", "n2"]) == ranked("00" * 20, ["n2", "n0", "n1"])
    True

    Args:
        shard: which.
        members: their names, in any order.
        weight: how much each is to hold against the others; 1 for who is not in it.
    """
    known = weight or {}

    def place(member: NodeName) -> tuple[float, int, NodeName]:
        number = xxhash.xxh3_64_intdigest(f"{shard}\0{member}".encode())
        # Half a step off both ends: neither 0, whose logarithm there is none of, nor 1, whose logarithm is 0.
        uniform = min((number + 0.5) / _HASHES, 1.0 - 2.0**-53)
        return known.get(member, 1) / math.log(uniform), -number, member

    return tuple(sorted(members, key=place))


def owners(
    shard: ShardId, members: Iterable[NodeName], replicas: int, weight: Mapping[NodeName, int] | None = None
) -> tuple[NodeName, ...]:
    """Return the `replicas` members a shard belongs on, the first one first; all members when there are fewer."""
    return ranked(shard, members, weight)[:replicas]
