"""A member's side of packing: makes the shards it is asked for straight onto its own SSD, and reads shards back.

One packing at a time: two would only take the SSD from each other. A second one is refused, and done by others.
"""

from __future__ import annotations

import logging
import queue
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np

from deeplink.cache.errors import (
    BadKeyError,
    HomeError,
    KeyCollisionError,
    PackRunningError,
    PlacementError,
    SourceChangedError,
    SourceError,
    SourceFileError,
)
from deeplink.cache.layout import checked_shard_id
from deeplink.cache.names import Names
from deeplink.cache.packing.placing import Placer
from deeplink.cache.packing.shard_pipeline import PipelineContext, ShardPipeline
from deeplink.cache.packing.staging import staging
from deeplink.cache.packing.verifying import verified
from deeplink.cache.source import open_source
from deeplink.cache.sources.home import open_home
from deeplink.cache.sources.reading import FileReader
from deeplink.clock import Clock, SystemClock
from deeplink.errors import DeepLinkError
from deeplink.runtokens import shown
from deeplink.types import parse_members
from deeplink.v1 import cache_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from deeplink.cache.packing.staging import Piece, Staging
    from deeplink.cache.sources.origin import Source
    from deeplink.cache.store import Store
    from deeplink.runtokens import RunTokens
    from deeplink.types import NodeName

log = logging.getLogger(__name__)

SERVICE = "deeplink.v1.Cache"
BEAT_S = 1.0
_MOST_WAITING = 8
_MOST_MEMBERS = 4096
_MOST_BYTES = 1 << 46


class _LeftError(Exception):
    """Who asked for the packing has gone."""


class PackingServicer:
    """Packs into `store` as member `node`. Register it with the server of the member's other calls.

    Args:
        store: this node's shards.
        node: this member's name.
        token: what calls to the other members carry.
        clock: where time comes from.
    """

    def __init__(self, store: Store, node: NodeName, token: str | RunTokens, clock: Clock | None = None) -> None:
        self._store, self._node, self._token = store, node, token
        self._clock = clock or SystemClock()
        self._packing = threading.Lock()

    def register(self, server: grpc.Server) -> list[str]:
        """Add the calls to a server; their service is that of `CacheServicer`, so there is no further name."""
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Pack": grpc.stream_stream_rpc_method_handler(
                self.pack,
                request_deserializer=cache_pb2.PackRequest.FromString,
                response_serializer=cache_pb2.PackReply.SerializeToString,
            ),
            "Verify": grpc.unary_stream_rpc_method_handler(
                self.verify,
                request_deserializer=cache_pb2.VerifyRequest.FromString,
                response_serializer=cache_pb2.VerifyReply.SerializeToString,
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        return []

    def pack(
        self, requests: Iterator[cache_pb2.PackRequest], context: grpc.ServicerContext
    ) -> Iterator[cache_pb2.PackReply]:
        """Make shards as they are asked for; the first request says where from and where to."""
        first = next(requests, None)
        if first is None or first.WhichOneof("what") != "task":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message names no task")
        if not self._packing.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "this member is packing for somebody else")
        try:
            shift = _Shift(self._store, self._node, shown(self._token), self._clock)
            thread = threading.Thread(
                target=self._work, args=(shift, first.task, requests), name="deeplink-packing", daemon=True
            )
            if not context.add_callback(shift.leave):
                shift.leave()
            thread.start()
        except BaseException:
            self._packing.release()
            raise
        yield from shift.replies()
        if shift.problem:
            code = grpc.StatusCode.RESOURCE_EXHAUSTED if shift.busy else grpc.StatusCode.FAILED_PRECONDITION
            context.abort(code, shift.problem)

    def _work(self, shift: _Shift, task: cache_pb2.PackTask, requests: Iterator[cache_pb2.PackRequest]) -> None:
        try:
            shift.work(task, requests)
        finally:
            # Not before: what hangs in a source or on the SSD still has hold of both.
            self._packing.release()

    def verify(
        self, request: cache_pb2.VerifyRequest, context: grpc.ServicerContext
    ) -> Iterator[cache_pb2.VerifyReply]:
        """Read shards back, one after another, as long as the caller waits."""
        for name in request.ids:
            if not context.is_active():
                return
            yield from verified(self._store, name)


