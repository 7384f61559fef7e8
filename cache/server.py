"""The Cache service of a node agent: serves the shards of this node's store, and takes shards in.

Reads are slices of mapped files (or `preadv` where a file was not verified here); LMDB is not involved. Whatever a
request holds is answered per item or refused as a whole; nothing in it becomes a path unchecked.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np

from deeplink import metrics
from deeplink.cache import described, frames, layout
from deeplink.cache.client import CHUNK_BYTES
from deeplink.cache.errors import (
    FrameError,
    ShardCorruptError,
    ShardIdError,
    StoreError,
    StoreFullError,
)
from deeplink.cache.mapped import ColdGauge, ShardFile
from deeplink.cache.store import is_damage
from deeplink.v1 import cache_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from deeplink.cache.store import Store
    from deeplink.types import NodeName, ShardId

log = logging.getLogger(__name__)

SERVICE = "deeplink.v1.Cache"
_BODY_BYTES = 16 << 20
"""A reply's body is closed when it has so many bytes: it bounds the memory a call takes."""
_MOST_OPEN = 400
MOST_READS = 80
"""Read calls at once. The agent has more threads: heartbeats and reports are answered whatever is read."""


@dataclass(frozen=True, slots=True, eq=False)
class _Served:
    """An open shard and where its blocks lie (int64 arrays)."""

    file: ShardFile
    offsets: np.ndarray
    payloads: np.ndarray


@dataclass(frozen=True, slots=True)
class ServedTotals:
    """What was sent to other nodes since the service started."""

    samples: int
    bytes: int


