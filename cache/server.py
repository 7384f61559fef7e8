"""The Cache service of a node agent: serves the shards of this node's store, and takes shards in.

Reads are slices of mapped files (or `preadv` where a file was not verified here); LMDB is not involved. Whatever a
request holds is answered per item or refused as a whole; nothing in it becomes a path unchecked.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from deeplink import metrics
from deeplink.cache import described, layout
from deeplink.cache.client import CHUNK_BYTES
from deeplink.cache.errors import (
    FrameError,
    ShardCorruptError,
    ShardIdError,
    StoreError,
    StoreFullError,
)
from deeplink.cache.remote import frames
from deeplink.cache.remote.routes import DATA_PORT_HEADER, PROTOCOL, PROTOCOL_HEADER
from deeplink.cache.serving.served import Answering, ServedShards
from deeplink.clock import Clock, SystemClock
from deeplink.plainrpc import CallRefusedError, Status
from deeplink.v1 import cache_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from deeplink.cache.serving.served import Body
    from deeplink.cache.store import Store
    from deeplink.plainrpc.scattered import Scattered
    from deeplink.types import NodeName, ShardId

log = logging.getLogger(__name__)

SERVICE = "deeplink.v1.Cache"
MOST_READS = 80
"""Read calls at once. The agent has more threads: heartbeats and reports are answered whatever is read."""


@dataclass(frozen=True, slots=True)
class ServedTotals:
    """What was sent to other nodes since the service started."""

    samples: int
    bytes: int


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
    """Serves `store` as member `node`. Register it with a server; safe to use from its threads.

    Attributes:
        data_port: where `read_message` is served besides (see `deeplink.cache.serving.dataport`); 0: nowhere.
        stat_more: adds to what `stat` says.
    """

    def __init__(self, store: Store, node: NodeName, clock: Clock | None = None) -> None:
        self._store, self._node = store, node
        self._lock = threading.Lock()
        self._shards = ServedShards(store, clock or SystemClock())
        self._reading = threading.BoundedSemaphore(MOST_READS)
        self._samples = self._bytes = 0
        self.data_port = 0
        self.stat_more: Callable[[cache_pb2.StatReply], None] = lambda _reply: None

    def register(self, server: grpc.Server) -> list[str]:
        """Add the service to a server and return its full name, as `deeplink.wire.bound_server` wants it."""
        unary, unary_stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Stat": unary(
                self.stat,
                request_deserializer=cache_pb2.StatRequest.FromString,
                response_serializer=cache_pb2.StatReply.SerializeToString,
            ),
            # No serializers: the messages are bytes on this side too.
            "Read": grpc.stream_stream_rpc_method_handler(self.read),
            "Put": grpc.stream_unary_rpc_method_handler(
                self.put,
                request_deserializer=cache_pb2.PutRequest.FromString,
                response_serializer=cache_pb2.PutReply.SerializeToString,
            ),
            "Get": unary_stream(
                self.get,
                request_deserializer=cache_pb2.GetRequest.FromString,
                response_serializer=cache_pb2.GetReply.SerializeToString,
            ),
        }
        handlers["Describe"] = described.handler(self._store)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        return [SERVICE]

    def totals(self) -> ServedTotals:
        """Return what was sent to other nodes so far."""
        with self._lock:
            return ServedTotals(self._samples, self._bytes)

    def stat(self, _request: cache_pb2.StatRequest, _context: grpc.ServicerContext) -> cache_pb2.StatReply:
        """Say what the store holds."""
        reply = cache_pb2.StatReply(
            node=self._node, free_bytes=self._store.free_bytes(), data_port=self.data_port, protocol=PROTOCOL
        )
        for shard in self._store.ids():
            try:
                size = self._store.path(shard).stat().st_size
            except FileNotFoundError:  # removed since
                continue
            reply.shards.add(id=shard, bytes=size, verified=self._store.is_verified(shard))
        self.stat_more(reply)
        return reply

    def read(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Answer batches of extents, in order."""
        if self.data_port:
            context.set_trailing_metadata(
                ((DATA_PORT_HEADER, str(self.data_port)), (PROTOCOL_HEADER, str(PROTOCOL)))
            )
        if not self._reading.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"more than {MOST_READS} calls read at this moment")
        try:
            for message in requests:
                try:
                    request = self._taken(message)
                except FrameError as problem:
                    context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(problem))
                with metrics.CACHE_READ_SECONDS.time():
                    for body in Answering(self._shards, request, copied=True).bodies():
                        self._count(body)
                        yield frames.encode_reply(request.id, body.head, body.copies)
        except CallRefusedError as problem:  # not enough descriptors: as on the data port, it is busy
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, problem.why)
        finally:
            self._reading.release()

    def read_message(self, message: bytes) -> Iterator[_Sent]:
        """Answer a batch of extents with replies that are sent where they lie, for a `PlainServer`.

        Raises:
            CallRefusedError: it is no such request.
        """
        try:
            request = self._taken(message)
        except FrameError as problem:
            raise CallRefusedError(Status.INVALID, str(problem)) from problem
        with metrics.CACHE_READ_SECONDS.time():
            answering = Answering(self._shards, request, copied=False)
            for body in answering.bodies():
                self._count(body)
                start = frames.reply_start(request.id, body.head, body.size)
                places = [] if body.places is None else [body.places]
                yield _Sent([start, *body.copies, *places], len(start) + body.size, answering)

    def _taken(self, message: bytes) -> frames.ExtentsRequest:
        request = frames.decode_request(message)
        for shard in request.doubted:
            self._doubt(shard)
        return request

    def _doubt(self, shard: ShardId) -> None:
        """Have a shard verified anew by whoever looks after the store; until then it is served as it is."""
        try:
            # Another file may have taken its place a moment ago: that one is what the reader asks for next.
            self._shards.close(shard)
            if self._store.doubt(shard):
                log.warning("shard %s: a reader was sent wrong bytes of it; it will be verified anew", shard)
        except (ShardIdError, OSError) as problem:
            log.warning("shard %s cannot be taken for unverified: %s", shard[:80], problem)

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
            shard = layout.checked_shard_id(first.id)
            stored = self._store.add(shard, (request.chunk for request in requests), first.total_bytes)
        except ShardIdError as problem:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(problem))
        except ShardCorruptError as problem:
            context.abort(grpc.StatusCode.DATA_LOSS, str(problem))
        except StoreFullError as problem:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(problem))
        except StoreError as problem:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(problem))
        return cache_pb2.PutReply(stored=stored)

    def get(self, request: cache_pb2.GetRequest, context: grpc.ServicerContext) -> Iterator[cache_pb2.GetReply]:
        """Send a whole shard."""
        try:
            path = self._store.path(layout.checked_shard_id(request.id))
            with path.open("rb") as file:
                while chunk := file.read(CHUNK_BYTES):
                    yield cache_pb2.GetReply(chunk=chunk)
        except ShardIdError as problem:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(problem))
        except FileNotFoundError:
            context.abort(grpc.StatusCode.NOT_FOUND, f"shard {request.id} is not held here")
        except OSError as problem:
            context.abort(grpc.StatusCode.DATA_LOSS, f"shard {request.id}: {problem.strerror}")
