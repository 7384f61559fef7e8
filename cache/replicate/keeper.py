"""An agent's store: serving, filling, evicting, and the upkeep that it does on its own account, put together."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from deeplink.cache import membership
from deeplink.cache.catalog import Catalog
from deeplink.cache.errors import StoreError
from deeplink.cache.membership import RendezvousOrder, Tier, configured_members, weight_of
from deeplink.cache.pack.distributed_pack import PackingServicer
from deeplink.cache.replicate.budget import StoreBudget
from deeplink.cache.replicate.fetching import Fetcher, WantedShard
from deeplink.cache.replicate.fill import Filler, FillServicer
from deeplink.cache.replicate.readers import ShardReaders
from deeplink.cache.replicate.shard_recovery import KnownShards, ReplicaLookup
from deeplink.cache.serve.server import CacheServicer, local_listener, plain_clients, register
from deeplink.cache.source.opening import SourceCap, TokenBucket
from deeplink.cache.store.identity import StoreNotes
from deeplink.cache.store.index_copies import IndexCopies
from deeplink.cache.store.pins import read_pins
from deeplink.core import metrics
from deeplink.core.codec import to_message
from deeplink.core.config import Config
from deeplink.core.errors import DeepLinkError
from deeplink.core.publish import read_members
from deeplink.core.timeouts import LastAnswer
from deeplink.rpc.tokens import RunTokens
from deeplink.v1 import cache_pb2, node_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import grpc

    from deeplink.cache.store.store import Store
    from deeplink.core.clock import Clock
    from deeplink.core.types import Member, NodeName, ShardId
    from deeplink.rpc.grpc_server import PlainClients
    from deeplink.rpc.plain.local_socket import LocalListener
    from deeplink.rpc.tokens import Vouch

log = logging.getLogger(__name__)

VERIFY_BYTES_PER_S = 200e6
"""Shards are verified in the background no faster than this, so that training has the SSD to itself."""
SCRUB_BYTES_PER_S = 50e6
DAY_S = 86_400.0
_TICK_S = 1.0
_AGAIN_S = 60.0
"""A shard that was lost or missed is not wanted again sooner."""
_PATIENCE_S, _ASKED_KEPT_S = 8.0, 120.0
"""A member that is not a shard's first owner brings it when asked again this much later, and not much later."""
_MOST_ASKED = 4096
_LIST_AGAIN_S = 5.0
"""A list of members that could not be read is not read again sooner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpkeepIntervals:
    """Seconds between two looks at the same thing, and how long a shard stays that is not read."""

    verify_s: float = 30.0
    lost_s: float = 2.0
    budget_s: float = 60.0
    share_s: float = 600.0
    unused_s: float = 3600.0
    note_s: float = 600.0
    scrub_s: float = 7 * DAY_S
    unused_after_s: float = 30 * DAY_S


@dataclass(eq=False)
class Upkeep:
    """Verifies shards, now and then again, brings back lost ones, takes this member's share, keeps the budget.

    All of it at bounded rates, as long as the agent runs; no error ends it.
    """

    node: NodeName
    store: Store
    filler: Filler
    room: StoreBudget
    known: KnownShards
    recovery: ReplicaLookup
    clock: Clock
    pace: UpkeepIntervals
    notes: StoreNotes | None
    copies: IndexCopies | None
    replicas: int
    verified: threading.Event = field(default_factory=threading.Event)
    """Set once every shard that was here at the start has been verified or set aside."""
    problem: str = ""
    """What is wrong with the store's disk; empty while it is well."""
    everyone: tuple[Member, ...] = ()
    """All members, this one among them; empty where none are known."""
    order: RendezvousOrder | None = None
    """Theirs, for each shard; None where none are known."""
    _ending: threading.Event = field(default_factory=threading.Event)
    _is_started: bool = False
    _due: dict[str, float] = field(default_factory=dict)
    _again: dict[ShardId, float] = field(default_factory=dict)
    _asked: OrderedDict[ShardId, tuple[float, bool]] = field(default_factory=OrderedDict)
    _missed: set[ShardId] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        """Begin: a thread each for reading shards whole, having shards brought, and looking at sources."""
        pace = self.pace
        bringing = (("lost", pace.lost_s, self._bring_back), ("share", pace.share_s, self._take_share))
        tending = (
            ("wiped", float("inf"), self._look_for_wiping),
            ("budget", pace.budget_s, self._keep_to_budget),
            ("unused", pace.unused_s, self._drop_unused),
            ("note", pace.note_s, self._note),
        )
        works: dict[str, Callable[[], None]] = {
            "verify": self._verify_all,
            "bring": partial(self._run, bringing),
            "tend": partial(self._run, tending),
        }
        for name, work in works.items():
            threading.Thread(target=work, name=f"deeplink-{name}", daemon=True).start()
        self._is_started = True

    def stop(self) -> None:
        """End, and note what the store holds."""
        self._ending.set()
        if self._is_started:
            self._note()

    def take_share_soon(self) -> None:
        """Look for shards to take now: the members are others."""
        self._due.pop("share", None)

    def _verify_all(self) -> None:
        while not self._ending.is_set():
            try:
                self.store.sweep(self.clock.unix())
                shards = self.store.ids()
            except OSError as problem:
                self._complain(problem)
                shards = []
            for shard in shards:
                self._ending.wait(self._verify_one(shard))
                if self._ending.is_set():
                    return
            self.verified.set()
            self._ending.wait(self.pace.verify_s)

    def _verify_one(self, shard: ShardId) -> float:
        """Verify a shard if that is due; return for how many seconds the SSD is to be left alone."""
        began = self.clock.monotonic()
        try:
            if self.clock.unix() - self.store.verified_unix(shard) < self.pace.scrub_s:
                return 0.0
            is_first = not self.store.is_verified(shard)
            size = self.store.path(shard).stat().st_size
            is_whole = self.store.verify(shard)
        except FileNotFoundError:  # removed since
            return 0.0
        except OSError as problem:  # one that cannot be opened hides none of the others
            self._complain(problem)
            return 0.0
        metrics.SCRUB_SHARDS.labels("whole" if is_whole else "damaged").inc()
        metrics.SCRUB_BYTES.inc(size)
        rate = VERIFY_BYTES_PER_S if is_first else SCRUB_BYTES_PER_S
        return max(0.0, size / rate - (self.clock.monotonic() - began))

    def _run(self, duties: Sequence[tuple[str, float, Callable[[], None]]]) -> None:
        while not self._ending.is_set():
            for name, every, duty in duties:
                now = self.clock.monotonic()
                if self._ending.is_set() or now < self._due.get(name, float("-inf")):
                    continue
                self._due[name] = now + every
                try:
                    duty()
                except (OSError, DeepLinkError) as problem:
                    self._complain(problem)
            self._ending.wait(min(_TICK_S, self.pace.lost_s))

    def _complain(self, problem: Exception) -> None:
        if str(problem) != self.problem:  # once, not every few seconds
            self.problem = str(problem)
            log.warning("store %s: %s", self.store.root, problem)
        metrics.STORE_HEALTHY.set(0)

    def _look_for_wiping(self) -> None:
        if self.notes is not None and (said := self.notes.wiped()):
            log.warning("%s", said)
            metrics.STORE_WIPED.set(1)
            self.notes.note()  # so that it is logged once

    def _bring_back(self) -> None:
        """Have shards brought that were quarantined, by any process, and those that were missed."""
        with self._lock:
            missed, self._missed = self._missed, set()
            for shard in missed:
                self._asked.pop(shard, None)
        now = self.clock.monotonic()
        if len(self._again) > _MOST_ASKED:
            self._again.clear()
        for shard in [*self.store.lost(), *missed]:
            if self._again.get(shard, 0.0) <= now:
                self._again[shard] = now + _AGAIN_S
                self._want(shard, urgent=True)

    def _want(self, shard: ShardId, *, urgent: bool) -> None:
        wanted = self.known.find(shard)
        if wanted is None:
            self.recovery.ask_members()
            size = self.recovery.held_elsewhere().get(shard, 0)
            if not size:
                return
            wanted = WantedShard(id=shard, bytes=size)
        self.filler.want(wanted, urgent=urgent)

    def missed(self, shard: ShardId) -> None:
        """Note that a reader asked for a shard that is not here.

        The first of its owners has it brought at once; another member only when it is asked again after a while,
        for then those before it are gone, not merely slow.
        """
        now = self.clock.monotonic()
        with self._lock:
            since, at_once = self._asked.get(shard, (0.0, False))
            if not since or now - since > _ASKED_KEPT_S:
                since, at_once = now, self._owns(shard, 1)
                self._asked[shard] = since, at_once
                if len(self._asked) > _MOST_ASKED:
                    self._asked.popitem(last=False)
            if at_once or now - since > _PATIENCE_S:
                self._missed.add(shard)

    def wanted_here(self, shard: ShardId) -> None:
        """Note that a user of this node asks for a shard that is not here: it is brought, whoever owns it."""
        with self._lock:
            if len(self._missed) < _MOST_ASKED:
                self._missed.add(shard)

    def _owns(self, shard: ShardId, copies: int) -> bool:
        return self.order is None or self.node in self.order.owners(shard, copies)

    def _take_share(self) -> None:
        """Have shards brought that are in use, and that this member is to hold.

        In use: another member holds it, and it is of a dataset's newest version or pinned here. So a member that
        joins takes its share, and old versions stay away.
        """
        if len(self.everyone) < 2:  # noqa: PLR2004 - alone
            return
        self.recovery.ask_members()
        elsewhere = self.recovery.held_elsewhere()
        current = self.known.in_newest()
        pinned = {shard for pin in read_pins(self.store.root, self.clock.unix()) for shard in pin.shards}
        wanted = [
            shard
            for shard in elsewhere
            if (not current or shard in current or shard in pinned)
            and not self.store.has(shard)
            and self._owns(shard, self.replicas)
        ]
        # Looked at last: what was dropped since is not to come back at once.
        away, spare = self.store.dismissed(), self.room.spare()
        for shard in wanted:
            if shard in away:
                continue
            spare -= elsewhere[shard]
            if spare < 0:  # a share is taken where there is room; nothing leaves for it
                log.info("there is no room for all of this member's share")
                return
            self._want(shard, urgent=False)

    def _keep_to_budget(self) -> None:
        is_within = self.room.keep()
        probe = self.store.root / f".draft-probe-{self.node}"
        probe.write_bytes(b"x")  # a disk that was remounted read-only is noticed here
        probe.unlink()
        oldest = min((self.store.verified_unix(shard) for shard in self.store.ids()), default=0.0)
        metrics.SCRUB_OLDEST_SECONDS.set(self.clock.unix() - oldest if oldest else 0.0)
        if not is_within:
            raise StoreError(self.store.root, "it is over its budget, and nothing may leave")
        if self.problem:
            log.warning("store %s has recovered", self.store.root)
        self.problem = ""
        metrics.STORE_HEALTHY.set(1)

    def _drop_unused(self) -> None:
        oldest = self.clock.unix() - self.pace.unused_after_s
        dropped = self.room.drop_unused(oldest)
        if dropped:
            log.info("%d shards that were not read for long were dropped", dropped)
        if self.copies is not None and (removed := self.copies.collect(oldest)):
            log.info("%d copies of indexes were removed: unused, or of versions that are gone", removed)

    def _note(self) -> None:
        if self.notes is None:
            return
        try:
            self.notes.note()
        except (OSError, DeepLinkError) as problem:
            log.warning("it cannot be noted what the store holds: %s", problem)