class CacheServicer:
    """Serves `store` as member `node`. Register it with a server; safe to use from its threads."""

    def __init__(self, store: Store, node: NodeName) -> None:
        self._store, self._node = store, node
        self._lock = threading.Lock()
        self._open: OrderedDict[ShardId, _Served] = OrderedDict()
        self._cold = ColdGauge()
        self._reading = threading.BoundedSemaphore(MOST_READS)
        self._samples = self._bytes = 0
        self.missed: Callable[[ShardId], None] = lambda _shard: None
        """Told, in passing, of shards that are asked for and not here."""

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
        reply = cache_pb2.StatReply(node=self._node, free_bytes=self._store.free_bytes())
        for shard in self._store.ids():
            try:
                size = self._store.path(shard).stat().st_size
            except FileNotFoundError:  # removed since
                continue
            reply.shards.add(id=shard, bytes=size, verified=self._store.is_verified(shard))
        return reply

    def read(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Answer batches of extents, in order."""
        if not self._reading.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"more than {MOST_READS} calls read at this moment")
        try:
            for message in requests:
                try:
                    request = frames.decode_request(message)
                except FrameError as problem:
                    context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(problem))
                for shard in request.doubted:
                    self._doubt(shard)
                with metrics.CACHE_READ_SECONDS.time():
                    yield from self._answers(request)
        finally:
            self._reading.release()

    def _doubt(self, shard: ShardId) -> None:
        """Have a shard verified anew by whoever looks after the store; until then it is served as before."""
        try:
            if self._store.doubt(shard):
                log.warning("shard %s: a reader was sent wrong bytes of it; it will be verified anew", shard)
        except (ShardIdError, OSError) as problem:
            log.warning("shard %s cannot be taken for unverified: %s", shard[:80], problem)

    def _answers(self, request: frames.Request) -> Iterator[bytes]:
        status, offsets = self._located(request)
        lengths = np.where(status == cache_pb2.READ_STATUS_OK, request.extents["length"], 0).astype(np.int64)
        start, cold = 0, self._cold.is_cold()
        ends = np.cumsum(lengths)
        while start < len(lengths) or not len(lengths):
            before = int(ends[start - 1]) if start else 0
            stop = max(int(np.searchsorted(ends, before + _BODY_BYTES, side="right")), start + 1)
            run = slice(start, stop)
            yield self._answer(request, run, status[run], offsets[run], cold=cold)
            start = stop
            if not len(lengths):
                return

    def _located(self, request: frames.Request) -> tuple[np.ndarray, np.ndarray]:
        """Return, per extent, its status (so far) and where it begins in its shard's file."""
        extents = request.extents
        status = np.full(len(extents), cache_pb2.READ_STATUS_BAD_EXTENT, np.uint32)
        offsets = np.zeros(len(extents), np.int64)
        for number in sorted(set(extents["shard"].tolist())):
            mine = np.flatnonzero(extents["shard"] == number)
            if number >= len(request.shards):
                continue
            served, problem = self._served(request.shards[number])
            if served is None:
                status[mine] = problem
                continue
            blocks, begins = extents["block"][mine].astype(np.int64), extents["offset"][mine].astype(np.int64)
            lengths = extents["length"][mine].astype(np.int64)
            known = np.minimum(blocks, len(served.offsets) - 1)
            good = (
                (blocks < len(served.offsets))
                & (begins + lengths <= served.payloads[known])
                & (lengths <= frames.MOST_EXTENT_BYTES)
            )
            status[mine[good]] = cache_pb2.READ_STATUS_OK
            offsets[mine] = served.offsets[known] + begins
        return status, offsets

    def _answer(
        self, request: frames.Request, run: slice, status: np.ndarray, offsets: np.ndarray, *, cold: bool
    ) -> bytes:
        extents = request.extents[run]
        parts: list[memoryview | None] = [None] * len(extents)
        for number in sorted(set(extents["shard"][status == cache_pb2.READ_STATUS_OK].tolist())):
            shard = request.shards[number]
            mine = np.flatnonzero((extents["shard"] == number) & (status == cache_pb2.READ_STATUS_OK))
            try:
                served, problem = self._served(shard)
                if served is None:
                    status[mine] = problem
                    continue
                found = served.file.read(offsets[mine].tolist(), extents["length"][mine].tolist(), cold=cold)
            except (ShardCorruptError, OSError) as error:
                self._set_aside(shard, error)
                status[mine] = cache_pb2.READ_STATUS_DAMAGED
                continue
            for position, part in zip(mine.tolist(), found, strict=True):
                parts[position] = part
        body = [part for part in parts if part is not None]
        head = np.zeros(len(extents), frames.ITEM)
        head["status"] = status
        head["length"] = np.where(status == cache_pb2.READ_STATUS_OK, extents["length"], 0)
        self._count(body, len(extents) - len(body))
        return frames.encode_reply(request.id, head, body)

    def _count(self, body: Sequence[memoryview], refused: int) -> None:
        size = sum(map(len, body))
        with self._lock:
            self._samples += len(body)
            self._bytes += size
        metrics.CACHE_SERVED_SAMPLES.inc(len(body))
        metrics.CACHE_SERVED_BYTES.inc(size)
        metrics.CACHE_REFUSED_SAMPLES.inc(refused)

    def _served(self, name: ShardId) -> tuple[_Served | None, int]:
        """Return an open shard; None, with the status that says why, where it cannot be served."""
        with self._lock:
            served = self._open.get(name)
            if served is not None:
                self._open.move_to_end(name)
        # A reader in another process may have put the file aside, and another copy may have come.
        if served is not None and self._store.inode(name) == served.file.inode:
            return served, cache_pb2.READ_STATUS_OK
        try:
            served = self._opened(layout.checked_shard_id(name))
        except ShardIdError:
            return None, cache_pb2.READ_STATUS_NO_SHARD
        except FileNotFoundError:
            self.missed(name)
            return None, cache_pb2.READ_STATUS_NO_SHARD
        except (ShardCorruptError, OSError) as problem:
            self._set_aside(name, problem)
            return None, cache_pb2.READ_STATUS_DAMAGED
        self._store.touch(name)
        with self._lock:
            self._open[name] = served
            if len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)
        return served, cache_pb2.READ_STATUS_OK

    def _opened(self, shard: ShardId) -> _Served:
        file = ShardFile(self._store.path(shard), shard, mapped=self._store.is_verified(shard))
        found = file.scan()
        return _Served(file, found.offsets.astype(np.int64), found.payloads.astype(np.int64))

    def _set_aside(self, shard: ShardId, problem: Exception) -> None:
        with self._lock:
            served = self._open.pop(shard, None)
        if not is_damage(problem):
            log.warning("shard %s cannot be served now: %s", shard, problem)
            return
        metrics.CACHE_DAMAGED_SHARDS.inc()
        self._store.quarantine(shard, str(problem), inode=served.file.inode if served else None)

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
