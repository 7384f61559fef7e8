"""Keeps a store within its budget: asks what may leave, and has it leave."""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from deeplink import metrics
from deeplink.cache.errors import StoreFullError
from deeplink.cache.holding import eviction
from deeplink.cache.holding.eviction import HeldShard
from deeplink.cache.keeping.pins import demand, read_pins

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from deeplink.cache.holding.eviction import Budget
    from deeplink.cache.holding.recovery import Recovery
    from deeplink.cache.store import Store, StoreStatus
    from deeplink.clock import Clock
    from deeplink.types import ShardId

log = logging.getLogger(__name__)

_WAIT_S = 60.0
"""How long a shard that comes waits for others that come at the same time."""
_MOST_PROVED = 64
"""Shards whose source is looked at in one round: a round must end."""


class Room:
    """The budget of one store. Safe to use from several threads.

    Args:
        store: which.
        setting: `store_bytes` of the configuration.
        recovery: what can be had again.
        clock: where time comes from.
    """

    def __init__(self, store: Store, setting: int, recovery: Recovery, clock: Clock) -> None:
        self._store, self._setting, self._recovery, self._clock = store, setting, recovery, clock
        self._freed = threading.Condition()
        self._reserved = 0

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
        with self._freed:
            deadline = self._clock.monotonic() + _WAIT_S
            while (left := self._left_after(needed)) < 0:
                # What comes at this moment may leave once it has come.
                if not self._reserved or not self._freed.wait(deadline - self._clock.monotonic()):
                    raise StoreFullError(self._store.root, needed, max(needed + left, 0))
            self._reserved += needed
        try:
            yield
        finally:
            with self._freed:
                self._reserved -= needed
                self._freed.notify_all()

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
        with self._freed:
            return self._left_after(0) >= 0

    def _left_after(self, needed: int) -> int:
        """Drop shards where that is due; return the bytes left once `needed` more have come; negative: a lack."""
        coming = self._reserved + needed
        budget, status = self.budget(), self._store.status()
        excess = budget.excess(status.bytes, status.free_bytes, coming)
        if excess > 0:
            for shard in self._leaving(self.held(status), excess):
                self._drop(shard, "budget")
            status = self._store.status()
        return min(budget.bytes - status.bytes, status.free_bytes - budget.reserve) - coming

    def held(self, status: StoreStatus) -> list[HeldShard]:
        """Return what is known of each shard here; `replaceable` by what members have said."""
        self._recovery.ask_members()
        wanted = demand(read_pins(self._store.root, self._clock.unix()))
        return [
            HeldShard(
                id=shard,
                bytes=size,
                used_unix=self._store.used_unix(shard),
                needed=shard in wanted.needed,
                next_use=wanted.next_use.get(shard),
                replaceable=self._recovery.at_member(shard),
            )
            for shard, size in zip(status.ids, status.sizes, strict=True)
        ]

    def _leaving(self, held: Sequence[HeldShard], excess: int) -> tuple[ShardId, ...]:
        """Return what leaves: looks at sources only where members' copies are not enough."""
        known = {shard.id: shard for shard in held}
        for _ in range(_MOST_PROVED):
            gone = eviction.to_evict(list(known.values()), excess)
            if sum(known[shard].bytes for shard in gone) >= excess:
                return gone
            doubtful = [shard for shard in known.values() if not shard.replaceable and not shard.needed]
            assumed = eviction.in_order(replace(shard, replaceable=True) for shard in doubtful)
            if not assumed:
                return gone
            first = assumed[0]
            if self._recovery.is_kept(first.id):
                known[first.id] = replace(first, replaceable=True)
            else:
                del known[first.id]
        return eviction.to_evict(list(known.values()), excess)

    def drop_unused(self, before_unix: float) -> int:
        """Drop the shards that nobody has read since and that can be had again; return how many."""
        with self._freed:
            held = self.held(self._store.status())
            old = {
                shard.id
                for shard in held
                if not shard.needed and shard.next_use is None and shard.used_unix < before_unix
            }
            proved = [
                replace(shard, replaceable=True)
                for shard in held
                if shard.id in old and (shard.replaceable or self._recovery.is_kept(shard.id))
            ]
            gone = eviction.unused(proved, before_unix)
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
