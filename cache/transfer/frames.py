"""Batches of extents from a member: the messages (docs/decisions/0036-frames.md), and the calls that carry them.

A request is the protobuf message of `Cache.Read`. A reply to a gRPC client is one too; a reply to our own clients
is a count, the items and their bytes, which are received where they are wanted. Every call carries the token, has
a deadline, is bounded, and ends in bytes and statuses, or in a member error.
"""

from __future__ import annotations

import select
import struct
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, Protocol, Self, cast

import numpy as np
from google.protobuf.message import DecodeError
from typing_extensions import override

from deeplink.cache.errors import FrameError, MemberBusyError, MemberError, MemberSilentError
from deeplink.cache.format import block
from deeplink.core.types import ShardId
from deeplink.rpc.plain import (
    PlainBusyError,
    PlainCallError,
    PlainConnection,
    PlainRefusedError,
    PlainSilentError,
    PlainStatusError,
    Status,
)
from deeplink.rpc.plain.local_socket import UNIX
from deeplink.v1 import cache_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from deeplink.core.clock import Clock
    from deeplink.core.types import Member
    from deeplink.rpc.plain import Incoming
    from deeplink.rpc.tokens import Credentials

SERVICE = "deeplink.v1.Cache"
READ_METHOD = f"/{SERVICE}/Read"
EXTENT = np.dtype([("shard", "<u4"), ("block", "<u4"), ("offset", "<u4"), ("length", "<u4")])
ITEM = np.dtype([("status", "<u4"), ("length", "<u4")])
MOST_EXTENTS = 65_536
MOST_SHARDS = 4096
MOST_EXTENT_BYTES = block.SPAN
_MOST_IDLE = 8
_AT_ONCE = 512 << 10
"""About so many bytes are received before their checksums are taken, which costs no time while the next come."""
_SLOWEST_BYTES_PER_S = 16 << 20
"""A member that sends slower than this, over the whole of a batch, counts as silent."""

_COUNT = struct.Struct("<I")


@dataclass(frozen=True, slots=True, eq=False)
class ExtentsRequest:
    """A batch of extents: `extents` is an array of EXTENT whose `shard` is a position in `shards`.

    `doubted` names shards of which the member has sent other bytes than were packed.
    """

    id: int
    shards: Sequence[ShardId]
    extents: np.ndarray
    doubted: Sequence[ShardId] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where the bytes of a request's extents are wanted."""

    arena: memoryview  # writable
    starts: np.ndarray  # int64, one per extent: where in the arena its bytes begin; ascending, none overlap
    views: list[memoryview] | None = None  # of the arena, one per extent, where they were made already

    @classmethod
    def alone(cls, request: ExtentsRequest) -> Self:
        """Return places one after another in an arena of their own."""
        lengths = request.extents["length"].astype(np.int64)
        return cls(memoryview(bytearray(int(lengths.sum()))), np.cumsum(lengths) - lengths)


@dataclass(frozen=True, slots=True, eq=False)
class BatchReply:
    """What came of a request, extent by extent."""

    status: np.ndarray  # a ReadStatus each, uint32
    checksums: np.ndarray  # xxh3-64 of the bytes that came of each, uint64
    is_ok: bool = False  # whether all are known to be READ_STATUS_OK

    @classmethod
    def joined(cls, answers: Sequence[BatchReply]) -> BatchReply:
        """Return several answers as one."""
        if len(answers) == 1:
            return answers[0]
        status = np.concatenate([np.empty(0, np.uint32), *(answer.status for answer in answers)])
        return cls(status, np.concatenate([np.empty(0, np.uint64), *(answer.checksums for answer in answers)]))


def encode_request(request: ExtentsRequest) -> bytes:
    """Return the message of a request."""
    message = cache_pb2.ReadRequest(
        id=request.id, shards=request.shards, extents=request.extents.tobytes(), doubted=request.doubted
    )
    return message.SerializeToString()


def decode_request(message: bytes) -> ExtentsRequest:
    """Return the request in a message. Whether its extents exist is not looked at."""
    try:
        said = cache_pb2.ReadRequest.FromString(message)
    except DecodeError as problem:
        raise FrameError(str(problem)) from problem
    if len(said.extents) % EXTENT.itemsize:
        raise FrameError(f"{len(said.extents)} bytes of extents, not a multiple of {EXTENT.itemsize}")
    extents = np.frombuffer(said.extents, EXTENT)
    if len(extents) > MOST_EXTENTS:
        raise FrameError(f"{len(extents)} extents, more than {MOST_EXTENTS}")
    if max(len(said.shards), len(said.doubted)) > MOST_SHARDS:
        raise FrameError(f"more than {MOST_SHARDS} shards")
    doubted = [ShardId(name) for name in said.doubted]
    return ExtentsRequest(said.id, [ShardId(name) for name in said.shards], extents, doubted)


