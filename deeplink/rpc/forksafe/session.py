"""The server's side of one gRPC connection: calls are answered in order. Touches no socket."""

from __future__ import annotations

import itertools
import logging
import socket
from collections import deque
from typing import TYPE_CHECKING

from deeplink.rpc.forksafe import framing
from deeplink.rpc.forksafe.framing import PREFIX, ErrorCode, FrameType, Status
from deeplink.rpc.forksafe.intake import CallRefusedError, Intake, trailers
from deeplink.rpc.forksafe.scattered import IOV_MAX, Scattered

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from deeplink.rpc.forksafe.intake import CallRequest, Reply, Stream, Terms

    Piece = bytes | memoryview | Scattered

log = logging.getLogger(__name__)

_PUT_AT_ONCE = 8 << 20
"""Bytes of replies made ready before the first of them is sent."""
_PROGRESS = 1024
"""A frame so long is no trickle that a peer makes us send."""
_TOO_BUSY = "as many calls are answered as this server takes at once"
_ZEROS = memoryview(bytes(1 << 16))


class OutgoingMessage:
    """A message on its way into frames, in pieces; the gRPC prefix is its first."""

    def __init__(self, parts: Sequence[Piece], size: int) -> None:
        self.left = PREFIX.size + size
        self._parts: list[Piece] = [PREFIX.pack(0, size), *parts]
        self._at = 0

    def take(self, size: int) -> list[Piece]:
        """Return the next `size` bytes, in pieces."""
        self.left -= size
        if not self.left:
            rest, self._parts = self._parts[self._at :], []
            return rest
        taken: list[Piece] = []
        while size:
            piece = self._parts[self._at]
            if len(piece) <= size:
                self._at += 1
            else:
                self._parts[self._at], piece = piece[size:], piece[:size]
            taken.append(piece)
            size -= len(piece)
        return taken

    def blank(self) -> None:
        """Let all that is left be zeros: what was announced cannot be read, and its length is on the wire."""
        self._parts, self._at = zeros(self.left), 0


def zeros(size: int) -> list[Piece]:
    """Return so many zero bytes, in pieces."""
    whole, rest = divmod(size, len(_ZEROS))
    return [*(_ZEROS for _ in range(whole)), *([_ZEROS[:rest]] if rest else [])]


class Outbox:
    """Pieces to be sent, in order.

    Attributes:
        left: bytes in it.
    """

    def __init__(self) -> None:
        self.left = 0
        self._pieces: deque[Piece] = deque()
        self._end = b""

    def put(self, pieces: Sequence[Piece], size: int) -> None:
        """Take pieces in, of so many bytes in all."""
        self._pieces.extend(pieces)
        self.left += size

    def end_with(self, piece: bytes) -> None:
        """Send `piece` after all others; in place of an earlier such piece."""
        self.left += len(piece) - len(self._end)
        self._end = piece

    @property
    def has_end(self) -> bool:
        """Whether the piece that ends a call waits in here."""
        return bool(self._end)

    def blank(self) -> None:
        """Send zeros in place of the memory that is still to be sent."""
        pieces, self._pieces = self._pieces, deque()
        for piece in pieces:
            self._pieces.extend([piece] if isinstance(piece, bytes) else zeros(len(piece)))

    def send(self, to: socket.socket, flags: int) -> bool:
        """Send what the socket takes in one call; tell whether it took all that it was offered."""
        first = self._pieces[0] if self._pieces else self._end
        if isinstance(first, Scattered):
            size = len(first)
            sent = first.send(to.fileno(), flags | self._more(size))
            self._forget([first], sent)
        else:
            run = self._run()
            size = sum(map(len, run))
            sent = to.sendmsg(run, (), flags | self._more(size))
            self._forget(run, sent)
        return sent == size

    def _more(self, size: int) -> int:
        """Return the flag that lets what follows the next `size` bytes go into the same packets."""
        return socket.MSG_MORE if size < self.left else 0

    def _run(self) -> list[bytes | memoryview]:
        """Return the pieces, up to what is scattered, that go in one call."""
        run: list[bytes | memoryview] = []
        for piece in itertools.islice(self._pieces, IOV_MAX):
            if isinstance(piece, Scattered):
                return run
            run.append(piece)
        if self._end and len(run) < IOV_MAX:
            run.append(self._end)
        return run

    def _forget(self, run: Sequence[Piece], sent: int) -> None:
        """Let go of what was sent: it may be copies, and a peer that reads slowly never lets the box run empty."""
        self.left -= sent
        for piece in run:
            done, is_end = min(sent, len(piece)), not self._pieces
            if is_end:
                self._end = self._end[done:]
            else:
                self._pieces.popleft()
            if done < len(piece):
                if not is_end:
                    self._pieces.appendleft(piece[done:])
                return
            sent -= done


