"""Everything of an agent that has to do with shards, put together: serving, filling, evicting, upkeep."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink import metrics
from deeplink.cache.catalog import Catalog
from deeplink.cache.holding.disk_budget import StoreBudget
from deeplink.cache.holding.fetching import Fetcher
from deeplink.cache.holding.filling import Filler
from deeplink.cache.holding.fillservice import FillServicer
from deeplink.cache.holding.recovery import ReplicaLookup
from deeplink.cache.holding.shard_versions import KnownShards
from deeplink.cache.holding.upkeep import DAY_S, Upkeep, UpkeepIntervals
from deeplink.cache.keeping.identity import StoreNotes
from deeplink.cache.membership import configured_members
from deeplink.cache.ownership import weight_of
from deeplink.cache.packing.packing_service import PackingServicer
from deeplink.cache.server import CacheServicer
from deeplink.cache.serving.dataport import data_server
from deeplink.cache.sources.bucket import SourceCap, TokenBucket
from deeplink.cache.sources.home import open_home
from deeplink.config import Config
from deeplink.runtokens import accepted
from deeplink.types import parse_members
from deeplink.v1 import cache_pb2, node_pb2

if TYPE_CHECKING:
    import socket

    import grpc

    from deeplink.cache.store import Store
    from deeplink.clock import Clock
    from deeplink.plainrpc.serving import PlainServer
    from deeplink.runtokens import RunTokens
    from deeplink.types import Member, NodeName

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a keeper is made of."""

    serving: CacheServicer
    packing: PackingServicer
    filling: FillServicer
    upkeep: Upkeep
    fetcher: Fetcher
    filler: Filler
    recovery: ReplicaLookup
    room: StoreBudget
    cap: SourceCap


class Keeper:
    """Keeps one store as member `node`. Safe to use from several threads.

    Args:
        node: this member's name.
        store: its store.
        token: what calls carry, to this member and to the others; of an agent of a run, the run's.
        config: the settings; None: no catalog, no members, nothing is noted, and the defaults.
        clock: where time comes from.
        pace: how often the upkeep looks; from the settings when not given.
    """

    def __init__(
        self,
        node: NodeName,
        store: Store,
        token: str | RunTokens,
        config: Config | None,
        *,
        clock: Clock,
        pace: UpkeepIntervals | None = None,
    ) -> None:
        self._node, self._store, self._token, self._clock = node, store, token, clock
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._told = ""
        self._parts = self._put_together(token, config, pace)
        self.verified = self._parts.upkeep.verified
        if config is not None and config.members:
            self.know(configured_members(config))

    def _put_together(self, token: str | RunTokens, config: Config | None, pace: UpkeepIntervals | None) -> _Parts:
        settings = config or Config()
        catalog = Catalog(config.catalog) if config else None
        known = KnownShards(catalog, self._clock)
        bucket = TokenBucket(settings.source_bytes_per_s, settings.source_requests_per_s)
        cap = SourceCap(bucket, self._clock, self._ending.wait)
        recovery = ReplicaLookup(self._node, token, known, cap, self._clock)
        room = StoreBudget(self._store, settings.store_bytes, recovery, self._clock)
        self._store.reserve = room.reserve
        fetcher = Fetcher(self._store, token, self._clock, node=self._node, cap=cap, open_home=open_home)
        filler = Filler(fetcher, self._clock, bytes_per_s=settings.fill_bytes_per_s, ending=self._ending)
        filling = FillServicer(
            self._node, self._store, catalog, filler, recovery, clock=self._clock, replicas=settings.replicas
        )
        upkeep = Upkeep(
            self._node,
            self._store,
            filler,
            room,
            known,
            recovery=recovery,
            clock=self._clock,
            pace=pace
            or UpkeepIntervals(scrub_s=settings.scrub_days * DAY_S, unused_after_s=settings.unused_days * DAY_S),
            notes=StoreNotes(config.state, self._node, self._store, self._clock) if config else None,
            replicas=settings.replicas,
        )
        serving = CacheServicer(self._store, self._node)
        packing = PackingServicer(self._store, self._node, token, self._clock)
        self._store.missed = upkeep.missed
        filling.told = self.know

        def stat_more(reply: cache_pb2.StatReply) -> None:
            load = cap.load()
            reply.budget_bytes, reply.filling = room.budget().bytes, len(filler)
            reply.source_bytes, reply.source_requests = load.bytes, load.requests

        serving.stat_more = stat_more
        return _Parts(serving, packing, filling, upkeep, fetcher, filler, recovery, room, cap)

    def register(self, server: grpc.Server) -> list[str]:
        """Add the Cache service to a server and return its full name."""
        services = self._parts.serving.register(server)
        self._parts.packing.register(server)
        self._parts.filling.register(server)
        return services

    def data_server(self, listener: socket.socket) -> PlainServer:
        """Return a server of samples on a socket that listens."""
        return data_server(self._parts.serving, listener, accepted(self._token), self._clock)

    def start(self) -> None:
        """Begin the upkeep."""
        metrics.STORE_FILLING_SHARDS.set_function(lambda: len(self._parts.filler))
        self._parts.upkeep.start()

    def stop(self) -> None:
        """End it."""
        self._parts.filler.close()
        self._parts.upkeep.stop()

    def told_members(self, text: str) -> None:
        """Take in the list of members as a launcher sends it with each question; what cannot be read is logged."""
        if text == self._told:
            return
        self._told = text
        try:
            self.know(parse_members(text))
        except ValueError as problem:
            log.warning("the launcher's list of members cannot be used: %s", problem)

    def know(self, members: tuple[Member, ...]) -> None:
        """Take `members` for all members there are; this one need not be among them."""
        with self._lock:
            parts = self._parts
            if members == parts.upkeep.everyone:
                return
            others = tuple(member for member in members if member.name != self._node)
            parts.fetcher.members = members
            parts.recovery.members = others
            parts.recovery.forget()
            parts.filling.all_members = parts.upkeep.everyone = members
        if len(others) < len(members):
            parts.upkeep.take_share_soon()

    def weight(self) -> int:
        """Return this member's weight, from its store's budget; 1 where the store cannot be looked at."""
        try:
            return weight_of(self._parts.room.budget().bytes)
        except OSError:
            return 1

    def status(self) -> node_pb2.StoreStatus:
        """Return what the store holds and what was served so far."""
        served = self._parts.serving.totals()
        status = node_pb2.StoreStatus(served_samples=served.samples, served_bytes=served.bytes)
        held = self._store.status()
        status.shards, status.bytes, status.free_bytes = held.shards, held.bytes, held.free_bytes
        status.verified_shards, status.verified_bytes = held.verified, held.verified_bytes
        status.shard_ids.extend(held.ids)
        status.budget_bytes = self._parts.room.budget().bytes
        status.problem = self._parts.upkeep.problem
        return status