def reply_start(head: np.ndarray) -> bytes:
    """Return a reply to one of our own clients, up to where its items' bytes begin: their count, and `head`."""
    return _COUNT.pack(len(head)) + head.tobytes()


class Bytes(Protocol):
    """A message that is read from its beginning; `left` bytes of it are to come."""

    @property
    def left(self) -> int:
        """Bytes that are not read yet."""
        ...

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes."""
        ...


def read_reply_head(message: Bytes) -> np.ndarray:
    """Return a reply's items (of ITEM), and leave their bytes, and no more, to be read from the message."""
    if message.left < _COUNT.size:
        raise FrameError("a reply that ends too soon")
    (count,) = _COUNT.unpack(message.read(_COUNT.size))
    if count * ITEM.itemsize > message.left:
        raise FrameError(f"a reply with {count} items that ends too soon")
    items = np.frombuffer(message.read(count * ITEM.itemsize), ITEM)
    if int(items["length"].sum(dtype=np.uint64)) != message.left:
        raise FrameError(f"a body of {message.left} bytes that does not fit its head")
    return items


def _raise(member: Member, problem: PlainCallError) -> NoReturn:
    """Raise what a plain call to `member` met as one of the member errors."""
    if isinstance(problem, PlainSilentError):
        raise MemberSilentError(member.name, str(problem), is_late=problem.is_late) from problem
    if isinstance(problem, PlainRefusedError):
        raise MemberError.refused(member.name) from problem
    if isinstance(problem, PlainBusyError):
        raise MemberBusyError(member.name, problem.retry_s) from problem
    if isinstance(problem, PlainStatusError) and problem.code == Status.DATA_LOSS:
        remedy = "Its other samples are well; look at that node's SSD."
        raise MemberError(member.name, problem.details, remedy, is_well=True) from problem
    raise MemberError(member.name, problem.problem, problem.remedy) from problem


def _connection(member: Member, shown: Credentials, clock: Clock) -> PlainConnection:
    """Return a connection on which no other agent is shown who we are: it could pass that on to this member."""
    # A Unix socket leads to this node, whatever its agent is called.
    node = "" if member.address.startswith(UNIX) else member.name
    return PlainConnection(member.address, shown, clock, node=node)


def call_member(
    member: Member, shown: Credentials, clock: Clock, method: str, request: bytes, *, deadline_s: float
) -> Iterator[bytes]:
    """Yield the replies to one call of the Cache service, over a connection of its own."""
    try:
        with _connection(member, shown, clock) as connection:
            connection.send(f"/{SERVICE}/{method}", request, clock.monotonic() + deadline_s)
            yield from connection.replies()
    except PlainCallError as problem:
        _raise(member, problem)


class IdleConnections:
    """Connections to members that no call uses now, by address. Safe to use from several threads."""

    def __init__(self, shown: Credentials, clock: Clock) -> None:
        self._shown, self._clock = shown, clock
        self._lock = threading.Lock()
        self._idle: dict[str, list[PlainConnection]] = {}

    def connection(self, member: Member, *, fresh: bool) -> PlainConnection:
        """Return a connection for one call, an idle one unless it is to be fresh."""
        with self._lock:
            idle = self._idle.get(member.address)
            if idle and not fresh:
                return idle.pop()
        return _connection(member, self._shown, self._clock)

    def keep(self, connection: PlainConnection) -> None:
        """Take a connection back after a call that went well."""
        with self._lock:
            idle = self._idle.setdefault(connection.address, [])
            if len(idle) < _MOST_IDLE:
                idle.append(connection)
                return
        connection.close()

    def close(self, address: str | None = None) -> None:
        """End those to an address, whose server has ended one of them; without one, all."""
        with self._lock:
            for one in list(self._idle) if address is None else [address]:
                for connection in self._idle.pop(one, ()):
                    connection.close()


