"""Tells a node's store which shards training uses next, so that those leave it that are used latest, or no more.

An epoch is a run of uses: a shard, and the places of the epoch between which samples of it are taken. In the
dataset's own order that is a stretch per shard, in the order by blocks a window per block. In an exact shuffle
each shard is used from an epoch's first steps to its last ones: all that can be said is which are used at all.

What counts is the order that all ranks go through together, not one rank's part of it: every rank has samples of
nearly all shards that are in use. Where samples are shared out by where they lie (`Residency`), a node keeps those
shards for the epoch that its own ranks are to take, and after them the others'.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from typing_extensions import override

from deeplink.clock import SystemClock
from deeplink.data.order import Order
from deeplink.errors import DeepLinkError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from deeplink.clock import Clock
    from deeplink.data.blocks import BlockOrder
    from deeplink.data.share import Residency

log = logging.getLogger(__name__)

EVERY_S: Final = 2.0
"""Within an epoch it is not said more often: each time a small file is written."""
_NEVER: Final = np.iinfo(np.int64).max


class Announced(Protocol):
    """What an Announcer needs of a dataset; `deeplink.Dataset` is one."""

    @property
    def shard(self) -> np.ndarray:
        """Shard number of each sample."""
        ...

    @property
    def shards(self) -> Sequence[str]:
        """Name of each shard by number."""
        ...

    def announce(self, shards: Sequence[int], needed: int) -> None:
        """Say in which order shards are used from now on; the first `needed` of them in this epoch."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Uses:
    """The uses of one epoch, in their order; arrays of int64 of one length.

    Attributes:
        shard: number of the shard.
        begin: the first place of the epoch that may be a sample of it.
        end: the place behind the last one; no smaller than that of the use before.
    """

    shard: NDArray[np.int64]
    begin: NDArray[np.int64]
    end: NDArray[np.int64]

    def next(self, place: int, count: int) -> NDArray[np.int64]:
        """Return for each of `count` shards where it is used next, from `place` on; int64's largest for never."""
        left = int(np.searchsorted(self.end, place, side="right"))
        found = np.full(count, _NEVER)
        np.minimum.at(found, self.shard[left:], self.begin[left:])
        return found

    def last(self, count: int) -> NDArray[np.int64]:
        """Return for each of `count` shards behind which place it is used no more; 0 for never at all."""
        found = np.zeros(count, np.int64)
        np.maximum.at(found, self.shard, self.end)
        return found


def uses_in(order: Order, shard: NDArray[np.integer], by_blocks: BlockOrder | None, epoch: int) -> Uses:
    """Return the uses of an epoch.

    Args:
        order: how its samples follow one another.
        shard: shard number of each sample.
        by_blocks: the order by blocks, where it is that.
        epoch: which.
    """
    if by_blocks is not None:
        samples, begin, end = by_blocks.uses(epoch)
        return Uses(shard[samples].astype(np.int64), begin, end)
    if order is Order.SEQUENTIAL:
        edges = np.flatnonzero(shard[1:] != shard[:-1]) + 1
        bounds = np.concatenate([[0], edges, [len(shard)]])
        return Uses(shard[bounds[:-1]].astype(np.int64), bounds[:-1], bounds[1:])
    is_used = np.zeros(int(shard.max()) + 1, bool)
    is_used[shard] = True
    used = np.flatnonzero(is_used)
    return Uses(used, np.zeros(len(used), np.int64), np.full(len(used), len(shard)))


@dataclass(frozen=True, slots=True, eq=False)
class Upcoming:
    """What is to be announced at a place of an epoch.

    Attributes:
        shards: numbers, in the order of their next use.
        needed: how many of them, from the first, the epoch still needs here.
        until: the place from which on fewer are needed.
    """

    shards: NDArray[np.int64]
    needed: int
    until: int


