"""What a version that follows another one shares with it: which shards stay, and what is packed anew. Pure.

A shard holds a run of the sorted keys, in the new version too. It stays when all its files are as they were and
no new one sorts between them; else that run is packed anew. New files between two runs, or behind the last one,
become shards of their own, or join a neighbour that is packed anew.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from deeplink.cache.packing.plan import PackPlan, ShardPlan, cut

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deeplink.cache.names import Names
    from deeplink.cache.sources.origin import Listing


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """The files of the version before, as they were when they were packed.

    Attributes:
        keys: sorted.
        sizes: int64, bytes.
        marks: uint64, their change marks; None where they were not kept, so that every file counts as changed.
        counts: how many of them each shard holds, one after another.
    """

    keys: Names
    sizes: np.ndarray
    marks: np.ndarray | None
    counts: Sequence[int]


@dataclass(frozen=True, slots=True)
class Appended:
    """The plan of the new version, and which shard of the old one each shard that stays is."""

    plan: PackPlan
    kept: dict[int, int]


@dataclass(slots=True)
class _Cutter:
    """Collects shards; runs that are to be packed anew are joined where they touch."""

    ends: np.ndarray
    most: int
    shards: list[ShardPlan]
    kept: dict[int, int]
    anew: int = -1

    def pack(self, start: int) -> None:
        if self.anew < 0:
            self.anew = start

    def flush(self, stop: int) -> None:
        if 0 <= self.anew < stop:
            self.shards.extend(cut(self.ends, self.anew, stop, self.most))
        self.anew = -1

    def keep(self, start: int, stop: int, old: int) -> None:
        self.flush(start)
        before = int(self.ends[start - 1]) if start else 0
        self.kept[len(self.shards)] = old
        self.shards.append(ShardPlan(start, stop, int(self.ends[stop - 1]) - before))


def append(base: str, listing: Listing, packed: Packed, shard_bytes: int) -> Appended:
    """Return the plan of a version that shares with the one before it what did not change.

    Args:
        base: digest of the plan that packs all of the listing anew.
        listing: what the source holds now.
        packed: what the version before it holds.
        shard_bytes: most bytes of samples in a new shard.
    """
    ends = np.cumsum(listing.sizes, dtype=np.int64)
    bounds = np.cumsum([0, *packed.counts]).tolist()
    cutter = _Cutter(ends, shard_bytes, [], {})
    row = 0
    for old, (start, stop) in enumerate(itertools.pairwise(bounds)):
        first = _first_not_below(listing.keys, packed.keys[start])
        behind = _first_not_below(listing.keys, packed.keys[stop - 1] + "\0")
        if row < first:
            cutter.pack(row)
        if _is_same(listing, slice(first, behind), packed, slice(start, stop)):
            cutter.keep(first, behind, old)
        elif first < behind:
            cutter.pack(first)
        row = behind
    if row < len(listing):
        cutter.pack(row)
    cutter.flush(len(listing))
    starts = np.array([shard.start for shard in cutter.shards], "<i8").tobytes()
    digest = hashlib.sha256(f"deeplink append {base}\n".encode() + starts).hexdigest()[:40]
    return Appended(PackPlan(tuple(cutter.shards), shard_bytes, digest), cutter.kept)


def _is_same(listing: Listing, now: slice, packed: Packed, before: slice) -> bool:
    if packed.marks is None or not listing.marked or now.stop - now.start != before.stop - before.start:
        return False
    names, were = listing.keys[now], packed.keys[before]
    return (
        bool((listing.sizes[now] == packed.sizes[before]).all())
        and bool((listing.marks[now] == packed.marks[before]).all())
        and bool((names.lengths == were.lengths).all())
        and names.joined() == were.joined()
    )


def _first_not_below(names: Names, key: str) -> int:
    raw = key.encode()
    low, high = 0, len(names)
    while low < high:
        middle = (low + high) // 2
        if names[middle].encode() < raw:
            low = middle + 1
        else:
            high = middle
    return low
