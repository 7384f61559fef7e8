"""gRPC over HTTP/2 (RFC 9113), the client's side: one call at a time, one request, any number of replies.

Replies are received straight into the memory they are wanted in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn
from urllib.parse import unquote

from deeplink.core.admission import STRANGERS
from deeplink.core.errors import DeepLinkError
from deeplink.rpc.forksafe import framing
from deeplink.rpc.forksafe.framing import ErrorCode, FrameType, HeaderReader, Status, frame
from deeplink.rpc.forksafe.link import TcpConnection
from deeplink.rpc.resolving import UnresolvedError
from deeplink.rpc.tokens import TOKEN_HEADER

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType
    from typing import Self

    from deeplink.core.clock import Clock

LARGEST_REQUEST = 60_000
"""Bytes of a request: within what a server takes before it has said anything, so sending never waits for it."""
_WINDOW = framing.WINDOW
_LARGEST_REPLY = 64 << 20
_LARGEST_HEAD = 1 << 20
_CONTROL, _LONGEST_CONTROL = {FrameType.SETTINGS, FrameType.PING, FrameType.WINDOW_UPDATE}, 1 << 12
_LONGEST_RETRY_S = 60.0
_MOST_DIGITS = 9


class PlainCallError(DeepLinkError):
    """A call did not get all of its replies; the connection must be closed."""

    def __init__(self, address: str, problem: str, remedy: str = "") -> None:
        super().__init__(f"{address}: {problem}", remedy=remedy)
        self.address, self.problem = address, problem


class PlainSilentError(PlainCallError):
    """The server did not answer in time (`is_late`), cannot be reached, or ended the connection."""

    def __init__(self, address: str, problem: str, *, is_late: bool = False) -> None:
        super().__init__(address, problem)
        self.is_late = is_late


class PlainRefusedError(PlainCallError):
    """The server refuses our token."""

    def __init__(self, address: str) -> None:
        super().__init__(address, "it refuses our token", "The token file must hold the token of that agent.")


class PlainBusyError(PlainCallError):
    """The server has as many calls to answer as it takes at once; `retry_s`: when it may be asked again."""

    def __init__(self, address: str, retry_s: float = 0.0) -> None:
        super().__init__(address, "the server is busy")
        self.retry_s = retry_s


class PlainStatusError(PlainCallError):
    """The call ended with another status than success."""

    def __init__(self, address: str, code: int, details: str) -> None:
        super().__init__(address, f"status {code}: {details}")
        self.code, self.details = code, details


def _silence(address: str, problem: OSError) -> PlainSilentError:
    return PlainSilentError(address, str(problem), is_late=isinstance(problem, TimeoutError))


def _format_error(address: str, problem: str) -> PlainCallError:
    """Return the error for what is not gRPC over HTTP/2, or is too long for it."""
    return PlainCallError(address, problem, "Is it an agent of the same release of DeepLink?")


class Incoming:
    """A reply that is being received. Take all of it before the next.

    Attributes:
        left: bytes of it that are not yet taken.
    """

    def __init__(self, connection: PlainConnection, size: int) -> None:
        self._connection, self.left = connection, size

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes."""
        if size > self.left:
            self._connection.refuse("a reply that ends too soon")
        self.left -= size
        return self._connection.take_bytes(size)

    def read_into(self, parts: Sequence[memoryview]) -> None:
        """Fill `parts`, in order, with the next bytes."""
        size = sum(map(len, parts))
        if size > self.left:
            self._connection.refuse("a reply that ends too soon")
        self.left -= size
        self._connection.take(parts, size)


def check_status(address: str, fields: Mapping[str, str]) -> None:
    """Return if a call ended well, as its last header block says; ValueError where it says nothing."""
    code = int(fields.get("grpc-status", "none"))
    details = unquote(fields.get("grpc-message", ""))
    if code == Status.UNAUTHENTICATED:
        raise PlainRefusedError(address)
    if code in {Status.CANCELLED, Status.DEADLINE, Status.UNAVAILABLE}:
        raise PlainSilentError(address, details)
    if code == Status.EXHAUSTED:
        raise PlainBusyError(address, _retry_s(fields.get("grpc-retry-pushback-ms", "")))
    if code != Status.OK:
        raise PlainStatusError(address, code, details)


def _retry_s(said: str) -> float:
    if not (said.isascii() and said.isdigit()):
        return 0.0
    # Python refuses to read a number of thousands of digits.
    return min(int(said) / 1000, _LONGEST_RETRY_S) if len(said) <= _MOST_DIGITS else _LONGEST_RETRY_S


