"""Batches of extents from a member (docs/decisions/0036-frames.md): one interface for every transport.

Every read carries the token, has a deadline, is bounded, and ends in bytes and statuses, or in a member error.
"""

from __future__ import annotations

import select
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
from typing_extensions import override

from deeplink.cache.errors import FrameError, MemberBusyError, MemberError, MemberSilentError
from deeplink.cache.format import block
from deeplink.cache.transfer import frames
from deeplink.cache.transfer.frames import BatchReply, Places
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

SERVICE = "deeplink.v1.Cache"
READ_METHOD = f"/{SERVICE}/Read"
_MOST_IDLE = 8
_AT_ONCE = 256 << 10
"""Bytes received before their checksums are taken, which costs no time while the next come."""
_SLOWEST_BYTES_PER_S = 16 << 20
"""A member that sends slower than this, over the whole of a batch, counts as silent."""


@contextmanager
def member_errors(member: Member) -> Iterator[None]:
    """Raise what a plain call to `member` meets as one of the member errors."""
    try:
        yield
    except PlainSilentError as problem:
        is_late = problem.is_late
        raise MemberSilentError(member.name, str(problem), is_late=is_late) from problem
    except PlainRefusedError as problem:
        raise MemberError.refused(member.name) from problem
    except PlainBusyError as problem:
        raise MemberBusyError(member.name, problem.retry_s) from problem
    except PlainCallError as problem:
        if isinstance(problem, PlainStatusError) and problem.code == Status.DATA_LOSS:
            remedy = "Its other samples are well; look at that node's SSD."
            raise MemberError(member.name, problem.details, remedy, is_well=True) from problem
        raise MemberError(member.name, problem.problem, problem.remedy) from problem


def call_member(
    member: Member, token: str, clock: Clock, method: str, request: bytes, *, deadline_s: float
) -> Iterator[bytes]:
    """Yield the replies to one call of the Cache service, over a connection of its own."""
    with member_errors(member), PlainConnection(member.address, token, clock) as connection:
        connection.send(f"/{SERVICE}/{method}", request, clock.monotonic() + deadline_s)
        yield from connection.replies()


class IdleConnections:
    """Connections to members that no call uses now, by address. Safe to use from several threads."""

    def __init__(self, token: str, clock: Clock) -> None:
        self._token, self._clock = token, clock
        self._lock = threading.Lock()
        self._idle: dict[str, list[PlainConnection]] = {}

    def connection(self, member: Member, *, fresh: bool) -> PlainConnection:
        """Return a connection for one call, an idle one unless it is to be fresh."""
        with self._lock:
            idle = self._idle.get(member.address)
            if idle and not fresh:
                return idle.pop()
        # A Unix socket leads to this node, whatever its agent is called.
        node = "" if member.address.startswith(UNIX) else member.name
        return PlainConnection(member.address, self._token, self._clock, node=node)

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

    def __init__(self, places: Places, lengths: np.ndarray, chosen: np.ndarray | None = None) -> None:
        starts = places.starts if chosen is None else places.starts[chosen]
        stops = starts + lengths
        arena = self._arena = places.arena
        self._starts, self._stops = starts.tolist(), stops.tolist()
        self._views = [arena[a:b] for a, b in zip(self._starts, self._stops, strict=True)]
        self._is_one = bool((starts[1:] == stops[:-1]).all())
        self._ends = np.cumsum(lengths)

    def receive(self, message: Incoming) -> Iterator[int]:
        """Fill the memory from a message, and yield each extent's checksum while what follows is received."""
        first, count, ends = 0, len(self._views), self._ends
        while first < count:
            before = int(ends[first - 1]) if first else 0
            last = max(int(np.searchsorted(ends, before + _AT_ONCE, side="right")), first + 1)
            views = self._views[first:last]
            if int(ends[last - 1]) > before:
                whole = self._arena[self._starts[first] : self._stops[last - 1]]
                message.read_into([whole] if self._is_one else views, ends=last == count)
            yield from map(block.checksum, views)
            first = last


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

    def start(self, member: Member, request: frames.ExtentsRequest, deadline_s: float, places: Places) -> Pending:
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

    def __init__(self, token: str, clock: Clock) -> None:
        self.idle, self._clock = IdleConnections(token, clock), clock

    @override
    def start(self, member: Member, request: frames.ExtentsRequest, deadline_s: float, places: Places) -> Pending:
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
        request: frames.ExtentsRequest,
        deadline_s: float,
        places: Places,
    ) -> None:
        self._transport, self._member, self._places = transport, member, places
        self._lengths = request.extents["length"].astype(np.int64)
        self._allowance_s = deadline_s + int(self._lengths.sum()) / _SLOWEST_BYTES_PER_S
        self._patience_s = deadline_s / 2
        self._deadline = transport.deadline(self._allowance_s)
        self._message = frames.encode_request(request)
        self._problem: MemberError | None = None
        self._connection: PlainConnection | None = None
        self._is_begun = False
        self._try_to_send(fresh=False)
        self._landing = _Landing(places, self._lengths)

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
        with member_errors(self._member):
            connection = self._transport.idle.connection(self._member, fresh=fresh)
        try:
            with member_errors(self._member):
                connection.send(READ_METHOD, self._message, self._deadline)
        except MemberError as problem:
            if self._is_final(connection, problem):
                raise
            return self._sent(fresh=True)
        return connection

    def _is_final(self, connection: PlainConnection, problem: MemberError) -> bool:
        """Close a connection that failed; tell whether that is the member's fault.

        An idle connection may have been closed by a server that was restarted since.
        """
        connection.close()
        if not isinstance(problem, MemberSilentError) or problem.is_late:
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
            with member_errors(self._member):
                self._is_begun = connection.advance() and connection.has_begun()
        except MemberError as problem:
            if self._is_final(connection, problem):
                self._give_up(problem)
            else:
                self._try_to_send(fresh=True)
            return self._connection is None
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
        except MemberError as problem:
            if self._is_final(connection, problem):
                raise
            return self._taken(self._sent(fresh=True))

    def _taken(self, connection: PlainConnection) -> BatchReply:
        found: list[BatchReply] = []
        done = 0
        try:
            with member_errors(self._member):
                for message in connection.incoming(patience_s=self._patience_s):
                    found.append(self._items(message, done))
                    done += len(found[-1].status)
        except FrameError as problem:
            connection.close()
            raise MemberError(self._member.name, str(problem), problem.remedy) from problem
        except BaseException:
            connection.close()
            raise
        self._transport.idle.keep(connection)
        self._connection = None
        if done != len(self._lengths):
            raise MemberError(self._member.name, f"{done} of {len(self._lengths)} items came")
        return BatchReply.joined(found)

    def _items(self, message: Incoming, done: int) -> BatchReply:
        items = frames.read_reply_head(message)
        run = slice(done, done + len(items))
        wanted = self._lengths[run]
        if len(wanted) != len(items):
            raise FrameError(f"more items than the {len(self._lengths)} asked for")
        status: np.ndarray = items["status"]
        is_ok = status == cache_pb2.READ_STATUS_OK
        if (items["length"] != np.where(is_ok, wanted, 0)).any():
            raise FrameError("an item that is not as long as it was asked for")
        checksums = np.zeros(len(items), np.uint64)
        chosen, landing = np.flatnonzero(is_ok), self._landing
        if len(chosen) < len(self._lengths):  # not all, or not in one message
            landing = _Landing(self._places, wanted[chosen], done + chosen)
        checksums[chosen] = np.fromiter(landing.receive(message), np.uint64, len(chosen))
        return BatchReply(status, checksums)

    @override
    def cancel(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
