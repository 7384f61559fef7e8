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
    def alone(cls, request: frames.Request) -> Self:
        """Return places one after another in an arena of their own."""
        lengths = request.extents["length"].astype(np.int64)
        return cls(memoryview(bytearray(int(lengths.sum()))), np.cumsum(lengths) - lengths)

    def part(self, run: slice, lengths: np.ndarray) -> list[memoryview]:
        """Return the memory for the extents of `run`, of which so many bytes come; neighbours are one piece."""
        starts = self.starts[run]
        if not lengths.all():
            starts, lengths = starts[lengths > 0], lengths[lengths > 0]
        stops = starts + lengths
        if len(starts) > 1:
            is_next = starts[1:] == stops[:-1]
            starts = starts[np.concatenate([[True], ~is_next])]
            stops = stops[np.concatenate([~is_next, [True]])]
        arena = self.arena
        return [arena[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]


class Pending(Protocol):
    """A batch on its way."""

    def result(self) -> np.ndarray:
        """Return a ReadStatus per extent, in order (uint32); the bytes of those that are OK are in their places.

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

    def start(self, member: Member, request: frames.Request, deadline_s: float, places: Places) -> Pending:
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
    def start(self, member: Member, request: frames.Request, deadline_s: float, places: Places) -> Pending:
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
        self, transport: PlainTransport, member: Member, request: frames.Request, deadline_s: float, places: Places
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

    def _try_to_send(self, *, fresh: bool) -> None:
        try:
            self._connection = self._sent(fresh=fresh)
        except MemberError as problem:
            self._connection, self._problem = None, problem

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
                self._connection, self._problem = None, problem
            else:
                self._try_to_send(fresh=True)
            return self._connection is None
        return False

    @override
    def result(self) -> np.ndarray:
        connection = self._connection
        if connection is None:
            raise self._problem or MemberError(self._member.name, "no connection")
        # Another member may have been waited for until now, in vain: that is not this one's silence.
        connection.postpone(self._transport.deadline(self._allowance_s))
        try:
            return self._taken(connection)
        except MemberError as problem:
            if self._is_final(connection, problem):
                raise
            return self._taken(self._sent(fresh=True))

    def _taken(self, connection: PlainConnection) -> np.ndarray:
        found: list[np.ndarray] = []
        try:
            with member_errors(self._member):
                for message in connection.incoming(patience_s=self._patience_s):
                    found.append(self._items(message, sum(map(len, found))))
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
        status = found[0] if len(found) == 1 else np.concatenate([np.empty(0, np.uint32), *found])
        if len(status) != len(self._lengths):
            raise MemberError(self._member.name, f"{len(status)} of {len(self._lengths)} items came")
        return status

    def _items(self, message: Incoming, done: int) -> np.ndarray:
        number, items = frames.read_reply_head(message)
        if number != self._request.id:
            raise FrameError(f"an answer to request {number} instead of {self._request.id}")
        run = slice(done, done + len(items))
        wanted = self._lengths[run]
        if len(wanted) != len(items):
            raise FrameError(f"more items than the {len(self._lengths)} asked for")
        status: np.ndarray = items["status"]
        lengths = items["length"].astype(np.int64)
        if (lengths != np.where(status == cache_pb2.READ_STATUS_OK, wanted, 0)).any():
            raise FrameError("an item that is not as long as it was asked for")
        message.read_into(self._places.part(run, lengths))
        return status

    @override
    def cancel(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
