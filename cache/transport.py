"""How batches of extents come from a member: one interface, so that a second transport has the same contract.

The contract: every read carries the token, has a deadline, is bounded in size, and ends in items in order or in
one of the member errors. docs/decisions/0005-transport.md says why it is gRPC's wire, without its library.
"""

from __future__ import annotations

import itertools
import threading
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from typing_extensions import override

from deeplink.cache import frames
from deeplink.cache.errors import (
    FrameError,
    MemberBusyError,
    MemberError,
    MemberRefusedError,
    MemberSilentError,
)
from deeplink.plainrpc import (
    PlainBusyError,
    PlainCallError,
    PlainConnection,
    PlainRefusedError,
    PlainSilentError,
)
from deeplink.v1 import cache_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deeplink.clock import Clock
    from deeplink.types import Member

READ_METHOD = "/deeplink.v1.Cache/Read"
_SLOWEST_BYTES_PER_S = 16 << 20
"""A member that sends slower than this, over the whole of a batch, counts as silent."""
_MOST_IDLE = 8


@contextmanager
def member_errors(member: Member) -> Iterator[None]:
    """Raise what a plain call to `member` meets as one of the member errors.

    Raises:
        MemberSilentError: no answer in time, or no connection.
        MemberRefusedError: the token was refused.
        MemberBusyError: it has too much to do.
        MemberError: it answered something else.
    """
    try:
        yield
    except PlainSilentError as problem:
        raise MemberSilentError(member.name, str(problem)) from problem
    except PlainRefusedError as problem:
        raise MemberRefusedError(member.name) from problem
    except PlainBusyError as problem:
        raise MemberBusyError(member.name) from problem
    except PlainCallError as problem:
        raise MemberError(member.name, problem.problem, problem.remedy) from problem


@dataclass(frozen=True, slots=True)
class Item:
    """What became of one extent: its bytes (a view of the message), or why there are none."""

    status: int
    data: memoryview

    @property
    def is_ok(self) -> bool:
        """Whether the bytes are there."""
        return self.status == cache_pb2.READ_STATUS_OK


class Pending(Protocol):
    """A batch on its way."""

    def result(self) -> list[Item]:
        """Return the items of the batch, in order; waits until the deadline at most.

        Raises:
            MemberSilentError: no answer in time, or no connection.
            MemberRefusedError: the token was refused.
            MemberError: it answered something else.
        """
        ...


class Transport(Protocol):
    """Fetches batches from members. Safe to use from several threads; each process needs its own."""

    def start(self, member: Member, request: frames.Request, deadline_s: float) -> Pending:
        """Send a batch and return without waiting, so that several members work at once.

        Args:
            member: whom to ask.
            request: the extents; its id is set by the transport.
            deadline_s: seconds the member has to answer, besides the time that the bytes take on the way.
        """
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
        self._token, self._clock = token, clock
        self._lock = threading.Lock()
        self._idle: dict[str, list[PlainConnection]] = {}
        self._numbers = itertools.count(1)

    @override
    def start(self, member: Member, request: frames.Request, deadline_s: float) -> Pending:
        numbered = replace(request, id=next(self._numbers))
        size = int(request.extents["length"].sum(dtype="u8"))
        return _PlainPending(self, member, numbered, deadline_s + size / _SLOWEST_BYTES_PER_S)

    def deadline(self, allowance_s: float) -> float:
        """Return the moment so many seconds from now."""
        return self._clock.monotonic() + allowance_s

    def connection(self, member: Member, *, fresh: bool) -> PlainConnection:
        """Return a connection for one call, an idle one unless it is to be fresh.

        Raises:
            MemberSilentError: the address cannot be used.
        """
        if not fresh:
            with self._lock:
                idle = self._idle.get(member.address)
                if idle:
                    return idle.pop()
        with member_errors(member):
            return PlainConnection(member.address, self._token, self._clock)

    def keep(self, member: Member, connection: PlainConnection) -> None:
        """Take a connection back after a call that went well."""
        with self._lock:
            idle = self._idle.setdefault(member.address, [])
            if len(idle) < _MOST_IDLE:
                idle.append(connection)
                return
        connection.close()

    @override
    def close(self) -> None:
        with self._lock:
            for idle in self._idle.values():
                for connection in idle:
                    connection.close()
            self._idle.clear()


class _PlainPending(Pending):
    def __init__(
        self, transport: PlainTransport, member: Member, request: frames.Request, allowance_s: float
    ) -> None:
        self._transport, self._member, self._request = transport, member, request
        self._allowance_s = allowance_s
        self._message = frames.encode_request(request)
        self._problem: MemberError | None = None
        self._connection: PlainConnection | None = None
        try:
            self._connection = self._sent(fresh=False)
        except MemberError as problem:
            self._problem = problem

    def _sent(self, *, fresh: bool) -> PlainConnection:
        connection = self._transport.connection(self._member, fresh=fresh)
        try:
            with member_errors(self._member):
                connection.send(READ_METHOD, self._message, self._transport.deadline(self._allowance_s))
        except MemberError as problem:
            connection.close()
            if not connection.is_used or not isinstance(problem, MemberSilentError):
                raise
            return self._sent(fresh=True)
        return connection

    @override
    def result(self) -> list[Item]:
        connection = self._connection
        if connection is None:
            raise self._problem or MemberError(self._member.name, "no connection")
        # Another member may have been waited for until now, in vain: that is not this one's silence.
        connection.postpone(self._transport.deadline(self._allowance_s))
        try:
            items = self._taken(connection)
        except MemberSilentError:
            # An idle connection may have been closed by a server that was started anew: worth one more.
            if not connection.is_used:
                raise
            items = self._taken(self._sent(fresh=True))
        if len(items) != len(self._request.extents):
            raise MemberError(self._member.name, f"{len(items)} of {len(self._request.extents)} items came")
        return items

    def _taken(self, connection: PlainConnection) -> list[Item]:
        items: list[Item] = []
        try:
            with member_errors(self._member):
                for message in connection.replies():
                    items.extend(self._items(message, len(self._request.extents) - len(items)))
        except FrameError as problem:
            connection.close()
            raise MemberError(self._member.name, str(problem), problem.remedy) from problem
        except BaseException:
            connection.close()
            raise
        self._transport.keep(self._member, connection)
        return items

    def _items(self, message: memoryview, most: int) -> Iterator[Item]:
        reply = frames.decode_reply(message)
        if reply.id != self._request.id:
            raise FrameError(f"an answer to request {reply.id} instead of {self._request.id}")
        if len(reply.head) > most:
            raise FrameError(f"more items than the {len(self._request.extents)} asked for")
        for status, data in zip(reply.head["status"].tolist(), frames.split_body(reply), strict=True):
            yield Item(status, data)
