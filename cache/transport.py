"""How batches of extents come from a member: one interface, so that a second transport has the same contract.

The contract: every read carries the token, has a deadline, is bounded in size, and ends in items in order or in
one of the member errors. docs/decisions/0003-transport.md says why it is gRPC with raw bytes.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import grpc
from typing_extensions import override

from deeplink.cache import frames
from deeplink.cache.client import raise_member_error
from deeplink.cache.errors import FrameError, MemberError
from deeplink.v1 import cache_pb2
from deeplink.wire import open_channel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deeplink.types import Member

READ_METHOD = "/deeplink.v1.Cache/Read"
_SLOWEST_BYTES_PER_S = 16 << 20
"""A member that sends slower than this, over the whole of a batch, counts as silent."""


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
    """Fetches batches from members. Safe to use from several threads; not to be carried across fork."""

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


class GrpcTransport(Transport):
    """The Cache service's Read call, messages as raw bytes. One connection per member, one call per batch.

    Args:
        token: what each call carries.
    """

    def __init__(self, token: str) -> None:
        self._token = token
        self._lock = threading.Lock()
        self._channels: dict[str, grpc.Channel] = {}
        self._numbers = itertools.count(1)

    def _channel(self, address: str) -> grpc.Channel:
        with self._lock:
            if address not in self._channels:
                self._channels[address] = open_channel(address, self._token)
            return self._channels[address]

    @override
    def start(self, member: Member, request: frames.Request, deadline_s: float) -> Pending:
        numbered = frames.Request(next(self._numbers), request.shards, request.extents)
        size = int(request.extents["length"].sum(dtype="u8"))
        # A stream of one request: on the wire the service's stream of many, without a thread to feed it.
        read: Any = self._channel(member.address).unary_stream(READ_METHOD)
        call = read(frames.encode_request(numbered), timeout=deadline_s + size / _SLOWEST_BYTES_PER_S)
        return _GrpcPending(member, numbered, call)

    @override
    def close(self) -> None:
        with self._lock:
            for channel in self._channels.values():
                channel.close()
            self._channels.clear()


class _GrpcPending(Pending):
    def __init__(self, member: Member, request: frames.Request, call: Any) -> None:
        self._member, self._request, self._call = member, request, call

    @override
    def result(self) -> list[Item]:
        try:
            items = list(self._items())
        except grpc.RpcError as problem:
            raise_member_error(self._member, problem)
        except FrameError as problem:
            raise MemberError(self._member.name, str(problem), problem.remedy) from problem
        if len(items) != len(self._request.extents):
            raise MemberError(self._member.name, f"{len(items)} of {len(self._request.extents)} items came")
        return items

    def _items(self) -> Iterator[Item]:
        for message in self._call:
            reply = frames.decode_reply(message)
            if reply.id != self._request.id:
                raise FrameError(f"an answer to request {reply.id} instead of {self._request.id}")
            for status, data in zip(reply.head["status"].tolist(), frames.split_body(reply), strict=True):
                yield Item(status, data)