class _Shift:
    """One call to pack: `work` in a thread of its own, `replies` in that of the call."""

    def __init__(self, store: Store, node: NodeName, token: str, clock: Clock) -> None:
        self._store, self._node, self._token, self._clock = store, node, token, clock
        self._replies: queue.Queue[cache_pb2.PackReply | None] = queue.Queue(_MOST_WAITING)
        self._left = threading.Event()
        self._lock = threading.Lock()
        self._files = self._bytes = 0
        self.problem, self.busy = "", False

    def leave(self) -> None:
        """Take note that the caller has gone: end soon."""
        self._left.set()

    def replies(self) -> Iterator[cache_pb2.PackReply]:
        """Yield what there is to say, at least every second, until all is done."""
        while True:
            try:
                reply = self._replies.get(timeout=BEAT_S)
            except queue.Empty:
                yield self._advance()
                continue
            # What was read comes before what was made of it.
            yield self._advance()
            if reply is None:
                return
            yield reply

    def _advance(self) -> cache_pb2.PackReply:
        with self._lock:
            files, size = self._files, self._bytes
            self._files = self._bytes = 0
        return cache_pb2.PackReply(advance=cache_pb2.PackAdvance(files=files, bytes=size))

    def _was_read(self, files: int, size: int) -> None:
        if self._left.is_set():
            raise _LeftError
        with self._lock:
            self._files += files
            self._bytes += size

    def _say(self, reply: cache_pb2.PackReply | None) -> None:
        while not self._left.is_set():
            try:
                self._replies.put(reply, timeout=BEAT_S)
            except queue.Full:
                continue
            return

    def work(self, task: cache_pb2.PackTask, requests: Iterator[cache_pb2.PackRequest]) -> None:
        """Make all shards that are asked for."""
        try:
            self._pack(task, requests)
        except _LeftError:
            log.info("packing ends: who asked for it has gone")
        except (DeepLinkError, ValueError) as problem:
            self.problem, self.busy = str(problem), isinstance(problem, PackRunningError)
        except Exception:
            log.exception("packing")
            self.problem = "it failed in a way that its log tells"
        finally:
            self._say(None)

    def _pack(self, task: cache_pb2.PackTask, requests: Iterator[cache_pb2.PackRequest]) -> None:
        members = parse_members(task.members)
        if not 0 < task.replicas <= _MOST_MEMBERS or not 0 < len(members) <= _MOST_MEMBERS:
            raise ValueError("the task names no members or no copies")
        origin = open_source(task.source)
        home = open_home(task.home) if task.home else None
        # Besides the packer's own folder, which may lie in this very store.
        plan = f"{checked_shard_id(task.plan)}-{self._node}"
        with (
            Placer(self._store, self._node, members, self._token, replicas=task.replicas) as placer,
            staging(self._store.root, plan, self._clock.unix()) as stage,
            FileReader(origin, self._clock) as reader,
            ShardPipeline(
                origin, reader, PipelineContext(self._store, stage, placer, home), self._was_read
            ) as line,
        ):
            for request in _until_cancelled(requests):
                if self._left.is_set():
                    raise _LeftError
                self._make(request.shard, origin, line, stage, placer)

    def _make(
        self, wanted: cache_pb2.PackShard, origin: Source, line: ShardPipeline, stage: Staging, placer: Placer
    ) -> None:
        try:
            names = Names.checked(wanted.keys, np.frombuffer(wanted.key_lengths, "<u2"))
            sizes = np.frombuffer(wanted.sizes, "<u8").astype(np.int64)
            if (
                not len(names)
                or len(sizes) != len(names)
                or not 0 <= int(sizes.min()) <= int(sizes.max()) < _MOST_BYTES
            ):
                raise BadKeyError("", "the files do not fit their sizes")
            piece = stage.noted(wanted.number, len(names)) if wanted.mark else None
            if piece is not None and line.keep(wanted.number, piece):
                self._was_read(len(names), int(sizes.sum()))
                self._say(_made(wanted.number, piece, placer))
                return
            _check_mark(origin, names[0], wanted.mark)
            finished = line.build(wanted.number, names, sizes)
        except (DeepLinkError, OSError) as problem:
            self._say(_failed(wanted.number, problem))
            return
        finished.add_done_callback(partial(self._finished, wanted.number, partial(_made, placer=placer)))

    def _finished(
        self, number: int, made: Callable[[int, Piece], cache_pb2.PackReply], finished: Future[Piece]
    ) -> None:
        problem = finished.exception()
        self._say(made(number, finished.result()) if problem is None else _failed(number, problem))


def _until_cancelled(requests: Iterator[cache_pb2.PackRequest]) -> Iterator[cache_pb2.PackRequest]:
    try:
        yield from requests
    except Exception as problem:  # grpc raises a bare Exception when the caller has gone
        raise _LeftError from problem


def _check_mark(origin: Source, name: str, mark: int) -> None:
    """Look whether the files here are those that were listed, and not others of the same names and sizes.

    Raises:
        SourceChangedError: they are others.
        SourceFileError: they cannot be looked at.
    """
    if mark and origin.mark(name) != mark:
        raise SourceChangedError(origin.url, name, "it has another time of change here than where it was listed")


def _made(number: int, piece: Piece, placer: Placer) -> cache_pb2.PackReply:
    return cache_pb2.PackReply(
        done=cache_pb2.PackDone(
            number=number,
            id=piece.id,
            bytes=piece.bytes,
            block_offsets=piece.block_offsets.astype("<u8").tobytes(),
            checksums=piece.checksums.astype("<u8").tobytes(),
            holders=placer.holders(piece.id, piece.bytes),
        )
    )


def _failed(number: int, problem: BaseException) -> cache_pb2.PackReply:
    kinds: list[tuple[tuple[type[BaseException], ...], cache_pb2.PackProblem.ValueType]] = [
        (
            (SourceError, SourceFileError, SourceChangedError, BadKeyError, KeyCollisionError),
            cache_pb2.PACK_PROBLEM_SOURCE,
        ),
        ((PlacementError,), cache_pb2.PACK_PROBLEM_PLACEMENT),
        ((HomeError,), cache_pb2.PACK_PROBLEM_HOME),
    ]
    found = next((kind for classes, kind in kinds if isinstance(problem, classes)), cache_pb2.PACK_PROBLEM_STORE)
    return cache_pb2.PackReply(failed=cache_pb2.PackFailed(number=number, problem=found, text=str(problem)))
