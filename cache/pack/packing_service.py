"""A member's side of packing: makes shards straight onto its own SSD, and reads shards back."""

from __future__ import annotations

import logging
import queue
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np

from deeplink.cache.errors import PlacementError, SourceChangedError, SourceError
from deeplink.cache.format.block import checked_shard_id
from deeplink.cache.format.names import Names
from deeplink.cache.pack.shard_pipeline import Placer, ShardPipeline, staging
from deeplink.cache.pack.verifying import verified
from deeplink.cache.source.home import open_home
from deeplink.cache.source.opening import open_source
from deeplink.core.clock import Clock, SystemClock
from deeplink.core.descriptors import LockHeldError
from deeplink.core.errors import DeepLinkError
from deeplink.core.types import parse_members
from deeplink.rpc.tokens import shown
from deeplink.v1 import cache_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from deeplink.cache.pack.building import Piece
    from deeplink.cache.store.store import Store
    from deeplink.core.types import NodeName
    from deeplink.rpc.tokens import RunTokens

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
_MOST_WAITING = 8
_MOST_MEMBERS = 4096
_MOST_BYTES = 1 << 46


class _LeftError(Exception):
    """The caller of the packing has gone."""


class PackingServicer:
    """Packs into `store` as member `node`: the calls Pack and Verify.

    One packing at a time: two would only take the SSD from each other.
    """

    def __init__(self, store: Store, node: NodeName, token: str | RunTokens, clock: Clock | None = None) -> None:
        self._store, self._node, self._token = store, node, token
        self._clock = clock or SystemClock()
        self._packing = threading.Lock()
        self.calls: dict[str, Callable[..., Any]] = {"Pack": self.pack, "Verify": self.verify}

    def pack(
        self, requests: Iterator[cache_pb2.PackRequest], context: grpc.ServicerContext
    ) -> Iterator[cache_pb2.PackReply]:
        """Make shards as they are asked for; the first request says where from and where to."""
        first = next(requests, None)
        if first is None or first.WhichOneof("what") != "task":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message names no task")
        if not self._packing.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "this member is packing for another caller")
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
        """Note that the caller has gone: end soon."""
        self._left.set()

    def replies(self) -> Iterator[cache_pb2.PackReply]:
        """Yield replies, at least one a second, until all is done."""
        while True:
            try:
                reply = self._replies.get(timeout=HEARTBEAT_S)
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

    def _reply(self, reply: cache_pb2.PackReply | None) -> None:
        while not self._left.is_set():
            try:
                self._replies.put(reply, timeout=HEARTBEAT_S)
            except queue.Full:
                continue
            return

    def work(self, task: cache_pb2.PackTask, requests: Iterator[cache_pb2.PackRequest]) -> None:
        """Make all shards that are asked for."""
        try:
            self._pack(task, requests)
        except _LeftError:
            log.info("packing ends: its caller has gone")
        except (DeepLinkError, ValueError) as problem:
            self.problem, self.busy = str(problem), isinstance(problem, LockHeldError)
        except Exception:
            log.exception("packing")
            self.problem = "it failed; see its log"
        finally:
            self._reply(None)

    def _pack(self, task: cache_pb2.PackTask, requests: Iterator[cache_pb2.PackRequest]) -> None:
        members = parse_members(task.members)
        if not 0 < task.replicas <= _MOST_MEMBERS or not 0 < len(members) <= _MOST_MEMBERS:
            raise ValueError("the task names no members or no copies")
        origin, store, clock = open_source(task.source), self._store, self._clock
        home = open_home(task.home, task.access) if task.home else None
        # Besides the packer's own folder, which may lie in this very store.
        plan = f"{checked_shard_id(task.plan)}-{self._node}"
        with (
            Placer(store, self._node, members, self._token, replicas=task.replicas) as placer,
            staging(store.root, plan, clock.unix()) as stage,
            ShardPipeline(origin, store, stage, placer, home=home, clock=clock, done=self._was_read) as line,
        ):
            for request in _until_cancelled(requests):
                if self._left.is_set():
                    raise _LeftError
                self._make(request.shard, line)

    def _make(self, wanted: cache_pb2.PackShard, line: ShardPipeline) -> None:
        try:
            names = Names.checked(wanted.keys, np.frombuffer(wanted.key_lengths, "<u2"))
            sizes = np.frombuffer(wanted.sizes, "<u8").astype(np.int64)
            if (
                not len(names)
                or len(sizes) != len(names)
                or not 0 <= int(sizes.min()) <= int(sizes.max()) < _MOST_BYTES
            ):
                raise SourceError.bad_key("", "the files do not fit their sizes")
            piece = line.stage.noted(wanted.number, len(names)) if wanted.mark else None
            if piece is not None and line.keep(wanted.number, piece):
                self._was_read(len(names), int(sizes.sum()))
                self._reply(_made(wanted.number, piece, line.placer))
                return
            if wanted.mark and line.origin.stat(names[0])[1] != wanted.mark:
                # These are other files of the same names and sizes.
                problem = "it has another time of change here than where it was listed"
                raise SourceChangedError(line.origin.url, names[0], problem)
            finished = line.build(wanted.number, names, sizes)
        except (DeepLinkError, OSError) as error:
            self._reply(_failed(wanted.number, error))
            return
        finished.add_done_callback(partial(self._finished, wanted.number, line.placer))

    def _finished(self, number: int, placer: Placer, finished: Future[Piece]) -> None:
        problem = finished.exception()
        self._reply(_made(number, finished.result(), placer) if problem is None else _failed(number, problem))


def _until_cancelled(requests: Iterator[cache_pb2.PackRequest]) -> Iterator[cache_pb2.PackRequest]:
    try:
        yield from requests
    except Exception as problem:  # grpc raises a bare Exception when the caller has gone
        raise _LeftError from problem


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
    kinds = (
        (SourceError, cache_pb2.PACK_PROBLEM_SOURCE),
        (PlacementError, cache_pb2.PACK_PROBLEM_PLACEMENT),
    )
    found = next((kind for error, kind in kinds if isinstance(problem, error)), cache_pb2.PACK_PROBLEM_STORE)
    return cache_pb2.PackReply(failed=cache_pb2.PackFailed(number=number, problem=found, text=str(problem)))
