"""Which sample goes into which shard: a pure function of what was listed and of the shards' size."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from deeplink.cache import block

if TYPE_CHECKING:
    from deeplink.cache.source import Listing


SHARDS_PER_MEMBER = 4
"""Shards wanted per member, at least: fewer would leave some members without, since a hash deals them out."""
_LEAST_BYTES = 64 << 10
"""Shards are not made smaller than this for the sake of their number: each is a file and a call."""


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One shard to be: rows `start` to `stop` of the sorted listing, and their bytes."""

    start: int
    stop: int
    payload: int

    @property
    def rows(self) -> slice:
        """The rows as a slice of the listing's columns."""
        return slice(self.start, self.stop)


@dataclass(frozen=True, slots=True)
class Plan:
    """All shards to be, the most bytes of samples in one, and the digest of everything they follow from."""

    shards: tuple[ShardPlan, ...]
    shard_bytes: int
    digest: str


def shard_size(total: int, most: int, members: int) -> int:
    """Return how many bytes of samples go into a shard, so that `members` get about four to eight each.

    A power of two below `most`, so that a dataset that grows a little, or goes to a few members more, keeps it.

    >>> shard_size(100 << 20, 256 << 20, 4) == 4 << 20
    True

    Args:
        total: bytes of all samples.
        most: the upper bound; what a shard has where one member alone holds all.
        members: how many members share the shards.
    """
    if members <= 1:
        return most
    wanted = max(total // (members * SHARDS_PER_MEMBER), _LEAST_BYTES)
    return min(most, 1 << (wanted.bit_length() - 1))


def make_plan(source: str, listing: Listing, shard_bytes: int) -> Plan:
    """Return the shards for a listing, each at most `shard_bytes` of samples unless one sample alone is more.

    The digest is of source, names, sizes, change marks, shard size and format: packing the same plan again gives
    the same shards, as long as the files are what they were.
    """
    ends = np.cumsum(listing.sizes, dtype=np.int64)
    shards: list[ShardPlan] = []
    start, before = 0, 0
    while start < len(listing):
        stop = max(int(np.searchsorted(ends, before + shard_bytes, side="right")), start + 1)
        shards.append(ShardPlan(start, stop, int(ends[stop - 1]) - before))
        start, before = stop, int(ends[stop - 1])
    return Plan(tuple(shards), shard_bytes, _digest(source, listing, shard_bytes))


def _digest(source: str, listing: Listing, shard_bytes: int) -> str:
    whole = hashlib.sha256(f"deeplink plan {block.FORMAT} {shard_bytes}\n{source}\n".encode())
    for key in listing.keys:
        whole.update(key.encode() + b"\0")
    whole.update(listing.sizes.astype("<i8").tobytes())
    whole.update(listing.marks.astype("<u8").tobytes())
    return whole.hexdigest()[:40]