def upcoming(now: Uses, later: Uses, place: int, is_near: NDArray[np.bool_]) -> Upcoming:
    """Return what is to be announced.

    First what this epoch still uses and this node is to take, then what others take of this epoch, then the next
    epoch's; each in the order of its next use.

    Args:
        now: the uses of the epoch under way.
        later: those of the next one.
        place: how far training is in the epoch.
        is_near: per shard number, whether this node is to take its samples.
    """
    count = len(is_near)
    use, then, last = now.next(place, count), later.next(0, count), now.last(count)
    is_left = use < _NEVER
    is_needed = is_left & is_near
    group = np.where(is_needed, 0, np.where(is_left, 1, 2))
    when = np.where(is_left, use, then)
    order = np.lexsort((when, group))
    shards = order[when[order] < _NEVER]
    until = int(last[is_needed].min()) if is_needed.any() else _NEVER
    return Upcoming(shards, int(is_needed.sum()), until)


class Announcer:
    """Says what a pass uses next, when it begins and whenever a shard is used up. In the trainer's process.

    Args:
        dataset: whose store is told.
        order: how samples follow one another.
        by_blocks: the order by blocks, where it is that.
        is_near: per shard number, whether this node is to take its samples; all of them when not given.
        clock: where time comes from.
    """

    def __init__(
        self,
        dataset: Announced,
        order: Order,
        by_blocks: BlockOrder | None,
        is_near: NDArray[np.bool_] | None = None,
        *,
        clock: Clock | None = None,
    ) -> None:
        self._dataset, self._order, self._by_blocks = dataset, order, by_blocks
        self._is_near = np.ones(len(dataset.shards), bool) if is_near is None else is_near
        self._clock = clock or SystemClock()
        self._epoch, self._place, self._until, self._said = -1, 0, 0, float("-inf")
        self._uses: dict[int, Uses] = {}

    @override
    def __getstate__(self) -> dict[str, Any]:
        # Spawned workers get a copy and never ask it: 50 bytes per block are not sent to each of them.
        return vars(self) | {"_uses": {}}

    def tell(self, epoch: int, place: int, *, anew: bool = False) -> None:
        """Say what comes, now that training has come to a place of an epoch; nothing where that is known already.

        Cheap enough to be called after each step.

        Args:
            epoch: the one under way.
            place: how many of its samples all ranks together have used.
            anew: say it again even so: what was said may have been forgotten.
        """
        is_same = epoch == self._epoch and place >= self._place
        if is_same and not anew and (place < self._until or self._clock.monotonic() - self._said < EVERY_S):
            return
        try:
            until = self._announced(epoch, place)
        except (DeepLinkError, IndexError) as problem:  # what is not said stays; reads meet what is damaged
            log.warning("the store is not told what is used next: %s", problem)
            until = _NEVER
        self._epoch, self._place, self._until, self._said = epoch, place, until, self._clock.monotonic()

    def _announced(self, epoch: int, place: int) -> int:
        """Say what comes; return until which place of the epoch that holds."""
        now, later = (epoch, epoch + 1) if self._by_blocks is not None else (0, 0)
        self._uses = {number: self._uses_of(number) for number in {now, later}}
        found = upcoming(self._uses[now], self._uses[later], place, self._is_near)
        self._dataset.announce(found.shards.tolist(), found.needed)
        return found.until

    def _uses_of(self, epoch: int) -> Uses:
        known = self._uses.get(epoch)
        return known or uses_in(self._order, self._dataset.shard, self._by_blocks, epoch)


def announcer_of(
    dataset: Any, order: Order, by_blocks: BlockOrder | None, residency: Residency | None, rank: int
) -> Announcer | None:
    """Return who tells the store of a sampler's dataset; None where that is no `Announced` one."""
    # Looked for, not asked for: that would go through the whole index.
    if any(inspect.getattr_static(dataset, name, None) is None for name in ("announce", "shard", "shards")):
        return None
    return Announcer(dataset, order, by_blocks, None if residency is None else residency.is_home(rank))