class Session:
    """One connection. Not thread-safe: one thread at a time works on it.

    Attributes:
        intake: what came; feed it.
        out: what is to be sent; empty it.
    """

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self.intake, self.out = Intake(terms), Outbox()
        self._request: CallRequest | None = None
        self._stream: Stream | None = None
        self._replies: Iterator[Reply] | None = None
        self._reply: Reply | None = None
        self._message: OutgoingMessage | None = None
        self._ended: tuple[CallRequest, Stream] | None = None
        self._lost = ""

    @property
    def is_idle(self) -> bool:
        """Whether no call is open, nothing half came and nothing is to be sent."""
        return self.intake.is_idle and not self.out.left

    def fill(self, *, refuse: bool = False) -> None:
        """Put into `out` what can be sent now, at most to the end of one call."""
        if not self.out.left:
            self._reply = self._reply if self._replies is not None else None
        while not self.out.has_end and self.out.left < _PUT_AT_ONCE and self._advance(refuse=refuse):
            pass

    def _advance(self, *, refuse: bool) -> bool:
        if self.intake.control:
            said, self.intake.control = b"".join(self.intake.control), []
            self.out.put([said], len(said))
        if self._request is None:
            return self._begin(refuse=refuse)
        if self.intake.streams.get(self._request.stream) is not self._stream:
            self.abandon()  # cancelled
            return True
        return self._frame_up() if self._message is not None else self._next_reply()

    def _begin(self, *, refuse: bool) -> bool:
        """Take the next request; False: there is none."""
        while self.intake.ready:
            request = self.intake.ready.popleft()
            self.intake.give_back(request.stream, request.cost)
            stream = self.intake.streams.get(request.stream)
            if stream is None:  # cancelled before it was begun
                continue
            self._request, self._stream = request, stream
            if request.message is None:
                self._finish(Status.OK, "")
            elif refuse or not self._terms.admit():
                self._finish(Status.EXHAUSTED, _TOO_BUSY)
            else:
                self._replies = stream.method(request.message)
            return True
        return False

    def _next_reply(self) -> bool:
        """Begin the next reply to the request, or end with it."""
        request, stream = self._request, self._stream
        if self._replies is None or request is None or stream is None:
            return False
        try:
            reply = next(self._replies, None)
        except CallRefusedError as problem:
            self._finish(problem.status, problem.why)
            return True
        except Exception:
            log.exception("a call could not be answered")
            self._finish(Status.INTERNAL, "the server failed; its log says how")
            return True
        if reply is not None:
            self._reply, self._message = reply, OutgoingMessage(reply.parts, reply.size)
            if not stream.is_greeted:
                stream.is_greeted = True
                head = framing.frame(FrameType.HEADERS, framing.END_HEADERS, request.stream, framing.ANSWER)
                self.out.put([head], len(head))
            return True
        stream.waiting -= 1
        if stream.is_ended and not stream.waiting:
            self._finish(Status.OK, "")
        else:
            self.abandon()
        return True

    def _frame_up(self) -> bool:
        """Put as much of the message into a frame as the peer's windows allow; False: nothing."""
        message, request, stream = self._message, self._request, self._stream
        if message is None or request is None or stream is None:
            return False
        size = min(message.left, self.intake.frame_size, self.intake.window, stream.window)
        if size <= 0:
            return False
        self.intake.window -= size
        stream.window -= size
        if size >= _PROGRESS or size == message.left:
            self.intake.went_on()
        head = framing.frame_head(FrameType.DATA, 0, request.stream, size)
        self.out.put([head, *message.take(size)], len(head) + size)
        if not message.left:
            self._message = None
            if self._lost:
                self._finish(Status.DATA_LOSS, self._lost)
        return True

    def _finish(self, status: Status, why: str) -> None:
        """End the call of the request."""
        request, stream = self._request, self._stream
        if request is None or stream is None:
            return
        self.out.end_with(self._ending(request, stream, status, why))
        self.intake.drop(request.stream)
        self.abandon()
        self._ended = (request, stream)

    def _ending(self, request: CallRequest, stream: Stream, status: Status, why: str) -> bytes:
        retry_ms = self._terms.retry_after_ms if status == Status.EXHAUSTED else 0
        end = trailers(request.stream, status, why, is_alone=not stream.is_greeted, retry_ms=retry_ms)
        if stream.is_ended:
            return end
        # RFC 9113 8.1: the rest of the request is not wanted.
        return end + framing.frame(FrameType.RESET, 0, request.stream, framing.COUNT.pack(ErrorCode.NONE))

    def blank(self) -> None:
        """Go on after the kernel could not read what is to be sent: zeros, and a status that says so."""
        why = self._reply.unreadable() if self._reply is not None else "what was to be sent cannot be read"
        self.out.blank()
        if self.out.has_end and self._ended is not None:
            self.out.end_with(self._ending(*self._ended, Status.DATA_LOSS, why))
        elif self._message is not None:
            self._message.blank()
            self._lost = why
        else:
            self._finish(Status.DATA_LOSS, why)

    def abandon(self) -> None:
        """Let go of the request that is being answered, if there is one."""
        replies, self._replies = self._replies, None
        self._request = self._stream = self._message = None
        self._lost = ""
        if replies is not None:
            close = getattr(replies, "close", None)
            if close is not None:
                close()
            self._terms.release()
