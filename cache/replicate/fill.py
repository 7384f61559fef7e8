"""Calls that change what a member holds: Fill brings shards, Evict drops them."""

from __future__ import annotations

import logging
import queue
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc

from deeplink.cache import membership
from deeplink.cache.errors import ShardIdError
from deeplink.cache.format import block
from deeplink.cache.membership import RendezvousOrder
from deeplink.cache.replicate.fetching import HOME, SOURCE, Fetched, FetchOutcome, WantedShard
from deeplink.cache.store.index_copies import IndexCopies
from deeplink.cache.store.pins import demand, read_pins
from deeplink.cache.transfer.client import member_channel
from deeplink.core import metrics
from deeplink.core.errors import DeepLinkError
from deeplink.core.types import ShardId, format_members, parse_members
from deeplink.v1 import cache_pb2, cache_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from deeplink.cache.catalog import Catalog
    from deeplink.cache.format.index import Index
    from deeplink.cache.replicate.fetching import Fetcher
    from deeplink.cache.replicate.shard_recovery import ReplicaLookup
    from deeplink.cache.store.store import Store
    from deeplink.core.clock import Clock
    from deeplink.core.types import Member, NodeName


log = logging.getLogger(__name__)

MOST_CALLS = 8
"""Fill calls at once: each waits, and holds a thread of the agent's meanwhile."""
WORKERS = 2
MOST_WAITING = 1 << 16
_LOOK_S = 0.5
_BUSY_AGAIN_S = 0.5
_MOST_BUSY = 240
"""How often a shard is looked at again that another process is bringing."""
_START_S = 120.0
_SLOWEST_BYTES_PER_S = 1 << 20
"""A member that is slower than this, over all it is to bring, counts as stuck: sources are slow."""
_EVICT_S = 600.0
_MOST_AT_ONCE = 10_000
_OUTCOME = {
    FetchOutcome.HELD: cache_pb2.FILL_OUTCOME_HELD,
    FetchOutcome.FETCHED: cache_pb2.FILL_OUTCOME_FETCHED,
    FetchOutcome.FAILED: cache_pb2.FILL_OUTCOME_FAILED,
    FetchOutcome.NO_ROOM: cache_pb2.FILL_OUTCOME_NO_ROOM,
    FetchOutcome.CHANGED: cache_pb2.FILL_OUTCOME_CHANGED,
    FetchOutcome.BUSY: cache_pb2.FILL_OUTCOME_FAILED,
}


def evict(
    store: Store,
    shards: Sequence[str],
    recovery: ReplicaLookup,
    clock: Clock,
    *,
    force: bool,
    dry_run: bool,
    last_copies: bool = False,
) -> cache_pb2.EvictReply:
    """Drop shards; unless by force none that a job needs, nor, but for `last_copies`, the last one."""
    names = [block.checked_shard_id(shard) for shard in shards]
    safe = set[ShardId]()
    if not (force or last_copies):
        recovery.ask_members(again=True)
        wanted = demand(read_pins(store.root, clock.unix()))
        idle = [shard for shard in names if store.has(shard) and not wanted.needs(shard)]
        safe = {shard for shard in idle if recovery.at_member(shard) or recovery.is_kept(shard)}
    # Now: a job may have begun to read while homes and sources were asked.
    wanted = demand(read_pins(store.root, clock.unix()))
    reply = cache_pb2.EvictReply()
    for shard in names:
        if not store.has(shard):
            reply.shards.add(id=shard, outcome=cache_pb2.EVICT_OUTCOME_ABSENT)
            continue
        said = reply.shards.add(id=shard, outcome=cache_pb2.EVICT_OUTCOME_GONE)
        try:
            said.bytes = store.path(shard).stat().st_size
            if not force and wanted.needs(shard):
                said.outcome, said.problem = cache_pb2.EVICT_OUTCOME_NEEDED, "a running job needs it"
            elif not (force or last_copies or shard in safe):
                said.outcome = cache_pb2.EVICT_OUTCOME_ONLY
                said.problem = "it is not known that it can be had again"
            elif not dry_run:
                store.drop(shard)
        except OSError as problem:
            said.outcome, said.problem = cache_pb2.EVICT_OUTCOME_FAILED, problem.strerror or str(problem)
    return reply


