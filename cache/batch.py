"""Many samples in one piece of memory, in the order in which they were asked for."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Samples back to back in one arena; nothing else refers to it, so it may be written to.

    Attributes:
        arena: uint8, shape (bytes of all samples,).
        offsets: int64, shape (samples + 1,): sample i is `arena[offsets[i]:offsets[i + 1]]`.
    """

    arena: np.ndarray
    offsets: np.ndarray

    @classmethod
    def empty(cls, lengths: np.ndarray, room: Callable[[int], np.ndarray] | None = None) -> Self:
        """Return a batch with room for samples of these lengths, whose bytes are whatever was in memory.

        Args:
            lengths: bytes of each sample.
            room: gives the arena, uint8, for so many bytes; memory of its own when not given.
        """
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, dtype=np.int64, out=offsets[1:])
        size = int(offsets[-1])
        return cls(np.empty(size, np.uint8) if room is None else room(size), offsets)

    @property
    def data(self) -> memoryview:
        """The arena as bytes."""
        return self.arena.data

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, position: int) -> memoryview:
        if not 0 <= position < len(self):
            raise IndexError(position)
        return self.data[int(self.offsets[position]) : int(self.offsets[position + 1])]

    def __iter__(self) -> Iterator[memoryview]:
        return iter(self.views())

    def views(self) -> list[memoryview]:
        """Return each sample's bytes."""
        data, ends = self.data, self.offsets.tolist()
        return [data[start:stop] for start, stop in itertools.pairwise(ends)]

    @property
    def lengths(self) -> np.ndarray:
        """Bytes of each sample, int64, shape (samples,)."""
        found: np.ndarray = np.diff(self.offsets)
        return found
