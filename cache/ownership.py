"""Which members a shard belongs on: weighted rendezvous hashing, so that nobody is asked and little moves. Pure.

A member's weight is the size of its SSD's share for us: the store's budget in GiB, rounded down to a power of two
(`weight_of`). Its domain is what takes it down together with others: a leaf switch, a rack. Both are fixed where
the list of members is made, and travel in it (`NAME=HOST:PORT*WEIGHT@DOMAIN`): by `deeplink run` for a job, by
the site for standing agents. So whoever has the list agrees on the order, whatever an SSD has become since, and
budgets that differ by a few per cent are alike. Who has a list without them, or an older one, finds a shard all
the same: the order says only whom to ask first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from deeplink.types import Member, NodeName, ShardId

_GIB = 1 << 30
_HASHES = float(1 << 64)


def weight_of(budget: int) -> int:
    """Return the weight of a member whose store may hold so many bytes: GiB, rounded down to a power of two.

    >>> weight_of(7 << 40), weight_of(100), weight_of(3 << 30)
    (4096, 1, 2)
    """
    return 1 << (max(budget // _GIB, 1).bit_length() - 1)


@dataclass(frozen=True, slots=True)
class MemberAttributes:
    """What a list of members says of them beyond their names.

    Attributes:
        weight: how much each is to hold against the others; 1 for who is not in it.
        domain: what each fails together with; those that are not in it count as one domain: nobody knows what
            parts them. Empty where the list parts nobody.
    """

    weight: Mapping[NodeName, int] = field(default_factory=dict)
    domain: Mapping[NodeName, str] = field(default_factory=dict)


_ALIKE = MemberAttributes()


def standing(members: Iterable[Member]) -> MemberAttributes:
    """Return what `members` say of themselves, as `ranked` takes it."""
    listed = tuple(members)
    is_parted = len({member.domain for member in listed}) > 1
    return MemberAttributes(
        {member.name: member.weight for member in listed},
        {member.name: member.domain for member in listed} if is_parted else {},
    )


def ranked(shard: ShardId, members: Iterable[NodeName], known: MemberAttributes = _ALIKE) -> tuple[NodeName, ...]:
    """Return the members in the order in which they are to hold `shard`.

    By score, the order of two members does not depend on the others. The score is the logarithmic method of
    Schindelhauer and Schomaker ("Weighted Distributed Hash Tables", SPAA 2005), as Jason Resch put it for
    rendezvous hashing (SNIA SDC 2015): -weight / ln(hash), the hash uniform in (0, 1). Equal scores: by hash, then
    by name.

    Then the best one of another domain than the first one's becomes the second. So no domain has all copies of two
    or more where there is another one; where the best are of several already, they stay the owners; else the last
    of them makes room. When a member leaves, only the copies it held move, each to one other; when one joins, only
    those that it takes: with domains as without (the tests show it for any list). Without domains a lost member's
    share goes to all the others in proportion to their weights; with them, to those that are still apart.

    What it costs is evenness: members outside the largest domain hold at least one copy of whatever that one would
    hold twice. With two copies and members alike, the most that one of 16 holds against its even share, of 20,000
    shards: 1.03 without domains, on 4 and 4 and 4 and 4, and on 8 and 8; 1.2 on 9 and 7; 2.0 on 12 and 4; 8.0 on
    15 and 1. Of the copies 10, 23, 24, 29 and 44 % lie elsewhere than they would without domains.

    >>> ranked("00" * 20, ["n0", "n1", "n2"]) == ranked("00" * 20, ["n2", "n0", "n1"])
    True

    Args:
        shard: which.
        members: their names, in any order.
        known: their weights and domains.
    """
    weight = known.weight

    def place(member: NodeName) -> tuple[float, int, NodeName]:
        number = xxhash.xxh3_64_intdigest(f"{shard}\0{member}".encode())
        # Half a step off both ends: neither 0, whose logarithm there is none of, nor 1, whose logarithm is 0.
        uniform = min((number + 0.5) / _HASHES, 1.0 - 2.0**-53)
        return weight.get(member, 1) / math.log(uniform), -number, member

    placed = sorted(members, key=place)
    if known.domain and placed:
        apart = _apart(placed, placed[:1], known)
        if apart is not None:
            placed.remove(apart)
            placed.insert(1, apart)
    return tuple(placed)


def _apart(order: Iterable[NodeName], holders: Collection[NodeName], known: MemberAttributes) -> NodeName | None:
    """Return the first in `order` of another domain than the one of all `holders`; None: there is no such."""
    domain = known.domain
    held = {domain.get(name, "") for name in holders}
    if len(held) != 1:
        return None
    (one,) = held
    return next((name for name in order if domain.get(name, "") != one), None)


def owners(
    shard: ShardId, members: Iterable[NodeName], replicas: int, known: MemberAttributes = _ALIKE
) -> tuple[NodeName, ...]:
    """Return the `replicas` members a shard belongs on, the first one first; all members when there are fewer."""
    return ranked(shard, members, known)[:replicas]


def next_holder(
    order: Sequence[NodeName], holders: Collection[NodeName], replicas: int, known: MemberAttributes = _ALIKE
) -> NodeName | None:
    """Return who is to take the next copy of a shard that some hold already, owners or not; None: nobody is left.

    The first in `order`; for the last copy, where all others would be in one domain, the first of another one.

    Args:
        order: who may take it, as `ranked` has them.
        holders: who has a copy, or is to get it before.
        replicas: copies there are to be.
        known: the members' weights and domains.
    """
    left = [name for name in order if name not in holders]
    if known.domain and holders and len(holders) == replicas - 1:
        apart = _apart(left, holders, known)
        if apart is not None:
            return apart
    return left[0] if left else None