@dataclass(eq=False)
class FillServicer:
    """Serves the calls Fill and Evict. Safe to use from the server's threads."""

    node: NodeName
    store: Store
    catalog: Catalog | None
    filler: Filler
    recovery: ReplicaLookup
    clock: Clock
    replicas: int
    on_members: Callable[[tuple[Member, ...]], None]
    """Called with the members that a request names."""
    all_members: tuple[Member, ...] = ()
    """All known members, this one among them."""
    _calls: threading.BoundedSemaphore = field(default_factory=lambda: threading.BoundedSemaphore(MOST_CALLS))

    @property
    def calls(self) -> dict[str, Callable[..., Any]]:
        """The calls by name, as `serve.server.register` takes them."""
        return {"Fill": self.fill, "Evict": self.evict}

    def evict(self, request: cache_pb2.EvictRequest, context: grpc.ServicerContext) -> cache_pb2.EvictReply:
        """Drop shards."""
        how = {"force": request.force, "dry_run": request.dry_run, "last_copies": request.last_copies}
        try:
            return evict(self.store, request.shards, self.recovery, self.clock, **how)
        except ShardIdError as problem:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(problem))

    def fill(self, request: cache_pb2.FillRequest, context: grpc.ServicerContext) -> Iterator[cache_pb2.FillReply]:
        """Bring shards here, and say of each what became of it."""
        if not self._calls.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"more than {MOST_CALLS} calls fill at this moment")
        try:
            yield from self._filled(request, context)
        finally:
            self._calls.release()

    def _filled(
        self, request: cache_pb2.FillRequest, context: grpc.ServicerContext
    ) -> Iterator[cache_pb2.FillReply]:
        if self.catalog is None:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this member sees no catalog")
        try:
            members = parse_members(request.members)
            copies = IndexCopies(self.store, self.catalog, self.clock)  # ranks here will map it
            index = copies.open(request.name, request.version or None)
            numbers = list(request.shards) or self._owned(index, members, request.replicas)
            wanted = [WantedShard.of(index, number) for number in dict.fromkeys(numbers)]
        except (DeepLinkError, ValueError, IndexError) as problem:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(problem))
        if members:
            self.on_members(members)
        yield from self._brought(wanted, members, context)

    def _owned(self, index: Index, members: Sequence[Member], replicas: int) -> list[int]:
        """Return the numbers of the shards this member is to hold; all of them where it knows of no other."""
        everyone = members or self.all_members
        names = [member.name for member in everyone]
        if self.node not in names:
            names.append(self.node)
        order = RendezvousOrder(names, membership.standing(everyone))
        copies = replicas or self.replicas
        return [number for number, entry in enumerate(index.shards) if self.node in order.owners(entry.id, copies)]

    def _brought(
        self, wanted: Sequence[WantedShard], members: Sequence[Member], context: grpc.ServicerContext
    ) -> Iterator[cache_pb2.FillReply]:
        came = queue.SimpleQueue[tuple[WantedShard, Fetched]]()  # as many as were asked for, at most

        def put(one: WantedShard, found: Fetched) -> None:
            came.put((one, found))

        for one in wanted:
            if not self.filler.want(one, members=members, done=partial(put, one)):
                put(one, Fetched(FetchOutcome.FAILED, problem="too many shards are waiting already"))
        left = len(wanted)
        while left and context.is_active():
            try:
                one, found = came.get(timeout=_LOOK_S)
            except queue.Empty:
                continue
            left -= 1
            yield cache_pb2.FillReply(
                shard=one.number,
                id=ShardId(one.id),
                outcome=_OUTCOME[found.outcome],
                origin=found.origin,
                bytes=found.bytes or one.bytes,
                problem=found.problem,
                total=len(wanted),
            )


@dataclass(slots=True)
class _Order:
    wanted: WantedShard
    members: Sequence[Member]
    urgent: bool
    done: list[Callable[[Fetched], None]] = field(default_factory=list)
    busy: int = 0


