"""Packing by members: each makes shards on its own SSD, two at a time, and sends copies to the shards' owners.

`DistributedPack` is the packer's side, `PackingServicer` a member's. A member that fails is left out from then on;
what it had not finished others make, or the packer.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np

from deeplink.cache.errors import (
    MemberError,
    MemberSilentError,
    PlacementError,
    ShardIdError,
    SourceChangedError,
    SourceError,
)
from deeplink.cache.format.block import checked_shard_id
from deeplink.cache.format.names import Names
from deeplink.cache.pack.building import Piece
from deeplink.cache.pack.shard_pipeline import Placer, ShardPipeline, staging
from deeplink.cache.pack.verifying import verified
from deeplink.cache.source.home import open_home
from deeplink.cache.source.opening import open_source
from deeplink.cache.transfer.client import member_channel
from deeplink.core.clock import Clock, SystemClock
from deeplink.core.descriptors import LockHeldError
from deeplink.core.errors import DeepLinkError
from deeplink.core.types import NodeName, parse_members
from deeplink.rpc.channel import MAX_MESSAGE
from deeplink.rpc.tokens import shown
from deeplink.v1 import cache_pb2, cache_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    from deeplink.cache.store.store import Store
    from deeplink.core.types import Member
    from deeplink.rpc.tokens import RunTokens

log = logging.getLogger(__name__)

_EACH = 2
"""Shards a member has to make at a time: it reads the second while the first is written and sent on."""
_SILENT_S = 10.0
"""A member says every second that it works; one that has said nothing for so long does not."""
_STUCK_S = 300.0
"""A member that reads nothing and finishes nothing for so long is given up, whatever it says."""
_GRACE_S = 5.0
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class ShardShare:
    """The files of one shard; `mark` is the change mark of the first one, 0 where it has none."""

    number: int
    names: Names
    sizes: np.ndarray
    mark: int

    def request(self) -> cache_pb2.PackRequest:
        """Return the message that has a member make the shard."""
        return cache_pb2.PackRequest(
            shard=cache_pb2.PackShard(
                number=self.number,
                keys=self.names.joined(),
                key_lengths=self.names.lengths.astype("<u2").tobytes(),
                sizes=self.sizes.astype("<u8").tobytes(),
                mark=self.mark,
            )
        )

    @property
    def fits(self) -> bool:
        """Whether it fits into a message, and what comes back does too."""
        return int(self.names.offsets[-1] - self.names.offsets[0]) + 24 * len(self.names) < MAX_MESSAGE // 2


@dataclass(slots=True, eq=False)
class _Worker:
    """A member at work; `files` and `bytes` it has read for shards that are not made yet."""

    member: Member
    replied: float  # when it last sent anything
    moved: float
    call: grpc.Call | None = None
    doing: dict[int, ShardShare] = field(default_factory=dict)
    files: int = 0
    bytes: int = 0
    lost: bool = False


class DistributedPack:
    """Deals out the shards of one task, and says what happens, all in the thread that runs it.

    `was_read`: so many files and bytes more; fewer where a member is lost that had read them in vain. `made`: a
    shard lies with these members. `refused`: a member cannot read a shard's files, which may be their fault or its
    own. `gone`: a member does not answer any more; what it holds cannot be counted on.
    """

    def __init__(
        self,
        task: cache_pb2.PackTask,
        token: str,
        clock: Clock,
        *,
        was_read: Callable[[int, int], None],
        made: Callable[[int, Piece, Sequence[NodeName]], None],
        refused: Callable[[int], None],
        gone: Callable[[NodeName, str], None],
    ) -> None:
        self._task, self._token, self._clock = task, token, clock
        self._was_read, self._made, self._refused, self._gone = was_read, made, refused, gone
        self._changed = threading.Condition()
        self._todo: deque[int] = deque()
        self._ended = False
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._workers: list[_Worker] = []

    def run(self, members: Sequence[Member], numbers: Sequence[int], share: Callable[[int], ShardShare]) -> None:
        """Return when members have made all of these shards, or none of the members is left."""
        self._todo = deque(numbers)
        now = self._clock.monotonic()
        self._workers = [_Worker(member, now, now) for member in members]
        threads = [
            threading.Thread(target=self._serve, args=(worker, share), name="deeplink-spread", daemon=True)
            for worker in self._workers
        ]
        for thread in threads:
            thread.start()
        try:
            self._tell(threads)
            # Members that are done clear up behind them; that takes a moment.
            self._join(threads, _GRACE_S)
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()
            for worker in self._workers:
                if worker.call is not None:
                    worker.call.cancel()
            self._join(threads, _SILENT_S)

    def _join(self, threads: Sequence[threading.Thread], patience_s: float) -> None:
        until = self._clock.monotonic() + patience_s
        for thread in threads:
            thread.join(max(until - self._clock.monotonic(), 0.0))

    def _tell(self, threads: Sequence[threading.Thread]) -> None:
        while True:
            alive = any(thread.is_alive() for thread in threads)
            try:
                self._events.get(timeout=_LOOK_S)()
            except queue.Empty:
                if not alive:
                    return
            with self._changed:
                finished = not self._todo and not any(worker.doing for worker in self._workers)
                self._ended = self._ended or finished
                self._changed.notify_all()
            if finished and self._events.empty():
                return
            self._drop_silent()

    def _drop_silent(self) -> None:
        now = self._clock.monotonic()
        for worker in self._workers:
            silent, stuck = now - worker.replied > _SILENT_S, now - worker.moved > _STUCK_S
            if worker.call is not None and not worker.lost and worker.doing and (silent or stuck):
                log.warning("member %s packs no more: %s", worker.member.name, "silent" if silent else "stuck")
                worker.call.cancel()

    def _serve(self, worker: _Worker, share: Callable[[int], ShardShare]) -> None:
        try:
            with member_channel(worker.member, self._token) as channel:
                call = cache_pb2_grpc.CacheStub(channel).Pack(self._requests(worker, share))
                worker.call = call
                for reply in call:
                    self._take(worker, reply)
        except (MemberError, ShardIdError, ValueError) as problem:
            if not self._ended:
                log.warning("packing goes on without member %s: %s", worker.member.name, problem)
                if isinstance(problem, MemberSilentError):
                    self._events.put(partial(self._gone, worker.member.name, str(problem)))
        finally:
            self._lose(worker)

    def _requests(self, worker: _Worker, share: Callable[[int], ShardShare]) -> Iterator[cache_pb2.PackRequest]:
        yield cache_pb2.PackRequest(task=self._task)
        while True:
            with self._changed:
                while not self._ended and not worker.lost and (not self._todo or len(worker.doing) >= _EACH):
                    self._changed.wait(_LOOK_S)
                if self._ended or worker.lost:
                    return
                number = self._todo.popleft()
                wanted = share(number)
                if not wanted.fits:
                    self._events.put(partial(self._refused, number))
                    continue
                worker.doing[number] = wanted
            yield wanted.request()

    def _take(self, worker: _Worker, reply: cache_pb2.PackReply) -> None:
        worker.replied = self._clock.monotonic()
        kind = reply.WhichOneof("what")
        if kind == "advance":
            if reply.advance.files or reply.advance.bytes:
                worker.moved = worker.replied
            worker.files += reply.advance.files
            worker.bytes += reply.advance.bytes
            self._events.put(partial(self._was_read, reply.advance.files, reply.advance.bytes))
        elif kind == "done":
            worker.moved = worker.replied
            self._take_made(worker, reply.done)
        elif kind == "failed":
            self._take_failed(worker, reply.failed)

    def _take_made(self, worker: _Worker, done: cache_pb2.PackDone) -> None:
        wanted = worker.doing.get(done.number)
        checksums = np.frombuffer(done.checksums, "<u8")
        if wanted is None or len(checksums) != len(wanted.names) or not done.holders:
            raise ValueError(f"its answer does not fit shard {done.number}")
        offsets = np.frombuffer(done.block_offsets, "<u8")
        piece = Piece(checked_shard_id(done.id), done.bytes, offsets, checksums)
        worker.files -= len(wanted.names)
        worker.bytes -= int(wanted.sizes.sum())
        self._events.put(partial(self._made, done.number, piece, tuple(map(NodeName, done.holders))))
        with self._changed:
            del worker.doing[done.number]
            self._changed.notify_all()

    def _take_failed(self, worker: _Worker, failed: cache_pb2.PackFailed) -> None:
        with self._changed:
            known = worker.doing.pop(failed.number, None) is not None
            if known and failed.problem == cache_pb2.PACK_PROBLEM_SOURCE:
                self._events.put(partial(self._refused, failed.number))
            elif known:
                self._todo.append(failed.number)
            self._changed.notify_all()
        raise MemberError(worker.member.name, failed.text)

    def _lose(self, worker: _Worker) -> None:
        """Put back what a member has not made."""
        with self._changed:
            worker.lost = True
            self._todo.extend(worker.doing)
            worker.doing.clear()
            self._changed.notify_all()
        if worker.files or worker.bytes:
            self._events.put(partial(self._was_read, -worker.files, -worker.bytes))


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
