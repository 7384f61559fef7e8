"""How batches of extents come from a member: one interface, so that a second transport has the same contract.

The contract: every read carries the token, has a deadline, is bounded in size, and ends in bytes where they are
wanted and a status per extent, or in one of the member errors. docs/decisions/0007-data-server.md says how.
"""

from __future__ import annotations

import itertools
import select
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np
from typing_extensions import override

from deeplink.cache import block
from deeplink.cache.errors import (
    FrameError,
    MemberBusyError,
    MemberDamagedError,
    MemberError,
    MemberRefusedError,
    MemberSilentError,
)
from deeplink.cache.remote import frames
from deeplink.cache.remote.routes import Routes
from deeplink.plainrpc import (
    PlainBusyError,
    PlainCallError,
    PlainLateError,
    PlainRefusedError,
    PlainSilentError,
    PlainStatusError,
    Status,
)
from deeplink.v1 import cache_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from deeplink.clock import Clock
    from deeplink.plainrpc import Incoming, PlainConnection
    from deeplink.types import Member

READ_METHOD = "/deeplink.v1.Cache/Read"
_AT_ONCE = 256 << 10
"""Bytes received before their checksums are taken, which costs no time while the next come."""
_SLOWEST_BYTES_PER_S = 16 << 20
"""A member that sends slower than this, over the whole of a batch, counts as silent."""


@contextmanager
def member_errors(member: Member) -> Iterator[None]:
    """Raise what a plain call to `member` meets as one of the member errors.

    Raises:
        MemberSilentError: no answer in time, or no connection.
        MemberRefusedError: the token was refused.
        MemberBusyError: it has too much to do.
        MemberDamagedError: it could not read what it had begun to send.
        MemberError: it answered something else.
    """
    try:
        yield
    except PlainSilentError as problem:
        is_late = isinstance(problem, PlainLateError)
        raise MemberSilentError(member.name, str(problem), is_late=is_late) from problem
    except PlainRefusedError as problem:
        raise MemberRefusedError(member.name) from problem
    except PlainBusyError as problem:
        raise MemberBusyError(member.name, problem.retry_s) from problem
    except PlainStatusError as problem:
        if problem.code == Status.DATA_LOSS:
            raise MemberDamagedError(member.name, problem.details) from problem
        raise MemberError(member.name, problem.problem, problem.remedy) from problem
    except PlainCallError as problem:
        raise MemberError(member.name, problem.problem, problem.remedy) from problem


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where the bytes of a request's extents are wanted.

    Attributes:
        arena: writable.
        starts: int64, one per extent: where in the arena its bytes begin.
    """

    arena: memoryview
    starts: np.ndarray

    @classmethod
    def alone(cls, request: frames.ExtentsRequest) -> Self:
        """Return places one after another in an arena of their own."""
        lengths = request.extents["length"].astype(np.int64)
        return cls(memoryview(bytearray(int(lengths.sum()))), np.cumsum(lengths) - lengths)


class _Landing:
    """Where the bytes of extents go as they come, worked out while the member works.

    Args:
        places: where they are wanted.
        lengths: int64, bytes of each extent.
        chosen: which of the extents come, in order; all of them when not given.
    """

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
                message.read_into([whole] if self._is_one else list(filter(len, views)))
            yield from map(block.checksum, views)
            first = last


@dataclass(frozen=True, slots=True, eq=False)
class BatchReply:
    """What came of a request, extent by extent.

    Attributes:
        status: a ReadStatus each, uint32.
        checksums: xxh3-64 of the bytes that came of each, uint64.
    """

    status: np.ndarray
    checksums: np.ndarray

    @classmethod
    def joined(cls, answers: Sequence[BatchReply]) -> BatchReply:
        """Return several answers as one."""
        if len(answers) == 1:
            return answers[0]
        status = np.concatenate([np.empty(0, np.uint32), *(answer.status for answer in answers)])
        return cls(status, np.concatenate([np.empty(0, np.uint64), *(answer.checksums for answer in answers)]))


class Pending(Protocol):
    """A batch on its way."""

    def result(self) -> BatchReply:
        """Return what came; the bytes of those extents that are OK are in their places.

        Waits until the deadline at most.

        Raises:
            MemberSilentError: no answer in time, or no connection.
            MemberRefusedError: the token was refused.
            MemberBusyError: it has too much to do.
            MemberDamagedError: it could not read what it had begun to send.
            MemberError: it answered something else.
        """
        ...

    def cancel(self) -> None:
        """Give the batch up; nothing more is written to its places."""
        ...


class Transport(Protocol):
    """Fetches batches from members. Safe to use from several threads; each process needs its own."""

    def start(self, member: Member, request: frames.ExtentsRequest, deadline_s: float, places: Places) -> Pending:
        """Send a batch and return without waiting, so that several members work at once.

        Args:
            member: whom to ask.
            request: the extents; its id is set by the transport.
            deadline_s: seconds the member has to answer, besides the time that the bytes take on the way.
            places: where the bytes go.
        """
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

    Args:
        token: what each call carries.
        clock: where time comes from.
    """

    def __init__(self, token: str, clock: Clock) -> None:
        self.routes, self._clock = Routes(token, clock), clock
        self._numbers = itertools.count(1)

    @override
    def start(self, member: Member, request: frames.ExtentsRequest, deadline_s: float, places: Places) -> Pending:
        return _PlainPending(self, member, replace(request, id=next(self._numbers)), deadline_s, places)

    @override
    def answering(self, batches: Sequence[Pending], timeout_s: float) -> list[int]:
        until = self._clock.monotonic() + timeout_s
        while True:
            poll, numbers = select.poll(), {}
            for number, batch in enumerate(batches):
                assert isinstance(batch, _PlainPending)  # noqa: S101 - each transport knows its own
                watched = batch.watched()
                if watched is None:
                    return [number]
                numbers[watched[0]] = number
                poll.register(*watched)
            left = until - self._clock.monotonic()
            ready = [numbers[descriptor] for descriptor, _ in poll.poll(max(left, 0) * 1000)]
            begun = [number for number in ready if self._has_begun(batches[number])]
            if begun or left <= 0:
                return sorted(begun)

    @staticmethod
    def _has_begun(batch: Pending) -> bool:
        assert isinstance(batch, _PlainPending)  # noqa: S101 - as above
        return batch.has_begun()

    def deadline(self, allowance_s: float) -> float:
        """Return the moment so many seconds from now."""
        return self._clock.monotonic() + allowance_s

    @override
    def close(self) -> None:
        self.routes.close()


