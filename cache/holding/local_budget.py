"""The budget of a store in a process that fills it itself, where there are no members: `pack` and `warm` there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.cache.catalog import Catalog
from deeplink.cache.holding.disk_budget import StoreBudget
from deeplink.cache.holding.recovery import ReplicaLookup
from deeplink.cache.holding.shard_versions import KnownShards
from deeplink.cache.membership import node_name
from deeplink.cache.sources.bucket import SourceCap, TokenBucket

if TYPE_CHECKING:
    from collections.abc import Collection

    from deeplink.cache.store import Store
    from deeplink.clock import Clock
    from deeplink.config import Config
    from deeplink.types import ShardId


def keep_to_budget(store: Store, config: Config, clock: Clock, *, staying: Collection[ShardId]) -> None:
    """Have what comes into `store` keep to `config.store_bytes`, as an agent's store does.

    Shards of which it is known that they can be had again leave for it, and where those are not enough, what comes
    is refused with StoreFullError.

    Args:
        store: this node's own.
        config: the settings.
        clock: where time comes from.
        staying: shards that do not leave: those for whose sake others come.
    """
    cap = SourceCap(TokenBucket(config.source_bytes_per_s, config.source_requests_per_s), clock)
    recovery = ReplicaLookup(node_name(config), "", KnownShards(Catalog(config.catalog), clock), cap, clock)
    store.reserve = StoreBudget(store, config.store_bytes, recovery, clock, staying=staying).reserve
