"""What an agent holds of what ranks that save together tell each other: in memory, bounded."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from deeplink.errors import DeepLinkError
from deeplink.v1 import keep_pb2

MOST_BOARDS: Final = 8
MOST_BOARD_BYTES: Final = 256 << 20
MOST_PIECE: Final = 48 << 10
"""Of what a rank says in several; a request has 60,000 bytes at most (`plainrpc`)."""
FAILED: Final = "failed"
"""What a rank tells that gives up; who waits for others hears it."""


class BoardFullError(DeepLinkError):
    """Ranks told each other more than an agent holds for them."""

    def __init__(self, size: int) -> None:
        super().__init__(f"ranks that save together said more than {size} bytes")
        self.size = size


@dataclass(slots=True)
class _Words:
    pieces: int
    said: dict[int, bytes] = field(default_factory=dict)

    @property
    def are_whole(self) -> bool:
        return len(self.said) == self.pieces


class Boards:
    """What ranks that save together tell each other, in memory; the oldest save's is forgotten. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._boards: OrderedDict[str, dict[tuple[str, int], _Words]] = OrderedDict()
        self._sizes: dict[str, int] = {}

    def tell(self, request: keep_pb2.TellRequest) -> None:
        """Keep a piece of what a rank says.

        Raises:
            BoardFullError: it is too much.
            ValueError: the piece is none.
        """
        if not request.board or request.piece >= request.pieces or len(request.data) > MOST_PIECE:
            raise ValueError(f"piece {request.piece} of {request.pieces}, {len(request.data)} bytes")
        with self._lock:
            board = self._boards.setdefault(request.board, {})
            size = self._sizes.get(request.board, 0) + len(request.data)
            if size > MOST_BOARD_BYTES:
                raise BoardFullError(MOST_BOARD_BYTES)
            words = board.setdefault((request.kind, request.rank), _Words(request.pieces))
            if request.piece not in words.said:
                self._sizes[request.board] = size
            words.said[request.piece] = request.data
            while len(self._boards) > MOST_BOARDS:
                oldest, _ = self._boards.popitem(last=False)
                del self._sizes[oldest]

    def hear(self, request: keep_pb2.HearRequest) -> keep_pb2.HearReply:
        """Return what was said of a kind."""
        with self._lock:
            board = self._boards.get(request.board, {})
            whole = {
                rank: words for (kind, rank), words in board.items() if kind == request.kind and words.are_whole
            }
            failed = sorted(rank for kind, rank in board if kind == FAILED)
            reply = keep_pb2.HearReply(spoke=sorted(whole), failed=failed)
            if failed:
                reply.failure = _joined(board[FAILED, failed[0]]).decode(errors="replace")
            if all(rank in whole for rank in request.ranks):
                reply.words.extend(_joined(whole[rank]) for rank in request.ranks)
            return reply


def _joined(words: _Words) -> bytes:
    return b"".join(data for _, data in sorted(words.said.items()))
