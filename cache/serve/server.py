"""The Cache service of a node agent: serves the shards of this node's store, and takes shards in.

Whatever a request holds is answered per item or refused as a whole; nothing in it becomes a path unchecked.
"""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import grpc
from google.protobuf.message import DecodeError

from deeplink.cache.errors import FrameError, ShardCorruptError, ShardIdError, StoreError, StoreFullError
from deeplink.cache.format import block
from deeplink.cache.serve.served import Answering, ServedShards
from deeplink.cache.transfer import frames
from deeplink.cache.transfer.client import CHUNK_BYTES
from deeplink.core import metrics
from deeplink.core.clock import Clock, SystemClock
from deeplink.core.types import ShardId
from deeplink.rpc.grpc_server import PlainClients, PlainContext, WholeReply, connections_allowed
from deeplink.rpc.plain import CallRefusedError, Status
from deeplink.rpc.plain.framing import NO_SECRET
from deeplink.rpc.plain.local_socket import LocalListener
from deeplink.rpc.plain.serving import PlainServer, PlainTerms, ServerLimits
from deeplink.v1 import cache_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from deeplink.cache.serve.served import Body
    from deeplink.cache.store.store import Store
    from deeplink.core.types import NodeName
    from deeplink.rpc.plain.outgoing import Scattered
    from deeplink.rpc.tokens import RunTokens

log = logging.getLogger(__name__)

MOST_READS = 80
"""Read calls at once. The agent has more threads: heartbeats and reports are answered whatever is read."""
MOST_WAITING = 64
"""Calls of ranks and members at once that may wait: for a disk, or for what another node does."""
_LOCAL_CONNECTIONS, _LOCAL_WORKERS = 1024, 16
"""Of users of this node, who show no token."""
_METHODS: Any = cache_pb2.DESCRIPTOR.services_by_name["Cache"].methods_by_name

_PUT_STATUS = {
    ShardIdError: grpc.StatusCode.INVALID_ARGUMENT,
    ShardCorruptError: grpc.StatusCode.DATA_LOSS,
    StoreFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    StoreError: grpc.StatusCode.FAILED_PRECONDITION,
}


def register(server: grpc.Server, calls: Mapping[str, Callable[..., Any]]) -> list[str]:
    """Add calls, by name, of the Cache service to a server; return its full name, as `bound_server` wants it."""
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for name, call in calls.items():
        method = _METHODS[name]
        sides = ("stream" if side else "unary" for side in (method.client_streaming, method.server_streaming))
        make = getattr(grpc, f"{'_'.join(sides)}_rpc_method_handler")
        taken, given = (getattr(cache_pb2, kind.name) for kind in (method.input_type, method.output_type))
        read = None if name == "Read" else taken.FromString  # what it takes is read, and refused, by `frames`
        handlers[name] = make(call, read, given.SerializeToString)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(frames.SERVICE, handlers),))
    server.add_registered_method_handlers(frames.SERVICE, handlers)
    return [frames.SERVICE]


@contextmanager
def _sending(shard: str, context: grpc.ServicerContext) -> Iterator[None]:
    """End a call with the status that says why a shard cannot be sent."""
    try:
        yield
    except ShardIdError as problem:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(problem))
    except FileNotFoundError:
        context.abort(grpc.StatusCode.NOT_FOUND, f"shard {shard} is not held here")
    except OSError as problem:
        context.abort(grpc.StatusCode.DATA_LOSS, f"shard {shard}: {problem.strerror or problem}")
    except ShardCorruptError as problem:
        context.abort(grpc.StatusCode.DATA_LOSS, str(problem))


@dataclass(frozen=True, slots=True, eq=False)
class _Sent:
    """A reply whose body is sent where it lies."""

    parts: list[bytes | memoryview | Scattered]
    size: int
    answering: Answering

    def unreadable(self) -> str:
        """Find what the kernel could not read, put it aside, and say so."""
        return self.answering.unreadable()


