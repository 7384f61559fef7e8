"""The receiving side of a server's gRPC connection: bytes in, requests out. Touches no socket.

Everything a peer can make us keep is bounded: see `Terms`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from deeplink.core.errors import DeepLinkError
from deeplink.rpc.forksafe import framing
from deeplink.rpc.forksafe.framing import ErrorCode, FrameType, HeaderReader, Setting, Status
from deeplink.rpc.tokens import TOKEN_HEADER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from deeplink.rpc.forksafe.scattered import Scattered

    Method = Callable[[bytes], Iterator["Reply"]]

HEAD_BYTES = 16_384
MOST_CONTINUED = 16
"""Frames of one header block."""
_MOST_WAITING = 4096


class CallRefusedError(DeepLinkError):
    """A method of ours ends a call with a status; raised by what answers calls of a `PlainServer`."""

    def __init__(self, status: Status, why: str) -> None:
        super().__init__(f"{status.name}: {why}")
        self.status, self.why = status, why


class SessionError(DeepLinkError):
    """A peer of our server broke HTTP/2's rules, or a bound; its connection must end."""

    def __init__(self, fault: ErrorCode, why: str) -> None:
        super().__init__(f"{fault.name}: {why}")
        self.fault, self.why = fault, why


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The methods a server answers, and its bounds per connection.

    Attributes:
        methods: `/package.Service/Method` -> makes the replies to one request; what it raises as CallRefusedError
            ends the call with a status.
    """

    is_valid: Callable[[str], bool]  # whether a call with this token is answered
    methods: Mapping[str, Method]
    admit: Callable[[], bool]  # asked before a request is answered; False refuses the call
    release: Callable[[], None]  # called when an admitted request is done with, however it went
    retry_after_ms: int = 200  # how long a refused caller is asked to wait
    streams: int = 32  # calls open at once
    request_bytes: int = 3 << 19  # the longest request; all that is kept of requests is twice that
    head_bytes: int = HEAD_BYTES  # the longest header block
    chatter: int = 1000  # frames that carry no request, between two requests

    @property
    def window(self) -> int:
        """Bytes of requests a peer may send unasked."""
        return 2 * self.request_bytes


@dataclass(slots=True, eq=False)
class Stream:
    """A call that is open."""

    method: Method  # what answers it
    window: int  # bytes of answers that its caller still takes
    buffer: bytearray = field(default_factory=bytearray)  # the part of a request that has come
    held: int = 0  # bytes that came since the last whole request
    waiting: int = 0  # requests that are not answered to their end
    is_ended: bool = False  # whether no more requests come
    is_greeted: bool = False  # whether an answer has begun


class CallRequest(NamedTuple):
    """A request; without a message it is the end of a call that has none to answer. `cost` is what it took up."""

    stream: int
    message: bytes | None
    cost: int


class Intake:
    """Takes in what comes on one connection. Not thread-safe.

    The peer takes `window` bytes of answers, in frames of at most `frame_size`; once a call carried the token,
    the peer `is_proven`.
    """

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._unread, self._is_greeted, self.is_proven = b"", False, False
        self.work = 0  # counts up with what belongs to a call of a proven peer; a PING does not
        self._headers = HeaderReader()
        self.streams: dict[int, Stream] = {}
        self._last = self._chatter = 0
        self._block: tuple[int, int, list[bytes]] | None = None
        self.ready: deque[CallRequest] = deque()  # to be answered, in order
        self.control: list[bytes] = []  # frames to be sent between others
        self.window, self._owed, self._given = framing.DEFAULT_WINDOW, 0, terms.window
        self._initial_window, self.frame_size = framing.DEFAULT_WINDOW, framing.DEFAULT_FRAME
        self.control.append(
            framing.settings({
                Setting.MOST_STREAMS: terms.streams,
                Setting.INITIAL_WINDOW: terms.window,
                Setting.HEADER_LIST_SIZE: terms.head_bytes,
            })
            + framing.wider(0, terms.window - framing.DEFAULT_WINDOW)
        )  # fmt: skip

    @property
    def is_idle(self) -> bool:
        """Whether it rests between calls: one came with the token, none is open now, and nothing half came."""
        return self.is_proven and not (self.streams or self._unread or self._block)

    def receive(self, data: bytes) -> None:
        """Take in what came."""
        if self._unread:
            data, self._unread = self._unread + data, b""
        at = 0
        if not self._is_greeted:
            start = data[: len(framing.PREFACE)]
            if not framing.PREFACE.startswith(start):
                raise SessionError(ErrorCode.PROTOCOL, "this is a gRPC server")
            if len(start) < len(framing.PREFACE):
                self._unread = data
                return
            at, self._is_greeted = len(framing.PREFACE), True
        size = framing.FRAME.size
        while len(data) - at >= size:
            high, low, kind, flags, stream = framing.FRAME.unpack_from(data, at)
            end = at + size + (high << 16) + low
            if end - at - size > framing.DEFAULT_FRAME:
                raise SessionError(ErrorCode.FRAME_SIZE, "a frame longer than we said we take")
            if end > len(data):
                break
            self._take(kind, flags, stream & framing.LAST_STREAM, data[at + size : end])
            at = end
        self._unread = data[at:]

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if self._block is not None and kind != FrameType.CONTINUATION:
            raise SessionError(ErrorCode.PROTOCOL, "a header block that does not end")
        try:
            if kind == FrameType.DATA:
                self._take_data(flags, stream, payload)
            elif kind in {FrameType.HEADERS, FrameType.CONTINUATION}:
                self._take_head(kind, flags, stream, payload)
            else:
                self._take_other(kind, flags, stream, payload)
        except ValueError as problem:
            raise SessionError(ErrorCode.PROTOCOL, str(problem)) from problem

    def _take_other(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        self._count_chatter()
        if kind == FrameType.SETTINGS and not flags & framing.ACK:
            self._take_settings(payload)
        elif kind == FrameType.PING and len(payload) != 8:  # noqa: PLR2004 - RFC 9113 6.7
            raise SessionError(ErrorCode.FRAME_SIZE, "a ping that is none")
        elif kind == FrameType.PING and not flags & framing.ACK:
            self.control.append(framing.frame(FrameType.PING, framing.ACK, 0, payload))
        elif kind == FrameType.WINDOW_UPDATE:
            self._widen(stream, payload)
        elif kind == FrameType.RESET:
            self.drop(stream)
        elif kind == FrameType.PUSH_PROMISE:
            raise SessionError(ErrorCode.PROTOCOL, "a client that pushes")

    def _count_chatter(self) -> None:
        self._chatter += 1
        if self._chatter > self._terms.chatter:
            raise SessionError(ErrorCode.CALM, "frames without end that ask for nothing")

    def went_on(self) -> None:
        """Take notice that an answer goes on: its reader may say as much again between."""
        self._chatter = 0
        self.work += 1

    def _take_settings(self, payload: bytes) -> None:
        if len(payload) % framing.SETTING.size:
            raise SessionError(ErrorCode.FRAME_SIZE, "settings that are none")
        for key, value in framing.SETTING.iter_unpack(payload):
            if key == Setting.INITIAL_WINDOW:
                if value > framing.WINDOW:
                    raise SessionError(ErrorCode.FLOW_CONTROL, "a window too wide")
                for known in self.streams.values():
                    known.window += value - self._initial_window
                self._initial_window = value
            elif key == Setting.FRAME_SIZE:
                if not framing.DEFAULT_FRAME <= value <= framing.LARGEST_FRAME:
                    raise SessionError(ErrorCode.PROTOCOL, "a frame size that is none")
                self.frame_size = value
        self.control.append(framing.frame(FrameType.SETTINGS, framing.ACK, 0))

    def _widen(self, stream: int, payload: bytes) -> None:
        if len(payload) != framing.COUNT.size:
            raise SessionError(ErrorCode.FRAME_SIZE, "a window update that is none")
        more = framing.COUNT.unpack(payload)[0] & framing.LAST_STREAM
        known = self.streams.get(stream)
        if not more or max(self.window if not stream else 0, known.window if known else 0) + more > framing.WINDOW:
            raise SessionError(ErrorCode.FLOW_CONTROL, "a window that cannot be")
        if not stream:
            self.window += more
        elif known is not None:
            known.window += more

    def _take_head(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == FrameType.HEADERS:
            payload = framing.without_padding(flags, payload)
            self._block = (stream, flags, [payload[5:] if flags & framing.PRIORITY else payload])
        elif self._block is None or self._block[0] != stream:
            raise SessionError(ErrorCode.PROTOCOL, "a header block that goes on elsewhere")
        else:
            self._block[2].append(payload)
        _, first, pieces = self._block
        if len(pieces) > MOST_CONTINUED or sum(map(len, pieces)) > self._terms.head_bytes:
            raise SessionError(ErrorCode.CALM, "a header block longer than we said we take")
        if not flags & framing.END_HEADERS:
            return
        self._block = None
        try:
            fields = self._headers.read(b"".join(pieces))
        except ValueError as problem:
            raise SessionError(ErrorCode.COMPRESSION, str(problem)) from problem
        self._begin(stream, fields, is_ended=bool(first & framing.END_STREAM))

    def _begin(self, stream: int, fields: Mapping[str, str], *, is_ended: bool) -> None:
        known = self.streams.get(stream)
        if known is not None:  # its trailers
            self._end(stream, known)
            return
        if stream <= self._last or not stream % 2:
            raise SessionError(ErrorCode.STREAM_CLOSED, "a stream that is no new one")
        self._last = stream
        method = self._terms.methods.get(fields.get(":path", ""))
        given = fields.get(TOKEN_HEADER, "")
        if len(self.streams) >= self._terms.streams:
            self._count_chatter()
            self.control.append(
                framing.frame(FrameType.RESET, 0, stream, framing.COUNT.pack(ErrorCode.REFUSED_STREAM))
            )
        elif not self._terms.is_valid(given):
            self._refuse(stream, Status.UNAUTHENTICATED, "the call carries no valid token")
        elif method is None or not fields.get("content-type", "").startswith("application/grpc"):
            self._refuse(stream, Status.UNIMPLEMENTED, "no such method")
        else:
            self.is_proven = True
            self.work += 1
            self.streams[stream] = Stream(method, self._initial_window)
            if is_ended:
                self._end(stream, self.streams[stream])

    def _refuse(self, stream: int, status: Status, why: str) -> None:
        self._count_chatter()
        self.control.append(trailers(stream, status, why, is_alone=True))

    def _end(self, stream: int, known: Stream) -> None:
        known.is_ended = True
        if not known.waiting:
            known.waiting += 1
            self.ready.append(CallRequest(stream, None, 0))

    def drop(self, stream: int) -> None:
        """Forget a call: it is answered, refused or cancelled."""
        known = self.streams.pop(stream, None)
        if known is not None:
            self.give_back(stream, known.held)

    def _take_data(self, flags: int, stream: int, payload: bytes) -> None:
        size = len(payload)
        self._given -= size
        if self._given < 0:
            raise SessionError(ErrorCode.FLOW_CONTROL, "more than the window allows")
        known = self.streams.get(stream)
        if known is None or known.is_ended:
            if stream > self._last or not stream:
                raise SessionError(ErrorCode.PROTOCOL, "data of no stream")
            self._count_chatter()
            self.give_back(stream, size)
            return
        content = framing.without_padding(flags, payload) if flags & framing.PADDED else payload
        known.held += size
        known.buffer += content
        self.work += len(content)
        if not content and not flags & framing.END_STREAM:
            self._count_chatter()
        self._take_messages(stream, known)
        if flags & framing.END_STREAM and stream in self.streams:
            if known.buffer:
                self._give_up(stream, Status.INVALID, "a request that does not end")
            else:
                self._end(stream, known)

    def _take_messages(self, stream: int, known: Stream) -> None:
        buffer, head = known.buffer, framing.PREFIX.size
        while len(buffer) >= head:
            compressed, size = framing.PREFIX.unpack_from(buffer)
            if compressed:
                self._give_up(stream, Status.UNIMPLEMENTED, "compressed requests are not taken")
                return
            if size > self._terms.request_bytes:
                self._give_up(stream, Status.INVALID, f"a request of {size} bytes")
                return
            if len(buffer) < head + size:
                return
            self.ready.append(CallRequest(stream, bytes(buffer[head : head + size]), known.held))
            known.waiting += 1
            known.held = 0
            self._chatter = 0
            if len(self.ready) > _MOST_WAITING:
                raise SessionError(ErrorCode.CALM, "requests without end")
            del buffer[: head + size]

    def _give_up(self, stream: int, status: Status, why: str) -> None:
        known = self.streams[stream]
        if known.is_greeted or known.waiting:
            self.control.append(framing.frame(FrameType.RESET, 0, stream, framing.COUNT.pack(ErrorCode.PROTOCOL)))
        else:
            self._refuse(stream, status, why)
        self.drop(stream)

    def give_back(self, stream: int, size: int) -> None:
        """Let the peer send as much again as was dealt with."""
        self._owed += size
        if self._owed >= self._terms.window // 4:
            self.control.append(framing.wider(0, self._owed))
            self._given += self._owed
            self._owed = 0
        known = self.streams.get(stream)
        if size and known is not None and not known.is_ended:
            self.control.append(framing.wider(stream, size))


def trailers(stream: int, status: Status, why: str, *, is_alone: bool, retry_ms: int = 0) -> bytes:
    """Return the frame that ends a call; `is_alone`: no answer began before."""
    block = framing.trailers(status, why, retry_ms=retry_ms, is_alone=is_alone)
    return framing.frame(FrameType.HEADERS, framing.END_HEADERS | framing.END_STREAM, stream, block)
