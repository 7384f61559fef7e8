"""Keeps a store within its budget: chooses what may go, and evicts it."""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from deeplink import metrics
from deeplink.cache.errors import StoreFullError
from deeplink.cache.holding import eviction
from deeplink.cache.holding.eviction import HeldShard
from deeplink.cache.keeping.pins import Demand, demand, read_pins

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from deeplink.cache.holding.eviction import Budget
    from deeplink.cache.holding.recovery import ReplicaLookup
    from deeplink.cache.store import Store, StoreStatus
    from deeplink.clock import Clock
    from deeplink.types import ShardId

log = logging.getLogger(__name__)

_WAIT_S = 60.0
"""How long a shard that comes waits for others that come at the same time."""
_MOST_PROVED = 64
"""Shards whose source is looked at in one round: a round must end."""


@dataclass(frozen=True, slots=True)
class _Lack:
    """Bytes that must leave for others to come: at least so many, and so many that the next ones find room too."""

    least: int
    most: int


class StoreBudget:
    """The budget of one store. Safe to use from several threads.

    What may take long, asking members and looking at sources, is done outside the lock; what was proved so is
    looked at once more within it, before anything is dropped.

    Args:
        store: which.
        setting: `store_bytes` of the configuration.
        recovery: what can be had again.
        clock: where time comes from.
        staying: shards that never leave: what is being packed or warmed here.
    """

    def __init__(
        self,
        store: Store,
        setting: int,
        recovery: ReplicaLookup,
        clock: Clock,
        *,
        staying: Collection[ShardId] = (),
    ) -> None:
        self._store, self._setting, self._recovery, self._clock = store, setting, recovery, clock
        self._staying = staying
        self._freed = threading.Condition()
        self._reserved = self._came = 0

    def budget(self) -> Budget:
        """Return the budget as the file system is now.

        Raises:
            OSError: it cannot be looked at.
        """
        return eviction.budget_of(self._setting, shutil.disk_usage(self._store.root).total)

    @contextlib.contextmanager
    def reserve(self, needed: int) -> Iterator[None]:
        """Keep room for `needed` bytes that come meanwhile; drops shards for it.

        Raises:
            StoreFullError: they do not fit, and nothing else may leave.
            StoreError: the store cannot be looked at.
            OSError: the same.
        """
        self._take(needed)
        try:
            yield
        finally:
            with self._freed:
                self._reserved -= needed
                self._came += 1
                self._freed.notify_all()

    def _take(self, needed: int) -> None:
        deadline = self._clock.monotonic() + _WAIT_S
        while True:
            with self._freed:
                came, lack = self._came, self._lack(needed)
                if not lack.least:
                    self._reserved += needed
                    return
            if needed > self.budget().bytes:  # everything would leave for nothing
                raise StoreFullError(self._store.root, needed, max(needed - lack.least, 0))
            if self._make_room(needed):
                continue
            with self._freed:
                # What comes at this moment may leave once it has come.
                if self._came == came and not (
                    self._reserved and self._freed.wait(deadline - self._clock.monotonic())
                ):
                    raise StoreFullError(self._store.root, needed, max(needed - self._lack(needed).least, 0))

    def spare(self) -> int:
        """Return the bytes that may come without a shard leaving for them, now or soon; negative for none.

        Raises:
            StoreError: the store cannot be looked at.
            OSError: the same.
        """
        with self._freed:
            budget, status = self.budget(), self._store.status()
            return min(budget.low - status.bytes, status.free_bytes - 2 * budget.reserve) - self._reserved

    def keep(self) -> bool:
        """Bring a store that is too full back to its low mark. False: it is too full still, and nothing may leave.

        Raises:
            StoreError: the store cannot be looked at.
            OSError: the same.
        """
        self._make_room(0)
        with self._freed:
            return not self._lack(0).least

    def _lack(self, needed: int) -> _Lack:
        """Return what is lacking for `needed` more bytes to come. Call it with the lock."""
        coming = self._reserved + needed
        budget, status = self.budget(), self._store.status()
        left = min(budget.bytes - status.bytes, status.free_bytes - budget.reserve) - coming
        return _Lack(max(-left, 0), budget.excess(status.bytes, status.free_bytes, coming))

    def _make_room(self, needed: int) -> bool:
        """Drop shards where there is a lack, for coming bytes only if they fit then. False: nothing left."""
        with self._freed:
            lack = self._lack(needed)
        if not lack.least:
            return True
        proved = self._proved(self.held(self._store.status()), lack.most)
        with self._freed:
            lack = self._lack(needed)
            wanted = self._wanted()
            may = [shard for shard in proved if not wanted.needs(shard.id) and self._store.has(shard.id)]
            gone = eviction.to_evict(may, lack.most)
            sizes = {shard.id: shard.bytes for shard in may}
            if needed and sum(sizes[shard] for shard in gone) < lack.least:
                return False
            dropped = sum(self._drop(shard, "budget") for shard in gone)
            return dropped > 0 or not lack.least

    def _wanted(self) -> Demand:
        found = demand(read_pins(self._store.root, self._clock.unix()))
        return replace(found, needed=found.needed.union(self._staying))

    def held(self, status: StoreStatus) -> list[HeldShard]:
        """Return what is known of each shard here; `replaceable` by what members have said."""
        self._recovery.ask_members()
        wanted = self._wanted()
        return [
            HeldShard(
                id=shard,
                bytes=size,
                used_unix=self._store.used_unix(shard),
                needed=wanted.needs(shard),
                next_use=wanted.next_use.get(shard),
                replaceable=self._recovery.at_member(shard),
            )
            for shard, size in zip(status.ids, status.sizes, strict=True)
        ]

    def _proved(self, held: Sequence[HeldShard], excess: int) -> list[HeldShard]:
        """Return the shards, so many proved to be replaceable that `excess` bytes may leave, or all that may.

        Looks at sources only where members' copies are not enough.
        """
        known = {shard.id: shard for shard in held}
        for _ in range(_MOST_PROVED):
            gone = eviction.to_evict(list(known.values()), excess)
            if sum(known[shard].bytes for shard in gone) >= excess:
                break
            doubtful = [shard for shard in known.values() if not shard.replaceable and not shard.needed]
            assumed = eviction.in_order(replace(shard, replaceable=True) for shard in doubtful)
            if not assumed:
                break
            first = assumed[0]
            if self._recovery.is_kept(first.id):
                known[first.id] = replace(first, replaceable=True)
            else:
                del known[first.id]
        return list(known.values())

    def drop_unused(self, before_unix: float) -> int:
        """Drop the shards that nobody has read since and that can be had again; return how many."""
        proved = [
            replace(shard, replaceable=True)
            for shard in self.held(self._store.status())
            if not shard.needed
            and shard.next_use is None
            and shard.used_unix < before_unix
            and (shard.replaceable or self._recovery.is_kept(shard.id))
        ]
        with self._freed:
            wanted = self._wanted()
            gone = [
                shard
                for shard in eviction.unused(proved, before_unix)
                if not wanted.needs(shard)
                and shard not in wanted.next_use
                and self._store.used_unix(shard) < before_unix
            ]
            return sum(self._drop(shard, "unused") for shard in gone)

    def _drop(self, shard: ShardId, reason: str) -> bool:
        try:
            gone = self._store.drop(shard)
        except OSError as problem:
            log.warning("shard %s cannot be dropped: %s", shard, problem)
            return False
        if gone:
            metrics.STORE_EVICTED_SHARDS.labels(reason).inc()
            log.info("shard %s was dropped: %s", shard, reason)
        return gone
