"""Ranges of a sample that is longer than a block may be: read a piece at a time where this node holds it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.cache.block import SPAN
from deeplink.cache.reads.pieces import read_piece
from deeplink.cache.store import Store
from deeplink.errors import DeepLinkError
from deeplink.library import NotReadError

if TYPE_CHECKING:
    from deeplink.config import Config
    from deeplink.library import PathEntry

_KEPT = 2
"""Pieces remembered: who reads a table goes between its end and its columns."""


class LongSample:
    """A sample of several pieces. For one thread; holds some pieces in memory, or all of them.

    What this node does not hold is read whole, once: samples come from elsewhere with one checksum for all of it.

    Args:
        found: the sample.
        config: where this node's store is.

    Attributes:
        bytes: its length.
    """

    def __init__(self, found: PathEntry, config: Config) -> None:
        self._reader, self._store = found.reader, Store(config.store, make=False)
        self._row, self.bytes = found.entry.row, found.bytes
        self._pieces: dict[int, memoryview] = {}
        self._whole: memoryview | None = None

    @staticmethod
    def is_one(found: PathEntry) -> bool:
        """Tell whether a sample is so long."""
        return found.bytes > SPAN

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes from `start` to `stop`, both within the sample.

        Raises:
            NotReadError: they cannot be had anywhere.
        """
        parts = []
        while start < stop:
            number, begin = divmod(start, SPAN)
            end = min(stop - number * SPAN, SPAN)
            parts.append(self._piece(number)[begin:end])
            start = number * SPAN + end
        return b"".join(parts)

    def _piece(self, number: int) -> memoryview:
        if self._whole is None and number not in self._pieces:
            piece = read_piece(self._store, self._reader.index, self._row, number)
            if piece is None:
                self._pieces, self._whole = {}, self._read_whole()
            else:
                while len(self._pieces) >= _KEPT:
                    del self._pieces[next(iter(self._pieces))]
                self._pieces[number] = piece
        if self._whole is not None:
            return self._whole[number * SPAN : (number + 1) * SPAN]
        return self._pieces[number]

    def _read_whole(self) -> memoryview:
        try:
            return self._reader.read([self._row])[0]
        except DeepLinkError as problem:
            raise NotReadError(problem) from problem
