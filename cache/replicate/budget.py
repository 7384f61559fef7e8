"""Keeps a store within its budget: chooses what may go, and evicts it."""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from deeplink.cache.catalog import Catalog
from deeplink.cache.errors import StoreFullError
from deeplink.cache.membership import node_name
from deeplink.cache.replicate.shard_recovery import KnownShards, ReplicaLookup
from deeplink.cache.source.opening import source_cap
from deeplink.cache.store.index_copies import copied_bytes
from deeplink.cache.store.pins import Demand, demand, read_pins
from deeplink.core import metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from deeplink.cache.store.store import Store, StoreStatus
    from deeplink.core.clock import Clock
    from deeplink.core.config import Config
    from deeplink.core.types import ShardId

log = logging.getLogger(__name__)

_SHARE, _LOW = 0.9, 0.9
_RESERVE, _MOST_RESERVE = 0.02, 4 << 30
_WAIT_S = 60.0
"""How long a shard that comes waits for others that come at the same time."""
_MOST_PROVED = 64
"""Shards whose source is looked at in one round: a round must end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldShard:
    """What is known of a shard on this node."""

    id: ShardId
    bytes: int
    used_unix: float
    needed: bool = False  # by a running job
    next_use: int | None = None  # how far off the next use is, in shards; None where no job has announced one
    replaceable: bool = False  # it was proved, not long ago, that it can be had again


@dataclass(frozen=True, slots=True)
class Budget:
    """How full a store may become."""

    bytes: int
    low: int  # down to where it is emptied once it is too full, so that not every shard that comes costs a round
    reserve: int  # bytes of the file system that are left free

    def excess(self, held: int, free: int, coming: int) -> int:
        """Return how many bytes must go before `coming` more may come; 0 where there is room.

        >>> Budget(bytes=100, low=80, reserve=10).excess(held=95, free=500, coming=5)
        0
        >>> Budget(bytes=100, low=80, reserve=10).excess(held=95, free=500, coming=6)
        21
        """
        over = held + coming - self.low if held + coming > self.bytes else 0
        lacking = self.reserve + coming - free
        return max(over, lacking, 0)


def budget_of(setting: int, capacity: int) -> Budget:
    """Return the budget of a store."""
    most = int(setting or capacity * _SHARE)
    return Budget(bytes=most, low=int(most * _LOW), reserve=min(int(capacity * _RESERVE), _MOST_RESERVE))


def in_order(held: Iterable[HeldShard]) -> list[HeldShard]:
    """Return the shards that may leave, those that leave first first."""
    may = (shard for shard in held if shard.replaceable and not shard.needed)
    return sorted(
        may,
        key=lambda shard: (
            (0, shard.used_unix, shard.id) if shard.next_use is None else (1, -shard.next_use, shard.id)
        ),
    )


def to_evict(held: Iterable[HeldShard], excess: int) -> tuple[ShardId, ...]:
    """Return the shards that leave for `excess` bytes to become free; all that may, where that is not enough."""
    gone: list[ShardId] = []
    for shard in in_order(held):
        if excess <= 0:
            break
        gone.append(shard.id)
        excess -= shard.bytes
    return tuple(gone)


def unused(held: Iterable[HeldShard], before_unix: float) -> tuple[ShardId, ...]:
    """Return the shards that were not read since, nor announced, and that may leave."""
    return tuple(shard.id for shard in in_order(held) if shard.next_use is None and shard.used_unix < before_unix)


class StoreBudget:
    """The budget of one store. Safe to use from several threads.

    Members and sources are asked outside the lock, for it may take long; what they proved is checked again within
    it, before anything is dropped.
    """

    def __init__(
        self,
        store: Store,
        setting: int,
        recovery: Callable[[], ReplicaLookup],
        clock: Clock,
        *,
        staying: Collection[ShardId] = (),
    ) -> None:
        self._store, self._setting, self._recovery, self._clock = store, setting, recovery, clock
        self._staying = staying
        self._freed = threading.Condition()
        self._reserved = self._came = 0

    def budget(self) -> Budget:
        """Return the budget as the file system is now."""
        return budget_of(self._setting, shutil.disk_usage(self._store.root).total)

    @contextlib.contextmanager
    def reserve(self, needed: int) -> Iterator[None]:
        """Keep room for `needed` bytes that come meanwhile; drops shards for it."""
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
                came, (lacking, _) = self._came, self._lack(needed)
                if not lacking:
                    self._reserved += needed
                    return
            if needed > self.budget().bytes:  # everything would leave for nothing
                raise StoreFullError(self._store.root, needed, max(needed - lacking, 0))
            if self._make_room(needed):
                continue
            with self._freed:
                # What comes at this moment may leave once it has come.
                if self._came == came and not (
                    self._reserved and self._freed.wait(deadline - self._clock.monotonic())
                ):
                    raise StoreFullError(self._store.root, needed, max(needed - self._lack(needed)[0], 0))

    def spare(self) -> int:
        """Return the bytes that may come without a shard leaving for them, now or soon; negative for none."""
        with self._freed:
            budget, status = self.budget(), self._store.status()
            return min(budget.low - self._bytes(status), status.free_bytes - 2 * budget.reserve) - self._reserved

    def keep(self) -> bool:
        """Evict down to the low mark. False: the store is still too full, and nothing may leave."""
        self._make_room(0)
        with self._freed:
            return not self._lack(0)[0]

    def _lack(self, needed: int) -> tuple[int, int]:
        """Return how many bytes must leave for `needed` more, and how many with the next ones. Call it locked."""
        coming = self._reserved + needed
        budget, status = self.budget(), self._store.status()
        held = self._bytes(status)
        left = min(budget.bytes - held, status.free_bytes - budget.reserve) - coming
        return max(-left, 0), budget.excess(held, status.free_bytes, coming)

    def _bytes(self, status: StoreStatus) -> int:
        """Return what counts against the budget: shards, and copies of indexes, which do not leave for room."""
        return status.bytes + copied_bytes(self._store.root)

    def _make_room(self, needed: int) -> bool:
        """Drop shards where there is a lack, for coming bytes only if they fit then. False: nothing left."""
        with self._freed:
            lacking, excess = self._lack(needed)
        if not lacking:
            return True
        proved = self._proved(self.held(self._store.status()), excess)
        with self._freed:
            lacking, excess = self._lack(needed)
            wanted = self._wanted()
            may = {shard.id: shard for shard in proved if not wanted.needs(shard.id) and self._store.has(shard.id)}
            gone = to_evict(may.values(), excess)
            if needed and sum(may[shard].bytes for shard in gone) < lacking:
                return False
            dropped = sum(self._drop(shard, "budget") for shard in gone)
            return dropped > 0 or not lacking

    def _wanted(self) -> Demand:
        found = demand(read_pins(self._store.root, self._clock.unix()))
        return replace(found, needed=found.needed.union(self._staying))

    def held(self, status: StoreStatus) -> list[HeldShard]:
        """Return what is known of each shard here; `replaceable` by what members have said."""
        self._recovery().ask_members()
        wanted = self._wanted()
        return [
            HeldShard(
                id=shard,
                bytes=size,
                used_unix=self._store.used_unix(shard),
                needed=wanted.needs(shard),
                next_use=wanted.next_use.get(shard),
                replaceable=self._recovery().at_member(shard),
            )
            for shard, size in zip(status.ids, status.sizes, strict=True)
        ]

    def _proved(self, held: Sequence[HeldShard], excess: int) -> list[HeldShard]:
        """Return the shards, so many proved to be replaceable that `excess` bytes may leave, or all that may.

        Looks at sources only where members' copies are not enough.
        """
        known = {shard.id: shard for shard in held}
        for _ in range(_MOST_PROVED):
            gone = to_evict(known.values(), excess)
            if sum(known[shard].bytes for shard in gone) >= excess:
                break
            doubtful = (shard for shard in known.values() if not shard.replaceable)
            assumed = in_order(replace(shard, replaceable=True) for shard in doubtful)
            if not assumed:
                break
            first = assumed[0]
            if self._recovery().is_kept(first.id):
                known[first.id] = first
            else:
                del known[first.id]
        return list(known.values())

    def drop_unused(self, before_unix: float) -> int:
        """Drop the shards that were not read since and that can be had again; return how many."""
        held = {shard.id: shard for shard in self.held(self._store.status())}
        idle = unused((replace(shard, replaceable=True) for shard in held.values()), before_unix)
        proved = [shard for shard in idle if held[shard].replaceable or self._recovery().is_kept(shard)]
        with self._freed:
            wanted = self._wanted()
            return sum(
                self._drop(shard, "unused")
                for shard in proved
                if not wanted.needs(shard)
                and shard not in wanted.next_use
                and self._store.used_unix(shard) < before_unix
            )

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


def keep_to_budget(store: Store, config: Config, clock: Clock, *, staying: Collection[ShardId]) -> None:
    """Have what comes into `store` keep to `config.store_bytes`, as an agent's store does.

    Shards of which it is known that they can be had again leave for it, and where those are not enough, what comes
    is refused with StoreFullError.
    """

    @cache  # nothing is known before something has to leave
    def recovery() -> ReplicaLookup:
        cap = source_cap(config, clock)
        return ReplicaLookup(node_name(config), "", KnownShards(Catalog(config.catalog), clock), cap, clock)

    store.reserve = StoreBudget(store, config.store_bytes, recovery, clock, staying=staying).reserve
