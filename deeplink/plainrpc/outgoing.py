"""What one connection of a server still has to send: frames, and pieces of memory that are sent where they lie.

A memoryview may be of a mapped file. Only the kernel touches it, and says EFAULT where it cannot be read; a load
of ours would be SIGBUS, which no Python program survives.
"""

from __future__ import annotations

import bisect
import itertools
from typing import TYPE_CHECKING

from deeplink.plainrpc.framing import PREFIX

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    Piece = bytes | memoryview

_MOST_PIECES = 1024  # in one call: IOV_MAX
_ZEROS = memoryview(bytes(1 << 16))


class Message:
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
        self._pieces: list[Piece] = []
        self._at = 0
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
        pieces = self._pieces[self._at :]
        self._at, self._pieces = 0, []
        for piece in pieces:
            self._pieces += zeros(len(piece)) if isinstance(piece, memoryview) else [piece]

    def send(self, to: socket.socket, flags: int) -> bool:
        """Send what the socket takes in one call; tell whether that was all.

        Raises:
            BlockingIOError: it takes nothing now.
            OSError: EFAULT where memory cannot be read; else the connection is broken.
        """
        pieces = self._pieces[self._at : self._at + _MOST_PIECES] if self._at else self._pieces[:_MOST_PIECES]
        if self._end and len(pieces) < _MOST_PIECES and self._at + len(pieces) == len(self._pieces):
            pieces.append(self._end)
        sent = to.sendmsg(pieces, (), flags)
        self.left -= sent
        if not self.left:
            self._pieces, self._at, self._end = [], 0, b""
            return True
        self._forget(pieces, sent)
        return False

    def _forget(self, pieces: Sequence[Piece], sent: int) -> None:
        ends = list(itertools.accumulate(map(len, pieces)))
        done = bisect.bisect_right(ends, sent)
        # Let go of at once: it may be copies, and a peer that reads slowly never lets the box run empty.
        self._pieces[self._at : self._at + done] = [b""] * done
        self._at += done
        if done < len(pieces):
            rest = pieces[done][len(pieces[done]) - (ends[done] - sent) :]
            if self._at < len(self._pieces):
                self._pieces[self._at] = rest
            else:
                self._pieces, self._at, self._end = [], 0, bytes(rest)
        if self._at >= _MOST_PIECES:
            del self._pieces[: self._at]
            self._at = 0
