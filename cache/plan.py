"""Which sample goes into which shard: a pure function of what was listed and of the shards' size."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from deeplink.cache import block

if TYPE_CHECKING:
    from deeplink.cache.source import Listing


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
    """All shards to be, and the digest of everything they follow from."""

    shards: tuple[ShardPlan, ...]
    digest: str


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
    return Plan(tuple(shards), _digest(source, listing, shard_bytes))


def _digest(source: str, listing: Listing, shard_bytes: int) -> str:
    whole = hashlib.sha256(f"deeplink plan {block.FORMAT} {shard_bytes}\n{source}\n".encode())
    for key in listing.keys:
        whole.update(key.encode() + b"\0")
    whole.update(listing.sizes.astype("<i8").tobytes())
    whole.update(listing.marks.astype("<u8").tobytes())
    return whole.hexdigest()[:40]