class _Landing:
    """Where the bytes of extents go as they come."""

    def __init__(self, places: Places, lengths: np.ndarray, size: int) -> None:
        self._places, self._lengths, self._size, starts = places, lengths, size, places.starts
        self._first = int(starts[0]) if size else 0
        self._is_one = size > 0 and int(starts[-1]) + int(lengths[-1]) - self._first == size
        self._views = places.views
        if self._views is None:
            arena, ends = places.arena, (starts + lengths).tolist()
            self._views = [arena[a:b] for a, b in zip(starts.tolist(), ends, strict=True)]

    def of(self, chosen: np.ndarray) -> _Landing:
        """Return where some of the extents go."""
        places, lengths = self._places, self._lengths[chosen]
        return _Landing(Places(places.arena, places.starts[chosen]), lengths, int(lengths.sum()))

    def receive(self, message: Incoming) -> np.ndarray:
        """Fill the memory from a message; return each extent's checksum, taken while what follows is received."""
        views, checksums = self._views or [], list[int]()
        starts, end = self._places.starts, self._first + self._size
        step = max(1, len(views) * _AT_ONCE // max(self._size, 1))  # samples of a batch are about alike
        for first in range(0, len(views), step):
            some, ends = views[first : first + step], first + step >= len(views)
            whole = some
            if self._is_one:  # in the arena they are one piece, as a rule
                whole = [self._places.arena[int(starts[first]) : end if ends else int(starts[first + step])]]
            message.read_into(whole, ends=ends)
            checksums += map(block.checksum, some)
        return np.array(checksums, np.uint64)


class Pending(Protocol):
    """A batch on its way."""

    def result(self) -> BatchReply:
        """Return what came; the bytes of those extents that are OK are in their places.

        Waits until the deadline at most.
        """
        ...

    def cancel(self) -> None:
        """Give the batch up; nothing more is written to its places."""
        ...


class Transport(Protocol):
    """Fetches batches from members. Safe to use from several threads; each process needs its own."""

    def start(self, member: Member, request: ExtentsRequest, deadline_s: float, places: Places) -> Pending:
        """Send a batch and return without waiting, so that several members work at once."""
        ...

    def answering(self, batches: Sequence[Pending], timeout_s: float) -> list[int]:
        """Return which of the batches have begun to come, or failed; wait for the first so long at most."""
        ...

    def close(self) -> None:
        """End all connections; batches on their way fail."""
        ...


class PlainTransport(Transport):
    """The Cache service's Read call over plain connections, which do not mind a fork.

    A batch has a connection to itself while it is on its way; idle ones are kept and used again.
    """

    def __init__(self, shown: Credentials, clock: Clock) -> None:
        self.idle, self._clock = IdleConnections(shown, clock), clock

    @override
    def start(self, member: Member, request: ExtentsRequest, deadline_s: float, places: Places) -> Pending:
        return _PlainPending(self, member, request, deadline_s, places)

    @override
    def answering(self, batches: Sequence[Pending], timeout_s: float) -> list[int]:
        until, mine = self._clock.monotonic() + timeout_s, cast("Sequence[_PlainPending]", batches)
        while True:
            poll, numbers = select.poll(), {}
            for number, batch in enumerate(mine):
                watched = batch.watched()
                if watched is None:
                    return [number]
                numbers[watched[0]] = number
                poll.register(*watched)
            left = until - self._clock.monotonic()
            ready = [numbers[descriptor] for descriptor, _ in poll.poll(max(left, 0) * 1000)]
            begun = [number for number in ready if mine[number].has_begun()]
            if begun or left <= 0:
                return sorted(begun)

    def deadline(self, allowance_s: float) -> float:
        """Return the moment so many seconds from now."""
        return self._clock.monotonic() + allowance_s

    @override
    def close(self) -> None:
        self.idle.close()


class _PlainPending(Pending):
    def __init__(
        self,
        transport: PlainTransport,
        member: Member,
        request: ExtentsRequest,
        deadline_s: float,
        places: Places,
    ) -> None:
        self._transport, self._member = transport, member
        self._lengths = request.extents["length"].astype(np.int64)
        size = int(self._lengths.sum())
        self._allowance_s = deadline_s + size / _SLOWEST_BYTES_PER_S
        self._patience_s = deadline_s / 2
        self._deadline = transport.deadline(self._allowance_s)
        self._message = encode_request(request)
        self._problem: MemberError | None = None
        self._connection: PlainConnection | None = None
        self._is_begun = False
        self._try_to_send(fresh=False)
        self._landing = _Landing(places, self._lengths, size)

    def _try_to_send(self, *, fresh: bool) -> None:
        try:
            self._connection = self._sent(fresh=fresh)
        except MemberError as problem:
            self._give_up(problem)

    def _give_up(self, problem: MemberError) -> None:
        # Without its traceback, which refers to this batch and would keep its memory.
        each: BaseException | None = problem
        while each is not None:
            each.__traceback__ = None
            each = each.__cause__ or each.__context__
        self._connection, self._problem = None, problem

    def _taken_problem(self) -> MemberError:
        """Return why there is no connection, and forget it: once raised it refers to the frames of its callers."""
        problem, self._problem = self._problem, None
        return problem or MemberError(self._member.name, "no connection")

    def _sent(self, *, fresh: bool) -> PlainConnection:
        connection: PlainConnection | None = None
        try:
            connection = self._transport.idle.connection(self._member, fresh=fresh)
            connection.send(READ_METHOD, self._message, self._deadline)
        except PlainCallError as problem:
            if connection is None or self._is_final(connection, problem):
                _raise(self._member, problem)
        else:
            return connection
        return self._sent(fresh=True)

    def _is_final(self, connection: PlainConnection, problem: PlainCallError) -> bool:
        """Close a connection that failed; tell whether that is the member's fault.

        An idle connection may have been closed by a server that was restarted since.
        """
        connection.close()
        if not isinstance(problem, PlainSilentError) or problem.is_late:
            return True
        self._transport.idle.close(connection.address)
        return not connection.is_used or self._transport.deadline(0.0) >= self._deadline

    def watched(self) -> tuple[int, int] | None:
        """Return the socket to wait for, and for what; None: there is nothing to wait for."""
        connection = self._connection
        # Where its first bytes are read the socket may not be ready again.
        return None if connection is None or self._is_begun else connection.awaits

    def has_begun(self) -> bool:
        """Tell whether an answer comes, now that the socket is ready; sends what could not be sent before."""
        connection = self._connection
        if connection is None:
            return True
        try:
            self._is_begun = connection.advance() and connection.has_begun()
        except PlainCallError as problem:
            if not self._is_final(connection, problem):
                self._try_to_send(fresh=True)
                return self._connection is None
            try:
                _raise(self._member, problem)
            except MemberError as found:
                self._give_up(found)
            return True
        return self._is_begun

    @override
    def result(self) -> BatchReply:
        connection = self._connection
        if connection is None:
            raise self._taken_problem()
        # Time that was spent waiting for another member is not this one's silence.
        connection.postpone(self._transport.deadline(self._allowance_s))
        try:
            return self._taken(connection)
        except PlainCallError as problem:
            if self._is_final(connection, problem):
                _raise(self._member, problem)
        try:
            return self._taken(self._sent(fresh=True))
        except PlainCallError as problem:
            _raise(self._member, problem)

    def _taken(self, connection: PlainConnection) -> BatchReply:
        found: list[BatchReply] = []
        done = 0
        try:
            for message in connection.incoming(patience_s=self._patience_s):
                found.append(self._items(message, done))
                done += len(found[-1].status)
        except FrameError as problem:
            connection.close()
            raise MemberError(self._member.name, str(problem), problem.remedy) from problem
        except BaseException:
            connection.close()
            raise
        self._connection = None
        if done != len(self._lengths):
            connection.close()
            raise MemberError(self._member.name, f"{done} of {len(self._lengths)} items came")
        self._transport.idle.keep(connection)
        return BatchReply.joined(found)

    def _items(self, message: Incoming, done: int) -> BatchReply:
        items = read_reply_head(message)
        status, count = items["status"], len(items)
        wanted = self._lengths if count == len(self._lengths) else self._lengths[done : done + count]
        if len(wanted) != count:
            raise FrameError(f"more items than the {len(self._lengths)} asked for")
        if count == len(self._lengths) and not (status.any() or (items["length"] != wanted).any()):
            # The usual answer: all of them, READ_STATUS_OK, in one message.
            return BatchReply(status, self._landing.receive(message), is_ok=True)
        is_ok = status == cache_pb2.READ_STATUS_OK
        if (items["length"] != np.where(is_ok, wanted, 0)).any():
            raise FrameError("an item that is not as long as it was asked for")
        checksums, chosen = np.zeros(count, np.uint64), np.flatnonzero(is_ok)
        checksums[chosen] = self._landing.of(done + chosen).receive(message)
        return BatchReply(status, checksums)

    @override
    def cancel(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
