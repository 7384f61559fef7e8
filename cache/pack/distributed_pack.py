"""Has the members pack: each makes shards on its own SSD, two at a time, and sends copies to the shards' owners.

A member that fails is left out from then on; what it had not finished others make, or the caller.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from deeplink.cache.errors import MemberError, MemberSilentError, ShardIdError
from deeplink.cache.format.block import checked_shard_id
from deeplink.cache.pack.building import Piece
from deeplink.cache.transfer.client import member_channel
from deeplink.core.types import NodeName
from deeplink.rpc.channel import MAX_MESSAGE
from deeplink.v1 import cache_pb2, cache_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import grpc

    from deeplink.cache.format.names import Names
    from deeplink.core.clock import Clock
    from deeplink.core.types import Member

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


@dataclass(frozen=True, slots=True)
class ReadProgress:
    """So much was read since the last one; negative where a member is lost that had read it in vain."""

    files: int
    bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class ShardMade:
    """A shard was made and lies with `holders`."""

    number: int
    piece: Piece
    holders: tuple[NodeName, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """A member cannot read the files of a shard, which may be their fault or its own."""

    number: int


@dataclass(frozen=True, slots=True)
class MemberGone:
    """A member does not answer any more; what it holds cannot be counted on."""

    member: NodeName
    problem: str


Event = ReadProgress | ShardMade | Refused | MemberGone


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
    """Deals out the shards of one task."""

    def __init__(self, task: cache_pb2.PackTask, token: str, clock: Clock) -> None:
        self._task, self._token, self._clock = task, token, clock
        self._changed = threading.Condition()
        self._todo: deque[int] = deque()
        self._ended = False
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._workers: list[_Worker] = []

    @contextmanager
    def among(
        self, members: Sequence[Member], numbers: Sequence[int], share: Callable[[int], ShardShare]
    ) -> Iterator[Iterator[Event]]:
        """Give what happens as members make shards; it ends when all are made or no member is left."""
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
            yield self._happening(threads)
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

    def _happening(self, threads: Sequence[threading.Thread]) -> Iterator[Event]:
        while True:
            alive = any(thread.is_alive() for thread in threads)
            try:
                yield self._events.get(timeout=_LOOK_S)
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
                    self._events.put(MemberGone(worker.member.name, str(problem)))
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
                    self._events.put(Refused(number))
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
            self._events.put(ReadProgress(reply.advance.files, reply.advance.bytes))
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
        self._events.put(ShardMade(done.number, piece, tuple(map(NodeName, done.holders))))
        with self._changed:
            del worker.doing[done.number]
            self._changed.notify_all()

    def _take_failed(self, worker: _Worker, failed: cache_pb2.PackFailed) -> None:
        with self._changed:
            known = worker.doing.pop(failed.number, None) is not None
            if known and failed.problem == cache_pb2.PACK_PROBLEM_SOURCE:
                self._events.put(Refused(failed.number))
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
            self._events.put(ReadProgress(-worker.files, -worker.bytes))
