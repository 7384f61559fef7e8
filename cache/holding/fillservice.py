"""The calls that change what a member holds: Fill brings shards, Evict drops them."""

from __future__ import annotations

import queue
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc

from deeplink.cache import layout, ownership
from deeplink.cache.errors import ShardIdError
from deeplink.cache.holding.fetching import Fetched, FetchOutcome, WantedShard
from deeplink.cache.keeping.pins import demand, read_pins
from deeplink.errors import DeepLinkError
from deeplink.types import ShardId, Version, parse_members
from deeplink.v1 import cache_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from deeplink.cache.catalog import Catalog
    from deeplink.cache.holding.filling import Filler
    from deeplink.cache.holding.recovery import ReplicaLookup
    from deeplink.cache.index import Index
    from deeplink.cache.store import Store
    from deeplink.clock import Clock
    from deeplink.types import Member, NodeName

SERVICE = "deeplink.v1.Cache"
MOST_CALLS = 8
"""Fill calls at once: each waits, and holds a thread of the agent's meanwhile."""
_LOOK_S = 0.5
_OUTCOME = {
    FetchOutcome.HELD: cache_pb2.FILL_OUTCOME_HELD,
    FetchOutcome.FETCHED: cache_pb2.FILL_OUTCOME_FETCHED,
    FetchOutcome.FAILED: cache_pb2.FILL_OUTCOME_FAILED,
    FetchOutcome.NO_ROOM: cache_pb2.FILL_OUTCOME_NO_ROOM,
    FetchOutcome.CHANGED: cache_pb2.FILL_OUTCOME_CHANGED,
    FetchOutcome.BUSY: cache_pb2.FILL_OUTCOME_FAILED,
}


def evict(
    store: Store, shards: Sequence[str], recovery: ReplicaLookup, clock: Clock, *, force: bool, dry_run: bool
) -> cache_pb2.EvictReply:
    """Drop shards; unless by force, none that a job needs or that could not be had again.

    Args:
        store: from where.
        shards: their names.
        recovery: what can be had again.
        clock: where time comes from.
        force: drop them whatever is known.
        dry_run: only say what would become of them.

    Raises:
        ShardIdError: a name is not a shard's.
    """
    names = [layout.checked_shard_id(shard) for shard in shards]
    wanted = demand(read_pins(store.root, clock.unix()))
    if not force:
        recovery.ask_members(anew=True)
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
            elif not (force or recovery.at_member(shard) or recovery.is_kept(shard)):
                said.outcome = cache_pb2.EVICT_OUTCOME_ONLY
                said.problem = "it is not known that it can be had again"
            elif not dry_run:
                store.drop(shard)
        except OSError as problem:
            said.outcome, said.problem = cache_pb2.EVICT_OUTCOME_FAILED, problem.strerror or str(problem)
    return reply


class FillServicer:
    """Serves Fill and Evict beside `CacheServicer`. Safe to use from the server's threads.

    Args:
        node: this member's name.
        store: its store.
        catalog: where versions are found; None where there is none to be seen.
        filler: brings shards.
        recovery: what can be had again, and who the other members are.
        clock: where time comes from.
        replicas: copies of each shard unless a request says.
    """

    def __init__(
        self,
        node: NodeName,
        store: Store,
        catalog: Catalog | None,
        filler: Filler,
        recovery: ReplicaLookup,
        *,
        clock: Clock,
        replicas: int,
    ) -> None:
        self._node, self._store, self._catalog, self._filler = node, store, catalog, filler
        self._recovery, self._clock, self._replicas = recovery, clock, replicas
        self._calls = threading.BoundedSemaphore(MOST_CALLS)
        self.told: Callable[[tuple[Member, ...]], None] = lambda _members: None
        """Told of the members that a request names."""
        self.all_members: tuple[Member, ...] = ()
        """Who is known, this member among them."""

    def register(self, server: grpc.Server) -> None:
        """Add the calls to a server that has the Cache service already."""
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Fill": grpc.unary_stream_rpc_method_handler(
                self.fill,
                request_deserializer=cache_pb2.FillRequest.FromString,
                response_serializer=cache_pb2.FillReply.SerializeToString,
            ),
            "Evict": grpc.unary_unary_rpc_method_handler(
                self.evict,
                request_deserializer=cache_pb2.EvictRequest.FromString,
                response_serializer=cache_pb2.EvictReply.SerializeToString,
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    def evict(self, request: cache_pb2.EvictRequest, context: grpc.ServicerContext) -> cache_pb2.EvictReply:
        """Drop shards."""
        try:
            return evict(
                self._store,
                request.shards,
                self._recovery,
                self._clock,
                force=request.force,
                dry_run=request.dry_run,
            )
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
        if self._catalog is None:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this member sees no catalog")
        try:
            members = parse_members(request.members)
            index = self._catalog.open(request.name, Version(request.version) if request.version else None)
            numbers = list(request.shards) or self._owned(index, members, request.replicas)
            wanted = [WantedShard.of(index, number) for number in dict.fromkeys(numbers)]
        except (DeepLinkError, ValueError, IndexError) as problem:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(problem))
        if members:
            self.told(members)
        yield from self._brought(wanted, members, context)

    def _owned(self, index: Index, members: Sequence[Member], replicas: int) -> list[int]:
        """Return the numbers of the shards this member is to hold; all of them where it knows of no other."""
        everyone = members or self.all_members
        names = [member.name for member in everyone]
        if self._node not in names:
            names.append(self._node)
        known = ownership.standing(everyone)
        copies = replicas or self._replicas
        return [
            number
            for number, entry in enumerate(index.shards)
            if self._node in ownership.owners(entry.id, names, copies, known)
        ]

    def _brought(
        self, wanted: Sequence[WantedShard], members: Sequence[Member], context: grpc.ServicerContext
    ) -> Iterator[cache_pb2.FillReply]:
        came: queue.SimpleQueue[tuple[WantedShard, Fetched]] = (
            queue.SimpleQueue()
        )  # as many as were asked for, at most
        for one in wanted:
            if not self._filler.want(one, members=members, done=partial(_put, came, one)):
                came.put((one, Fetched(FetchOutcome.FAILED, problem="too many shards are waiting already")))
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


def _put(came: queue.SimpleQueue[tuple[WantedShard, Fetched]], one: WantedShard, found: Fetched) -> None:
    came.put((one, found))