class CacheServicer:
    """Serves `store` as member `node`. Register its `calls`; safe to use from the server's threads."""

    def __init__(self, store: Store, node: NodeName, clock: Clock | None = None) -> None:
        self._store, self.node = store, node
        self._lock = threading.Lock()
        self._shards = ServedShards(store, clock or SystemClock())
        self._reading = threading.BoundedSemaphore(MOST_READS)
        self._samples = self._bytes = 0
        self.stat_more: Callable[[cache_pb2.StatReply], None] = lambda _reply: None
        self.forbidden: Callable[[Sequence[ShardId], int], Collection[ShardId]] = lambda shards, _user: shards
        """Which of some shards a user may not read; it may wait."""
        self.wanted_here: Callable[[ShardId], None] = lambda _shard: None
        """Called, and must return at once, with shards that users of this node ask for and that are not here."""
        self.calls: dict[str, Callable[..., Any]] = {
            "Stat": self.stat,
            "Read": self.read,
            "Put": self.put,
            "Get": self.get,
            "Describe": self.describe,
        }

    def totals(self) -> tuple[int, int]:
        """Return how many samples and bytes were sent to other nodes so far."""
        with self._lock:
            return self._samples, self._bytes

    def stat(self, _request: cache_pb2.StatRequest, _context: grpc.ServicerContext) -> cache_pb2.StatReply:
        """Say what the store holds."""
        reply = cache_pb2.StatReply(node=self.node, free_bytes=self._store.free_bytes())
        for shard in self._store.ids():
            try:
                size = self._store.path(shard).stat().st_size
            except FileNotFoundError:  # removed since
                continue
            reply.shards.add(id=shard, bytes=size, verified=self._store.is_verified(shard))
        self.stat_more(reply)
        return reply

    def read(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[cache_pb2.ReadReply]:
        """Answer batches of extents, in order."""
        if not self._reading.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"more than {MOST_READS} calls read at this moment")
        try:
            for message in requests:
                try:
                    request = self._noted(message)
                except FrameError as problem:
                    context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(problem))
                with metrics.CACHE_READ_SECONDS.time():
                    for body in Answering(self._shards, request, copied=True).bodies():
                        self._count(body)
                        joined = b"".join(body.copies)
                        yield cache_pb2.ReadReply(id=request.id, head=body.head.tobytes(), body=joined)
        except CallRefusedError as problem:  # not enough descriptors: as for our own clients, it is busy
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, problem.why)
        finally:
            self._reading.release()

    def read_message(self, message: bytes) -> Iterator[_Sent]:
        """Answer a batch of extents with replies that are sent where they lie, for a `PlainServer`."""
        try:
            request = self._noted(message)
        except FrameError as problem:
            raise CallRefusedError(Status.INVALID, str(problem)) from problem
        yield from self._sent(request)

    def get_for_user(self, message: bytes, user: int) -> Iterator[WholeReply]:
        """Send a whole shard that this user may read."""
        try:
            request = cache_pb2.GetRequest.FromString(message)
        except DecodeError as problem:
            raise CallRefusedError(Status.INVALID, str(problem)) from problem
        if self.forbidden([ShardId(request.id)], user):
            raise CallRefusedError(Status.PERMISSION_DENIED, "the source does not let this user read that shard")
        for reply in self.get(request, cast("grpc.ServicerContext", PlainContext(lambda: True))):
            yield WholeReply.of(reply.SerializeToString())

    def read_for_user(self, message: bytes, user: int, *, is_here: bool = False) -> Iterator[_Sent]:
        """Answer a batch of extents as far as this user may read them, who is on this node or not."""
        try:
            request = frames.decode_request(message)
        except FrameError as problem:
            raise CallRefusedError(Status.INVALID, str(problem)) from problem
        named = {*request.shards, *request.doubted}
        forbidden = frozenset(self.forbidden(sorted(named), user))
        for shard in request.doubted:
            if shard not in forbidden:
                self._doubt(shard)
        for shard in (named - forbidden) if is_here else ():
            if block.is_shard_id(shard) and not self._store.has(shard):
                self.wanted_here(shard)
        yield from self._sent(request, forbidden)

    def _sent(self, request: frames.ExtentsRequest, forbidden: Collection[ShardId] = ()) -> Iterator[_Sent]:
        with metrics.CACHE_READ_SECONDS.time():
            answering = Answering(self._shards, request, copied=False, forbidden=forbidden)
            for body in answering.bodies():
                self._count(body)
                start = frames.reply_start(body.head)
                places = [] if body.places is None else [body.places]
                yield _Sent([start, *body.copies, *places], len(start) + body.size, answering)

    def _noted(self, message: bytes) -> frames.ExtentsRequest:
        request = frames.decode_request(message)
        for shard in request.doubted:
            self._doubt(shard)
        return request

    def _doubt(self, shard: ShardId) -> None:
        """Have a shard verified again by the agent's upkeep; until then it is served as it is."""
        try:
            # Another file may have taken its place a moment ago: that one is what the reader asks for next.
            self._shards.close(shard)
            if self._store.doubt(shard):
                log.warning("shard %s: a reader was sent wrong bytes of it; it will be verified again", shard)
        except (ShardIdError, OSError) as problem:
            log.warning("shard %s cannot be marked as unverified: %s", shard[:80], problem)

    def _count(self, body: Body) -> None:
        with self._lock:
            self._samples += body.samples
            self._bytes += body.size
        metrics.CACHE_SERVED_SAMPLES.inc(body.samples)
        metrics.CACHE_SERVED_BYTES.inc(body.size)
        if body.samples < len(body.head):
            metrics.CACHE_REFUSED_SAMPLES.inc(len(body.head) - body.samples)

    def put(self, requests: Iterator[cache_pb2.PutRequest], context: grpc.ServicerContext) -> cache_pb2.PutReply:
        """Take a shard in; it is published once all of it was verified."""
        first = next(requests, None)
        if first is None:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no message came")
        try:
            shard = block.checked_shard_id(first.id)
            stored = self._store.add(shard, (request.chunk for request in requests), first.total_bytes)
        except (ShardIdError, ShardCorruptError, StoreFullError, StoreError) as problem:
            context.abort(_PUT_STATUS[type(problem)], str(problem))
        return cache_pb2.PutReply(stored=stored)

    def get(self, request: cache_pb2.GetRequest, context: grpc.ServicerContext) -> Iterator[cache_pb2.GetReply]:
        """Send a whole shard."""
        with _sending(request.id, context), self._store.path(ShardId(request.id)).open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield cache_pb2.GetReply(chunk=chunk)

    def describe(
        self, request: cache_pb2.DescribeRequest, context: grpc.ServicerContext
    ) -> Iterator[cache_pb2.DescribeReply]:
        """Send what a shard says of itself."""
        from deeplink.cache.store import described  # noqa: PLC0415 - pyarrow: no agent needs it to start

        with _sending(request.id, context):
            yield from described.replies(self._store.path(ShardId(request.id)), ShardId(request.id))


