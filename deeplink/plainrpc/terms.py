"""What a server answers on its connections, what it keeps of each call, and its bounds."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from deeplink.plainrpc.scattered import Scattered

TOKEN_HEADER = "deeplink-token"  # noqa: S105 - the name of the header, not a token
HEAD_BYTES = 16_384
MOST_CONTINUED = 16
"""Frames of one header block."""


def only(token: str) -> Callable[[str], bool]:
    """Return what tells of a token whether it is this one."""
    return lambda given: hmac.compare_digest(given.encode(), token.encode())


class Reply(Protocol):
    """One message of an answer."""

    @property
    def parts(self) -> Sequence[bytes | memoryview | Scattered]:
        """Its bytes, in pieces; only the kernel touches those that are no `bytes`."""
        ...

    @property
    def size(self) -> int:
        """How many bytes it has."""
        ...

    def unreadable(self) -> str:
        """Say, for the caller, why a piece could not be read; called when the kernel could not."""
        ...


if TYPE_CHECKING:
    Method = Callable[[bytes], Iterator[Reply]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a server answers, and its bounds per connection.

    Attributes:
        is_valid: whether a call with this token is answered.
        methods: `/package.Service/Method` -> makes the replies to one request; what it raises as CallRefusedError
            ends the call with a status.
        admit: asked before a request is answered; False refuses the call.
        release: called when an admitted request is done with, however it went.
        retry_after_ms: what a refused caller is told to wait.
        streams: calls open at once.
        request_bytes: the longest request; all that is kept of requests is twice that.
        head_bytes: the longest header block.
        chatter: frames that carry no request, between two requests.
    """

    is_valid: Callable[[str], bool]
    methods: Mapping[str, Method]
    admit: Callable[[], bool]
    release: Callable[[], None]
    retry_after_ms: int = 200
    streams: int = 32
    request_bytes: int = 3 << 19
    head_bytes: int = HEAD_BYTES
    chatter: int = 1000

    @property
    def window(self) -> int:
        """Bytes of requests a peer may send unasked."""
        return 2 * self.request_bytes


@dataclass(slots=True, eq=False)
class Stream:
    """A call that is open.

    Attributes:
        method: what answers it.
        window: bytes of answers that its caller still takes.
        buffer: the part of a request that has come.
        held: bytes that came since the last whole request.
        waiting: requests that are not answered to their end.
        is_ended: whether no more requests come.
        is_greeted: whether an answer has begun.
    """

    method: Method
    window: int
    buffer: bytearray = field(default_factory=bytearray)
    held: int = 0
    waiting: int = 0
    is_ended: bool = False
    is_greeted: bool = False


class CallRequest(NamedTuple):
    """A request; without a message it is the end of a call that has none to answer. `cost` is what it took up."""

    stream: int
    message: bytes | None
    cost: int
