"""What one connection of a server still has to send: frames, and pieces of memory that are sent where they lie.

What is no `bytes` may be of a mapped file. Only the kernel touches it, and says EFAULT where it cannot be read; a
load of ours would be SIGBUS, which no Python program survives.
"""

from __future__ import annotations

import itertools
import socket
from collections import deque
from typing import TYPE_CHECKING

from deeplink.iovec import IOV_MAX
from deeplink.plainrpc.framing import PREFIX
from deeplink.plainrpc.scattered import Scattered

if TYPE_CHECKING:
    from collections.abc import Sequence

    Piece = bytes | memoryview | Scattered

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
        """Send what the socket takes in one call; tell whether it took all that it was offered.

        Raises:
            BlockingIOError: it takes nothing now.
            OSError: EFAULT where memory cannot be read; else the connection is broken.
        """
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
