"""Which sample goes into which shard: a pure function of what was listed and of the shards' size."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from deeplink.cache import block

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deeplink.cache.sources.origin import Listing


SHARDS_PER_MEMBER = 4
"""Shards wanted per member, at least: fewer would leave some members without, since a hash deals them out."""
MOST_SAMPLES = 1 << 20
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
class PackPlan:
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


def make_plan(source: str, listing: Listing, shard_bytes: int) -> PackPlan:
    """Return the shards for a listing, each at most `shard_bytes` of samples unless one sample alone is more.

    The digest is of source, names, sizes, change marks, shard size and format: packing the same plan again gives
    the same shards, as long as the files are what they were.
    """
    ends = np.cumsum(listing.sizes, dtype=np.int64)
    shards = tuple(cut(ends, 0, len(listing), shard_bytes))
    return PackPlan(shards, shard_bytes, _digest(source, listing, shard_bytes))


def cut(ends: np.ndarray, start: int, stop: int, shard_bytes: int) -> Iterator[ShardPlan]:
    """Yield the shards for rows `start` to `stop`, each as full as may be.

    Args:
        ends: int64, for each row of the listing the bytes of all rows up to it.
        start: the first row.
        stop: the row behind the last.
        shard_bytes: most bytes of samples in a shard, unless one sample alone is more.
    """
    while start < stop:
        before = int(ends[start - 1]) if start else 0
        # Empty files take no bytes: their number is bounded too, since a shard is made as a whole.
        most = min(int(np.searchsorted(ends, before + shard_bytes, side="right")), start + MOST_SAMPLES, stop)
        end = max(most, start + 1)
        yield ShardPlan(start, end, int(ends[end - 1]) - before)
        start = end


def _digest(source: str, listing: Listing, shard_bytes: int) -> str:
    whole = hashlib.sha256(f"deeplink plan {block.FORMAT} {shard_bytes}\n{source}\n".encode())
    for run in listing.keys.terminated():
        whole.update(run)
    whole.update(np.ascontiguousarray(listing.sizes, "<i8").data)
    whole.update(np.ascontiguousarray(listing.marks, "<u8").data)
    return whole.hexdigest()[:40]
