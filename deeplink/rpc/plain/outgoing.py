"""What an agent sends on one connection: pieces in order, and the answers that make them."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import socket
from collections import deque
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np

from deeplink.rpc.plain import framing
from deeplink.rpc.plain.framing import HEAD, CallRefusedError, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


IOV_MAX = 1024
"""Places in one call (Linux: UIO_MAXIOV)."""


PAIR = np.dtype([("base", np.uintp), ("length", np.uintp)])
"""struct iovec."""


def pairs(addresses: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return an array of PAIR of these addresses and lengths (both integers, shape (places,))."""
    found = np.empty(len(addresses), PAIR)
    found["base"], found["length"] = addresses, lengths
    return found


class _Header(ctypes.Structure):  # struct msghdr
    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint),
        ("iov", ctypes.c_void_p),
        ("iov_length", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


_sendmsg = ctypes.CDLL(None, use_errno=True).sendmsg
_sendmsg.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
_sendmsg.restype = ctypes.c_ssize_t


class Scattered:
    """Bytes that lie at several places; their length and a slice of them are had as of any buffer.

    256 memoryviews take some 50 us to make, which is as long as the kernel takes to send them.
    """

    __slots__ = ("_owners", "_pairs", "_size")

    def __init__(self, addresses: np.ndarray, lengths: np.ndarray, owners: Sequence[object]) -> None:
        self._pairs, self._owners = pairs(addresses, lengths), owners
        self._size = int(lengths.sum())

    @classmethod
    def _of(cls, found: np.ndarray, owners: Sequence[object]) -> Self:
        return cls(found["base"], found["length"], owners)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> Self:
        """Return the bytes from one place to another, both of the whole."""
        start, stop, _ = part.indices(self._size)
        ends = np.cumsum(self._pairs["length"], dtype=np.int64)
        first, last = np.searchsorted(ends, [start, stop - 1], side="right").tolist()
        if start >= stop:
            return self._of(self._pairs[:0], ())
        found = self._pairs[first : last + 1].copy()
        found["length"][-1] -= np.uintp(int(ends[last]) - stop)
        skipped = np.uintp(start - (int(ends[first - 1]) if first else 0))
        found["base"][0] += skipped
        found["length"][0] -= skipped
        return self._of(found, self._owners)

    @property
    def pairs(self) -> np.ndarray:
        """The places in order, an array of PAIR."""
        return self._pairs


def joined_places(pieces: Sequence[bytes | memoryview | Scattered], count: int) -> np.ndarray:
    """Return the `count` places of pieces in order, an array of PAIR; the pieces must outlive it."""
    found, at = np.empty(count, PAIR), 0
    bases, lengths = found["base"], found["length"]
    for piece in pieces:
        if isinstance(piece, Scattered):
            found[at : (at := at + len(piece.pairs))] = piece.pairs
        else:
            bases[at] = np.frombuffer(piece, np.uint8).ctypes.data
            lengths[at] = len(piece)
            at += 1
    return found


def send_places(descriptor: int, some: np.ndarray, flags: int) -> int:
    """Send what a socket takes of at most IOV_MAX places in one call; return how many bytes that was."""
    header = _Header(iov=some.ctypes.data, iov_length=len(some))
    while True:
        sent: int = _sendmsg(descriptor, ctypes.addressof(header), flags)
        if sent >= 0:
            return sent
        code = ctypes.get_errno()
        if code != errno.EINTR:  # a signal, or this process was stopped and goes on
            raise OSError(code, os.strerror(code))


log = logging.getLogger(__name__)

Piece = bytes | memoryview | Scattered
"""Bytes to be sent: ours, or mapped from a file and touched by the kernel alone."""
_ZEROS = memoryview(bytes(1 << 16))


class Reply(Protocol):
    """One message of an answer."""

    @property
    def parts(self) -> Sequence[Piece]:
        """Its bytes, in pieces; only the kernel touches those that are no `bytes`."""
        ...

    @property
    def size(self) -> int:
        """How many bytes it has."""
        ...

    def unreadable(self) -> str:
        """Say, for the caller, why a piece could not be read; called when the kernel could not."""
        ...


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
        self._pieces.extend(piece for piece in pieces if len(piece))
        self.left += size

    def end_with(self, piece: bytes) -> None:
        """Send `piece` after all others; in place of an earlier such piece."""
        self.left += len(piece) - len(self._end)
        self._end = piece

    def blank(self) -> None:
        """Send zeros in place of the memory that is still to be sent."""
        pieces, self._pieces = self._pieces, deque()
        for piece in pieces:
            self._pieces.extend([piece] if _is_own(piece) else _zeros(len(piece)))

    def send(self, to: socket.socket, flags: int) -> bool:
        """Send what the socket takes in one call; tell whether it took all that it was offered."""
        run, places, is_scattered = list[Piece](), 0, False
        for piece in (*self._pieces, self._end) if self._end else self._pieces:
            if places >= IOV_MAX:
                break
            run.append(piece)
            is_scattered |= isinstance(piece, Scattered)
            places += len(piece.pairs) if isinstance(piece, Scattered) else 1
        if is_scattered:
            pairs = joined_places(run, places)[:IOV_MAX]
            size = int(pairs["length"].sum()) if places > IOV_MAX else sum(map(len, run))
            sent = send_places(to.fileno(), pairs, flags | self._more(size))
        else:
            size = sum(map(len, run))
            sent = to.sendmsg(run, (), flags | self._more(size))  # type: ignore[arg-type] # none is scattered
        self._forget(sent)
        return sent == size

    def _more(self, size: int) -> int:
        """Return the flag that lets what follows the next `size` bytes go into the same packets."""
        return socket.MSG_MORE if size < self.left else 0

    def _forget(self, sent: int) -> None:
        """Let go of what was sent: it may be copies, and a peer that reads slowly never lets the box run empty."""
        self.left -= sent
        while self._pieces and sent >= len(self._pieces[0]):
            sent -= len(self._pieces.popleft())
        if not self._pieces:
            self._end = self._end[sent:]
        elif sent:
            first = self._pieces[0]
            self._pieces[0] = (memoryview(first) if isinstance(first, bytes) else first)[sent:]


def _is_own(piece: Piece) -> bool:
    """Tell whether a piece is memory of this process's own, not mapped from a file."""
    return isinstance(piece, bytes) or (isinstance(piece, memoryview) and isinstance(piece.obj, bytes))


def _zeros(size: int) -> list[Piece]:
    whole, rest = divmod(size, len(_ZEROS))
    return [*(_ZEROS for _ in range(whole)), *([_ZEROS[:rest]] if rest else [])]


class AnswerStream:
    """The answers on one connection, one at a time. Not thread-safe.

    Attributes:
        out: what is to be sent; empty it.
    """

    def __init__(self) -> None:
        self.out = Outbox()
        self._replies: Iterator[Reply] | None = None
        self._reply: Reply | None = None
        self._release: Callable[[], None] = lambda: None

    @property
    def is_open(self) -> bool:
        """Whether an answer is not made to its end; what is made may wait in `out`."""
        return self._replies is not None

    def begin(self, replies: Iterator[Reply], release: Callable[[], None] = lambda: None) -> None:
        """Answer with these from now on; `release` is called once they are made, however that went."""
        self._replies, self._release = replies, release

    def fill(self, at_once: int) -> None:
        """Put parts into `out` until it has so many bytes, or the answer's end."""
        while self._replies is not None and self.out.left < at_once:
            try:
                reply = next(self._replies, None)
            except CallRefusedError as problem:
                self.finish(problem.status, problem.why)
            except Exception:
                log.exception("a call could not be answered")
                self.finish(Status.INTERNAL, "the server failed; its log says how")
            else:
                if reply is None:
                    self.finish(Status.OK)
                else:
                    self._reply = reply
                    head, parts = framing.part(reply.size), reply.parts
                    if parts and isinstance(parts[0], bytes):  # in one piece: the kernel takes fewer
                        head, parts = head + parts[0], parts[1:]
                    self.out.put([head, *parts], HEAD.size + reply.size)

    def finish(self, status: int, why: str = "", *, retry_ms: int = 0) -> None:
        """End the answer, after what is in `out`."""
        self.out.end_with(framing.end(status, why, retry_ms=retry_ms))
        self.abandon()

    def blank(self) -> None:
        """Go on after the kernel could not read what is to be sent: zeros, and a status that says so."""
        why = self._reply.unreadable() if self._reply is not None else "what was to be sent cannot be read"
        self.out.blank()
        self.finish(Status.DATA_LOSS, why)

    def abandon(self) -> None:
        """Let go of what makes the answer."""
        replies, self._replies = self._replies, None
        if replies is not None:
            close = getattr(replies, "close", None)
            if close is not None:
                close()
            self._release()