class Keeper:
    """Keeps one store as member `node`. Safe to use from several threads."""

    def __init__(
        self,
        node: NodeName,
        store: Store,
        token: str | RunTokens,
        config: Config | None,
        *,
        clock: Clock,
        pace: UpkeepIntervals | None = None,
        vouch: Vouch | None = None,
    ) -> None:
        self._node, self._store, self._token, self._clock = node, store, token, clock
        self._lock = threading.Lock()
        self._member_list = self._named = ""
        self._reading = LastAnswer(self._read_member_list, clock, "deeplink-members")
        settings, ending = config or Config(), threading.Event()
        catalog = Catalog(config.catalog) if config else None
        known = KnownShards(catalog, clock)
        bucket = TokenBucket(settings.source_bytes_per_s, settings.source_requests_per_s)
        self._cap = cap = SourceCap(bucket, clock, ending.wait)
        self._recovery = recovery = ReplicaLookup(node, token, known, cap, clock)
        self._room = StoreBudget(store, settings.store_bytes, lambda: recovery, clock)
        # Beside a job's agents those of the site look after their own nodes.
        site, of_job = Tier(), isinstance(token, RunTokens)
        if of_job:
            site = Tier.of_site(settings, listed=settings.members, token_file=settings.token_file, vouch=vouch)
        self._standing_nodes = site.tended(settings, node)
        self._fetcher = Fetcher(store, token, clock, node=node, cap=cap, uses_home=True, standing=site)
        self._filler = Filler(self._fetcher, clock, bytes_per_s=settings.fill_bytes_per_s, ending=ending)
        replicas = settings.replicas
        self._filling = FillServicer(node, store, catalog, self._filler, recovery, clock, replicas, self.know)
        days = {"scrub_s": settings.scrub_days * DAY_S, "unused_after_s": settings.unused_days * DAY_S}
        self._upkeep = Upkeep(
            node,
            store,
            self._filler,
            self._room,
            known,
            recovery=recovery,
            clock=clock,
            pace=pace or UpkeepIntervals(**days),
            notes=StoreNotes(config.state, node, store, clock) if config else None,
            copies=IndexCopies(store, catalog, clock) if catalog else None,
            replicas=replicas,
        )
        self._serving = CacheServicer(store, node)
        self._packing = PackingServicer(store, node, token, clock)
        self.verified = self._upkeep.verified
        store.reserve, store.missed = self._room.reserve, self._upkeep.missed
        self._serving.stat_more = self._stat_more
        self._serving.forbidden = ShardReaders(known, clock).forbidden
        self._serving.wanted_here = self._upkeep.wanted_here
        if config is not None and config.members and not of_job:
            self.know(configured_members(config))

    def _stat_more(self, reply: cache_pb2.StatReply) -> None:
        load = self._cap.load()
        reply.budget_bytes, reply.filling = self._room.budget().bytes, len(self._filler)
        reply.source_bytes, reply.source_requests = load.bytes, load.requests

    def register(self, server: grpc.Server) -> list[str]:
        """Add the Cache service to a server and return its full name."""
        return register(server, {**self._serving.calls, **self._packing.calls, **self._filling.calls})

    def plain_clients(self, user_of: Callable[[str], tuple[int, str]] | None = None) -> PlainClients:
        """Return what the agent's server is to our own clients; they read without grpcio."""
        return plain_clients(self._serving, self._token, user_of=user_of)

    def local_listener(self, path: Path) -> LocalListener:
        """Return what answers this node's users at a Unix socket, as far as each may read."""
        return local_listener(path, self._serving)

    def start(self) -> None:
        """Begin the upkeep."""
        metrics.STORE_FILLING_SHARDS.set_function(lambda: len(self._filler))
        self._upkeep.start()

    def stop(self) -> None:
        """End it."""
        self._filler.close()
        self._upkeep.stop()

    def use_member_list(self, value: str) -> None:
        """Use the list of members that a launcher names with each request, once it is another one.

        It is read in a thread, for the shared folder may hang. One that cannot be read is logged, and tried again.
        """
        with self._lock:
            is_new = value != self._member_list and not self._reading.is_under_way
            if is_new:
                self._named = value
                self._reading.ask()

    def _read_member_list(self) -> bool:
        value = self._named
        try:
            self.know(read_members(value))
        except (ValueError, DeepLinkError) as problem:
            log.warning("the launcher's list of members cannot be used: %s", problem)
            self._clock.sleep(_LIST_AGAIN_S)
            return False
        self._member_list = value
        return True

    def know(self, members: tuple[Member, ...]) -> None:
        """Take `members` for all members there are; this one need not be among them.

        Those of a job leave the nodes that have a standing agent to that (`Tier.tended`).
        """
        members = tuple(member for member in members if member.name not in self._standing_nodes)
        with self._lock:
            if members == self._upkeep.everyone:
                return
            others = tuple(member for member in members if member.name != self._node)
            self._fetcher.members = members
            self._recovery.members = others
            self._recovery.forget()
            self._filling.all_members = self._upkeep.everyone = members
            known = membership.standing(members)
            self._upkeep.order = RendezvousOrder(known.weight, known) if members else None
        if len(others) < len(members):
            self._upkeep.take_share_soon()

    def weight(self) -> int:
        """Return this member's weight, from its store's budget; 1 where the store cannot be looked at."""
        try:
            return weight_of(self._room.budget().bytes)
        except OSError:
            return 1

    def status(self) -> node_pb2.StoreStatus:
        """Return what the store holds and what was served so far."""
        status = to_message(self._store.status(), node_pb2.StoreStatus)
        status.served_samples, status.served_bytes = self._serving.totals()
        status.budget_bytes, status.problem = self._room.budget().bytes, self._upkeep.problem
        return status
