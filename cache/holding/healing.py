"""Looks into shards that a reader doubts, and brings damaged ones back; meanwhile others serve their samples.

A checksum that does not agree may be the index's fault: a shard is read whole first, and only one that is not what
its name promises is put into quarantine and fetched anew.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from deeplink.cache.holding.fetching import Fetched, Fetcher, FetchOutcome
from deeplink.cache.sources.bucket import SourceCap, TokenBucket

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deeplink.cache.holding.fetching import WantedShard
    from deeplink.cache.store import Store
    from deeplink.clock import Clock
    from deeplink.types import Member, NodeName, ShardId

_MOST_WAITING = 4096
_SOURCE_BYTES_PER_S, _SOURCE_REQUESTS_PER_S = 50e6, 500.0
"""What a reader takes from the source to make a shard anew: it has a training to look after."""

log = logging.getLogger(__name__)


class Healer:
    """Looks at shards in one background thread, each once at a time over all processes that share the store.

    Args:
        store: where they belong.
        members: all of them, who may hold copies. Where there are no others, a shard is made anew from its source
            here; elsewhere that is the agents' work.
        token: what calls carry.
        clock: where time comes from.
        node: this node's name, which may be a member's.
    """

    def __init__(
        self, store: Store, members: Sequence[Member], token: str, clock: Clock, *, node: NodeName | None = None
    ) -> None:
        has_others = any(member.name != node for member in members)
        cap = None if has_others else SourceCap(TokenBucket(_SOURCE_BYTES_PER_S, _SOURCE_REQUESTS_PER_S), clock)
        self._fetcher = Fetcher(store, token, clock, node=node, cap=cap)
        self._fetcher.members = tuple(members)
        self._lock = threading.Lock()
        self._waiting: dict[ShardId, tuple[WantedShard, Callable[[], None]]] = {}
        self._running = False

    def heal(self, wanted: WantedShard, healed: Callable[[], None]) -> None:
        """Begin to look at a shard unless that is to come; `healed` is called once it is here and whole.

        One that is being looked at is looked at once more: what is wrong with it may have come since.
        """
        with self._lock:
            if wanted.id in self._waiting or len(self._waiting) >= _MOST_WAITING:
                return
            self._waiting[wanted.id] = wanted, healed
            if self._running:
                return
            self._running = True
        threading.Thread(target=self._run, name="deeplink-heal", daemon=True).start()

    def _run(self) -> None:
        while (next_one := self._next()) is not None:
            wanted, healed = next_one
            try:
                found = self._fetcher.fetch(wanted)
            except Exception as problem:  # whatever it is, the shards that wait behind this one get their turn
                log.exception("shard %s cannot be brought back", wanted.id)
                found = Fetched(FetchOutcome.FAILED, problem=f"{type(problem).__name__}: {problem}")
            if found.outcome.is_here:
                healed()  # before it is said: who looks at it until then takes it for damaged once more
                came = f"was brought back from {found.origin}" if found.origin else "is whole, and read again"
                log.warning("shard %s %s", wanted.id, came)
            elif found.outcome is not FetchOutcome.BUSY:
                log.warning("shard %s cannot be brought back: %s", wanted.id, found.problem)

    def _next(self) -> tuple[WantedShard, Callable[[], None]] | None:
        with self._lock:
            if not self._waiting:
                self._running = False
                return None
            return self._waiting.pop(next(iter(self._waiting)))