class _PlainPending(Pending):
    def __init__(
        self,
        transport: PlainTransport,
        member: Member,
        request: frames.ExtentsRequest,
        deadline_s: float,
        places: Places,
    ) -> None:
        self._transport, self._member, self._request, self._places = transport, member, request, places
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
        # Without where it was raised: that refers to this batch, and would keep its memory.
        each: BaseException | None = problem
        while each is not None:
            each.__traceback__ = None
            each = each.__cause__ or each.__context__
        self._connection, self._problem = None, problem

    def _what_failed(self) -> MemberError:
        """Return why there is no connection, and forget it: once raised it refers to whoever raised it."""
        problem, self._problem = self._problem, None
        return problem or MemberError(self._member.name, "no connection")

    def _sent(self, *, fresh: bool) -> PlainConnection:
        with member_errors(self._member):
            connection = self._transport.routes.connection(self._member.address, fresh=fresh)
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

        An idle connection may have been closed, and a data port may have moved, with a server started anew.
        """
        connection.close()
        if not isinstance(problem, MemberSilentError) or problem.is_late:
            return True
        has_moved = self._transport.routes.forget(self._member.address, connection)
        return not (connection.is_used or has_moved) or self._transport.deadline(0.0) >= self._deadline

    def watched(self) -> tuple[int, int] | None:
        """Return the socket to wait for, and for what; None: there is nothing to wait for."""
        connection = self._connection
        if connection is None or self._is_begun:  # its first bytes are read: the socket may not tell of it again
            return None
        return connection.fileno(), select.POLLOUT if connection.is_connecting else select.POLLIN

    def has_begun(self) -> bool:
        """Tell whether an answer comes, now that the socket is ready; sends what could not be sent before."""
        connection = self._connection
        if connection is None:
            return True
        if not connection.is_connecting:
            # A server's greeting is no answer: it may stand still after it, and the next copy must be asked.
            self._is_begun = connection.has_begun()
            return self._is_begun
        try:
            with member_errors(self._member):
                if not connection.stands():
                    return False
                connection.flush()
        except MemberError as problem:
            if self._is_final(connection, problem):
                self._give_up(problem)
            else:
                self._try_to_send(fresh=True)
            return self._connection is None
        return False

    @override
    def result(self) -> BatchReply:
        connection = self._connection
        if connection is None:
            raise self._what_failed()
        # Another member may have been waited for until now, in vain: that is not this one's silence.
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
        routes = self._transport.routes
        if connection.trailers:
            routes.learn(self._member.address, connection.trailers)
        routes.keep(connection)
        self._connection = None
        if done != len(self._lengths):
            raise MemberError(self._member.name, f"{done} of {len(self._lengths)} items came")
        return BatchReply.joined(found)

    def _items(self, message: Incoming, done: int) -> BatchReply:
        number, items = frames.read_reply_head(message)
        if number != self._request.id:
            raise FrameError(f"an answer to request {number} instead of {self._request.id}")
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