class Filler:
    """Brings shards to this node in the background: each once at a time, those that a caller waits for first.

    Safe to use from several threads.
    """

    def __init__(
        self, fetcher: Fetcher, clock: Clock, *, bytes_per_s: float, ending: threading.Event | None = None
    ) -> None:
        self._fetcher, self._clock, self._rate = fetcher, clock, bytes_per_s
        self._ending = ending or threading.Event()
        self._changed = threading.Condition()
        self._waiting: OrderedDict[ShardId, _Order] = OrderedDict()
        self._working: dict[ShardId, _Order] = {}
        self._threads: list[threading.Thread] = []

    def __len__(self) -> int:
        """How many shards are being brought, or wait for it."""
        with self._changed:
            return len(self._waiting) + len(self._working)

    def want(
        self,
        wanted: WantedShard,
        *,
        members: Sequence[Member] = (),
        urgent: bool = True,
        done: Callable[[Fetched], None] | None = None,
    ) -> bool:
        """Have a shard brought; one that is on its way already is not brought twice."""
        with self._changed:
            order = self._working.get(wanted.id) or self._waiting.get(wanted.id)
            if order is None:
                if len(self._waiting) >= MOST_WAITING or self._ending.is_set():
                    return False
                order = self._waiting[wanted.id] = _Order(wanted, members, urgent)
                if len(self._threads) < WORKERS:
                    thread = threading.Thread(target=self._run, name="deeplink-fill", daemon=True)
                    self._threads.append(thread)
                    thread.start()
            if urgent and not order.urgent and wanted.id in self._waiting:
                self._waiting.move_to_end(wanted.id)  # behind those that callers wait for already
            order.urgent = order.urgent or urgent
            if done is not None:
                order.done.append(done)
            self._changed.notify()
        return True

    def _next(self) -> _Order | None:
        with self._changed:
            while not self._waiting and not self._ending.is_set():
                self._changed.wait(1.0)
            if self._ending.is_set():
                return None
            chosen = next((order for order in self._waiting.values() if order.urgent), None)
            order = chosen or next(iter(self._waiting.values()))
            self._working[order.wanted.id] = self._waiting.pop(order.wanted.id)
            return order

    def _run(self) -> None:
        while (order := self._next()) is not None:
            began = self._clock.monotonic()
            try:
                found = self._fetcher.fetch(order.wanted, order.members)
            except Exception as problem:  # whatever it is, the queue goes on, and callers that wait get an answer
                log.exception("shard %s cannot be brought", order.wanted.id)
                found = Fetched(FetchOutcome.FAILED, problem=f"{type(problem).__name__}: {problem}")
            if found.outcome is FetchOutcome.BUSY and order.busy < _MOST_BUSY:
                order.busy += 1
                self._ending.wait(_BUSY_AGAIN_S)
                with self._changed:
                    self._waiting[order.wanted.id] = self._working.pop(order.wanted.id)
                continue
            self._finish(order, found)
            if found.outcome is FetchOutcome.FETCHED and not order.urgent:
                self._ending.wait(max(0.0, found.bytes / self._rate - (self._clock.monotonic() - began)))

    def _finish(self, order: _Order, found: Fetched) -> None:
        metrics.STORE_FILLED_SHARDS.labels(found.outcome.name.lower()).inc()
        if found.outcome is FetchOutcome.FETCHED:
            origin = found.origin if found.origin in {HOME, SOURCE} else "peer"
            metrics.STORE_FILLED_BYTES.labels(origin).inc(found.bytes)
        elif not found.outcome.is_here:
            log.warning("could not fetch shard %s: %s", order.wanted.id, found.problem)
        with self._changed:
            del self._working[order.wanted.id]
        for done in order.done:
            done(found)

    def close(self) -> None:
        """Begin nothing new; what is under way goes on until the process ends."""
        self._ending.set()
        with self._changed:
            self._changed.notify_all()


def fill(
    member: Member, token: str, name: str, index: Index, numbers: Sequence[int], *, members: Sequence[Member]
) -> Iterator[cache_pb2.FillReply]:
    """Have a member bring shards; yield what became of each as it is known."""
    size = sum(index.shards[number].bytes for number in numbers)
    timeout_s = _START_S + size / _SLOWEST_BYTES_PER_S
    named = format_members(tuple(members))
    request = cache_pb2.FillRequest(name=name, version=index.version, shards=numbers, members=named)
    with member_channel(member, token) as channel:
        yield from cache_pb2_grpc.CacheStub(channel).Fill(request, timeout=timeout_s)


def ask_to_evict(
    member: Member,
    token: str,
    shards: Sequence[ShardId],
    *,
    force: bool,
    dry_run: bool,
    last_copies: bool = False,
) -> list[cache_pb2.EvictedShard]:
    """Have a member drop shards; return what became of each."""
    found: list[cache_pb2.EvictedShard] = []
    with member_channel(member, token) as channel:
        stub = cache_pb2_grpc.CacheStub(channel)
        for start in range(0, len(shards), _MOST_AT_ONCE):
            some = shards[start : start + _MOST_AT_ONCE]
            request = cache_pb2.EvictRequest(shards=some, force=force, dry_run=dry_run, last_copies=last_copies)
            found.extend(stub.Evict(request, timeout=_EVICT_S).shards)
    return found