class PlainConnection:
    """A connection to one server, for one call at a time. Not thread-safe. Close it when done, and after an error.

    Connecting begins at once and does not wait; the first call does, until its deadline.

    Attributes:
        address: of the server.
        is_used: whether a call has succeeded on it; if the next fails, the server may just have closed it since.
        trailers: what the server said besides at the end of the last call that succeeded.
    """

    def __init__(self, address: str, token: str, clock: Clock) -> None:
        if STRANGERS.answered(address, token):
            raise PlainSilentError(address, "no agent listens there any more: what answered before is none")
        self.address, self._token = address, token
        self._stream = -1
        self._send_window = framing.DEFAULT_WINDOW
        self._unsent = b""
        self._cost = self._received = self._owed = 0
        self._headers = HeaderReader()
        self._frame_left = self._padding = 0
        self.is_used = self._is_greeted = False
        self.trailers: Mapping[str, str] = {}
        try:
            self._link = TcpConnection(address, clock)
        except (OSError, ValueError, UnresolvedError) as problem:
            raise PlainSilentError(address, str(problem)) from problem

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drop the connection."""
        self._link.close()

    def fileno(self) -> int:
        """Return the socket's number, to wait for several connections at once; it changes until it stands."""
        return self._link.fileno()

    @property
    def is_connecting(self) -> bool:
        """Whether the connection may not stand yet, so that nothing was sent."""
        return bool(self._unsent) or not self._link.is_established

    def stands(self) -> bool:
        """Tell whether the connection stands, without waiting."""
        try:
            return self._link.stands()
        except OSError as problem:
            raise _silence(self.address, problem) from problem

    def call(self, method: str, message: bytes, deadline: float) -> bytes:
        """Make a call that has one reply, and return it. See `send` and `replies`."""
        self.send(method, message, deadline)
        found = list(self.replies())
        if len(found) != 1:
            raise _format_error(self.address, f"{len(found)} replies instead of one")
        return bytes(found[0])

    def send(self, method: str, message: bytes, deadline: float) -> None:
        """Begin a call of `/package.Service/Method`; sends now if connected, else in `replies`."""
        if len(message) > LARGEST_REQUEST:
            raise _format_error(
                self.address,
                f"a request of {len(message)} bytes is too long, at most {LARGEST_REQUEST} can be sent",
            )
        if self._stream + 2 > framing.LAST_STREAM:
            raise PlainSilentError(self.address, "the connection has no streams left")
        self._stream += 2
        self._link.deadline, self._link.patience_s = deadline, 0.0
        head = framing.request_head(self.address, method, ((TOKEN_HEADER, self._token),))
        self._unsent, self._cost = framing.call(self._stream, head, message), framing.PREFIX.size + len(message)
        if self._send_window >= self._cost and self.stands():
            self.flush()

    def postpone(self, deadline: float) -> None:
        """Let the call begun by `send` go on until `deadline`, if it can go on at all at this moment.

        For who waited for another server meanwhile: what has come from this one in time is not late.
        """
        if deadline > self._link.deadline:
            goes_on = self._link.is_ready_to_send() if self._unsent else self.has_begun()
            self._link.deadline = deadline if goes_on else self._link.deadline

    def has_begun(self) -> bool:
        """Tell, without waiting, whether the call's answer has begun to come or has failed; a greeting is none."""
        try:
            while self._link.has(framing.FRAME.size):
                kind, _, stream, length = framing.unpacked(self._link.ahead(framing.FRAME.size))
                is_of_another = kind == FrameType.RESET and stream != self._stream
                if not (kind in _CONTROL or is_of_another) or length > _LONGEST_CONTROL:
                    return True
                if not self._link.has(framing.FRAME.size + length):
                    return False
                self._control(*self._next_frame())
        except OSError:
            return True  # the caller that takes the answer meets it too
        return False

    def flush(self) -> None:
        """Send what `send` could not yet; waits for the connection to stand."""
        if not self._unsent:
            return
        try:
            greeting = b""
            if not self._is_greeted:
                self._link.establish()
                greeting, self._is_greeted = framing.greeting(_WINDOW), True
            while self._send_window < self._cost:
                self._control(*self._next_frame())
            self._send_window -= self._cost
            unsent, self._unsent = greeting + self._unsent, b""
            self._link.send(unsent)
        except OSError as problem:
            raise _silence(self.address, problem) from problem

    def replies(self) -> Iterator[memoryview]:
        """Yield the replies of the call begun by `send`, each in memory of its own. See `incoming`."""
        for reply in self.incoming():
            whole = memoryview(bytearray(reply.left))
            reply.read_into([whole])
            yield whole

    def incoming(self, *, patience_s: float = 0.0) -> Iterator[Incoming]:
        """Yield the replies of the call begun by `send`, as they begin to come.

        The connection can be used again once all were taken, and must be closed after an error.
        """
        self.flush()
        self._received = 0
        try:
            while self._comes_more():
                self._link.patience_s = patience_s
                yield self._begun()
            # What was received is given back to the connection's window, for the next calls.
            if self._owed > _WINDOW // 4:
                self._link.send(framing.wider(0, self._owed))
                self._owed = 0
        except OSError as problem:
            raise _silence(self.address, problem) from problem
        self.is_used = True

    def _begun(self) -> Incoming:
        compressed, size = framing.PREFIX.unpack(self.take_bytes(framing.PREFIX.size))
        if compressed or size > _LARGEST_REPLY:
            self.refuse(f"a reply that is compressed or too long ({size} bytes)")
        return Incoming(self, size)

    def take_bytes(self, size: int) -> bytes:
        """Return the next `size` bytes of the call; see `take`."""
        if size <= self._frame_left:
            self._frame_left -= size
            try:
                return self._link.read(size)
            except OSError as problem:
                raise _silence(self.address, problem) from problem
        taken = memoryview(bytearray(size))
        self.take([taken], size)
        return bytes(taken)

    def take(self, parts: Sequence[memoryview], size: int) -> None:
        """Fill `parts`, `size` bytes in all, with what comes next in the call; `Incoming` asks for it."""
        try:
            self._take(parts, size)
        except OSError as problem:
            raise _silence(self.address, problem) from problem

    def _take(self, parts: Sequence[memoryview], size: int) -> None:
        if size <= self._frame_left:
            self._link.read_into(parts)
            self._frame_left -= size
            return
        for whole in parts:
            part = whole
            while part:
                if not self._frame_left and not self._comes_more():
                    self.refuse("a reply that does not end")
                room = part[: self._frame_left]
                self._link.read_into([room])
                self._frame_left -= len(room)
                part = part[len(room) :]

    def _comes_more(self) -> bool:
        """Go on to where the call's data goes on; False where it has ended, and well."""
        while not self._frame_left:
            if self._padding:
                self._link.read(self._padding)
                self._padding = 0
            if self._received > _WINDOW // 2:
                self._give_back()
            kind, flags, stream, length = self._next_frame()
            if kind != FrameType.DATA or stream != self._stream:
                if self._control(kind, flags, stream, length):
                    return False
                continue
            self._received += length
            self._owed += length
            if flags & framing.PADDED:
                self._padding = self._link.read(1)[0] if length else 0
                length -= self._padding + 1
            if length < 0:
                self.refuse("a frame that is all padding")
            if flags & framing.END_STREAM:
                self.refuse("a call without a status")
            self._frame_left = length
        return True

    def _give_back(self) -> None:
        """Let the server send on, in a call whose replies are more than the window."""
        self._link.send(framing.wider(0, self._owed) + framing.wider(self._stream, self._received))
        self._received = self._owed = 0

    def _control(self, kind: int, flags: int, stream: int, length: int) -> bool:
        """Act on a frame that is no data of ours; tell whether it ends the call well."""
        if length > _LARGEST_HEAD:
            self.refuse(f"a frame of {length} bytes: not a gRPC server?")
        payload = self._link.read(length)
        if kind == FrameType.WINDOW_UPDATE and stream == 0 and length == framing.COUNT.size:
            self._send_window += framing.COUNT.unpack(payload)[0] & framing.LAST_STREAM
        elif kind == FrameType.SETTINGS and not flags & framing.ACK:
            self._link.send(frame(FrameType.SETTINGS, framing.ACK, 0))
        elif kind == FrameType.PING and not flags & framing.ACK:
            self._link.send(frame(FrameType.PING, framing.ACK, 0, payload))
        elif kind == FrameType.GOAWAY:
            if payload[4:8] == framing.COUNT.pack(ErrorCode.CALM):
                raise PlainBusyError(self.address)
            raise PlainSilentError(self.address, "the server is going away")
        elif kind == FrameType.RESET and stream == self._stream:
            raise PlainSilentError(self.address, "the server ended the call")
        elif kind == FrameType.HEADERS:
            return self._take_head(flags, stream, payload)
        return False

    def _take_head(self, flags: int, stream: int, payload: bytes) -> bool:
        try:
            fields = self._headers.read(self._whole_head(flags, stream, payload))
            if stream != self._stream or not flags & framing.END_STREAM:
                return False
            check_status(self.address, fields)
        except ValueError as problem:
            self.refuse(f"a call without a status ({problem})")
        self.trailers = fields
        return True

    def _whole_head(self, flags: int, stream: int, payload: bytes) -> bytes:
        payload = framing.without_padding(flags, payload)
        if flags & framing.PRIORITY:
            payload = payload[5:]
        while not flags & framing.END_HEADERS:
            kind, flags, other, length = self._next_frame()
            if kind != FrameType.CONTINUATION or other != stream or len(payload) + length > _LARGEST_HEAD:
                self.refuse("a header block that does not end")
            payload += self._link.read(length)
        return payload

    def refuse(self, problem: str) -> NoReturn:
        """Raise what says that this is no gRPC server of ours; it is not shown the token again."""
        STRANGERS.note(self.address, self._token, problem)
        raise _format_error(self.address, problem)

    def _next_frame(self) -> tuple[int, int, int, int]:
        return framing.unpacked(self._link.read(framing.FRAME.size))