def plain_clients(
    servicer: CacheServicer,
    token: str | RunTokens,
    limits: ServerLimits | None = None,
    user_of: Callable[[str], tuple[int, str]] | None = None,
) -> PlainClients:
    """Return what a server is to our own clients, who read without grpcio (docs/decisions/0036-frames.md)."""
    get = f"/{frames.SERVICE}/Get"
    return PlainClients(
        node=servicer.node,
        token=token,
        methods={frames.READ_METHOD: servicer.read_message},
        limits=limits or own_limits(),
        on_refused=metrics.CACHE_REFUSED_CALLS.inc,
        user_methods={frames.READ_METHOD: servicer.read_for_user, get: servicer.get_for_user},
        user_of=user_of,
    )


def local_listener(path: Path, servicer: CacheServicer) -> LocalListener:
    """Return what answers reads of this node's users at a Unix socket, as far as each may read."""
    limits = ServerLimits(
        answers=MOST_READS, connections=connections_allowed(_LOCAL_CONNECTIONS, each=4), workers=_LOCAL_WORKERS
    )
    terms = PlainTerms(
        node=servicer.node,
        find_token=lambda _name: NO_SECRET,
        is_valid=lambda _token: True,
        methods={},
        user_methods={frames.READ_METHOD: partial(servicer.read_for_user, is_here=True)},
    )
    server = PlainServer(terms, SystemClock(), limits=limits, on_refused=metrics.CACHE_REFUSED_CALLS.inc)
    return LocalListener(path, server)


def own_limits() -> ServerLimits:
    """Return an agent's bounds: connections take a quarter of its descriptors, open shards half."""
    connections = connections_allowed(ServerLimits().connections)
    return ServerLimits(answers=MOST_READS, connections=connections, workers=MOST_WAITING)
