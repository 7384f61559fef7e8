"""The server's side of one gRPC connection: calls are answered in order. Touches no socket."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from deeplink.plainrpc import framing, hpack
from deeplink.plainrpc.errors import CallRefusedError
from deeplink.plainrpc.framing import ErrorCode, FrameType, Status
from deeplink.plainrpc.intake import Intake, trailers
from deeplink.plainrpc.outgoing import Outbox, OutgoingMessage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deeplink.plainrpc.terms import CallRequest, Reply, Stream, Terms

log = logging.getLogger(__name__)

_PUT_AT_ONCE = 8 << 20
"""Bytes of replies made ready before the first of them is sent."""
_PROGRESS = 1024
"""A frame so long is no trickle that a peer makes us send."""
_TOO_BUSY = "as many calls are answered as this server takes at once"


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
        """Put into `out` what can be sent now, at most to the end of one call.

        Args:
            refuse: whether to refuse every request as one too many, without a look at it.
        """
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
                head = framing.frame(FrameType.HEADERS, framing.END_HEADERS, request.stream, hpack.ANSWER)
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
